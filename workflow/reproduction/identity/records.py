"""Checks of stored results: whether they match their names and the current code, weights and tasks."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reproduction.identity.run import key_of
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import file_digest

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
    name = path.parent.name
    identity = record.get("identity")
    try:
        whole = isinstance(identity, dict) and key_of(identity) == name
    except ValueError:  # it contains nan or inf
        whole = False
    if record.get("key") != name or not whole:
        raise ResultError(f"{path} says that it is of {record.get('key')}, not of {name}: delete it and start again.")


def rotation_is_current(record: Told, path: Path, code: str, matrices: Path, at_hand: bool) -> bool:
    """Whether learned rotations match their name, are complete and were learned by that code.

    Args:
        path: the record. matrices: their file. at_hand: whether the file must exist, as for weights still to be made;
            results copied here without it are current.
    """
    digest = file_digest(matrices)
    whole = digest == record.get("digest") or (digest is None and not at_hand)
    return whole and _is_of_its_name(record, path) and record.get("code_digest") == code


def weights_are_current(record: Told, path: Path, code: str, rotation: str | None) -> bool:
    """Whether stored weights match their name and were made by that code with the learned rotations of that digest."""
    made = record.get("code_digest") == code and _part(record, "rotation").get("digest") == rotation
    return made and _is_of_its_name(record, path)


def run_is_current(provenance: Told, weights: Told | None, code: str, stored: Told | None, tasks: Told | None) -> bool:
    """Whether a run was measured by that code on the weights and tasks of these records.

    Args:
        provenance, weights: from the run's file. stored: the record of the weights that exist now.
        tasks: the record of the tasks; None where the run has none or they have not been made yet.
    """
    on_them = provenance.get("code_digest") == code and _same_weights(weights, stored)
    return on_them and same_tasks(provenance.get("tasks"), tasks)


def _is_of_its_name(record: Told, path: Path) -> bool:
    try:
        check_signed(record, path)
    except ResultError:
        return False
    return True


def _same_weights(one: Told | None, other: Told | None) -> bool:
    """Whether two records describe the same weights: equal files, whenever and wherever each was made."""
    if one == other:
        return True
    digests = (one or {}).get("digests")
    return bool(digests) and digests == (other or {}).get("digests")


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


def none_newer(record: Path, files: Iterable[Path]) -> bool:
    """Whether all files exist and none is newer than their record."""
    try:
        made = record.stat().st_mtime_ns
        return all(path.stat().st_mtime_ns <= made for path in files)
    except FileNotFoundError:
        return False
