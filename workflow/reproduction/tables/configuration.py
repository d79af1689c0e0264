"""The configuration: the checkpoints that stand for the papers' models, the texts and the seeds.

config/config.yaml is the default, for the models that ship with the project. A further file changes the keys that it
names, or stands alone (`standalone: true`): then the default is not read, so no setting of the shipped models affects
the papers' set-up through a key that config/paper.yaml omits. The configuration is checked before anything is computed.
Nothing here imports torch.
"""

import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from reproduction.corpora import Corpus
from reproduction.metrics.settings import WeightKurtosis
from reproduction.reading.written import Many, Written, read_yaml, some_of
from reproduction.tables.method_settings import MethodSettings
from reproduction.tables.tables import Row
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.data import first_problem, merge, problem_keys
from rotquant.foundation.errors import CheckpointError, ConfigError, RotquantError, lookup, nearest
from rotquant.foundation.files import read_object
from rotquant.foundation.hub import settings_of
from rotquant.foundation.written import yaml_value
from rotquant.models.deltas import base_folder
from rotquant.models.folders import located
from rotquant.models.gguf.importing import described
from rotquant.recipes.corpus import BOS
from rotquant.recipes.schemes import Calibration, Perplexity

DEFAULT = Path("config/config.yaml")
PAPERS = Path("workflow/papers")

#: Valid names of a project on a shared server.
PROJECT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

CalibrationText = Annotated[dict[str, Any], some_of(Calibration, "corpus")]
EvaluationText = Annotated[dict[str, Any], some_of(Perplexity, "kind", "corpus", "split", "bos")]
Scaled = dict[Annotated[int, Field(gt=0, strict=False)], Annotated[int, Field(gt=0)]]
"""Map from the paper's numbers to those on a checkpoint; keys are text, as in JSON."""


Tables = dict[Annotated[int, Field(gt=0, strict=False)], Annotated[int, Field(ge=0)]]
"""Map like `Scaled`, where 0 stands for a whole row."""


#: The rule for each map of numbers; the group size that `groups_per_row` counts; the papers' numbers.
_RULES = {"group_sizes": "groups_per_row", "outlier_features": "outlier_width"}
_PAPER_GROUP = 128
_PAPER_NUMBERS = {"group_sizes": (512, 256, 128, 64), "outlier_features": (256, 128)}


class Amounts(Written):
    """Amounts of data and work: for every slot, unless the slot has its own."""

    calibration: CalibrationText = Field(default_factory=dict)
    """Text that methods which calibrate read: windows of the train split."""
    evaluation: EvaluationText = Field(default_factory=dict)
    """Text that models are evaluated on: windows of the test split, all or `max_windows` of them, spread evenly."""
    bos: BOS | None = None
    """Where BOS stands in texts that models read, where a table's row does not say: at the head of the whole text
    (`text`, the papers' way, also without this key), of each window and item (`window`), or nowhere (`none`). For
    models that need BOS, such as Gemma, and for calibration, perplexity, SNR and tasks alike."""
    methods: Annotated[dict[str, dict[str, Any]], MethodSettings()] = Field(default_factory=dict)
    """Settings of methods by their names, such as amounts of work and text, where a table's row does not say its own;
    `rotquant methods` lists them."""
    unrotated: Annotated[dict[str, dict[str, Any]], MethodSettings()] = Field(default_factory=dict)
    """The same where a recipe has no `rotation`, on top of `methods`: a rate that suits a rotated network may not
    suit one with outliers."""
    texts: dict[Literal["samples", "sequence_length"], Scaled] = Field(default_factory=dict)
    """Numbers of samples, and their lengths in tokens, that a table's row says of a text that methods read, to those
    that stand for them here; a number without an entry stands as it is."""
    zero_shot: Annotated[dict[str, Any], some_of(ZeroShot, "kind")] = Field(default_factory=dict)
    """The tasks that zero-shot columns measure."""
    weight_kurtosis: Annotated[dict[str, Any], some_of(WeightKurtosis, "kind", "corpus")] = Field(default_factory=dict)
    """Groups and text of the metric `weight_kurtosis`, where a table does not say its own."""
    groups_per_row: Annotated[int, Field(gt=0)] | None = None
    """How many of the paper's groups of 128 a row of the checkpoint's hidden size has here; other group sizes in
    proportion, and never larger than the paper's. 16 makes groups of 20 where the hidden size is 320. Without it, the
    paper's own sizes."""
    group_sizes: Scaled = Field(default_factory=dict)
    """Single group sizes: the paper's to the one here. They stand before `groups_per_row`."""
    table_groups: Tables = Field(default_factory=dict)
    """The same of weights that have a table of values for each group, which costs more than a scale; 0 is a whole row,
    one table for each output feature."""
    outlier_width: Annotated[int, Field(gt=0)] | None = None
    """The hidden size that the paper's numbers of outlier features are of: the checkpoint keeps the same share of its
    own. Without it, the paper's own numbers."""
    outlier_features: Scaled = Field(default_factory=dict)
    """Single numbers of outlier features: the paper's to the one here. They stand before `outlier_width`."""


