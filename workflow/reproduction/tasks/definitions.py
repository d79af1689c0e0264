"""Task definitions as the YAML files that lm-eval reads: written and checked here without importing lm-eval.

A definition may hold functions, which a file names by module. No file is read back: what is asked is the definition
that the code makes, and its file must have that text.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from rotquant.foundation.contents import content_digest
from rotquant.foundation.errors import TaskError
from rotquant.foundation.files import short_hash

_DATASET = re.compile(r"^dataset_path:\s*(\S+)", re.MULTILINE)
_INCLUDE = re.compile(r"^include:\s*(\S+)", re.MULTILINE)


def measured(*measures: str) -> list[dict[str, Any]]:
    """The field `metric_list` of a definition: means of measures of which more is better."""
    return [{"metric": measure, "aggregation": "mean", "higher_is_better": True} for measure in measures]


def written(
    target: str, until: list[str], tokens: int, measure: str, judge: Callable[..., dict[str, float]] | None = None
) -> dict[str, Any]:
    """The fields of a definition whose answer is written greedily, until one of some texts or for a number of tokens.

    Args:
        target: `doc_to_target`. judge: scores an item and what was written for it; None lets lm-eval do so.
    """
    return {
        "output_type": "generate_until",
        "doc_to_target": target,
        "generation_kwargs": {"until": until, "max_gen_toks": tokens, "do_sample": False},
        **({"process_results": judge} if judge else {}),
        "metric_list": measured(measure),
    }


class _Writer(yaml.SafeDumper):
    """Writes a function as lm-eval names one: `!function <module>.<name>`."""


_Writer.add_representer(FunctionType, lambda writer, function: writer.represent_scalar("!function", _name_of(function)))


def write_definition(folder: Path, definition: dict[str, Any]) -> None:
    """Write the definition of one task into a file below its name."""
    (folder / f"{definition['task']}.yaml").write_text(_text(definition), encoding="utf-8")


def check_written(folder: Path, definition: dict[str, Any]) -> None:
    """Raise `TaskError` unless a folder has a definition as `write_definition` writes it."""
    file = folder / f"{definition['task']}.yaml"
    if not file.is_file() or file.read_bytes() != _text(definition).encode():
        raise TaskError(f"task definition {file} is missing, or not as it was written; remove its folder.")


def definition_digest(definition: dict[str, Any]) -> str:
    """What identifies how a task is asked, wherever its data and lm-eval lie: 16 hexadecimal digits.

    It covers every field, and of a definition of lm-eval's that is included its content, with what that includes and
    the functions next to it.
    """
    fields = {name: value for name, value in definition.items() if name not in ("dataset_kwargs", "include")}
    fields["included"] = [content_digest(path) for path in _included(definition)]
    return short_hash(json.dumps(fields, sort_keys=True, default=_name_of))


def hub_dataset(definition: dict[str, Any]) -> str:
    """The data set that a definition, or one of lm-eval's that it includes, names on the hub; empty where none does."""
    files = (path for path in _included(definition) if path.suffix == ".yaml")
    found = (_DATASET.search(path.read_text(encoding="utf-8")) for path in files)
    return definition.get("dataset_path") or next((match[1] for match in found if match), "")


def _text(definition: dict[str, Any]) -> str:
    return yaml.dump(definition, Dumper=_Writer, sort_keys=False, width=120)


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__name__}"


def _included(definition: dict[str, Any]) -> list[Path]:
    """The files of lm-eval's that a definition includes, directly or not, each with the Python files next to it."""
    if "include" not in definition:
        return []
    found, names = [], [Path(definition["include"])]
    for file in names:
        found += [file, *sorted(file.parent.glob("*.py"))]
        names += [file.parent / name for name in _INCLUDE.findall(file.read_text(encoding="utf-8"))]
    return found
