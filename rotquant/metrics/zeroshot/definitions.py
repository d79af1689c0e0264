"""Task definitions as the YAML files that lm-eval reads: written and read here without importing lm-eval.

A definition may hold functions, which a file names by module; files name their data relative to their folder.
"""

import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from rotquant.foundation.errors import TaskError

FUNCTION = "!function"
"""lm-eval's tag of a function, `!function <module>.<name>`."""


class _Writer(yaml.SafeDumper):
    """Writes a function as its name."""


class _Reader(yaml.SafeLoader):
    """Reads the name of one of this package's functions as the function; refuses any other."""


def _named(writer: _Writer, function: Callable[..., Any]) -> yaml.Node:
    return writer.represent_scalar(FUNCTION, f"{function.__module__}.{function.__name__}")


def _function(reader: _Reader, node: yaml.ScalarNode) -> Callable[..., Any]:
    name = reader.construct_scalar(node)
    if not name.startswith("rotquant.metrics.zeroshot."):
        raise TaskError(f"a task definition names the function {name}, which is none of rotquant's.")
    return pkgutil.resolve_name(name)


_Writer.add_representer(FunctionType, _named)
_Reader.add_constructor(FUNCTION, _function)


def write_definition(folder: Path, definition: dict[str, Any]) -> None:
    """Write the definition of one task below its name."""
    text = yaml.dump(definition, Dumper=_Writer, sort_keys=False, width=120)
    (folder / f"{definition['task']}.yaml").write_text(text, encoding="utf-8")


def read_definition(folder: Path, name: str) -> dict[str, Any]:
    """The definition of one task, its functions resolved.

    Raises:
        TaskError: the folder does not have it.
    """
    try:
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"task folder {folder} has no definition of {name!r}; prepare it again.") from None
    return yaml.load(text, Loader=_Reader)


def data_files(folder: Path, definition: dict[str, Any]) -> dict[str, Path]:
    """The absolute paths of a task's local data by split; empty for a task that reads the hub."""
    files = definition.get("dataset_kwargs", {}).get("data_files", {})
    return {split: (folder / file).resolve() for split, file in files.items()}
