"""Exceptions a user can meet. Each carries one sentence: what was wrong, where, and what would be right.

The command line prints the sentence of a `RotquantError` without a traceback; any other exception is a defect of ours.
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

#: Characters of a sentence: names in it come from files, which can say anything.
_LONGEST = 1000


def one_line(text: str) -> str:
    """A text as a terminal only shows it: one line, what cannot be printed as its escape, the middle of a long one cut.

    Sentences name what files say, such as a tensor or a key, which may hold control characters or a million letters.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST * 2 // 3]} [...] {text[-_LONGEST // 4 :]}"
    if text.isprintable():
        return text
    shown = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return "".join(" " if letter == "\\n" else letter for letter in shown)


class RotquantError(Exception):
    """Base class of every error that bad input or a bad environment can cause."""

    def __str__(self) -> str:
        """The sentence, see `one_line`."""
        return one_line(super().__str__())


class RecipeError(RotquantError, ValueError):
    """A recipe, scheme, run or table asks for something impossible or unknown."""


class CheckpointError(RotquantError):
    """A model folder is missing, truncated, of a wrong shape, or holds only pickled weights."""


class UnsupportedArchitectureError(RotquantError):
    """No adapter describes this model family."""


class CorpusError(RotquantError):
    """A text corpus cannot be read, is too short, or does not fit the protocol."""


class TaskError(RotquantError):
    """A zero-shot task's data is missing or of another schema, or a model cannot run the task."""


class KernelError(RotquantError):
    """A CUDA kernel cannot run: unsupported tensor, GPU or architecture, or CuPy or NVRTC is missing."""

    def __str__(self) -> str:
        """The sentence; what a compiler says follows it, line by line."""
        return Exception.__str__(self)


class ResultError(RotquantError):
    """A run file or manifest is missing or damaged."""


class ConfigError(RotquantError, ValueError):
    """A configuration file or table definition does not satisfy its schema."""


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """Return "; nearest: a, b" for the known names that resemble `name`; when none does, the first twenty of them."""
    import difflib

    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"; nearest: {', '.join(close)}"
    shown = sorted(known)[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"; known: {', '.join(shown)}{more}"


def lookup(known: Mapping[str, T], name: str, unknown: str) -> T:
    """Return the entry of `known` with a name; else a `ConfigError` that begins with `unknown` and lists the nearest
    names."""
    if name not in known:
        raise ConfigError(f"{unknown} {name!r}{nearest(name, list(known))}.")
    return known[name]
