"""The configuration: which checkpoint stands for each of the papers' models, on which text, with which seeds.

config/config.yaml is the default, for the models that ship with the project. A further file changes the keys it names,
or stands alone (`standalone: true`): then nothing of the default is read, so that no setting of the shipped models can
reach the papers' set-up through a key that config/paper.yaml leaves out. All of it is checked against a JSON schema
before anything is computed. Nothing here imports torch.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from rotquant.foundation.data import Frozen, first_problem, merge
from rotquant.foundation.errors import ConfigError, lookup, nearest
from rotquant.text import CorpusSpec

DEFAULT = Path("config/config.yaml")
SCHEMAS = Path("workflow/schemas")

#: Sections that hold for every slot, unless the slot has its own.
SHARED = ("calibration", "evaluation", "omniquant", "llm_qat", "learning", "zero_shot")


class Slot(Frozen):
    """What stands for one of the papers' models.

    group_sizes, outlier_features: the paper's number to this checkpoint's, since both scale with the width; without
        them, the paper's own.
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
        if not mapping:
            return number
        if number not in mapping:
            raise ConfigError(
                f"slots.{self.name}.{kind} has nothing for the paper's {number}; "
                f"add `{number}: <number for this model>`."
            )
        return mapping[number]


class Config(Frozen):
    """The validated configuration.

    trials: how many seeds tables about the distribution over seeds take, 0, 1, ...; None: `seeds`, as others do.
    layers: the data that it comes from by the name of its file, each on top of those before.
    """

    device: str
    dtype: str
    seeds: tuple[int, ...]
    trials: int | None = None
    tracking: bool = True
    corpora: dict[str, CorpusSpec]
    slots: dict[str, Slot]
    layers: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True, repr=False)

    @property
    def alone(self) -> dict[str, Any]:
        """The same configuration as the data of one file that stands alone."""
        return {**plain(merged(self.layers)), "standalone": True}

    def where(self, *path: str) -> str:
        """The place of a key for a sentence about it, as "config/paper.yaml: slots.Llama-2-7B"."""
        return f"{named(self.layers, path)}: {'.'.join(path)}"

    def slot(self, name: str) -> Slot:
        """The slot of a table's column.

        Raises:
            ConfigError: for an unknown slot; the sentence lists the nearest ones.
        """
        return lookup(self.slots, name, f"{' + '.join(self.layers)}: slots: a column of a table is the unknown slot")


def load_config(
    overrides: Sequence[str | Path] = (), root: Path = Path(), options: Mapping[str, Any] | None = None
) -> Config:
    """Read config/config.yaml, each of `overrides` on top and `options` last, and validate the result.

    Args:
        overrides: files; where the first stands alone, it takes the place of config/config.yaml.
        options: what Snakemake's --config says.

    Raises:
        ConfigError: a missing or unreadable file, or a key that does not satisfy the schema (the sentence names both).
    """
    layers = read_layers(overrides, root)
    if options:
        layers["--config"] = _typed(options)
    data = plain(merged(layers))
    problem = find_problem(data, "config", root)
    if problem is not None:
        path, what = problem
        mistyped = path[:-1] == ["slots"]  # which then looks like a new one that lacks something
        what += nearest(path[-1], [name for name in data["slots"] if name != path[-1]]) if mistyped else ""
        raise ConfigError(f"{named(layers, path)}: {what}.")
    corpora = {name: _corpus(fields, name, layers) for name, fields in data["corpora"].items()}
    shared = {section: data.get(section, {}) for section in SHARED}
    slots = {}
    for name, fields in data["slots"].items():
        own = {section: merge(values, fields.get(section, {})) for section, values in shared.items()}
        slots[name] = Slot.model_validate({**fields, **own, "name": name})
    top = {key: data[key] for key in ("device", "dtype", "seeds", "trials", "tracking") if key in data}
    return Config.model_validate({**top, "corpora": corpora, "slots": slots, "layers": layers})


def _corpus(fields: dict[str, Any], name: str, layers: Mapping[str, dict[str, Any]]) -> CorpusSpec:
    try:
        return CorpusSpec.model_validate(fields)
    except ValidationError as error:
        place = ("corpora", name)
        raise ConfigError(f"{named(layers, place)}: {'.'.join(place)}: {first_problem(error)}.") from None


