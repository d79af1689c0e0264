"""Files that people write in YAML: read, validated by one pydantic model a kind of file, refused in one sentence.

The sentence names the file, the key and what would be right. The site's page on the configuration is made from the same
models. Nothing here knows what the data is about.
"""

import csv
import functools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema, core_schema

from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import check_regular
from rotquant.foundation.written import yaml_problem, yaml_value

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Many = Annotated[tuple[T, ...], Field(strict=False)]
"""A list in YAML."""


class Written(Frozen):
    """A mapping in YAML: as `Frozen`, and no value is taken for one of another type, such as true for 1."""

    model_config = ConfigDict(strict=True)


class AsData:
    """Annotates a dict that is validated as a model and kept as plain data, the given fields alone."""

    def __init__(self, model: Any) -> None:
        """`model`: a model, or a union of several."""
        self.model = model

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The pydantic schema that validates the value; a dict is written as it is."""
        return core_schema.no_info_after_validator_function(
            lambda given: given.model_dump(exclude_unset=True),
            handler.generate_schema(self.model),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda data: data),
        )


def some_of(model: Any, *without: str, also: Mapping[str, Any] | None = None, **instead: Any) -> AsData:
    """Annotates a dict of some fields of a model, those that it changes, nested as the model is.

    Names and values are checked as the model's own; that they fit together is not, since the others are elsewhere.

    Args:
        without: fields that cannot be changed, as "corpus" or "text.corpus".
        also: fields that the model itself does not have, with their types.
        instead: types that fields of these names have here.
    """
    return AsData(_partial(model, without, tuple(instead.items()), tuple((also or {}).items())))


@functools.cache
def _partial(
    kind: Any,
    without: tuple[str, ...] = (),
    instead: tuple[tuple[str, Any], ...] = (),
    also: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """A type in which models have all of their fields optional, and tuples are lists as YAML has them."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _partial_model(kind, without, instead, also)
    if origin in (Union, types.UnionType):
        return Union[tuple(_partial(argument, without, instead, also) for argument in arguments)]  # noqa: UP007
    if origin is Annotated:
        return Annotated[(_partial(arguments[0], without, instead, also), *arguments[1:])]
    if origin in (dict, Mapping):  # of sections by name, which whoever knows the names checks
        return dict[str, Any]
    return Annotated[kind, Field(strict=False)] if origin is tuple else kind


def _partial_model(
    model: type[BaseModel],
    without: tuple[str, ...],
    instead: tuple[tuple[str, Any], ...],
    also: tuple[tuple[str, Any], ...],
) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (kind, None) for name, kind in also}
    others = dict(instead)
    for name, field in model.model_fields.items():
        inner = tuple(path.removeprefix(f"{name}.") for path in without if path.startswith(f"{name}."))
        if name in others:
            fields[name] = (others[name], None)
        elif name not in without:
            fields[name] = (Annotated[(_partial(field.annotation, inner, instead), *field.metadata, Field())], None)
    return _model(model.__name__, fields, getattr(model, "described_by", None) or model, model.__doc__)


def by_name(name: str, sections: Mapping[str, Any]) -> type[Written]:
    """A model of several sections by their names, each of which may be left out."""
    return _model(name, {section: (kind, None) for section, kind in sections.items()}, Written, None)


def _model(name: str, fields: Mapping[str, Any], described_by: type[BaseModel], doc: str | None) -> type[Written]:
    make: Any = create_model
    made = make(name, __base__=Written, __doc__=doc, **fields)
    made.described_by = described_by
    return made


def parse(model: type[M], data: Any, where: str) -> M:
    """The data of a file as a model.

    Raises:
        ConfigError: data that the model refuses; the sentence begins with `where` and names the key.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, data)}.") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: a missing file, invalid YAML, a key that occurs twice, aliases that fill in to more than
            `rotquant.foundation.written.LARGEST` values, or something that is not a mapping.
    """
    check_regular(path, ConfigError)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_problem(error)}.") from None
    data = yaml_value(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values.")
    return data


def read_csv(path: str | Path, columns: Sequence[str], what: str) -> list[dict[str, str]]:
    """The lines of a CSV file with a head, each with all of the head's columns.

    Args:
        columns: which the head must have. what: the file holds, for the sentence.

    Raises:
        ConfigError: it is missing or no regular file, is no CSV in UTF-8, or lacks a column.
    """
    check_regular(path, ConfigError)
    try:
        with Path(path).open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines, strict=True)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{what} {path} lack the column {missing[0]!r}.")
            found = []
            for line in reader:
                if None in line or None in line.values():
                    raise ConfigError(f"{what} {path}, line {reader.line_num}: it has not as many cells as the head.")
                found.append(line)
            return found
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} do not exist.") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} are not UTF-8 text ({error.reason} at byte {error.start + 1}).") from None
    except csv.Error as error:
        raise ConfigError(f"{what} {path} are no CSV ({error}).") from None
