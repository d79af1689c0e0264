"""Corpora as frozen data, and the content hash that identifies the text which a number was computed on."""

import hashlib
from string import Formatter
from typing import Literal

from pydantic import model_validator

from rotquant.foundation.data import Frozen

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

BOS = Literal["text", "window", "none"]
"""Where BOS stands: once at the head of a whole text (the papers' codes), at the head of each of its windows, or
nowhere. `rotquant.text.windows` applies it."""

CALIBRATION_CHARACTERS = 2_000_000
"""How much of the train split calibration reads at least: 128 samples of 2048 tokens are about 0.9 million."""

CHARACTERS_PER_TOKEN = 4
"""About what a token of English text is long: larger calibration sets read as much text as they have tokens."""


class CorpusSpec(Frozen):
    """A text corpus."""

    name: str
    """Label used in reports and keys, such as wikitext2."""
    source: Literal["hub", "local"]
    """`hub` (a Hugging Face dataset id), or `local` (a folder of parquet, json, jsonl or txt files, which are the
    splits that words of their names say, or one such file; where its name says none, the first 80 % of its rows are the
    train split, the next 10 % validation, the last 10 % test, so that no split holds another's text)."""
    path: str
    """The hub id or the local path."""
    subset: str | None = None
    """A dataset's configuration name on the hub, or a subfolder of a local folder."""
    text_field: str = "text"
    """The column that holds the text; or a text of several columns, each by its name in braces."""
    separator: str = "\n\n"
    """Text between two rows; the papers join WikiText-2 with a blank line."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `text_field` names."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.text_field) if name) or (self.text_field,)

    @model_validator(mode="after")
    def _columns_can_be_read(self) -> "CorpusSpec":
        try:
            named = [(name, spec, how) for _, name, spec, how in Formatter().parse(self.text_field) if name is not None]
        except ValueError as error:
            raise ValueError(f"corpus {self.name!r}: text_field {self.text_field!r}: {error}") from None
        if any(not name.isidentifier() or spec or how for name, spec, how in named):
            raise ValueError(f"corpus {self.name!r}: text_field takes names of columns in braces, such as {{question}}")
        return self

    @property
    def sources(self) -> tuple["CorpusSpec", ...]:
        """The corpora that are read for it."""
        return (self,)


WIKITEXT2 = CorpusSpec(name="wikitext2", source="hub", path="Salesforce/wikitext", subset="wikitext-2-raw-v1")


def content_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def portion(split: Split, max_characters: int | None) -> str:
    """The name of a split or of its head, as recorded: "test", "train[:2000000]"."""
    return split if max_characters is None else f"{split}[:{max_characters}]"