class SlotFields(Amounts):
    """What stands for one of the papers' models, and its own amounts of data and work."""

    checkpoint: Annotated[str, Field(min_length=1)]
    """A local Hugging Face folder (safetensors and tokenizer) or a hub id, `owner/name` or `owner/name@revision`."""
    digest: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None = None
    """Digest of a local checkpoint, as pages show it. One that is here is held to it; where none is, runs that were
    computed on it elsewhere are shown (`rotquant runs import`), and nothing is computed."""
    compute: bool = True
    """false leaves the columns of this slot uncomputed."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Windows per forward pass; changes speed and memory, not results."""


class Slot(SlotFields):
    """A slot with the configuration's amounts of data and work under its own."""

    name: str
    """The papers' name of the model."""
    hidden_size: int | None = None
    """Of the checkpoint, where it is known: local ones say it."""

    def scaled(self, kind: str, number: int) -> int:
        """The paper's group size or number of outlier features on this slot's checkpoint.

        An entry in the map of this kind overrides the rule, which gives at most the paper's number; without both, the
        paper's number is used.

        Raises:
            ConfigError: when the slot's map lacks the number and there is no rule, or the rule lacks the hidden size.
        """
        mapping: dict[int, int] = getattr(self, kind)
        if number in mapping:
            return mapping[number]
        rule = _RULES.get(kind)
        whole = rule and getattr(self, rule)
        if whole:
            if self.hidden_size is None:
                raise ConfigError(
                    f"slots.{self.name}.{rule} needs the hidden size of {self.checkpoint}, which is neither here nor "
                    "on a hub that answers; give its folder as checkpoint, or "
                    f"`{kind}: {{{number}: <number for this model>}}`."
                )
            share = number / (_PAPER_GROUP * whole if kind == "group_sizes" else whole)
            return min(number, max(1, round(self.hidden_size * share)))
        if mapping:
            raise ConfigError(
                f"slots.{self.name}.{kind} has nothing for the paper's {number}; "
                f"add `{number}: <number for this model>`."
            )
        return number

    def mapped(self, kind: str) -> dict[int, int]:
        """The papers' numbers of a kind, and the numbers that stand for them here; empty without a map or rule."""
        mapping: dict[int, int] = getattr(self, kind)
        ruled = getattr(self, _RULES[kind]) and self.hidden_size
        return {number: self.scaled(kind, number) for number in _PAPER_NUMBERS[kind]} | mapping if ruled else mapping


class Settings(Written):
    """Settings of a configuration in addition to corpora and slots."""

    device: Literal["cpu", "cuda", "auto"]
    """Where weights are quantized and models evaluated; auto takes a GPU when there is one."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Floating-point type of the simulated network."""
    dtypes: dict[str, Literal["float32", "bfloat16", "float16"]] = Field(default_factory=dict)
    """The same of the tables of single papers, by the paper's short name, or of single tables, which go before it."""
    seeds: Annotated[Many[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1, max_length=50)]
    """Each draws rotation, calibration sample and order of learning; a row that draws nothing is computed once. All
    tables together have about a thousand runs for each."""
    trials: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Tables about the distribution over seeds take the seeds 0 to trials - 1; without it, `seeds`, as others do."""
    table_seeds: dict[str, Annotated[int, Field(gt=0, le=1000)]] = Field(default_factory=dict)
    """How many seeds, from 0 on, single tables take instead: `{quarot_table1: 10}`."""
    tracking: bool | Annotated[str, Field(pattern=PROJECT_NAME)] = True
    """Whether MLflow shows results while they are computed. A name does too, in experiments `name/paper` instead of
    `paper`: a server, which projects share, asks for one."""
    rows: dict[str, Many[Row]] = Field(default_factory=dict)
    """Further rows of single tables, which the papers do not have: `{quarot_table1: [{name: RTN, method: rtn}]}`."""
    papers: Many[Annotated[str, Field(min_length=1)]] = ()
    """Folders with tables of your own, anywhere: each has files like those of a folder in workflow/papers."""
    allow_code_execution: bool = False
    """Whether programs that models write for HumanEval may be run, in a process that can do little (docs/tasks.md)."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _tracking_is_named(cls, given: object) -> object:
        if not (isinstance(given, bool) or (isinstance(given, str) and re.match(PROJECT_NAME, given))):
            raise ValueError("use true, false, or the project's name: letters, digits, '-', '_' and '.'")
        return given

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed occurs twice")
        return seeds


