"""The runner without Snakemake computes what is not there, once; whatever ends it, the next call continues."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from reproduction.identity.names import MODEL, ROTATION_RECORD, ROTATIONS_FILE, WEIGHTS_RECORD
from reproduction.planning.expansion import make_plan
from reproduction.run.execution import to_compute
from reproduction.run.plan import Plan
from reproduction.sources import load_project
from rotquant.foundation.data import merge
from tests.helpers.cases import only
from tests.helpers.project import CONFIG, TABLES, Copy, alive, checkpoints_by_name
from tests.helpers.workflows import one_column, with_rotations

PROBLEM = {"prompt": "def one():\n", "test": "def check(one):\n    assert one() == 1\n", "entry_point": "one"}
EXECUTE = ("rotquant", "runs", "execute")


def until(what: Callable[[], object]) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.05)


def started(project: Copy) -> subprocess.Popen:
    """The runner, once it makes weights, which take as long as the file `slow` is there."""
    (project.root / "slow").touch()
    process = project.start(*EXECUTE, "--jobs", "2")
    until((project.root / "started").exists)
    return process


def made(project: Copy) -> Counter[str]:
    """What the stand-ins have made since this was asked last, by kind."""
    record = project.root / "made"
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return Counter(line.partition(" ")[0] for line in lines)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan with learned rotations and zero-shot tasks; the working folder is its project's, without results."""
    checkpoints_by_name(monkeypatch)
    project = with_rotations(tmp_path)
    path = "workflow/papers/quarot/tables.yaml"
    project.edit(path, "  - kind: perplexity\n", "  - kind: zero_shot\n  - kind: perplexity\n")
    monkeypatch.chdir(tmp_path)
    return make_plan(load_project(root=tmp_path), "0" * 16, "0" * 16)


class Chain:
    """A run of a plan with all that it is computed on, and the files by which it is decided what is there."""

    def __init__(self, plan: Plan, kind: str = "perplexity") -> None:
        self.plan, results = plan, plan.results()
        found = (key for key in plan.runs if plan.metric(key)["kind"] == kind)
        self.run = next(key for key in found if (stored := plan.runs[key].weights) and plan.weights[stored].rotation)
        self.weights, self.tasks = str(plan.runs[self.run].weights), plan.runs[self.run].tasks
        self.rotation = str(plan.weights[self.weights].rotation)
        self.files = {
            "run": results.run(self.run),
            "model": results.weights(self.weights) / MODEL / "model.safetensors",
            "weights": results.weights(self.weights) / WEIGHTS_RECORD,
            "rotation": results.rotation(self.rotation) / ROTATION_RECORD,
            "matrices": results.rotation(self.rotation) / ROTATIONS_FILE,
        }
        if self.tasks is not None:
            self.files["tasks"] = results.tasks(self.tasks)
        for path in self.files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def without(self, *names: str) -> "Chain":
        """Delete some of it."""
        for name in names:
            path = self.files[name]
            shutil.rmtree(path.parent) if name == "model" else path.unlink()
        return self

    def computed(self, *asked: str, again: bool = False) -> dict[str, set[str]]:
        """The steps that are computed for some of it, by what it is, each with those that come before."""
        names = {getattr(self, name): name for name in ("run", "weights", "rotation", "tasks")}
        graph = to_compute(self.plan, [getattr(self, name) for name in asked], again)
        return {names[key]: {names[need] for need in needs} for key, needs in graph.items()}


@pytest.mark.parametrize(
    ("missing", "steps"),
    [
        ("", {}),
        ("run", {"run": set()}),
        ("model", {}),  # tensors are temporary
        ("model weights rotation matrices", {}),
        ("run model", {"run": {"weights"}, "weights": set()}),
        ("run weights", {"run": {"weights"}, "weights": set()}),  # as an end between both leaves it
        ("run matrices", {"run": set()}),
        ("run model matrices", {"run": {"weights"}, "weights": {"rotation"}, "rotation": set()}),
        ("run model rotation", {"run": {"weights"}, "weights": {"rotation"}, "rotation": set()}),
    ],
)
def test_what_is_not_there_is_computed_after_what_it_needs_and_nothing_else(
    missing: str, steps: dict[str, set[str]], plan: Plan
) -> None:
    assert Chain(plan).without(*missing.split()).computed("run") == steps


