"""Checks of stored results: whether they match their names, and whether two runs answered the same items."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reproduction.identity.names import key_in
from reproduction.identity.run import key_of
from rotquant.foundation.errors import ResultError

Told = Mapping[str, Any]
"""A record of a result."""


def signed(record: Told, identity: dict[str, Any]) -> dict[str, Any]:
    """A record with the identity of its result and the key, the hash of the identity."""
    return {**record, "key": key_of(identity), "identity": identity}


def check_signed(record: Told, path: Path) -> None:
    """Refuse a record whose key is not the name of its folder, such as one that was copied there.

    Raises:
        ResultError: its key is not the folder's name, or its identity has another key.
    """
    name = key_in(path.parent.name)
    identity = record.get("identity")
    try:
        whole = isinstance(identity, dict) and key_of(identity) == name
    except ValueError:  # it contains nan or inf
        whole = False
    if record.get("key") != name or not whole:
        raise ResultError(f"{path} says that it is of {record.get('key')}, not of {name}: delete it and start again.")


def same_tasks(answered: Told | None, record: Told | None) -> bool:
    """Whether a run answered the items of a record of tasks, wherever their files are."""

    def items(told: Told) -> dict[str, Any]:
        tasks = _part(told, "tasks")
        return {name: {part: one for part, one in _part(tasks, name).items() if part != "file"} for name in tasks}

    return record is None or (answered is not None and items(answered) == items(record))


def _part(record: Told, name: str) -> Told:
    """A part of a record by name; empty where the record is damaged, so that it matches nothing."""
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}