class ConfigFile(Amounts, Settings):
    """Which checkpoint stands for each column of the papers' tables, on which text, how much of it, with which seeds.

    It is the whole: a file on top of others names what differs, and takes a key of theirs away by null.
    """

    standalone: bool = False
    """Whether nothing of config/config.yaml lies below this file."""
    calibration: CalibrationText  # pyright: ignore[reportGeneralTypeIssues]  # required here
    evaluation: EvaluationText  # pyright: ignore[reportGeneralTypeIssues]  # required here
    corpora: Annotated[dict[str, Corpus], Field(min_length=1)]
    """The text that each corpus name of the tables stands for."""
    slots: Annotated[dict[str, SlotFields], Field(min_length=1)]
    """The papers' models by the names of the tables' columns, and what stands for each of them."""


class Config(Settings):
    """The validated configuration."""

    corpora: dict[str, Corpus]
    slots: dict[str, Slot]
    layers: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True, repr=False)
    """The data that it comes from by the name of its file, each on top of those before."""

    @property
    def alone(self) -> dict[str, Any]:
        """The configuration as the data of one standalone file."""
        return {**plain(merged(self.layers)), "standalone": True}

    def where(self, *path: str) -> str:
        """The location of a key for messages, such as "config/paper.yaml: slots.Llama-2-7B"."""
        return f"{named(self.layers, path)}: {'.'.join(path)}"

    def folders(self, root: Path) -> tuple[Path, ...]:
        """The folders of `papers`, absolute.

        Raises:
            ConfigError: one is no folder, has no YAML file, or is the project's or around it.
        """
        found = []
        for name in self.papers:
            folder, where = (root / Path(name).expanduser()).resolve(), f"{self.where('papers')}: {name}"
            if not folder.is_dir():
                raise ConfigError(f"{where} is no folder: name one that has YAML files with tables.")
            if root.resolve().is_relative_to(folder):
                raise ConfigError(
                    f"{where} is this project's folder or around it: name one of its own for your tables."
                )
            if not any(folder.glob("*.yaml")):
                raise ConfigError(f"{where} has no YAML file: write tables there, as docs/tables.md says.")
            found.append(folder)
        return tuple(dict.fromkeys(found))

    def slot(self, name: str) -> Slot:
        """Find the slot of a table's column.

        Raises:
            ConfigError: for an unknown slot; the sentence lists the nearest ones.
        """
        return lookup(self.slots, name, f"{' + '.join(self.layers)}: slots: a column of a table is the unknown slot")


def load_config(
    overrides: Sequence[str | Path] = (), root: Path = Path(), options: Mapping[str, Any] | None = None
) -> Config:
    """Read config/config.yaml, each of `overrides` on top and `options` last, and validate the result.

    Args:
        overrides: files; if the first stands alone, it replaces config/config.yaml.
        options: the values of Snakemake's --config.

    Raises:
        ConfigError: a missing or unreadable file, or a key that does not fit (the sentence names both).
    """
    layers = read_layers(overrides, root)
    if options:
        layers["--config"] = _typed(options)
    _check_nulls(layers)
    data = plain(merged(layers))
    try:
        said = ConfigFile.model_validate(data)
    except ValidationError as error:
        keys = problem_keys(error, data)
        mistyped = keys[:-1] == ("slots",)  # a mistyped slot looks like an incomplete new one
        others = nearest(keys[-1], [name for name in data["slots"] if name != keys[-1]]) if mistyped else ""
        raise ConfigError(f"{named(layers, keys)}: {first_problem(error, data)}{others}.") from None
    slots = {}
    for name, slot in said.slots.items():
        both = ((name, getattr(said, name), getattr(slot, name)) for name in Amounts.model_fields)
        own = {name: shared if one is None else merge(shared, one) for name, shared, one in both}
        width = hidden_size(root / slot.checkpoint)
        if width is None and any(own[rule] for rule in _RULES.values()):
            width = _hidden_size_on_hub(slot.checkpoint)
        slots[name] = Slot.model_validate({**dict(slot), **own, "name": name, "hidden_size": width})
    shared = {key: getattr(said, key) for key in Settings.model_fields}
    return Config.model_validate({**shared, "corpora": said.corpora, "slots": slots, "layers": layers})


