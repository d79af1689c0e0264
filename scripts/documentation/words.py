"""Small pieces of Markdown for the generated pages: tables, code, types and defaults in words."""

import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

#: The start of an entry, `name: what it is` or `name, other: ...`, at the margin of a docstring.
_ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; cells have no line ends and no bare bars (`cell`)."""
    lines = [head, [":--"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def entries(rows: Sequence[tuple[str, str, str]]) -> str:
    """A list of names, each with its kind or default and below it its meaning; on a phone it reads better than a table.

    Args:
        rows: name as code, kind and default, meaning.
    """
    return "\n".join(f"- **{code(name)}**: {kind}<br>{meaning}".replace(": <br>", ": ") for name, kind, meaning in rows)


def cell(text: str) -> str:
    """Text as a cell takes it."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text in the type of code."""
    return f"`{text}`" if text else ""


def paragraphs(documented: Any) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(one.split()) for one in (inspect.getdoc(documented) or "").split("\n\n")]


def sentences(text: str) -> list[str]:
    """The sentences of a text; "et al." and "Sec." end none."""
    return re.split(
        r"(?<=[a-z0-9)\]`\"]\.)(?<! al\.)(?<!Sec\.)(?<!Secs\.)(?<!Eqs\.)(?<!Eq\.)\s", " ".join(text.split())
    )


def sentence(text: str) -> str:
    """The first sentence of a text."""
    return sentences(text)[0]


def shown(value: Any) -> str:
    """A value as `--set` takes it; a section as what differs from its defaults."""
    if isinstance(value, BaseModel):
        fields = value.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(fields) if fields else "{}"
    if isinstance(value, Mapping) and not value:
        return "{}"
    return json.dumps(value, default=list).strip('"')


def type_words(annotated: tuple[Any, Sequence[Any]]) -> str:
    """The type of a field in words, with its bounds."""
    annotation, metadata = annotated
    return cell(" ".join([_kind(annotation), *filter(None, map(_bound, metadata))]))


def _kind(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join([_kind(inside[0]), *filter(None, map(_bound, inside[1:]))])
    if origin is Literal:
        return ", ".join(code(str(one)) for one in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one) for one in inside)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {_kind(inside[0])}"
    if origin is Mapping:
        return "mapping"
    named = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return named.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _bound(metadata: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    parts = [metadata, *getattr(metadata, "metadata", ())]
    found = {f"{sign} {getattr(one, name)}" for one in parts for name, sign in signs.items() if hasattr(one, name)}
    return ", ".join(sorted(found))


def with_lists(text: str) -> str:
    """A docstring whose entries at the margin are a list of Markdown, with their further lines indented."""
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if match := _ENTRY.match(line):
            if not inside:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines.append(f"- {names}: {line[match.end() :]}")
            inside = True
        else:
            inside = inside and line.startswith("    ")
            lines.append(line)
    return "\n".join(lines)
