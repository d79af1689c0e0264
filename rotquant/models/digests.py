"""Digests that identify checkpoints: the content of all files that loading reads, or the commit of a model on the
hub."""

from pathlib import Path

from rotquant.foundation.contents import content_digests
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.hub import UNRESOLVED, commit_of
from rotquant.models import deltas
from rotquant.models.deltas import checked_base
from rotquant.models.folders import is_delta, located, settings_files, weight_files


def checkpoint_digest(checkpoint: str | Path) -> str:
    """Digest that identifies a checkpoint wherever it lies: 16 hexadecimal digits for a folder, `id@commit` for a hub
    id.

    A folder's digest covers the content of configuration, tokenizer and weights; that of low-rank deltas covers them
    and their base. A hub id, which may carry its revision (`owner/name@revision`), is the commit that this names now,
    or without the network in the hub's local copy; where neither is there it is `id@unresolved`, under which nothing
    is ever computed (`refuse_other`).

    Raises:
        CheckpointError: the folder does not exist, is no checkpoint with safetensors weights, or has deltas that do not
            fit their base.
    """
    folder, name, revision = located(checkpoint)
    if folder is None:
        return f"{name}@{commit_of('model', name, revision) or UNRESOLVED}"
    if not is_delta(folder):
        return _digest([*settings_files(folder), *weight_files(folder)], folder.name)
    base_digest = checkpoint_digest(checked_base(folder))
    if base_digest.endswith(f"@{UNRESOLVED}"):
        return base_digest
    own = _digest([folder / deltas.CONFIG, folder / deltas.WEIGHTS], folder.name)
    return short_hash(canonical_json([base_digest, own]))


def _digest(files: list[Path], what: str) -> str:
    found = content_digests(files, what)
    return short_hash(canonical_json({path.name: digest for path, digest in found.items()}))


def refuse_other(checkpoint: str, planned: str) -> None:
    """Refuse to compute on a checkpoint that is not the planned one.

    Raises:
        CheckpointError: it changed since, or it is a hub id that could not be resolved.
    """
    if planned.endswith(f"@{UNRESOLVED}"):
        raise CheckpointError(
            f"the hub's model {planned.rpartition('@')[0]} could not be identified when the plan was made (no network "
            "and no local copy): start again when one is there, or give its folder."
        )
    if "@" not in planned and checkpoint_digest(checkpoint) != planned:
        raise CheckpointError(f"{checkpoint} has changed since the plan was made: start again.")
