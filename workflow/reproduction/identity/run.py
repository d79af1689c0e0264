"""Runs: one measured cell of a table with one seed, and the keys that name what is computed for it.

`Run.key` names its result file, `Run.weights_key` the rotated and weight-quantized checkpoint that it needs: many runs
that differ only in activations, KV cache or metric share one. `Run.rotation_key` names the learned rotations, which
weights of several methods and widths share. A key is the hash of an identity, so a file can be checked against its
name (`check_signed`). Nothing here computes results.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from reproduction.corpora import Corpus
from reproduction.metrics.settings import Metric
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.recipes.corpus import Split, portion
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration

_METRIC: TypeAdapter[Metric] = TypeAdapter(Metric)

Portion = tuple[str, Split, int | None]
"""A corpus by name, a split, and the number of characters read from its beginning; None for all."""


class Run(Frozen):
    """One measurement: a recipe on a checkpoint with a seed, measured by a metric.

    checkpoint: a local folder or a hub id; its location is not part of the key, `checkpoint_digest` is.
    corpora: the text for each corpus name that the recipe and the metric use; its location is not part of the key.
    texts: digests of the text that is read, by `named`; part of the key.
    seed: draws the rotation, calibration samples and the order of learning (`Recipe.is_random`); set to 0 where nothing
        is random, so equal cells have equal keys.
    dtype: floating-point type of the simulated network.
    """

    checkpoint: str
    checkpoint_digest: str
    recipe: Recipe
    metric: Metric
    corpora: dict[str, Corpus]
    texts: dict[str, str] = Field(default_factory=dict)
    seed: int = 0
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        if isinstance(data, dict):
            recipe = Recipe.model_validate(data.get("recipe", {}))
            if not recipe.needs_calibration:
                recipe = recipe.model_copy(update={"calibration": None})
            metric = _METRIC.validate_python(data.get("metric", {"kind": "perplexity"}))
            used = corpora_of(recipe, metric)
            corpora = data.get("corpora", {})
            missing = used - set(corpora)
            if missing:
                raise ValueError(f"corpus {sorted(missing)[0]!r} is not defined under corpora")
            corpora = {name: corpora[name] for name in sorted(used)}
            data = {**data, "recipe": recipe, "metric": metric, "corpora": corpora}
            if not recipe.is_random:
                data["seed"] = 0
        return data

    @property
    def portions(self) -> tuple[Portion, ...]:
        """The texts that are read to compute the run, without zero-shot tasks, which have their own records."""
        makers = (self.recipe.calibration, *(method.own_text for method in self.recipe.methods.values()))
        read = [_calibrating(text) for text in makers if text is not None]
        corpus, split = self.metric.corpus, getattr(self.metric, "split", None)
        if split is not None and corpus is not None:
            read.append((corpus, split, None))
        elif self.metric.kind == "weight_kurtosis":
            drawn = Calibration(samples=self.metric.samples, sequence_length=self.metric.sequence_length)
            read.append((self.metric.corpus, "train", drawn.characters))
        return tuple(dict.fromkeys(read))

    @property
    def unquantized(self) -> "Run":
        """The same measurement of the unchanged checkpoint, which reads fewer texts."""
        plain = Run.model_validate({**self.model_dump(), "recipe": {}})
        read = {named(*portion) for portion in plain.portions}
        return plain.model_copy(update={"texts": {name: text for name, text in self.texts.items() if name in read}})

    def identity(self) -> dict[str, Any]:
        """The data whose hash is the key: no place where something lies. Tasks count by their content, in the name."""
        data = self.model_dump(mode="json", exclude={"checkpoint", "corpora"})
        if data["metric"].get("path") is not None:
            data["metric"]["path"] = None
        return data

    def rotation_identity(self) -> dict[str, Any] | None:
        """The data whose hash is `rotation_key`; None where nothing is learned."""
        learner = self.recipe.learner
        if learner is None:
            return None
        return self._part({"recipe": self.recipe.learned(), "text": self._read(learner.own_text)})

    def weights_identity(self) -> dict[str, Any] | None:
        """The data whose hash is `weights_key`; None where the checkpoint is used unchanged."""
        stored = self.recipe.stored()
        if not any(stored.values()):
            return None
        own = {name: self._read(text) for name, text in self.recipe.own_texts.items()}
        made = {"recipe": stored, "calibration": self._read(self.recipe.calibration), "rotation": self.rotation_key}
        return self._part({**made, "own_texts": own})

    @cached_property
    def key(self) -> str:
        """Name of this run's result: 16 hexadecimal digits."""
        return key_of(self.identity())

    @cached_property
    def rotation_key(self) -> str | None:
        """Name of the learned rotations that this run needs; None where nothing is learned."""
        identity = self.rotation_identity()
        return None if identity is None else key_of(identity)

    @cached_property
    def weights_key(self) -> str | None:
        """Name of the stored weights that this run needs; None where the checkpoint is used unchanged."""
        identity = self.weights_identity()
        return None if identity is None else key_of(identity)

    def _read(self, text: Calibration | None) -> str | None:
        return None if text is None else self.texts.get(named(*_calibrating(text)), text.corpus)

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        """The identity of a part of the run, with checkpoint, seed and floating-point type."""
        common = {"checkpoint_digest": self.checkpoint_digest, "seed": self.seed, "dtype": self.dtype}
        return {**common, **part}


def corpora_of(recipe: Recipe, metric: Metric) -> set[str]:
    """The names of the texts that a recipe and a metric read."""
    calibration = recipe.calibration if recipe.needs_calibration else None
    texts = [calibration, *(method.own_text for method in recipe.methods.values()), metric]
    return {text.corpus for text in texts if text and text.corpus is not None}


def key_of(identity: dict[str, Any]) -> str:
    """The key of an identity: 16 hexadecimal digits."""
    return short_hash(canonical_json(identity))


def named(corpus: str, split: Split, characters: int | None) -> str:
    """The name of a text in a run, such as "wikitext2 train[:2000000]"."""
    return f"{corpus} {portion(split, characters)}"


def _calibrating(text: Calibration) -> Portion:
    return (text.corpus, "train", text.characters)


Told = Mapping[str, Any]
"""A record of a result."""


def signed(record: Told, identity: dict[str, Any]) -> dict[str, Any]:
    """A record with the identity of its result and the key, the hash of the identity."""
    return {**record, "key": key_of(identity), "identity": identity}


def check_signed(record: Told, path: Path) -> None:
    """Refuse a record whose key is not the name of its folder, such as one that was copied there.

    Raises:
        ResultError: its key is not the folder's name, or its identity has another key.
    """
    name = path.parent.name.partition("-")[0]
    identity = record.get("identity")
    try:
        whole = isinstance(identity, dict) and key_of(identity) == name
    except ValueError:  # it contains nan or inf
        whole = False
    if record.get("key") != name or not whole:
        raise ResultError(f"{path} says that it is of {record.get('key')}, not of {name}: delete it and start again.")


def same_tasks(answered: Told | None, record: Told | None) -> bool:
    """Whether a run answered the items of a record of tasks, wherever their files are."""

    def items(told: Told) -> dict[str, Any]:
        tasks = _part(told, "tasks")
        return {name: {part: one for part, one in _part(tasks, name).items() if part != "file"} for name in tasks}

    return record is None or (answered is not None and items(answered) == items(record))


def _part(record: Told, name: str) -> Told:
    """A part of a record by name; empty where the record is damaged, so that it matches nothing."""
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}
