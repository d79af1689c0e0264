"""Location of a speed table's record: this machine's own, or the newest committed one from other machines."""

from pathlib import Path

from reproduction.benchmarks.records import SPEED, Record, committed, read_record


def record_path(root: Path, table: str) -> Path | None:
    """The path of a table's record, relative to the project; None when it was never measured.

    Raises:
        ResultError: a committed record is damaged.
    """
    own = SPEED / f"{table}.json"
    return own if (root / own).exists() else committed_path(root, table)


def committed_path(root: Path, table: str) -> Path | None:
    """The newest committed record of a table, relative to the project; None when there is none.

    Raises:
        ResultError: one of several is damaged.
    """
    found = list(committed(root, table).values())
    if not found:
        return None
    return max(found, key=lambda path: _date(read_record(path, table))).relative_to(root)


def _date(record: Record) -> str:
    return max((str(sitting.environment.get("date", "")) for sitting in record.sittings), default="")
