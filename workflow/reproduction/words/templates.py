"""Templates with the words of pages. HTML templates are escaped; a missing name is an error."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reproduction.run.results import REPORTS
from reproduction.words.numbers import listed, show

#: Root folder of template names.
FOLDER = Path(__file__).parents[1] / "render"


def environment(filters: dict[str, Callable[..., Any]] | None = None, **syntax: Any) -> Environment:
    """Build the Jinja environment; `filters` add to the shared ones, `syntax` replaces the braces."""
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        **syntax,
    )
    made.filters |= {"file": file_link, "listed": listed, "once": once, "place": place, "show": show}
    made.filters |= {"commit": commit, "versions": versions, **(filters or {})}
    return made


def commit(data: Mapping[str, Any]) -> str:
    """The commit of a record's environment; of an installed package, or a copy of the files, its version."""
    known = data.get("git_commit")
    if not known:
        return f"rotquant {data.get('versions', {}).get('rotquant', 'of unknown version')}"
    return f"commit `{known[:12]}`{' with uncommitted changes' if data.get('git_dirty') else ''}"


def versions(data: Mapping[str, Any]) -> str:
    """The versions of the packages of a record's environment."""
    return ", ".join(f"{name} {version}" for name, version in data.get("versions", {}).items())


def sentences(template: str, macro: str, **arguments: Any) -> tuple[str, ...]:
    """Sentences of a macro, one on each line."""
    said = getattr(_plain().get_template(template).module, macro)(**arguments)
    return tuple(line for line in said.splitlines() if line)


def place(section: str) -> str:
    """A section of a paper in words: "Section 5.1", "Section A.3", but "Abstract"; nothing for "-"."""
    return f"Section {section}" if re.match(r"\d|[A-Z](\.|$)", section) else section.strip("-").capitalize()


def once(text: str, between: str = ", ") -> str:
    """Join the distinct lines of a text."""
    return listed((line for line in text.splitlines() if line), between)


def file_link(path: Path, words: str = "") -> str:
    """A link from the reports folder to a project file, by its path or under other words."""
    return f"[{words or path}]({os.path.relpath(path, REPORTS)})"


_plain = functools.cache(environment)
