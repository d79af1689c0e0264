"""Whether a text is the planned one, and the files that decide it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from reproduction.corpora import Corpus, text_files
from rotquant.foundation.errors import CorpusError
from rotquant.recipes.corpus import Split, portion
from rotquant.text import text_digest


def refuse_other_text(spec: Corpus, split: Split, characters: int | None, text: str, planned: str | None) -> None:
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


def files_of_text(spec: Corpus, split: Split, characters: int | None) -> Iterator[Path]:
    """The files and folders of this machine that decide a text; none of one that cannot be read."""
    for part in spec.sources:
        with suppress(CorpusError):
            yield from text_files(part, split, characters)
