"""Corpora of the tables: those of the library, the source files and docstrings of installed packages, and mixtures.

`rotquant.text` reads them all: this module registers how its own kinds are read.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from reproduction.corpora.docstrings import docstring_rows
from reproduction.corpora.modules import module_names, module_rows
from reproduction.corpora.packages import PACKAGES, lists_of_files, package_files, versions
from rotquant.foundation.files import cache_folder
from rotquant.recipes.corpus import CorpusSpec, Split
from rotquant.text import loading

#: Sources that every installation has.
INSTALLED = ("modules", "docstrings")


def _pairs(given: Any) -> Any:
    """A mapping as pairs, which have a hash."""
    return tuple(given.items()) if isinstance(given, dict) else given


class Corpus(CorpusSpec):
    """The text that a corpus name of the tables stands for."""

    name: Annotated[str, Field(min_length=1)]
    """Label used in reports and keys, such as modules or wikitext2."""
    source: Literal["modules", "docstrings", "hub", "local", "mixed"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """`modules` and `docstrings` (source files and documentation strings of the installed pinned packages), `hub`
    (a Hugging Face dataset id), or `local` (a folder of parquet, json, jsonl or txt files, which are the splits that
    words of their names say, or one such file; where its name says none, the first 80 % of its rows are the train
    split, the next 10 % validation, the last 10 % test, so that no split holds another's text), or `mixed` (other
    corpora, one after the other)."""
    path: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """The hub id or the local path; none for what every installation has."""
    parts: Annotated[tuple["Corpus", ...], Field(exclude_if=lambda parts: not parts)] = ()
    """Corpora that source `mixed` joins, with as much text of each where only a part is read."""
    digests: Annotated[
        tuple[tuple[str, str], ...], BeforeValidator(_pairs, json_schema_input_type=dict[str, str]), Field(exclude=True)
    ] = ()
    """Digests of its texts by their names in a run, such as `train` or `train[:2000000]`, as pages show them. Where a
    text is not here, runs on it that `rotquant runs import` brought are shown."""

    about: Annotated[str, Field(exclude=True)] = ""
    """What the text is, as a sentence, where that is not what the name says: a note of pages whose runs read it."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> "Corpus":
        placeless = self.source in (*INSTALLED, "mixed")
        if (self.path is None) != placeless:
            need = "takes no path" if placeless else "needs a path (hub id, folder or file)"
            raise ValueError(f"corpus {self.name!r}: source {self.source!r} {need}")
        if (self.source == "mixed") != bool(self.parts):
            need = "needs parts, corpora" if self.source == "mixed" else "takes no parts"
            raise ValueError(f"corpus {self.name!r}: source {self.source!r} {need}")
        return self

    @property
    def sources(self) -> tuple["Corpus", ...]:
        """The corpora that are read for it: itself, or its parts' own."""
        return tuple(source for part in self.parts for source in part.sources) or (self,)


MODULES = Corpus(name="modules", source="modules")
DOCSTRINGS = Corpus(name="docstrings", source="docstrings")


def corpus_spec(text: str) -> CorpusSpec:
    """The corpus that a user names: `modules`, `docstrings`, or as `rotquant.text.corpus_spec`."""
    return {"modules": MODULES, "docstrings": DOCSTRINGS}.get(text) or loading.corpus_spec(text)


_load_rows = loading.load_rows.dispatch(CorpusSpec)


@loading.load_rows.register
def _rows(
    spec: Corpus, split: Split, *, max_characters: int | None = None, cache: str | Path | None = None
) -> list[str]:
    """As `rotquant.text.load_rows`; `cache`, by default the user's, keeps what was read from installed packages."""
    if spec.source == "mixed":
        share = None if max_characters is None else -(-max_characters // len(spec.parts))
        return [row for part in spec.parts for row in loading.load_rows(part, split, max_characters=share)]
    if spec.source in INSTALLED:
        read = module_rows if spec.source == "modules" else docstring_rows
        return read(split, cache or cache_folder("corpora"), max_characters)
    return _load_rows(spec, split, max_characters=max_characters)


@loading.split_source.register
def _split_source(spec: Corpus, split: Split) -> dict[str, Any]:
    """Of an installed corpus the versions of the packages that it was read from."""
    own = spec.source in INSTALLED
    return {"packages": versions(split)} if own else loading.split_source.dispatch(CorpusSpec)(spec, split)


def text_files(spec: Corpus, split: Split, max_characters: int | None = None) -> list[Path]:
    """The files of this machine, or the folder, that decide what `load_rows` reads of a split.

    Of installed packages also their lists of files, which change with the version. A mixed or hub corpus has none of
    its own. Raises as `load_rows` does.
    """
    if spec.source == "modules":
        names = module_names(split, cache_folder("corpora"), max_characters)
        installed = dict(package_files(PACKAGES[split]))
        return [*(installed[name] for name in names), *lists_of_files(split)]
    if spec.source == "docstrings":
        return lists_of_files(split)
    return [loading.corpus_root(spec)] if spec.source == "local" else []
