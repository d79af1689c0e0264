"""Digests that identify a text: the content of the split, or of its head, that is read; of a hub's data set its
commit."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.hub import commit_of
from rotquant.recipes.corpus import CorpusSpec, Split, content_hash, portion
from rotquant.text import load_text, text_files

#: In the place of a digest where a text cannot be read; nothing is computed under it.
UNREAD = "unread"


def text_digest(spec: CorpusSpec, split: Split, characters: int | None = None, text: str | None = None) -> str:
    """Digest that identifies a split, or its head: 16 hexadecimal digits, or `unread`.

    Args:
        text: what was read, where it was.
    """
    if any(part.source == "hub" for part in spec.sources):
        commits = [commit_of("dataset", str(part.path)) for part in spec.sources if part.source == "hub"]
        identity = [spec.model_dump(mode="json"), commits, portion(split, characters)]
        return UNREAD if None in commits else short_hash(canonical_json(identity))
    try:
        return content_hash(load_text(spec, split, max_characters=characters) if text is None else text)[:16]
    except CorpusError:
        return UNREAD  # whose sentence comes from the job that needs it


def refuse_other_text(spec: CorpusSpec, split: Split, characters: int | None, text: str, planned: str | None) -> None:
    """Refuse a text that is not the planned one.

    Args:
        text: what was read. planned: its digest in the run; None where nobody planned.

    Raises:
        CorpusError: it changed since the plan was made.
    """
    if planned is not None and text_digest(spec, split, characters, text) != planned:
        raise CorpusError(
            f"Corpus {spec.name}: its {portion(split, characters)} text is not the one that was planned, which changed "
            "or could not be read then: start again."
        )


def files_of_text(spec: CorpusSpec, split: Split, characters: int | None) -> Iterator[Path]:
    """The files and folders of this machine that decide a text; none of one that cannot be read."""
    for part in spec.sources:
        with suppress(CorpusError):
            yield from text_files(part, split, max_characters=characters)
