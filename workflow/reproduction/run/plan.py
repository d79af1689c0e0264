"""The plan: all tables of one configuration expanded into runs, their weights and rotations, written once and read by
Snakemake's rules and by every job. Reading one loads neither recipes nor tables.
"""

import contextlib
import fcntl
import functools
import os
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reproduction.identity.names import RESULTS, Results
from rotquant.foundation.errors import ConfigError, ResultError, lookup
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text

if TYPE_CHECKING:
    from reproduction.identity.run import Run

Output = Literal["table", "figure", "page"]
"""The workflow's outputs of a table: its numbers as a file, its figure, its page."""

PLANS = Path("results/plans")
#: Age in seconds since the last read at which old plans are removed when a new one is written.
KEPT = 14 * 24 * 3600


class PlanEntry(BaseModel):
    """A part of the plan as plain data."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Places(PlanEntry):
    """The places that decide a plan's content and are not read whole for it, relative to the project or absolute.

    content: checkpoints, speed records, text files, data of tasks and folders of tables outside of workflow/. hub:
    models and data sets of the hub, as (kind, id). packages: those whose versions decide tasks.
    """

    content: tuple[str, ...]
    hub: tuple[tuple[Literal["model", "dataset"], str], ...]
    packages: tuple[str, ...]


class PlannedTable(PlanEntry):
    """A table of any source, or a figure.

    definition: digest of its files' content; codes: digests of the code of each output. figure: the table whose figure
    it shows. has_numbers: whether it has numbers of its own, in addition to those of other tables in its figure.
    runs: its runs by key, each with the row, column and slot of the cells that print it.
    benchmarks, kernels: its measurements, and their code; on_gpu: whether they need a GPU; records: the tables whose
    records it shows, each with the committed record that is used if this machine has none. remarks: what of it is
    not possible here, or adapted (`Project.remarks`).
    """

    source: str
    paper: str
    definition: str
    codes: dict[Output, str]
    figure: str | None = None
    has_numbers: bool = True
    runs: dict[str, tuple[tuple[str, str, str], ...]] = Field(default_factory=dict)
    benchmarks: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    on_gpu: bool = False
    records: dict[str, str | None] = Field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class PlannedRun(PlanEntry):
    """A run for its job. fields: of a `Run`, the large ones by their name in the plan's `shared`; weights, tasks: the
    keys of what it needs, if any; unquantized: whether it is of the model as it is."""

    label: str
    fields: dict[str, Any]
    code: str
    batch_size: int
    weights: str | None
    tasks: str | None
    unquantized: bool


class PlannedWeights(PlanEntry):
    """Stored weights. run: the first run on them; rotation: the key of their learned rotations, if any."""

    label: str
    code: str
    run: str
    rotation: str | None


class PlannedRotation(PlanEntry):
    """Learned rotations, and the first run on them."""

    label: str
    code: str
    run: str


class Plan(PlanEntry):
    """The computations of one configuration.

    inputs: digest of everything that the plan depends on. sources: digest of all code then. config: the data of one
    standalone file. codes: digests of the stages that do not depend on a recipe. local: checkpoints that are folders.
    shown: those that are not here, so that nothing is computed on them. small: those that a job needs little memory and
    time for. names: of results by key (`identity.names`).
    shared: recipes, metrics and corpora of the runs, each once. left_out: tables of which nothing can be computed, and
    why. fits: the fittings of recipes to models that are not as they were written, as plain data (`tables.fitting`).
    """

    inputs: str
    sources: str
    config: dict[str, Any]
    device: str
    tracking: bool | str
    allow_code_execution: bool
    codes: dict[str, str]
    local: tuple[str, ...]
    shown: tuple[str, ...]
    small: tuple[str, ...]
    names: dict[str, str]
    tables: dict[str, PlannedTable]
    weights: dict[str, PlannedWeights]
    rotations: dict[str, PlannedRotation]
    tasks: dict[str, str]
    runs: dict[str, PlannedRun]
    shared: dict[str, Any]
    left_out: dict[str, str] = Field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The plan's file, relative to the project."""
        return PLANS / f"{self.inputs}.json"

    @property
    def of_runs(self) -> dict[str, PlannedTable]:
        """The tables with runs to compute."""
        return {name: table for name, table in self.tables.items() if table.runs}

    def table(self, name: str) -> PlannedTable:
        """Find a table by id.

        Raises:
            ConfigError: for an unknown table; the sentence lists the nearest ones, or says why it is left out.
        """
        if name in self.left_out:
            raise ConfigError(f"{name}: {self.left_out[name]}")
        return lookup(self.tables, name, "unknown table")

    def results(self, place: Path | None = None) -> Results:
        """Where results lie; place: their folder, by default `results` in the working folder."""
        return Results(place or RESULTS, self.names)

    def metric(self, key: str) -> dict[str, Any]:
        """The metric of a run."""
        return self.shared[self.planned(key).fields["metric"]]

    def is_only_shown(self, run: str) -> bool:
        """Whether a run is shown where its result is here, and not computed."""
        return self.planned(run).fields["checkpoint"] in self.shown

    def is_small(self, run: str) -> bool:
        """Whether a run is of a small model."""
        return self.planned(run).fields["checkpoint"] in self.small

    @property
    def only_small(self) -> bool:
        """Whether all runs are of small models."""
        return all(run.fields["checkpoint"] in self.small for run in self.runs.values())

    def planned(self, key: str) -> PlannedRun:
        """Find a run's data in the plan.

        Raises:
            ConfigError: when no table asks for it under this configuration.
        """
        if key not in self.runs:
            raise ConfigError(
                f"no table asks for a run {key!r} under this configuration; `rotquant runs list` prints all keys."
            )
        return self.runs[key]

    def run(self, key: str) -> "Run":
        """Build a run from the plan.

        Raises:
            ConfigError: when no table asks for it under this configuration.
            ResultError: the plan is damaged.
        """
        from reproduction.identity.run import Run  # recipes take time to load, and most readers of a plan need none

        fields = self.planned(key).fields
        try:
            return Run.model_validate({**fields, **{name: self.shared[fields[name]] for name in LARGE}})
        except (ValidationError, LookupError, TypeError):
            raise ResultError(f"the plan {self.path} is damaged at run {key}; start Snakemake again.") from None

    def place(self, run: "Run") -> str:
        """The location of a run's checkpoint: an absolute path, or its id on the hub with the commit."""
        return str(Path.cwd() / run.checkpoint) if run.checkpoint in self.local else run.checkpoint_digest


