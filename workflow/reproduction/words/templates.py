"""Templates hold the words of pages. Those of HTML are escaped; a name that is not given is an error."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reproduction.run.results import REPORTS
from reproduction.words.numbers import listed, show

#: The folder that templates are named from.
FOLDER = Path(__file__).parents[1] / "render"


def environment(filters: dict[str, Callable[..., Any]] | None = None, **syntax: Any) -> Environment:
    """What reads templates; `filters` beside those that all share, `syntax` where braces are in the way."""
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        **syntax,
    )
    made.filters |= {"file": file_link, "listed": listed, "once": once, "show": show, **(filters or {})}
    return made


def sentences(template: str, macro: str, **arguments: Any) -> tuple[str, ...]:
    """What a macro says, a sentence on each line."""
    said = getattr(_plain().get_template(template).module, macro)(**arguments)
    return tuple(line for line in said.splitlines() if line)


def once(text: str, between: str = ", ") -> str:
    """The lines of a text, each once, on one line."""
    return listed((line for line in text.splitlines() if line), between)


def file_link(path: Path, words: str = "") -> str:
    """A link from the reports folder to a file of the project, by its path or under other words."""
    return f"[{words or path}]({os.path.relpath(path, REPORTS)})"


_plain = functools.cache(environment)