def read_layers(overrides: Sequence[str | Path], root: Path) -> dict[str, dict[str, Any]]:
    """The data of config/config.yaml and of each further file by the file's name; without the default's if one stands
    alone.

    Raises:
        ConfigError: a missing or unreadable file, or one that stands alone after another.
    """
    layers = {_shown(path, root): read_yaml(path) for path in overrides}
    for place, (name, data) in enumerate(layers.items()):
        if data.get("standalone") and place > 0:
            first = next(iter(layers))
            raise ConfigError(f"{name} stands alone, so {first} before it would change nothing: name {name} first.")
    alone = any(data.get("standalone") for data in layers.values())
    return layers if alone else {str(DEFAULT): read_yaml(root / DEFAULT), **layers}


def merged(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The layers as one, each on top of those before."""
    return functools.reduce(merge, layers.values(), {})


def named(layers: Mapping[str, dict[str, Any]], path: Sequence[str]) -> str:
    """Which layer says what stands at a path: the last that has it, or all where none does or the path is empty."""
    holding = (name for name in reversed(layers) if path and _holds(layers[name], path))
    return next(holding, " + ".join(layers))


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


def plain(data: Any) -> Any:
    """`data` with text as keys, as JSON and its schemas have them, and without entries whose value is null, by which a
    later file removes an earlier one's key."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items() if value is not None}
    return [plain(value) for value in data] if isinstance(data, list) else data


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: a missing file, invalid YAML, a key that occurs twice, or something that is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        _check_keys(node, str(path))
        data = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values.")
    return data


def _check_keys(node: yaml.Node | None, where: str, above: tuple[yaml.Node, ...] = ()) -> None:
    """Refuse a mapping that names a key twice, of which YAML keeps the last, and an alias inside of what it names."""
    if node in above:
        raise ConfigError(f"{where}, line {node.start_mark.line + 1}: an alias stands inside of what it names.")
    if isinstance(node, yaml.MappingNode):
        seen: set[tuple[str, str]] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{where}, line {line}: the key {key.value!r} occurs twice in one mapping.")
            seen.add((key.tag, str(key.value)))
            _check_keys(value, where, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value, where, (*above, node))


def validate(data: Any, schema: str, where: str, root: Path = Path()) -> None:
    """Check `data` against workflow/schemas/<schema>.schema.yaml.

    Raises:
        ConfigError: one sentence about the most telling problem: the file, the key, what is wrong.
    """
    problem = find_problem(data, schema, root)
    if problem is not None:
        raise ConfigError(f"{where}: {problem[1]}.")


def find_problem(data: Any, schema: str, root: Path = Path()) -> tuple[list[str], str] | None:
    """The most telling problem of `data` under workflow/schemas/<schema>.schema.yaml: where it is, and a sentence that
    says so too; None where there is none."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema, root).iter_errors(data))
    if error is None:
        return next((([*path], f"{'.'.join(path)}: {value} is not finite") for path, value in _not_finite(data)), None)
    path = [str(part) for part in error.absolute_path]
    key, what = _explain(error)
    return [*path, *key], f"{'.'.join(path)}: {what}" if path else what


def _not_finite(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Numbers that are inf or nan, which a schema's bounds let pass, and where they stand."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _not_finite(value, (*path, str(key)))
    elif isinstance(data, float) and not math.isfinite(data):
        yield path, data


def _holds(data: Any, path: Sequence[str]) -> bool:
    """Whether nested data has something at a path."""
    for part in path:
        data = plain(data)
        if isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return False
    return True


def _typed(value: Any) -> Any:
    """Values of Snakemake's --config, where lists and mappings come as text: `seeds=[0]`."""
    if isinstance(value, Mapping):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    return yaml.safe_load(value) if isinstance(value, str) else value


def _shown(path: str | Path, root: Path) -> str:
    """A file's name in sentences: relative to the project where it lies inside."""
    whole, top = Path(path).resolve(), root.resolve()
    return whole.relative_to(top).as_posix() if whole.is_relative_to(top) else str(path)


@functools.cache
def _validator(schema: str, root: Path) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(read_yaml(root / SCHEMAS / f"{schema}.schema.yaml"))


def _explain(error: Any) -> tuple[list[str], str]:
    """The wrong key at the place of a schema's error, if that is what is wrong, and what is; with the nearest valid
    names where a name is unknown."""
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = list(error.schema.get("properties", {}))
        unknown = next(key for key in error.instance if key not in known)
        return [unknown], f"unknown key {unknown!r}{nearest(unknown, known)}"
    if error.validator == "enum":
        known = [str(value) for value in error.validator_value]
        return [], f"{error.instance!r} is none of {', '.join(known)}{nearest(str(error.instance), known)}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return [], f"key {missing!r} is missing"
    return [], str(error.message)
