"""Trial of the workflow on two GPUs of one host: QuaRot's Table 1 by one and by two, and what of it is equal.

The kinds of cell are those of config/paper.yaml, the model has random weights of Llama-2-7B's widths. The quick form
has a tiny model, on cores of the CPU where there are no two GPUs.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reproduction.identity.names import key_in
from reproduction.planning.current import current_plan
from reproduction.run.plan import Plan
from rotquant.foundation.data import merge
from tests.trials import projects
from tests.trials.gpus import several_gpus
from tests.trials.material import TINY, make_folder
from tests.trials.trial import REPOSITORY, Trial, run

TABLE = "quarot_table1"
#: The table's method that is trained. A GPU's sums in a backward pass may come in any order.
TRAINED = "omniquant"
#: Largest difference of a perplexity after a training, as a share, where those by one GPU do not differ by half of it.
SAME_VALUE = 0.01
#: Amounts by which kernels are compiled and texts are read once before a time is taken.
LEAST: dict[str, Any] = {
    "seeds": [0],
    "calibration": {"samples": 2},
    "evaluation": {"max_windows": 1},
    "methods": {"omniquant": {"steps": 1}},
}


@dataclass(frozen=True)
class Size:
    """Amounts of the trial. amounts: of the workflow's configuration."""

    shape: str
    layers: int
    amounts: dict[str, Any]


WHOLE = Size(
    shape="llama-2-7b",
    layers=4,
    amounts={
        "seeds": [0, 1, 2],  # as paper.yaml
        "calibration": {"samples": 64, "sequence_length": 2048},
        "evaluation": {"sequence_length": 2048, "max_windows": 32},
        "methods": {"omniquant": {"steps": 32}},
    },
)
QUICK = Size(shape=TINY, layers=2, amounts={})


@dataclass(frozen=True)
class Computed:
    """A table that Snakemake has computed. seconds: wall time. units: seconds of each set of weights and each run.

    again: the values of what is trained, trained once more; empty where that was not asked for.
    """

    plan: Plan
    digests: dict[str, str]
    values: dict[str, float]
    seconds: float
    units: list[float]
    again: dict[str, float]


def body(trial: Trial) -> None:
    """Compute the table by two and by one, after a small one by two."""
    gpus, size = several_gpus(trial), (QUICK if trial.quick else WHOLE)
    trial.versions["snakemake"] = version("snakemake")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        make_folder(REPOSITORY, place, size.shape, size.layers, "cuda" if gpus else "cpu")
        _table(trial, size, gpus, 2, place, merge(size.amounts, LEAST))
        two, one = (_table(trial, size, gpus, count, place, size.amounts) for count in (2, 1))
    trial.figure("runs", len(one.values))
    trial.figure("sets of weights", sum(name.startswith("weights ") for name in one.digests))
    trial.figure("seconds by one", one.seconds)
    trial.figure("seconds by two", two.seconds)
    trial.figure("times as fast by two", round(one.seconds / two.seconds, 2))
    for name, table in (("one", one), ("two", two)):
        trial.figure(f"seconds that weights and runs take in all, by {name}", round(sum(table.units), 1))
        trial.figure(f"seconds of the longest of them, by {name}", round(max(table.units), 1))
    _compare(trial, one, two)


def _compare(trial: Trial, one: Computed, two: Computed) -> None:
    """What is rounded and measured is equal; what is trained has the same values."""
    trained = {*_trained(one.plan)} & one.digests.keys()
    differing = projects.differing(one.digests, two.digests)
    trial.check(
        "Two compute what one computes, to the last bit, but for what is trained",
        differing <= trained,
        ", ".join(sorted(differing - trained)),
    )
    trial.figure("trained weights and their runs", len(trained))
    trial.figure("of these equal to the last bit", len(trained - differing))
    by_two, again = (
        [abs(values[key] / one.values[key] - 1) for key in one.again] for values in (two.values, one.again)
    )
    trial.figure("largest difference of a perplexity after a training, by two", f"{max(by_two):.2e}")
    trial.figure("largest difference of a perplexity after a training, by one again", f"{max(again):.2e}")
    what = "What is trained has one's perplexity, within 1 % or twice what one's own differ by"
    trial.check(what, max(by_two) <= max(SAME_VALUE, 2 * max(again)), f"{by_two}, {again}")


def _trained(plan: Plan) -> Iterator[str]:
    """The trained weights and the runs on them, as `projects.digests` names them."""
    recipes = {key: plan.run(unit.run).recipe for key, unit in plan.weights.items()}
    weights = {key for key, recipe in recipes.items() if TRAINED in recipe.methods}
    yield from (f"weights {plan.names[key]}" for key in weights)
    yield from (f"run {plan.names[key]}" for key, run in plan.runs.items() if run.weights in weights)


def _table(trial: Trial, size: Size, gpus: list[str], count: int, place: Path, amounts: dict[str, Any]) -> Computed:
    """Compute the table with so many GPUs, or cores, in a folder of its own, on the model of `place`."""
    with tempfile.TemporaryDirectory(dir=place) as own:
        folder = Path(own)
        (folder / "model").symlink_to(place / "model")
        files = make_folder(REPOSITORY, folder, size.shape, size.layers, "cuda" if gpus else "cpu")
        for name in ("Snakefile", "profiles"):
            (folder / name).symlink_to(REPOSITORY / name)
        files.append(folder / "amounts.json")
        files[-1].write_text(json.dumps({**projects.ONE_COLUMN, **amounts}))
        with contextlib.chdir(folder):
            plan = current_plan(folder, files, write=False)
        targets = [str(plan.results().run(key)) for key in plan.table(TABLE).runs]
        line = [sys.executable, "-m", "snakemake", "--cores", "all" if gpus else str(count), *targets]
        line += ["--resources", f"gpu={count}"]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:count])} if gpus else {}
        command, started = [*line, "--configfile", *map(str, files)], time.monotonic()
        env = {**os.environ, **visible}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
        seconds = round(time.monotonic() - started, 1)
        said = (done.stdout + done.stderr)[-3000:]
        trial.check("Snakemake computes Table 1", done.returncode == 0, said)
        assert done.returncode == 0, said
        records = [json.loads(path.read_text()) for path in folder.glob("results/runs/*.json")]
        weights = [json.loads(path.read_text()) for path in folder.glob("results/weights/*/weights.json")]
        units = [record["seconds"] for record in (*weights, *(one["provenance"] for one in records))]
        values, digests = _values(records), projects.digests(folder)
        trained = {*_trained(plan)} & digests.keys()
        again = _trained_again(trial, plan, trained, files, folder, env) if count == 1 else {}
        return Computed(plan, digests, values, seconds, units, again)


def _values(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {one["key"]: one["metrics"]["perplexity"] for one in records}


def _trained_again(
    trial: Trial, plan: Plan, trained: Iterable[str], files: Iterable[Path], folder: Path, env: Mapping[str, str]
) -> dict[str, float]:
    """The values of the trained weights' runs after another training by the same GPU."""
    keys = [key_in(name.split()[1]) for name in trained]
    line = [sys.executable, "-m", "rotquant", "runs", "execute", *keys, "--again"]
    command = [*line, "--jobs", "3", *(part for path in files for part in ("--config", str(path)))]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    trial.check("What is trained is trained again", done.returncode == 0, (done.stdout + done.stderr)[-3000:])
    paths = [folder / plan.results().run(key) for key in keys if key in plan.runs]
    return _values(json.loads(path.read_text()) for path in paths)


if __name__ == "__main__":
    run("gpus_workflow", __doc__.splitlines()[0], body)