def hidden_size(folder: Path) -> int | None:
    """The hidden size of a local checkpoint or of its base; None if unknown: loading the checkpoint reports why."""
    with suppress(RotquantError, OSError):
        place = described(base_folder(folder) or folder)
        found = read_object(place / "config.json", error=CheckpointError).get("hidden_size")
        return found if isinstance(found, int) and found > 0 else None
    return None


def _hidden_size_on_hub(checkpoint: str) -> int | None:
    """The same of the hub's model, asked only where it decides a size."""
    with suppress(CheckpointError):
        folder, name, revision = located(checkpoint)
        if folder is None and (file := settings_of(name, revision)) is not None:
            return hidden_size(file.parent)
    return None


def read_layers(overrides: Sequence[str | Path], root: Path) -> dict[str, dict[str, Any]]:
    """The data of config/config.yaml and of each further file by file name; without the default if one stands alone.

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


def _check_nulls(layers: Mapping[str, dict[str, Any]]) -> None:
    """Refuse a method's null setting that removes nothing, which reads as if the setting were none."""
    before = itertools.accumulate(layers.values(), merge, initial={})
    for (name, layer), known in zip(layers.items(), before, strict=False):
        said = [(kind, layer[kind]) for kind in ("methods", "unrotated") if isinstance(layer.get(kind), dict)]
        settings = [(kind, str(method), one) for kind, methods in said for method, one in methods.items()]
        paths = [(kind, method, str(key)) for kind, method, one in settings for key in _nulls(one)]
        if path := next((path for path in paths if not _holds(known, path)), None):
            raise ConfigError(
                f"{name}: {'.'.join(path)}: null removes what a file before sets, and none does: leave it out."
            )


def _nulls(data: Any) -> list[Any]:
    return [key for key, value in data.items() if value is None] if isinstance(data, dict) else []


def merged(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge the layers, each on top of those before."""
    return functools.reduce(merge, layers.values(), {})


def named(layers: Mapping[str, dict[str, Any]], path: Sequence[str]) -> str:
    """The name of the layer that sets a path: the last that has it, or all names if none does or the path is empty."""
    holding = (name for name in reversed([*layers]) if path and _holds(layers[name], path))
    return next(holding, " + ".join(layers))


def find_root(start: Path | None = None) -> Path:
    """The project folder: `start` (default: the working folder) or the nearest parent with a configuration and papers.

    Raises:
        ConfigError: when there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in [start, *start.parents]:
        if (folder / DEFAULT).is_file() and (folder / PAPERS).is_dir():
            return folder
    raise ConfigError(
        f"{start} is not inside a rotquant project: neither it nor a parent holds {DEFAULT} and {PAPERS}/."
    )


def plain(data: Any) -> Any:
    """`data` with text keys, as in JSON, and without null entries, which remove an earlier file's keys."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items() if value is not None}
    return [plain(value) for value in data] if isinstance(data, list) else data


def _holds(data: Any, path: Sequence[str]) -> bool:
    """Whether nested data has a value at a path."""
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
    """Parse values of Snakemake's --config, which passes lists and mappings as text: `seeds=[0]`."""
    if isinstance(value, Mapping):
        return {key: _typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    return yaml_value(value, "--config") if isinstance(value, str) else value


def _shown(path: str | Path, root: Path) -> str:
    """A file's name in messages: relative to the project if the file is inside."""
    whole, top = Path(os.path.realpath(path)), root.resolve()
    return whole.relative_to(top).as_posix() if whole.is_relative_to(top) else str(path)