def test_a_run_on_tasks_needs_their_record_as_well(plan: Plan) -> None:
    chain = Chain(plan, "zero_shot")
    assert chain.computed("run") == {}
    assert chain.without("tasks").computed("run") == {}
    both = {"run": {"tasks", "weights"}, "weights": set(), "tasks": set()}
    assert chain.without("run", "model").computed("run") == both
    assert chain.computed("tasks") == {"tasks": set()}


@pytest.mark.parametrize("name", ["run", "weights", "rotation"])
def test_what_is_named_is_computed_again_and_what_it_needs_only_where_it_is_missing(name: str, plan: Plan) -> None:
    assert Chain(plan).computed(name) == {}
    assert Chain(plan).computed(name, again=True) == {name: set()}
    chain = Chain(plan).without("model", "matrices")
    whole = {"run": {"weights"}, "weights": {"rotation"}, "rotation": set()}
    places = [*whole]
    expected = dict(list(whole.items())[places.index(name) :])
    assert chain.computed(name, again=True) == expected
    assert chain.computed(name) == ({} if name == "run" else expected)


def test_all_is_computed_once_and_then_nothing_and_tensors_go(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    status, output = project.rotquant(*EXECUTE[1:], "quarot", "--jobs", "2")
    assert status == 0, output
    assert made(project) == {"run": 6, "weights": 4}
    assert len(project.read("results/runs/*.json")) == 6
    assert (
        len(project.read("results/weights/*/weights.json")) == len(project.read("results/weights/*/history.json")) == 4
    )
    assert not [*tmp_path.glob("results/weights/*/model")]
    assert output.count(": done\n") == 10
    assert "QuaRot on Llama-2-13B, seed 1" in output
    before = project.read("results/[rw]*/**/*.json")
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, "nothing to compute" in output) == (0, True)
    assert project.read("results/[rw]*/**/*.json") == before


def test_runs_are_measured_before_further_weights_are_made(tmp_path: Path) -> None:
    """Or the tensors of all weights would lie on the disk at once."""
    project = Copy(tmp_path)
    assert project.rotquant(*EXECUTE[1:], "--jobs", "1")[0] == 0
    plan = json.loads(next(tmp_path.glob("results/plans/*.json")).read_text())["plan"]
    last = ""
    for line in (tmp_path / "made").read_text().splitlines():
        kind, key = line.split()
        last = key if kind == "weights" else last
        assert kind == "weights" or plan["runs"][key]["weights"] in (None, last)


@pytest.mark.long
def test_kept_tensors_serve_a_later_call_that_then_removes_them(tmp_path: Path) -> None:
    project = with_rotations(tmp_path)
    assert project.rotquant(*EXECUTE[1:], "--keep")[0] == 0
    assert len([*tmp_path.glob("results/weights/*/model")]) == made(project)["weights"] == 6
    for path in tmp_path.glob("results/runs/*"):
        path.unlink()
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    assert made(project) == {"run": 7}
    assert not [*tmp_path.glob("results/weights/*/model")]


@pytest.mark.long
def test_tensors_that_are_asked_for_stay(tmp_path: Path) -> None:
    project = with_rotations(tmp_path)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    (name, *_) = sorted(path.name for path in tmp_path.glob("results/weights/*"))
    assert project.rotquant(*EXECUTE[1:], name.partition("-")[0])[0] == 0
    assert [path.parent.name for path in tmp_path.glob("results/weights/*/model")] == [name]


