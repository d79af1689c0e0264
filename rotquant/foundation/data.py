"""Frozen data: the base class of all that is validated, mappings on top of each other, and what is wrong in a sentence.

Nothing here knows what the data is about, and nothing imports torch.
"""

import ast
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from rotquant.foundation.errors import nearest

LONGEST = 100
"""Characters of a value that a sentence repeats."""


class Frozen(BaseModel):
    """Immutable value object of finite numbers; unknown fields are errors, so a misspelt option never passes silently.

    The error names the known fields that resemble the unknown one.
    """

    # What a class validates by is built when it is first used: most processes use few of two hundred.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    described_by: ClassVar[type[BaseModel] | None] = None
    """The class below whose fields their meanings stand, where that is another one."""

    @model_validator(mode="before")
    @classmethod
    def _fields_are_known(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.model_config.get("extra") == "forbid":
            known = _known(cls)
            for name in data:
                if name not in known:
                    problem = f"unknown field {name!r}{nearest(str(name), list(known))}"
                    raise PydanticCustomError("unknown_field", "{problem}", {"problem": problem, "field": str(name)})
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The JSON schema, in which each field is described by the string below it."""
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, meaning in field_meanings(cls.described_by or cls).items():
            if name in properties:
                properties[name].setdefault("description", meaning)
        return found


@functools.cache
def _known(section: type[BaseModel]) -> dict[str, None]:
    """The names that data of a model may have, in the order of its fields."""
    return {field.alias or name: None for name, field in section.model_fields.items()}


def field_meanings(section: type[BaseModel]) -> dict[str, str]:
    """The documentation strings that stand below a model's fields, those that it inherits included, by field.

    pydantic can attach them when a class is made, which would cost every process time for what two commands show.
    """
    meanings: dict[str, str] = {}
    for model in reversed(section.__mro__):
        if issubclass(model, BaseModel) and model not in (BaseModel, Frozen):
            (declared,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
            meanings |= _strings_below(declared)
    return meanings


def _strings_below(declared: ast.stmt) -> Iterator[tuple[str, str]]:
    body = declared.body if isinstance(declared, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(below.value.value).split())


def nested(path: str, value: Any) -> dict[str, Any]:
    """A value at the end of a dotted path: `a.b` and 1 are {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def merge(base: Any, changes: Any) -> Any:
    """`base` with `changes` on top; mappings are merged key by key, anything else is replaced."""
    if isinstance(base, dict) and isinstance(changes, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in changes.items()}}
    return changes


def first_problem(error: ValidationError, data: Any = None) -> str:
    """The first problem of a pydantic report as "field.path: message".

    Args:
        data: what was validated, by which items of lists that have an id or a name are named.
    """
    problem = error.errors()[0]
    loc, missing = problem["loc"], problem["type"] == "missing"
    names = [str(part) for part in loc[: -1 if missing else None]] if data is None else [n for _, n in _walk(loc, data)]
    if missing:
        return f"{'.'.join([*names, str(loc[-1])])} is missing"
    return ": ".join(filter(None, (".".join(names), _message(problem))))


def problem_keys(error: ValidationError, data: Any) -> tuple[str, ...]:
    """The keys that lead to the first problem of a pydantic report, an unknown one included and a missing one not."""
    problem = error.errors()[0]
    unknown = problem.get("ctx", {}).get("field")
    return (*(key for key, _ in _walk(problem["loc"], data)), *((unknown,) if unknown is not None else ()))


def _walk(loc: tuple[int | str, ...], data: Any) -> Iterator[tuple[str, str]]:
    """Each key on the way to a problem as text, and the id or name of an item in place of its number.

    What pydantic puts between them, such as which member of a union it tried, is left out.
    """
    for part in map(str, loc):
        numbered = isinstance(data, list | tuple)
        inside = dict(enumerate(data) if numbered else data.items() if isinstance(data, Mapping) else ())
        by_text = {str(key): value for key, value in inside.items()}
        if part in by_text:
            data = by_text[part]
            named = (data.get("id") or data.get("name")) if numbered and isinstance(data, Mapping) else None
            yield part, str(named or part)


def _message(problem: ErrorDetails) -> str:
    """Describe what is wrong with a value, in the words of YAML instead of Python's, the value, and the nearest right
    ones."""
    kind, context, given = problem["type"], problem.get("ctx", {}), problem["input"]
    message = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = message.replace("valid tuple", "list").replace("Tuple should", "List should")
    message = re.sub(r" or instance of \w+", "", message)
    known = context.get("expected") if kind == "literal_error" else None
    if kind == "union_tag_invalid":
        known, given = context["expected_tags"], context["tag"]
        message = f"{context['discriminator']} should be one of {known}"
    if isinstance(given, Mapping | BaseModel):
        return message
    shown = repr(given) if len(repr(given)) <= LONGEST else f"{repr(given)[:LONGEST]}..."
    if close := difflib.get_close_matches(str(given), re.findall(r"'([^']*)'", known or ""), n=3, cutoff=0.5):
        shown += f"; nearest: {', '.join(close)}"
    if kind in ("int_type", "float_type") and isinstance(given, str) and re.fullmatch(r"[-+.\deE]+", given):
        shown += ", which is text in YAML: write it without quotes, and a power of ten as 1.0e-3"
    return f"{message} (given {shown})"
