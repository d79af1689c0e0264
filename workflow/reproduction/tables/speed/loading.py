"""Speed tables read from workflow/papers/<paper>/speed.yaml, and everything in them checked before anything runs."""

from collections.abc import Iterator
from pathlib import Path

from reproduction.benchmarks.registry import find
from reproduction.tables.speed.definitions import SpeedFile, SpeedTable
from reproduction.tables.speed.published import references
from reproduction.tables.tables import in_order, with_path
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.foundation.written import parse, read_yaml

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
    file = parse(SpeedFile, read_yaml(path), str(where))
    for fields in file.tables:
        said = dict(with_path(fields, where.parent)) | {"paper": file.paper, "paper_title": file.title}
        table = SpeedTable.model_validate(said)
        try:
            _check(table, root)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        yield table


def _check(table: SpeedTable, root: Path) -> None:
    """Arguments fit their benchmarks, which measure one device; the paper's numbers are there."""
    devices = sorted({find(cell.benchmark, table.id).device for cell in table.cells})
    if len(devices) > 1:
        raise ConfigError(f"table {table.id}: its benchmarks measure {' and '.join(devices)}, and a record is of one.")
    references(table, root)
