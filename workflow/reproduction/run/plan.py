"""The plan: all tables of one configuration expanded into runs, their weights and parts, written once and read by
Snakemake's rules and by every job. Reading one loads neither recipes nor tables.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reproduction.tables.source import Output
from rotquant.foundation.errors import ConfigError, ResultError, lookup
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text

if TYPE_CHECKING:
    from reproduction.identity.run import Run

T = TypeVar("T")

PLANS = Path("results/plans")
#: Plans that no job has read for so many seconds are removed when a new one is written.
KEPT = 14 * 24 * 3600


class PlanEntry(BaseModel):
    """A part of the plan as plain data."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Places(PlanEntry):
    """The places that decide what a plan says and are not read whole for it, relative to the project or absolute.

    content: checkpoints, records of speed and the files of texts. hub: models and data sets of the hub, as (kind, id).
    """

    content: tuple[str, ...]
    hub: tuple[tuple[Literal["model", "dataset"], str], ...]


class PlannedCell(PlanEntry):
    """A cell of a table: its runs, one per seed."""

    row: str
    column: str
    runs: tuple[str, ...]


class PlannedTable(PlanEntry):
    """A table of any source, or a figure.

    definition: digest of what its files say; codes: of the code that makes each of its outputs. figure: whose figure it
    shows. has_numbers: whether any are its own, beside those that a figure draws of other tables.
    cells, parts: its runs, and the jobs that compute them. benchmarks, kernels: what is measured for it, and by which
    code; on_gpu: whether on a GPU; records: the tables whose records it shows, each with the committed one that stands
    for it where there is none of this machine.
    """

    source: str
    paper: str
    definition: str
    codes: dict[Output, str]
    figure: str | None = None
    has_numbers: bool = True
    cells: tuple[PlannedCell, ...] = ()
    parts: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    on_gpu: bool = False
    records: dict[str, str | None] = Field(default_factory=dict)


class PlannedRun(PlanEntry):
    """A run as it is given to its job. fields: of a `Run`, the large ones by their name in the plan's `shared`;
    weights, tasks: what has to be there before, if anything."""

    label: str
    fields: dict[str, Any]
    code: str
    batch_size: int
    weights: str | None
    tasks: str | None


class PlannedPart(PlanEntry):
    """The runs that one job of the workflow computes, and the sets of tasks that it needs."""

    label: str
    runs: tuple[str, ...]
    tasks: tuple[str, ...]


class PlannedWeights(PlanEntry):
    """Stored weights. run: the first one on them; rotation: the learned one that they are made with, if any."""

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
    """What is to be computed under one configuration.

    inputs: digest of all that the plan follows from. sources: of all code then. config: as the data of one
    file that stands alone. codes: digest of the code of the stages that do not depend on a recipe. local: checkpoints
    that are folders. shared: recipes, metrics and corpora of the runs, each once.
    """

    inputs: str
    sources: str
    config: dict[str, Any]
    device: str
    tracking: bool | str
    allow_code_execution: bool
    codes: dict[str, str]
    local: tuple[str, ...]
    tables: dict[str, PlannedTable]
    parts: dict[str, PlannedPart]
    weights: dict[str, PlannedWeights]
    rotations: dict[str, PlannedRotation]
    tasks: dict[str, str]
    runs: dict[str, PlannedRun]
    shared: dict[str, Any]

    @property
    def path(self) -> Path:
        """The plan's file, relative to the project."""
        return PLANS / f"{self.inputs}.json"

    @property
    def of_runs(self) -> dict[str, PlannedTable]:
        """The tables whose runs are to be computed."""
        return {name: table for name, table in self.tables.items() if table.parts}

    def table(self, name: str) -> PlannedTable:
        """The table of that id.

        Raises:
            ConfigError: for an unknown table; the sentence lists the nearest ones.
        """
        return lookup(self.tables, name, "unknown table")

    def part(self, name: str) -> PlannedPart:
        """A part of a table.

        Raises:
            ConfigError: no table has it under this configuration.
        """
        return known(self.parts, name, "no table has a part")

    def stored(self, key: str) -> PlannedWeights:
        """Stored weights.

        Raises:
            ConfigError: no run uses them under this configuration.
        """
        return known(self.weights, key, "no run uses weights")

    def rotation(self, key: str) -> PlannedRotation:
        """Learned rotations.

        Raises:
            ConfigError: when no run is on them under this configuration.
        """
        return known(self.rotations, key, "no run has learned rotations")

    def planned(self, key: str) -> PlannedRun:
        """A run as the plan holds it.

        Raises:
            ConfigError: when no table asks for it under this configuration.
        """
        return known(self.runs, key, "no table asks for a run")

    def run(self, key: str) -> "Run":
        """A run, built from the plan.

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
        """Where a run's checkpoint lies: a path that is valid from anywhere, or its id on the hub with the commit."""
        return str(Path.cwd() / run.checkpoint) if run.checkpoint in self.local else run.checkpoint_digest


#: Fields of a run that many runs share.
LARGE = ("recipe", "metric", "corpora")


def known(found: Mapping[str, T], key: str, missing: str) -> T:
    """The entry of a key; `missing` begins the sentence that says there is none."""
    if key not in found:
        raise ConfigError(f"{missing} {key!r} under this configuration; `rotquant runs list` prints all keys.")
    return found[key]


def read_plan(path: Path) -> Plan:
    """Read a plan's file; doing so keeps it from being removed as forgotten.

    Raises:
        ResultError: it is missing, damaged or not what its name says.
    """
    check_regular(path)
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        if digest != short_hash(text):
            raise ValueError
        plan = Plan.model_validate_json(text)
        canonical_json(plan.config)  # raises ValueError for a number that is none
    except FileNotFoundError:
        raise ResultError(f"the plan {path} does not exist; start Snakemake again, or name --config.") from None
    except (OSError, ValueError, ValidationError):
        raise ResultError(f"the plan {path} is damaged; start Snakemake again, or name --config.") from None
    if plan.inputs != path.stem:
        raise ResultError(f"the plan {path} is that of other inputs ({plan.inputs}); start Snakemake again.")
    with contextlib.suppress(OSError):
        os.utime(path)
    return plan


def write_plan(root: Path, plan: Plan) -> None:
    """Write a plan and its configuration atomically, and remove plans that nobody has read for long."""
    text = plan.model_dump_json()
    config_file(root, plan)
    write_text(root / plan.path, f"{short_hash(text)}\n{text}")
    for other in (root / PLANS).iterdir():
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < time.time() - KEPT:
                other.unlink()


def config_file(root: Path, plan: Plan) -> Path:
    """The plan's configuration as one file, for the commands that expand tables themselves; written where it is not."""
    import yaml  # which readers of a plan do without

    path = root / "results/config" / f"{short_hash(canonical_json(plan.config))}.yaml"
    if not path.exists():  # as YAML, to which 3e-05, as JSON has it, is text
        write_text(path, yaml.safe_dump(plan.config, sort_keys=False))
    return path
