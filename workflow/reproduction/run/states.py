"""The states of the workflow's outputs: what each follows from, and what became of it.

A rule's one parameter is such a state: Snakemake runs a job again when it is not what it was at the job's last end.
It changes with the code behind an output, with what the output is defined by, and with what became of the output.

Snakemake deletes a job's old outputs before it starts, and a failing re-run would cost an earlier good result; outputs
marked `update` are kept. Then, however, Snakemake takes the kept file of a failed job for that job's own. So a job has
a mark from its start on, which at its end becomes the state that it was started for (workflow/scripts/job.sh): one
that failed or was interrupted in any way is of another state, and is tried again.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from reproduction.benchmarks.records import SPEED
from reproduction.identity.records import none_newer
from reproduction.run.plan import Plan
from reproduction.run.results import (
    FIGURES,
    HISTORY_FILE,
    REPORTS,
    ROTATION_RECORD,
    TABLES,
    part_path,
    rotation_path,
    run_path,
    task_set_path,
)
from reproduction.tables.source import Output
from rotquant.foundation.files import canonical_json, short_hash, write_text

#: Where the marks of jobs lie, each under the path of the job's first output.
MARKS = Path(".snakemake/attempts")


def rotation_files(key: str) -> list[Path]:
    """What learning rotations leaves for pages; the rotations themselves are for weights that are still to be made."""
    return [rotation_path(key) / name for name in (ROTATION_RECORD, HISTORY_FILE)]


class States:
    """The states of a plan's outputs, in the working folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def tasks(self, key: str) -> str:
        """The state of a set of zero-shot tasks."""
        return self._state(task_set_path(key), self.plan.codes["tasks"])

    def part(self, name: str) -> str:
        """The state of a part of a table.

        Its record stands for the files of its runs and of the rotations behind them. Where one was deleted, damaged or
        made anew by hand, the job runs again: it finds the others there.
        """
        keys = self.plan.part(name).runs
        runs = [self.plan.runs[run] for run in keys]
        weights = [self.plan.weights[run.weights] for run in runs if run.weights]
        rotations = {one.rotation for one in weights if one.rotation}
        codes = {one.code for one in (*runs, *weights, *(self.plan.rotations[key] for key in rotations))}
        whole = all(path.exists() for rotation in rotations for path in rotation_files(rotation))
        record = part_path(name)
        return self._state(record, [sorted(codes), keys], whole and none_newer(record, map(run_path, keys)))

    def table(self, name: str) -> str:
        """The state of a table's numbers, which are made again where one of their files was deleted."""
        return self._output("table", name, TABLES / f"{name}.csv", self._has_numbers(name))

    def figure(self, name: str) -> str:
        """The state of a table's figure."""
        return self._output("figure", name, FIGURES / f"{name}.svg")

    def page(self, name: str) -> str:
        """The state of a table's page, which says of what was timed whether the code is still the same.

        It is made again where the table's numbers were deleted.
        """
        return self._output("page", name, REPORTS / f"{name}.md", self._has_numbers(name))

    def _has_numbers(self, name: str) -> bool:
        """Whether all numbers that a table has are there."""
        forms = (TABLES / f"{name}{suffix}" for suffix in (".csv", ".parquet"))
        return not self.plan.table(name).has_numbers or all(form.exists() for form in forms)

    def _output(self, output: Output, name: str, file: Path, whole: bool = True) -> str:
        table = self.plan.table(name)
        return self._state(file, [table.codes.get(output), table.definition, table.kernels], whole)

    def speed(self, name: str) -> str:
        """The state of a measured record: a renamed row is not measured anew."""
        table = self.plan.table(name)
        return self._state(SPEED / f"{name}.json", [table.benchmarks, table.kernels])

    def index(self) -> str:
        """The state of the scoreboard."""
        return self._state(REPORTS / "index.md", self.plan.codes["index"])

    def tracking(self, place: str) -> str:
        """The state of MLflow's database, for where it lies and under which name this project's runs are in it."""
        return self._state(Path("results/tracking.json"), [place, self.plan.tracking])

    def _state(self, output: Path, basis: Any, whole: bool = True) -> str:
        """What an output is computed from, and after a dash what became of it: nothing where all went well."""
        mark = self._marks.get(str(output), "")
        if output.exists() and not whole:
            made = output.stat().st_mtime_ns
            if not mark.endswith(f".{made}"):
                mark = self._marks[str(output)] = f"{short_hash(mark)}.{made}"
                write_text(MARKS / output, mark)  # Snakemake asks again when what was lacking is there
        return f"{short_hash(canonical_json(basis))}-{mark}"

    @cached_property
    def _marks(self) -> dict[str, str]:
        files = (path for path in MARKS.rglob("*") if path.is_file())
        return {str(path.relative_to(MARKS)): path.read_text(errors="replace").strip() for path in files}
