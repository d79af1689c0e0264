"""Task definitions as the YAML files that lm-eval reads: written and read here without importing lm-eval.

A definition may hold functions, which a file names by module; files name their data relative to their folder.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from rotquant.foundation.contents import content_digest
from rotquant.foundation.errors import ConfigError, ResultError, TaskError
from rotquant.foundation.files import check_regular, short_hash
from rotquant.foundation.written import yaml_value
from rotquant.metrics.zeroshot import longbench, reasoning, rouge

_DATASET = re.compile(r"^dataset_path:\s*(\S+)", re.MULTILINE)
_INCLUDE = re.compile(r"^include:\s*(\S+)", re.MULTILINE)

FUNCTION = "!function"
"""lm-eval's tag of a function, `!function <module>.<name>`."""


class _Writer(yaml.SafeDumper):
    """Writes a function as its name."""


class _Reader(yaml.SafeLoader):
    """Reads the name of one of the functions that definitions have here as the function; refuses any other."""


#: All functions that a definition made here has, by the name that a file gives them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{function.__module__}.{function.__name__}": function
    for function in (
        rouge.rouge_l,
        reasoning.by_running,
        reasoning.by_number,
        longbench.by_f1,
        longbench.by_f1_of_a_line,
        longbench.by_rouge_of_a_line,
        longbench.by_count,
    )
}


def _named(writer: _Writer, function: Callable[..., Any]) -> yaml.Node:
    return writer.represent_scalar(FUNCTION, f"{function.__module__}.{function.__name__}")


def _function(reader: _Reader, node: yaml.ScalarNode) -> Callable[..., Any]:
    name = reader.construct_scalar(node)
    if name not in _FUNCTIONS:
        raise TaskError(f"names the function {name!r}, which is none of a task's here.")
    return _FUNCTIONS[name]


_Writer.add_representer(FunctionType, _named)
_Reader.add_constructor(FUNCTION, _function)


def write_definition(folder: Path, definition: dict[str, Any]) -> None:
    """Write the definition of one task below its name."""
    text = yaml.dump(definition, Dumper=_Writer, sort_keys=False, width=120)
    (folder / f"{definition['task']}.yaml").write_text(text, encoding="utf-8")


def read_definition(folder: Path, name: str) -> dict[str, Any]:
    """The definition of one task, its functions resolved.

    Raises:
        TaskError: the folder does not have it, or it is none: no YAML, of another task, with a function of others.
    """
    file = folder / f"{name}.yaml"
    if not file.exists():
        raise TaskError(f"task folder {folder} has no definition of {name!r}; prepare it again.")
    try:
        check_regular(file)
        definition = yaml_value(file.read_text(encoding="utf-8"), "it", _Reader)
    except TaskError as error:
        raise TaskError(f"task definition {file} {error}") from None
    except (ConfigError, ResultError, OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"task definition {file} cannot be read ({str(error).rstrip('.')}); remove its folder."
        ) from None
    if not isinstance(definition, dict) or definition.get("task") != name:
        raise TaskError(f"task definition {file} is none of task {name!r}; remove its folder.")
    return definition


def definition_digest(definition: dict[str, Any]) -> str:
    """What identifies how a task is asked, wherever its data and lm-eval lie: 16 hexadecimal digits.

    It covers every field, and of a definition of lm-eval's that is included its content, with what that includes and
    the functions beside it.
    """
    told = {name: value for name, value in definition.items() if name not in ("dataset_kwargs", "include")}
    included = [] if "include" not in definition else _included(Path(definition["include"]))
    told["included"] = [content_digest(path) for path in included]
    return short_hash(json.dumps(told, sort_keys=True, default=_name_of))


def _name_of(value: Any) -> str:
    """A function by its name; what else JSON does not have, such as a date, as text."""
    return f"{value.__module__}.{value.__name__}" if callable(value) else str(value)


def hub_dataset(definition: dict[str, Any]) -> str:
    """The data set that a definition, or one of lm-eval's that it includes, names on the hub; empty where none does."""
    included = [] if "include" not in definition else _included(Path(definition["include"]))
    found = (_DATASET.search(path.read_text(encoding="utf-8")) for path in included if path.suffix == ".yaml")
    return definition.get("dataset_path") or next((match[1] for match in found if match), "")


def _included(file: Path) -> list[Path]:
    """A definition of lm-eval's, those that it includes, and the Python files beside them."""
    more = [file.parent / name for name in _INCLUDE.findall(file.read_text(encoding="utf-8"))]
    return [file, *sorted(file.parent.glob("*.py")), *(path for one in more for path in _included(one))]


def data_files(folder: Path, definition: dict[str, Any]) -> dict[str, Path]:
    """The absolute paths of a task's local data by split; empty for a task that reads the hub.

    Raises:
        TaskError: the definition has something else in their place.
    """
    files = (definition.get("dataset_kwargs") or {}).get("data_files") or {}
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise TaskError(
            f"task definition {folder / definition['task']}.yaml is damaged (data_files); remove its folder."
        )
    return {split: (folder / file).resolve() for split, file in files.items()}


def item_count(folder: Path, definition: dict[str, Any]) -> int:
    """How many items a task with local data has.

    Raises:
        TaskError: the definition does not say.
    """
    metadata = definition.get("metadata")
    count = metadata.get("items") if isinstance(metadata, dict) else None
    if not isinstance(count, int):
        raise TaskError(
            f"task definition {folder / definition['task']}.yaml is damaged (metadata.items); remove its folder."
        )
    return count
