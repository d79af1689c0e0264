"""docs/reliability.md, made from the records of the trials: `python -m tests.trials.page`."""

from pathlib import Path
from typing import Any

from rotquant.foundation.files import read_json, write_text
from tests.trials.trial import RECORDS, REPOSITORY

PAGE = REPOSITORY / "docs/reliability.md"

#: The trials in the page's order: their headings, and what each does.
TRIALS = {
    "slurm": (
        "A SLURM cluster",
        "munge, slurmctld and two slurmd run on one machine. QuaRot's Table 1 is computed through `profiles/slurm`, "
        "each set of weights with its runs as one job, and compared with a local run. Then jobs are cancelled, nodes "
        "lost and time limits passed.",
    ),
    "storage": (
        "A cluster without a shared file system",
        "Each node has a file system of its own. Results lie in an object store that speaks S3, by Snakemake's storage "
        "plugin, and pages are rendered where Snakemake runs.",
    ),
    "container": (
        "A container",
        "The image of `Containerfile` is built without a daemon, and computes a column of Table 1.",
    ),
    "tracking": (
        "A tracking server that a team shares",
        "Many processes write to one MLflow store in PostgreSQL at once. The server is killed while they write.",
    ),
    "chaos": (
        "Faults",
        "Processes are killed with -9 at random moments: Snakemake (then `--unlock` takes its lock), a warm process "
        "that jobs are forked from, a job, its client. Disks are full, the clock is set back, two Snakemakes run at "
        "once, results are read-only, and there is no network.",
    ),
    "gpus_workflow": (
        "The workflow on two GPUs",
        "Snakemake computes QuaRot's Table 1 by one GPU and by two: the kinds of cell of `config/paper.yaml` with its "
        "three seeds, on 4 layers of random weights of Llama-2-7B's widths. A small computation before compiles the "
        "kernels.",
    ),
    "gpus_layers": (
        "Layers on either of two GPUs",
        "Quantizing is one GPU's work. GPTQ rounds 2 layers of Llama-3-70B's widths, OmniQuant trains 2 of "
        "Llama-2-7B's, by one GPU twice and by two at a time.",
    ),
    "gpus_training": (
        "A training that several GPUs share",
        "Two GPUs share a training of RCP, on a layer of random weights of Llama-2-7B's widths. It is killed and "
        "continued. Where there are four GPUs, these share it too.",
    ),
    "engines": (
        "Engines that serve",
        "llama.cpp, transformers and vLLM on a CPU run what is exported. The log-probability of each token is compared "
        "with this project's simulation, as stored and without its quantizers of inputs, which tells what was dropped.",
    ),
    "engines_gpu": (
        "vLLM on a GPU",
        "vLLM runs what is exported for it, and its log-probabilities are compared with this project's, as stored and "
        "without quantizers. `vllm serve` answers one request. Tokens a second are those of CUDA graphs.",
    ),
    "fuzzing": (
        "Foreign input",
        "Every format that is read gets mutated examples, by structure and by bytes.",
    ),
    "audit": (
        "Known vulnerabilities",
        "pip-audit compares the locked packages with the Python Packaging Advisory Database.",
    ),
}

#: What the names of figures begin with that are the cases of one format each.
BY_FORMAT = "cases of "

OPENING = """# Reliability

Nothing that was computed is lost, whatever fails: this page shows how that was tried, and what held. Each section is a
trial: a program that sets up what it needs and removes it afterwards. Its figures are those of its last whole run, on
the machine named there. Continuous integration runs the short form of the trials of tracking, faults, engines,
foreign input and known vulnerabilities beside its tests. Times are measurements of GPUs alone: the other machines did
other work at the same time.

```
python -m tests.trials.slurm            # again here; --quick is a short form, --seed N draws other moments and inputs
make trials                             # all of them, an hour on 2 cores; make trials QUICK=--quick, some minutes
```
"""


def page() -> str:
    """The page, with a section for each record."""
    sections = [OPENING]
    for name, (heading, what) in TRIALS.items():
        path = RECORDS / f"{name}.json"
        if path.exists():
            sections.append(_section(heading, what, read_json(path, "record")))
        else:
            sections.append(f"## {heading}\n\n{what} It has not been run as a whole.\n")
    return "\n".join(sections)


def _section(heading: str, what: str, record: dict[str, Any]) -> str:
    checks = [f"| {check} | {one['tried']:,} | {one['held']:,} |" for check, one in record["checks"].items()]
    figures = {name: _figure(value) for name, value in record["figures"].items()}
    formats = [
        f"{name.removeprefix(BY_FORMAT)} {figures.pop(name)}" for name in list(figures) if name.startswith(BY_FORMAT)
    ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"## {heading}",
        "",
        what,
        "",
        "| what must hold | tried | held |",
        "| --- | --: | --: |",
        *checks,
        "",
        *([*(f"- {name}: {value}" for name, value in figures.items()), ""] if figures else []),
        *([f"By format: {', '.join(formats)}.", ""] if formats else []),
        *([note, ""] if (note := record.get("note", "")) else []),
        f"`python -m tests.trials.{record['trial']} --seed {record['seed']}`: {record['seconds']:,.0f} s on "
        f"{record['cpu_count']} cores ({record['cpu']}), {record['date'][:10]}, commit {record['git_commit'][:7]}; "
        f"{versions}.",
        "",
    ]
    return "\n".join(lines)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


if __name__ == "__main__":
    write_text(PAGE, page())
    print(PAGE.relative_to(Path.cwd()))