#: Fields of a run that many runs share.
LARGE = ("recipe", "metric", "corpora")


def read_plan(path: Path) -> Plan:
    """Read a plan's file, once in a process, and mark it as used, so that it is not removed.

    Raises:
        ResultError: it is missing, damaged or not what its name says.
    """
    check_regular(path)
    try:
        file = path.stat()
    except OSError:
        raise ResultError(f"the plan {path} does not exist; start Snakemake again, or name --config.") from None
    return _read(path.absolute(), file.st_ino, file.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, *_changes: int) -> Plan:
    try:
        written = path.read_text(encoding="utf-8")
        text = written.partition('"plan": ')[2].removesuffix("}\n")
        if written != _with_digest(text):
            raise ValueError
        plan = Plan.model_validate_json(text)
        canonical_json(plan.config)  # raises ValueError for nan and inf
    except (OSError, ValueError, ValidationError):
        raise ResultError(f"the plan {path} is damaged; start Snakemake again, or name --config.") from None
    if plan.inputs != path.stem:
        raise ResultError(f"the plan {path} is that of other inputs ({plan.inputs}); start Snakemake again.")
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return plan


def write_plan(root: Path, plan: Plan) -> None:
    """Write a plan and its configuration atomically, and remove plans that have not been read for long."""
    config_file(root, plan)
    write_text(root / plan.path, _with_digest(plan.model_dump_json()))
    for other in (root / PLANS).iterdir():
        with contextlib.suppress(OSError):
            if max(other.stat().st_mtime, other.stat().st_atime) < time.time() - KEPT:
                other.unlink()


def _with_digest(plan: str) -> str:
    """The JSON of a plan's file, with the digest of the plan's own JSON."""
    return f'{{"digest": "{short_hash(plan)}", "plan": {plan}}}\n'


def occupied(root: Path, alone: bool = False) -> IO[str]:
    """A project that is computed in until the file is closed: by Snakemakes, which know each other, or one execution.

    Each removes the tensors of weights that none of its own runs needs any more.

    Raises:
        ResultError: the others compute in it, or nothing can be written there.
    """
    path = root / RESULTS / ".computing"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}.") from None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        other = "Snakemake or another `rotquant runs execute`" if alone else "`rotquant runs execute`"
        raise ResultError(f"{other} computes in {root}: start again when it has ended.") from None
    return file


def config_file(root: Path, plan: Plan) -> Path:
    """The plan's configuration file, for commands that expand tables themselves; written if missing."""
    import yaml  # not needed by readers of a plan

    path = root / "results/config" / f"{short_hash(canonical_json(plan.config))}.yaml"
    if not path.exists():  # as YAML, which reads JSON's 3e-05 as text
        write_text(path, yaml.safe_dump(plan.config, sort_keys=False))
    return path
