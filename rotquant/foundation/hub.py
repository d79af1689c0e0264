"""The commit that an id and a revision of the Hugging Face hub stand for."""

import functools
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

#: In the place of a commit that could not be found out; nothing is computed under it.
UNRESOLVED = "unresolved"

_COMMIT = re.compile(r"[0-9a-f]{40}")


def keep_to_files() -> None:
    """Let the `datasets` library read files here without a word to the hub, which it would tell of each that it opens.

    A machine without a network would wait seconds for that, and a machine with one would say more than it was asked.
    """
    from datasets import config

    config.HF_UPDATE_DOWNLOAD_COUNTS = False


def settings_of(name: str, revision: str | None = None) -> Path | None:
    """The config.json of the hub's model, alone in its local copy; None where neither the hub nor a copy has it."""
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # no connection shows as one of many libraries' exceptions
        return Path(hf_hub_download(name, "config.json", revision=revision))
    return None


@functools.cache
def commit_of(kind: Literal["model", "dataset"], name: str, revision: str | None = None) -> str | None:
    """The commit of a repository: asked of the hub, or without it that of the local copy; None where neither answers.

    Args:
        revision: a branch, a tag or a commit; None stands for main.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        with suppress(Exception):  # no connection shows as one of many libraries' exceptions
            return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10).sha
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision or ""
    return commit if _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir() else None
