"""Result files: places, reading and checks. A run's file holds everything needed to recompute it.

A name is the key of what is computed and a digest of the code that computes it, so what exists is current.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reproduction.identity.run import Run
from reproduction.run.provenance import Provenance, WeightsProvenance
from reproduction.run.samples import Samples, check_samples
from reproduction.tables.quantities import quantities
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_object, write_json

RUNS = Path("results/runs")
TASKS = Path("results/tasks")
TABLES = Path("results/tables")
REPORTS = Path("reports")
FIGURES = Path("reports/figures")


@dataclass(frozen=True)
class RunResult:
    """A computed run.

    metrics: numbers by quantity (`quantities`) and other numbers of the metric; inf and nan are results.
    provenance: time, machine and code; `weights`: the same for the stored weights.
    arrays: data of figures, as nested lists; empty for metrics with only numbers.
    texts: the metric's texts by quantity; empty for most.
    samples: the samples whose means the numbers are (`samples`), for their noise; empty in older files.
    """

    run: Run
    metrics: dict[str, float]
    provenance: dict[str, Any]
    weights: dict[str, Any] | None
    arrays: dict[str, Any] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The run's key."""
        return self.run.key

    @property
    def value(self) -> float:
        """The metric's main quantity."""
        return self.metrics[quantities(self.run.metric)[0].name]

    @property
    def rotation(self) -> dict[str, Any] | None:
        """The record of its weights' learned rotations; None where none were learned."""
        return (self.weights or {}).get("rotation")

    @property
    def reference_is_alike(self) -> bool:
        """Whether its KL divergence is from a full-precision model that reads the same prefix, or none as it does."""
        prefixed = any("prefix" in method.roles for method in self.run.recipe.methods.values())
        return not prefixed or "reference" in self.provenance

    @property
    def seconds(self) -> float:
        """Wall time of the run, of its stored weights and of their learned rotations."""
        stages = (self.provenance, self.weights or {}, self.rotation or {})
        return sum(float(stage.get("seconds", 0.0)) for stage in stages)


def rotations_of(results: Iterable[RunResult]) -> dict[str, dict[str, Any]]:
    """The records of all learned rotations used by some results, by key."""
    return {result.rotation["key"]: result.rotation for result in results if result.rotation}


def table_path(name: str) -> Path:
    """The CSV of a table's numbers; the Parquet file next to it holds the same."""
    return TABLES / f"{name}.csv"


def write_result(path: Path, result: RunResult) -> None:
    """Write a run file atomically."""
    data = {
        "key": result.run.key,
        "weights_key": result.run.weights_key,
        "run": result.run.model_dump(mode="json"),
        "metrics": result.metrics,
        "provenance": result.provenance,
        "weights": result.weights,
    }
    more = {"arrays": result.arrays, "samples": result.samples, "texts": result.texts}
    write_json(path, data | {name: value for name, value in more.items() if value})


def read_result(path: Path) -> RunResult:
    """Read a run file.

    Raises:
        ResultError: it is missing, damaged, or does not match its name.
    """
    data = read_object(path, "run file")
    try:
        run = Run.model_validate(data["run"])
        metrics = {name: float(value) for name, value in data["metrics"].items()}
        texts = {name: str(text) for name, text in data.get("texts", {}).items()}
        known = {True: texts, False: metrics}
        missing = [one.name for one in quantities(run.metric) if one.name not in known[one.text]]
        if missing:
            raise _damaged(path, f"it lacks the metric {missing[0]}")
        samples = check_samples(run.metric, metrics, data.get("samples", {}))
        Provenance.model_validate(data["provenance"])
        if data["weights"] is not None:
            WeightsProvenance.model_validate(data["weights"])
        beside = (data["provenance"], data["weights"], dict(data.get("arrays", {})))
        result = RunResult(run, metrics, *beside, samples, texts)
    except ValidationError as error:
        raise _damaged(path, first_problem(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if not data.get("key") == run.key == path.stem.partition("-")[0]:
        raise _damaged(path, f"its name is not the key of its run, {run.key}, and it says {data.get('key')}")
    return result


def _damaged(path: Path, why: str) -> ResultError:
    return ResultError(f"run file {path} is damaged ({why}); delete it and run again to recompute it.")
