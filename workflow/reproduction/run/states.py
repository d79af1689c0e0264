"""States of the workflow's outputs: the inputs of each, and its condition.

A rule's one parameter is such a state: Snakemake runs a job again when it differs from that at the job's last end. The
state changes with the output's code, its definition and its condition.

Snakemake deletes a job's old outputs before it starts, so a failing re-run would lose an earlier good result; outputs
marked `update` are kept. Then, however, Snakemake takes the kept file of a failed job for that job's result. So a job
has a mark from its start on, which at its end becomes the state that it was started for (workflow/scripts/job.sh): a
job that failed or was interrupted has another state and is tried again.
"""

import os
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduction.benchmarks.records import SPEED
from reproduction.identity.records import none_newer
from reproduction.run.plan import Output, Plan
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
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, read_object, short_hash, write_text

#: Folder of the marks of jobs, each under the path of the job's first output.
MARKS = Path(".snakemake/attempts")
#: Folder of the signs of parts whose records are of other code.
SIGNS = Path(".snakemake/signs")


def rotation_files(key: str) -> list[Path]:
    """The files of learned rotations that pages need; only weights still to be made need the rotations themselves."""
    return [rotation_path(key) / name for name in (ROTATION_RECORD, HISTORY_FILE)]


def _digest_of(record: Path) -> Any:
    """The digest in a part's record; None if it is missing, damaged or of an earlier version."""
    try:
        return read_object(record, "record of a part").get("digest")
    except ResultError:
        return None


class States:
    """The states of a plan's outputs, in the working folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def tasks(self, key: str) -> str:
        """The state of a set of zero-shot tasks."""
        return self._state(task_set_path(key), self.plan.codes["tasks"])

    def part(self, name: str) -> str:
        """The state of a part of a table.

        Its record represents the files of its runs and their rotations. If one was deleted, damaged or made anew by
        hand, the job runs again and reuses the others.
        """
        keys, (_, rotations) = self.plan.part(name).runs, self.plan.behind(name)
        whole = all(path.exists() for rotation in rotations for path in rotation_files(rotation))
        record = part_path(name)
        return self._state(record, self.plan.part_digest(name), whole and none_newer(record, map(run_path, keys)))

    def part_sign(self, name: str) -> Path:
        """A file that is newer than the record of a part that other code computed, or of other runs.

        It is an input of the part's job: Snakemake remembers the states of its own jobs only, and a record may have
        been brought by an archive or by `rotquant runs execute`. It never has the same content twice, by which
        Snakemake would take it for unchanged.
        """
        record, sign = part_path(name), SIGNS / name
        if _digest_of(record) == self.plan.part_digest(name):
            if not sign.exists():
                write_text(sign, "")
            os.utime(sign, ns=(0, 0))
        elif not (sign.exists() and record.exists() and sign.stat().st_mtime_ns > record.stat().st_mtime_ns):
            write_text(sign, f"{time.time_ns()}")
        return sign

    def table(self, name: str) -> str:
        """The state of a table's numbers, which are made again if one of their files was deleted."""
        return self._output("table", name, TABLES / f"{name}.csv", self._has_numbers(name))

    def figure(self, name: str) -> str:
        """The state of a table's figure."""
        return self._output("figure", name, FIGURES / f"{name}.svg")

    def page(self, name: str) -> str:
        """The state of a table's page, which reports whether the code of timings is still the same.

        The page is made again if the table's numbers were deleted.
        """
        return self._output("page", name, REPORTS / f"{name}.md", self._has_numbers(name))

    def _has_numbers(self, name: str) -> bool:
        """Whether the files of all of a table's numbers exist."""
        forms = (TABLES / f"{name}{suffix}" for suffix in (".csv", ".parquet"))
        return not self.plan.table(name).has_numbers or all(form.exists() for form in forms)

    def _output(self, output: Output, name: str, file: Path, whole: bool = True) -> str:
        table = self.plan.table(name)
        return self._state(file, [table.codes.get(output), table.definition, table.kernels], whole)

    def speed(self, name: str) -> str:
        """The state of a measured record, which does not change when a row is renamed."""
        table = self.plan.table(name)
        return self._state(SPEED / f"{name}.json", [table.benchmarks, table.kernels])

    def index(self) -> str:
        """The state of the scoreboard."""
        return self._state(REPORTS / "index.md", self.plan.codes["index"])

    def tracking(self, place: str) -> str:
        """The state of MLflow's database, for its location and the name of this project's runs in it."""
        return self._state(Path("results/tracking.json"), [place, self.plan.tracking])

    def _state(self, output: Path, basis: Any, whole: bool = True) -> str:
        """Digest of an output's inputs, and after a dash its condition, which is empty after success."""
        mark = self._marks.get(str(output), "")
        if output.exists() and not whole:
            made = output.stat().st_mtime_ns
            if not mark.endswith(f".{made}"):
                mark = self._marks[str(output)] = f"{short_hash(mark)}.{made}"
                write_text(MARKS / output, mark)  # Snakemake tries again when the missing input exists
        return f"{short_hash(canonical_json(basis))}-{mark}"

    @cached_property
    def _marks(self) -> dict[str, str]:
        files = (path for path in MARKS.rglob("*") if path.is_file())
        return {str(path.relative_to(MARKS)): path.read_text(errors="replace").strip() for path in files}
