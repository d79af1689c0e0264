"""Speed tables read from workflow/papers/<paper>/speed.yaml, and everything in them checked before anything runs."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rotquant.bench.registry import find
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.foundation.written import read_yaml
from rotquant.study.speed.definitions import SpeedTable, matches, rows
from rotquant.study.speed.published import references
from rotquant.study.tables import in_order

#: Where speed tables stand: with each paper, and apart those that are of none.
SPEED_FILE = "*/speed.yaml"
FOLDERS = (Path("workflow/papers"), Path("workflow"))


def load_speed(root: Path) -> dict[str, SpeedTable]:
    """All speed tables by id.

    Raises:
        ConfigError: a field that is missing, unknown or impossible (the sentence names file and field), or a name that
            refers to nothing.
    """
    found: dict[str, SpeedTable] = {}
    for path in sorted(path for folder in FOLDERS for path in (root / folder).glob(SPEED_FILE)):
        for table in _load(path, root):
            if table.id in found:
                raise ConfigError(f"{path}: table {table.id!r} is defined twice.")
            found[table.id] = table
    for table in found.values():
        for part in table.drawing.parts if table.drawing else ():
            lookup(found, part.table, f"figure {table.id}: unknown table").grid(part.grid).column(part.column)
    return dict(sorted(found.items(), key=lambda item: in_order(item[1])))


def _load(path: Path, root: Path) -> Iterator[SpeedTable]:
    where = path.relative_to(root)
    data = read_yaml(path)
    if set(data) != {"paper", "title", "tables"}:
        raise ConfigError(f"{where}: it must hold the keys paper, title and tables.")
    for fields in data["tables"]:
        common = {"paper": data["paper"], "paper_title": data["title"]}
        if "published" in fields:
            common["published"] = (where.parent / fields["published"]).as_posix()
        try:
            table = SpeedTable.model_validate({**fields, **common})
        except ValidationError as error:
            raise ConfigError(f"{where}: tables.{fields.get('id')}.{first_problem(error)}.") from None
        try:
            _check(table, root)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        yield table


def _check(table: SpeedTable, root: Path) -> None:
    """Names that refer to each other; arguments that fit their benchmarks."""
    for grid in table.grids:
        for column in grid.columns:
            grid.column(column.over or grid.baseline)
        names = [row.name for row in rows(grid)]
        if len(set(names)) != len(names):
            raise ConfigError(f"table {table.id}: two rows of grid {grid.name} have one name.")
    for claim in table.claims:
        named = [grid for grid in table.grids if matches(grid.name, claim.grid)]
        if not any(matches(row.name, *claim.rows) for grid in named for row in rows(grid)):
            raise ConfigError(f"table {table.id}: no grid and row is what the claim {claim.text!r} is about.")
        for grid in named:
            for column in filter(None, (*claim.check.columns, claim.check.over)):
                grid.column(column)
    devices = sorted({find(cell.benchmark, table.id).device for cell in table.cells})
    if len(devices) > 1:
        raise ConfigError(f"table {table.id}: its benchmarks measure {' and '.join(devices)}, and a record is of one.")
    references(table, root)
