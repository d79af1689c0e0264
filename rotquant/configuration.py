"""The configuration: which checkpoint stands for each of the papers' models, on which text, with which seeds.

config/config.yaml is the default; every further file changes the keys it names, as Snakemake's --configfile does. All
of it is checked against a JSON schema before anything is computed. Nothing here imports torch.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from rotquant.errors import ConfigError, lookup, nearest
from rotquant.schemes import Frozen

DEFAULT = Path("config/config.yaml")
SCHEMAS = Path("workflow/schemas")

#: Sections that hold for every slot, unless the slot has its own.
SHARED = ("calibration", "evaluation", "omniquant", "llm_qat", "learning", "zero_shot")


class Slot(Frozen):
    """What stands for one of the papers' models.

    group_sizes, outlier_features: the paper's number to this checkpoint's, since both scale with the width.
    calibration, evaluation, omniquant, llm_qat, learning, zero_shot: amounts of data and work, the configuration's
        with the slot's own on top.
    compute: False leaves the slot's columns uncomputed.
    """

    name: str
    checkpoint: str
    compute: bool = True
    batch_size: int = 8
    group_sizes: dict[int, int] = Field(default_factory=dict)
    outlier_features: dict[int, int] = Field(default_factory=dict)
    calibration: dict[str, Any] = Field(default_factory=dict)
    evaluation: dict[str, Any] = Field(default_factory=dict)
    omniquant: dict[str, Any] = Field(default_factory=dict)
    llm_qat: dict[str, Any] = Field(default_factory=dict)
    learning: dict[str, Any] = Field(default_factory=dict)
    zero_shot: dict[str, Any] = Field(default_factory=dict)

    def scaled(self, kind: str, number: int) -> int:
        """The paper's group size or number of outlier features on this slot's checkpoint.

        Raises:
            ConfigError: when the slot's map lacks the number.
        """
        mapping: dict[int, int] = getattr(self, kind)
        if number not in mapping:
            raise ConfigError(
                f"slots.{self.name}.{kind} has nothing for the paper's {number}; "
                f"add `{number}: <number for this model>`."
            )
        return mapping[number]


class Config(Frozen):
    """The validated configuration. `corpora` holds the fields of a `CorpusSpec` per name.

    trials: how many seeds tables about the distribution over seeds take, 0, 1, ...; None: `seeds`, as others do.
    """

    device: str
    dtype: str
    seeds: tuple[int, ...]
    trials: int | None = None
    tracking: bool = True
    corpora: dict[str, dict[str, Any]]
    slots: dict[str, Slot]

    def slot(self, name: str) -> Slot:
        """The slot of a table's column.

        Raises:
            ConfigError: for an unknown slot; the sentence lists the nearest ones.
        """
        return lookup(self.slots, name, "unknown slot")


def load_config(overrides: Sequence[str | Path] = (), root: Path = Path()) -> Config:
    """Read config/config.yaml and then each of `overrides`, and validate the result.

    Raises:
        ConfigError: a missing or unreadable file, or a key that does not satisfy the schema (the sentence names it).
    """
    merged: dict[str, Any] = {}
    for path in [root / DEFAULT, *overrides]:
        merged = merge(merged, read_yaml(path))
    return parse_config(merged, " + ".join(str(path) for path in [DEFAULT, *overrides]), root)


def parse_config(data: dict[str, Any], where: str, root: Path = Path()) -> Config:
    """Validate configuration data, as `load_config` does; `where` begins the sentence of an error."""
    data = without_nulls(json.loads(json.dumps(data)))  # YAML allows numbers as keys, JSON and its schemas do not
    validate(data, "config", where, root)
    shared = {section: data.get(section, {}) for section in SHARED}
    slots = {}
    for name, fields in data["slots"].items():
        own = {section: merge(values, fields.get(section, {})) for section, values in shared.items()}
        slots[name] = Slot.model_validate({**fields, **own, "name": name})
    top = {key: data[key] for key in ("device", "dtype", "seeds", "corpora")}
    optional = {key: data[key] for key in ("trials", "tracking") if key in data}
    return Config.model_validate({**top, **optional, "slots": slots})


def find_root(start: Path | None = None) -> Path:
    """The project folder: `start` (default: the working folder) or the nearest parent with config/config.yaml.

    Raises:
        ConfigError: when there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in [start, *start.parents]:
        if (folder / DEFAULT).is_file() and (folder / SCHEMAS).is_dir():
            return folder
    raise ConfigError(
        f"{start} is not inside a rotquant project: neither it nor a parent holds {DEFAULT} and {SCHEMAS}/."
    )


def merge(base: Any, changes: Any) -> Any:
    """`base` with `changes` on top; mappings are merged key by key, anything else is replaced."""
    if isinstance(base, dict) and isinstance(changes, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in changes.items()}}
    return changes


def without_nulls(data: Any) -> Any:
    """`data` without mapping entries whose value is null: null in a later file removes an earlier file's key."""
    if isinstance(data, dict):
        return {key: without_nulls(value) for key, value in data.items() if value is not None}
    return data


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: a missing file, invalid YAML, or something that is not a mapping.
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values.")
    return data


def validate(data: Any, schema: str, where: str, root: Path = Path()) -> None:
    """Check `data` against workflow/schemas/<schema>.schema.yaml.

    Raises:
        ConfigError: one sentence about the most telling problem: the file, the key, what is wrong.
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema, root).iter_errors(data))
    if error is not None:
        path = ".".join(str(part) for part in error.absolute_path)
        raise ConfigError(f"{where}: {f'{path}: ' if path else ''}{_explain(error)}.")


@functools.cache
def _validator(schema: str, root: Path) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(read_yaml(root / SCHEMAS / f"{schema}.schema.yaml"))


def _explain(error: Any) -> str:
    """What is wrong, with the nearest valid names where a name is unknown."""
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = list(error.schema.get("properties", {}))
        unknown = [key for key in error.instance if key not in known]
        return f"unknown key {unknown[0]!r}{nearest(unknown[0], known)}"
    if error.validator == "enum":
        known = [str(value) for value in error.validator_value]
        return f"{error.instance!r} is none of {', '.join(known)}{nearest(str(error.instance), known)}"
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        return f"key {missing[0]!r} is missing"
    return str(error.message)