def test_other_code_has_other_names_and_both_results_stay(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    first = project.read("results/runs/*.json")
    code = ("workflow/reproduction/run/stages/runs.py", "FACTOR = 1.0", "FACTOR = 2.0")
    project.edit(*code)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    both = project.read("results/runs/*.json")
    assert first.items() <= both.items()
    assert len(both) == 2 * len(first)
    project.edit(code[0], code[2], code[1])  # as it was: current
    assert "nothing to compute" in project.rotquant(*EXECUTE[1:])[1]


@pytest.mark.parametrize("how", only([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
def test_a_runner_that_is_ended_takes_its_processes_with_it_and_the_next_one_continues(
    tmp_path: Path, how: signal.Signals
) -> None:
    project = Copy(tmp_path)
    process = started(project)
    until(lambda: project.read("results/runs/*.json"))  # of a baseline, which needs no weights
    process.send_signal(how)  # to it alone
    process.communicate(timeout=60)
    until(lambda: not alive(process.pid))
    kept = project.read("results/runs/*.json")
    time.sleep(0.2)
    until(lambda: not _working(tmp_path))
    (tmp_path / "slow").unlink()
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 0, output
    assert len(project.read("results/runs/*.json")) == 6
    assert kept.items() <= project.read("results/runs/*.json").items()
    assert not list(tmp_path.glob("results/**/.tmp-*"))


def _working(root: Path) -> list[str]:
    """Processes that work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if Path(os.readlink(entry)) == root:
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "other", [EXECUTE, pytest.param(("snakemake", "--cores", "2", "--nolock"), marks=pytest.mark.long)]
)
def test_while_a_runner_computes_others_are_refused_and_its_results_are_whole(
    tmp_path: Path, other: tuple[str, ...]
) -> None:
    """One may remove tensors that only the other still needs."""
    project = Copy(tmp_path)
    first = started(project)
    status, output = project.run(*other)
    assert (status != 0, "computes in" in output, "Traceback" in output) == (True, True, False), output
    (tmp_path / "slow").unlink()
    assert first.communicate(timeout=120)[0].count(": done\n") == 10
    assert first.returncode == 0
    assert made(project) == {"run": 6, "weights": 4}
    assert not [*tmp_path.glob("results/weights/*/model")]
    assert not [*tmp_path.glob("results/**/.tmp-*")]


def test_a_runner_is_refused_while_snakemake_computes(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (tmp_path / "slow").touch()
    first = project.start("snakemake", "--cores", "2")
    until((tmp_path / "started").exists)
    status, output = project.run(*EXECUTE)
    assert (status, "Snakemake or another" in output) == (2, True), output
    (tmp_path / "slow").unlink()
    assert (first.communicate(timeout=120), first.returncode)[1] == 0


def test_what_fails_is_told_in_a_sentence_and_all_else_is_computed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (tmp_path / "fail").touch()
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 2
    # Which of the failing weights is the first is up to the processes.
    last = r"8 results could not be computed; the first, weights QuaRot on Llama-2-\d+B, seed [01]: the weights"
    assert re.search(last, output.splitlines()[-1])
    assert output.count("failed: ") == 4  # no run on them was begun
    assert "Traceback" not in output
    assert len(project.read("results/runs/*.json")) == 2
    (tmp_path / "fail").unlink()
    made(project)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    assert made(project) == {"weights": 4, "run": 4}


@pytest.mark.parametrize(
    "ends", ['raise CheckpointError("the GPU\'s memory does not suffice.")', "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_what_finds_too_little_memory_beside_others_is_computed_after_them_alone(ends: str, tmp_path: Path) -> None:
    """A GPU's, or the host's, of which a system gives no other sign."""
    project = one_column(tmp_path)
    stage = "workflow/reproduction/run/stages/weights.py"
    crowded = f"""    import os, signal
    others = len(list(Path().glob("crowd-*")))
    here = Path("crowd-" + run.weights_key)
    here.touch()
    time.sleep(0.5)
    others += len(list(Path().glob("crowd-*"))) - 1
    here.unlink()
    if others:
        {ends}
    while Path("slow")"""
    project.edit(stage, '    while Path("slow")', crowded)
    status, output = project.run("rotquant", "runs", "execute", "--jobs", "2")
    assert (status, "failed" in output) == (0, False), output
    assert len([*tmp_path.glob("results/runs/*.json")]) == 3


def test_a_failure_whose_message_ends_with_an_empty_line_is_one(tmp_path: Path) -> None:
    """As errors of CUDA do, which torch passes on."""
    project = one_column(tmp_path)
    stage = "workflow/reproduction/run/stages/weights.py"
    lost = '    raise RuntimeError("CUDA error: unspecified launch failure\\nno more is known.\\n\\n")\n'
    project.edit(stage, '    while Path("slow")', lost + '    while Path("slow")')
    status, output = project.run("rotquant", "runs", "execute", "--jobs", "2")
    assert (status, "weights.json is needed" in output) == (2, False), output
    assert re.search(r"failed: weights .*: no more is known\.", output)


def test_weights_stay_for_runs_that_failed(tmp_path: Path) -> None:
    """They may have cost hours, and the next call measures on them."""
    project = Copy(tmp_path)
    project.edit(
        "workflow/reproduction/run/stages/runs.py",
        '    with Path("made")',
        '    if Path("short").exists() and folder: raise CheckpointError("no such window.")\n    with Path("made")',
    )
    project.edit(
        "workflow/reproduction/run/stages/runs.py",
        "from rotquant.foundation.environment",
        "from rotquant.foundation.errors import CheckpointError\nfrom rotquant.foundation.environment",
    )
    (tmp_path / "short").touch()
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, output.count("no such window.")) == (2, 5), output
    (tmp_path / "short").unlink()
    made(project)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    assert made(project) == {"run": 4}
    assert not [*tmp_path.glob("results/weights/*/model")]


def test_results_that_cannot_be_written_are_one_sentence_before_any_process_starts(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.write("results", "a file")
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, output.count("\n")) == (2, 1), output
    assert "/results/" in output
    assert "Not a directory" in output
    assert not (tmp_path / "logs").exists()


def test_a_killed_process_costs_its_step_alone_and_what_is_on_it(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    killed = (
        "import os, signal\n    print('warning: memory is short', flush=True)\n"
        "    if run.seed: os.kill(os.getpid(), signal.SIGKILL)\n    if Path"
    )
    project.edit("workflow/reproduction/run/stages/weights.py", "if Path", killed)
    status, output = project.rotquant(*EXECUTE[1:], "--jobs", "2")
    assert status == 2
    assert "its process was ended by SIGKILL, which is how a system short of memory ends a process" in output
    assert len(project.read("results/runs/*.json")) == 4


def test_without_lm_eval_all_but_the_papers_tasks_is_computed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (table,) = TABLES["tables"]
    both = [*table["metrics"], {"kind": "zero_shot"}]
    fields = {key: value for key, value in table.items() if key not in ("published", "figure")}
    project.set_tables({**TABLES, "tables": [{**fields, "metrics": both, "claims": []}]})
    paper = {"slots": {"Llama-2-13B": {"compute": False}}, "zero_shot": {"suite": "paper", "corpus": None}}
    project.set_config(merge(CONFIG, paper))
    for path in (tmp_path / "workflow/reproduction/tasks").glob("*.py"):
        project.write(str(path.relative_to(tmp_path)), path.read_text().replace('"lm_eval"', '"no_such_package"'))
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 2
    assert re.search(r"4 results could not be computed; the first, zero-shot tasks: .*lm-eval", output.splitlines()[-1])
    assert len(project.read("results/runs/*.json")) == 3


def test_runs_that_execute_what_models_write_are_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (table,) = TABLES["tables"]
    fields = {key: value for key, value in table.items() if key not in ("published", "figure")}
    reasoning = {"kind": "zero_shot", "tasks": ["humaneval"]}
    other = {**fields, "id": "quarot_table2", "metrics": [reasoning], "claims": []}
    project.set_tables({**TABLES, "tables": [{**fields, "claims": []}, other]})
    paper = {"slots": {"Llama-2-13B": {"compute": False}}, "zero_shot": {"suite": "paper", "corpus": None}}
    project.set_config(merge(CONFIG, paper))
    project.write("humaneval.jsonl", json.dumps(PROBLEM))
    project.edit("config/config.yaml", "suite: paper", "suite: paper\n  path: .")
    sentence = "this run executes programs that models write (HumanEval), which needs --allow-code-execution"
    status, output = project.rotquant(*EXECUTE[1:], "quarot_table2")
    assert (status, output.count(sentence)) == (2, 4), output
    assert not made(project)  # no weights that only these runs are on
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, output.count(sentence)) == (2, 4), output
    assert {json.loads(text)["run"]["metric"]["kind"] for text in project.read("results/runs/*.json").values()} == {
        "perplexity"
    }
    status, output = project.rotquant(*EXECUTE[1:], "quarot_table2", "--allow-code-execution")
    assert status == 0, output
    assert len(project.read("results/runs/*.json")) == 6


def test_what_a_target_names_is_computed_again_and_nothing_else(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    earlier = project.read("results/runs/*.json")
    path = next(path for path, text in earlier.items() if json.loads(text)["weights"] is None)
    made(project)
    assert project.rotquant(*EXECUTE[1:], Path(path).stem.partition("-")[0], "--again")[0] == 0
    assert made(project) == {"run": 1}
    assert project.read("results/runs/*.json").keys() == earlier.keys()
