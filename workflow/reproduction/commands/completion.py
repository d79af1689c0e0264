"""What a shell completes the reproduction's arguments with: ids of tables, read from their files without validation."""

from typing import Any

from reproduction.sources import patterns
from reproduction.tables.configuration import find_root
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.written import yaml_value


def tables() -> list[str]:
    """The ids of all tables of the project around the working folder; none outside of one."""
    try:
        root = find_root()
        files = {path for pattern, _ in patterns() for path in (root / "workflow").glob(pattern)}
        data: list[Any] = [yaml_value(path.read_text(encoding="utf-8"), path.name) for path in sorted(files)]
        return [table["id"] for one in data for table in one["tables"]]
    except (RotquantError, OSError, KeyError, TypeError):  # a file that is being written completes nothing
        return []
