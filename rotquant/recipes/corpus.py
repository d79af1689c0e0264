"""What a corpus is, as frozen data, and the content hash that identifies the text which a number was computed on.

A report compares the hash it measured with the recorded one (workflow/resources/models/corpus.json), since the
corpora that are read from installed packages follow their versions.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rotquant.foundation.data import Frozen

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

CALIBRATION_CHARACTERS = 2_000_000
"""How much of the train split calibration reads at least: 128 samples of 2048 tokens are about 0.9 million."""

CHARACTERS_PER_TOKEN = 4
"""About what a token of English text is long: larger calibration sets read as much text as they have tokens."""

EXPECTED_HASHES = Path(__file__).resolve().parents[2] / "workflow" / "resources" / "models" / "corpus.json"


#: Sources that every installation has.
INSTALLED = ("modules", "docstrings")


class CorpusSpec(Frozen):
    """A text corpus."""

    name: str = "modules"
    """Label used in reports and keys, such as modules or wikitext2."""
    source: Literal["modules", "docstrings", "hub", "local", "mixed"] = "modules"
    """`modules` and `docstrings` (source files and documentation strings of the installed pinned packages), `hub`
    (a Hugging Face dataset id), or `local` (a folder of parquet, json, jsonl or txt files, which are the splits that
    words of their names say, or one such file; where its name says none, the first 80 % of its rows are the train
    split, the next 10 % validation, the last 10 % test, so that no split holds another's text), or `mixed` (other
    corpora, one after the other)."""
    path: str | None = None
    """The hub id or the local path; none for what every installation has."""
    subset: str | None = None
    """A dataset's configuration name on the hub, or a subfolder of a local folder."""
    text_field: str = "text"
    """The column that holds the text."""
    separator: str = "\n\n"
    """What stands between two rows; the papers join WikiText-2 with a blank line."""
    parts: Annotated[tuple["CorpusSpec", ...], Field(exclude_if=lambda parts: not parts)] = ()
    """Of source `mixed`: the corpora that it is of, with as much text of each where only a part is read."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> "CorpusSpec":
        placeless = self.source in (*INSTALLED, "mixed")
        if (self.path is None) != placeless:
            need = "takes no path" if placeless else "needs a path (hub id, folder or file)"
            raise ValueError(f"corpus {self.name!r}: source {self.source!r} {need}")
        if (self.source == "mixed") != bool(self.parts):
            need = "needs parts, corpora" if self.source == "mixed" else "takes no parts"
            raise ValueError(f"corpus {self.name!r}: source {self.source!r} {need}")
        return self

    @property
    def sources(self) -> tuple["CorpusSpec", ...]:
        """The corpora that are read for it: itself, or its parts' own."""
        return tuple(source for part in self.parts for source in part.sources) or (self,)


MODULES = CorpusSpec()
DOCSTRINGS = CorpusSpec(name="docstrings", source="docstrings")
WIKITEXT2 = CorpusSpec(name="wikitext2", source="hub", path="Salesforce/wikitext", subset="wikitext-2-raw-v1")


def content_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def portion(split: Split, max_characters: int | None) -> str:
    """The name of a split or of its head, as recorded: "test", "train[:2000000]"."""
    return split if max_characters is None else f"{split}[:{max_characters}]"


def expected_hashes(spec: CorpusSpec) -> dict[str, str]:
    """The recorded content hashes of a corpus that follows installed packages, by portion; none of any other."""
    if spec.source not in INSTALLED or not EXPECTED_HASHES.is_file():
        return {}
    return json.loads(EXPECTED_HASHES.read_text(encoding="utf-8")).get(spec.source, {}).get("sha256", {})
