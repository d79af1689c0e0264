"""Recipes and runs: what is done to a model, and one measured cell of a table, as validated data with a key.

A `Recipe` says everything that happens to a model; a `Run` is a recipe applied to one checkpoint with one seed and
measured by one metric. `Run.key` names its result file, `Run.weights_key` the rotated and weight-quantized checkpoint
it needs: many runs that differ only in activations, KV cache or metric share one. `Run.rotation_key` names the learned
rotation, which weights of several methods and widths share. Nothing here computes.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError, model_validator

from rotquant.foundation.data import Frozen, first_problem, merge
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.schemes import (
    AWQ,
    LLMQAT,
    Calibration,
    Metric,
    OmniQuant,
    OutlierFeatures,
    QuantizationScheme,
    QuIP,
    RotationLearning,
    RotationScheme,
    Smoothing,
    WeightQuantization,
)

#: Fields that act while the model runs; all others decide the stored weights.
RUNTIME_FIELDS = ("activations", "attention_output", "keys", "values")
#: Methods that change features or weights before these are rounded: a recipe has one of them.
TRANSFORMATIONS = ("smoothing", "omniquant", "awq", "llm_qat", "quip")

_METRIC: TypeAdapter[Metric] = TypeAdapter(Metric)


class Recipe(Frozen):
    """Everything that is done to a model. A section left at null is not done; the empty recipe is the baseline.

    Sections act in this order, those of weights seeing the effect of all before them; a recipe has at most one of
    `smoothing`, `omniquant`, `awq`, `llm_qat` and `quip`.
    """

    rotation: RotationScheme | None = None
    """Rotate the residual stream, with norms fused into the linear layers, and values, keys and the MLP's products."""
    smoothing: Smoothing | None = None
    """Transform equivalently as SmoothQuant does."""
    omniquant: OmniQuant | None = None
    """Transform equivalently and clip weights as OmniQuant learns to."""
    awq: AWQ | None = None
    """Transform equivalently as AWQ does."""
    llm_qat: LLMQAT | None = None
    """Train the weights for being rounded."""
    quip: QuIP | None = None
    """Round weights to points of a lattice instead of integers."""
    outliers: OutlierFeatures | None = None
    """Input features that are kept in higher precision, chosen and reordered."""
    weights: WeightQuantization | None = None
    """Quantize the weights of all linear layers but lm_head."""
    activations: QuantizationScheme | None = None
    """Quantize the input of every linear layer but lm_head."""
    attention_output: QuantizationScheme | None = None
    """Quantize the input of o_proj so, in place of `activations`."""
    keys: QuantizationScheme | None = None
    """Quantize the keys of the KV cache, after RoPE and R3."""
    values: QuantizationScheme | None = None
    """Quantize the values of the KV cache, at v_proj's output."""
    calibration: Calibration | None = None
    """The text that methods which calibrate read."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "Recipe":
        if self.needs_calibration and self.calibration is None:
            raise ValueError("GPTQ, smoothing, omniquant, awq, quip and outliers need a calibration section")
        chosen = [name for name in TRANSFORMATIONS if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} both change the same weights: choose one")
        if self.omniquant and self.weights is None:
            raise ValueError("omniquant learns weight clipping: it needs a weights section")
        if self.outliers and self.weights is None and self.activations is None:
            raise ValueError("outliers keep features from being quantized: they need a weights or activations section")
        if self.weights and self.weights.scheme.granularity not in ("tensor", "channel", "group"):
            raise ValueError("weights take granularity tensor, channel or group")
        if self.activations and self.activations.granularity not in ("tensor", "token", "group"):
            raise ValueError("activations take granularity tensor, token or group")
        if self.attention_output and self.activations is None:
            raise ValueError("attention_output takes the place of activations at one site: it needs that section")
        if self.attention_output and not (
            self.attention_output.dynamic and self.attention_output.granularity == "head"
        ):
            raise ValueError("attention_output takes granularity head and dynamic scales")
        if self._calibrates_quantized and not (self.activations or self.keys or self.values):
            raise ValueError("gptq.hessian_inputs 'quantized' needs an activations, keys or values section")
        if self._calibrates_quantized and self.activations and not self.activations.dynamic:
            raise ValueError("gptq.hessian_inputs 'quantized' needs dynamic activations: static scales come after GPTQ")
        return self

    @model_validator(mode="after")
    def _weights_are_rounded_by_one_method(self) -> "Recipe":
        name = next((name for name in ("awq", "llm_qat", "quip") if getattr(self, name)), None)
        if name is None:
            return self
        if self.weights is None:
            raise ValueError(f"{name} makes weights fit to be rounded: it needs a weights section")
        if self.weights.gptq or self.weights.clip_search or self.outliers:
            raise ValueError(
                f"{name} rounds weights in its own way: leave outliers and weights.gptq out and set "
                "weights.clip_search to false"
            )
        if self.awq and self.weights.scheme.granularity == "tensor":
            raise ValueError("awq takes weights of granularity channel or group")
        if self.llm_qat and self.activations and not self.activations.dynamic:
            raise ValueError("llm_qat trains with dynamic activations: static scales come after it")
        scheme = self.weights.scheme
        if self.quip and (scheme.bits not in (2, 4) or scheme.granularity != "tensor" or not scheme.symmetric):
            raise ValueError("quip takes symmetric weights of 2 or 4 bits with granularity tensor")
        if self.quip and self.activations:
            raise ValueError("quip is for weights alone: leave activations out")
        return self

    @model_validator(mode="after")
    def _rotations_can_be_learned(self) -> "Recipe":
        if self.learning is None:
            return self
        for name in (*TRANSFORMATIONS, "outliers"):
            if getattr(self, name):
                raise ValueError(f"rotation.learning cannot be combined with {name}: remove this section")
        if self.activations and not self.activations.dynamic:
            raise ValueError("rotation.learning needs dynamic activations: static scales come after it")
        if self.learning.network == "all" and self.weights is None:
            raise ValueError("rotation.learning.network 'all' needs a weights section")
        if self.learning.network == "activations" and not (self.activations or self.keys or self.values):
            raise ValueError(
                "rotation.learning.network 'activations' needs an activations, keys or values section: nothing else is "
                "quantized while learning; 'all' learns for quantized weights too"
            )
        return self

    @property
    def learning(self) -> RotationLearning | None:
        """How the rotations are learned, None where they are not."""
        return None if self.rotation is None else self.rotation.learning

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them: `RotationScheme.residual`."""
        return self.rotation is not None and self.rotation.fuses_norms

    @property
    def needs_calibration(self) -> bool:
        """Whether building the weights reads calibration text."""
        gptq = self.weights is not None and self.weights.gptq is not None
        static = self.activations is not None and not self.activations.dynamic
        return bool(gptq or self.smoothing or self.omniquant or self.awq or self.quip or self.outliers or static)

    @property
    def is_baseline(self) -> bool:
        """Whether the model is left as it is."""
        return self == Recipe()

    @property
    def is_random(self) -> bool:
        """Whether the run's seed changes the result (calibration draws from its own seed)."""
        return self.rotation is not None and self.rotation.is_random

    @property
    def _calibrates_quantized(self) -> bool:
        gptq = self.weights and self.weights.gptq
        return bool(gptq and gptq.hessian_inputs == "quantized")

    def stored(self) -> dict[str, Any]:
        """The part that decides the stored weights, as plain data.

        OmniQuant and LLM-QAT train, rotations are learned and GPTQ may calibrate on the quantized activations, and
        static scales are stored: they count.
        """
        static = self.activations is not None and not self.activations.dynamic
        all_count = self.omniquant or self.llm_qat or self.learning or static or self._calibrates_quantized
        return self.model_dump(mode="json", exclude=set() if all_count else set(RUNTIME_FIELDS))

    def learned(self) -> dict[str, Any]:
        """The part that decides learned rotations, as plain data: every quantizer of the network they are learned on.

        Weights are rounded to nearest there or left alone (`RotationLearning.network`), so GPTQ and round-to-nearest
        share rotations, and in the latter case all bit widths of the weights do.
        """
        part = self.model_dump(mode="json", include={"rotation", *RUNTIME_FIELDS})
        if self.learning is not None and self.learning.network == "all" and self.weights is not None:
            part["weights"] = self.weights.scheme.model_dump(mode="json")
        return part


class Run(Frozen):
    """One measurement: a recipe on a checkpoint with a seed, measured by a metric. Its key is the name of its result.

    checkpoint: a local folder or a hub id; where it lies is not part of the key, `checkpoint_digest` is.
    corpora: the text behind each corpus name that the recipe and the metric use.
    seed: seeds the random rotation; normalised to 0 where nothing is random, so equal cells have equal keys.
    dtype: floating-point type of the simulated network.
    """

    checkpoint: str
    checkpoint_digest: str
    recipe: Recipe
    metric: Metric
    corpora: dict[str, CorpusSpec]
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
            texts = [recipe.calibration, recipe.learning and recipe.learning.text]
            used = ({metric.corpus} - {None}) | {text.corpus for text in texts if text}
            corpora = data.get("corpora", {})
            missing = used - set(corpora)
            if missing:
                raise ValueError(f"corpus {sorted(missing)[0]!r} is not defined under corpora")
            corpora = {name: corpora[name] for name in sorted(used)}
            data = {**data, "recipe": recipe, "metric": metric, "corpora": corpora}
            if not recipe.is_random:
                data["seed"] = 0
        return data

    def identity(self) -> dict[str, Any]:
        """What the key is computed from."""
        return self.model_dump(mode="json", exclude={"checkpoint"})

    @cached_property
    def key(self) -> str:
        """Name of this run's result: 16 hexadecimal digits."""
        return short_hash(canonical_json(self.identity()))

    @cached_property
    def rotation_key(self) -> str | None:
        """Name of the learned rotations this run needs, or None where nothing is learned."""
        learning = self.recipe.learning
        if learning is None:
            return None
        return self._key({"recipe": self.recipe.learned(), "text": self._text(learning.text)})

    @cached_property
    def weights_key(self) -> str | None:
        """Name of the stored weights this run needs, or None when it uses the checkpoint as it is."""
        stored = self.recipe.stored()
        if all(value is None for value in stored.values()):
            return None
        learned = {} if self.rotation_key is None else {"rotation": self.rotation_key}
        calibration = self._text(self.recipe.calibration)
        return self._key({"recipe": stored, "calibration_corpus": calibration, **learned})

    def _text(self, calibration: Calibration | None) -> dict[str, Any] | None:
        return None if calibration is None else self.corpora[calibration.corpus].model_dump(mode="json")

    def _key(self, part: dict[str, Any]) -> str:
        """A key of a part of the run, together with checkpoint, seed and type."""
        common = {"checkpoint_digest": self.checkpoint_digest, "seed": self.seed, "dtype": self.dtype}
        return short_hash(canonical_json({**common, **part}))


def parse_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Validate recipe data, turning pydantic's report into one sentence that names the first offending field."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error)}.") from None


def override(recipe: Recipe, changes: dict[str, Any], where: str) -> Recipe:
    """A recipe with nested changes, e.g. {"weights": {"scheme": {"bits": 3}}, "rotation": None}.

    A mapping changes the named fields of a section and creates the section where the recipe has none; None removes it.

    Raises:
        RecipeError: an unknown field or an impossible value; the sentence starts with `where`.
    """
    return override_all(recipe, [changes], where)


def override_all(recipe: Recipe, changes: Iterable[dict[str, Any]], where: str) -> Recipe:
    """A recipe with several changes, one after the other; only the last has to leave a valid recipe. See `override`."""
    return parse_recipe(reduce(merge, changes, recipe.model_dump(mode="json")), where)


def check_widths(recipe: Recipe, widths: Mapping[str, int]) -> None:
    """Refuse, before any work, outlier counts that leave no normal features or no whole number of groups.

    Args:
        widths: input features of the linear layers by the name of their site.

    Raises:
        RecipeError: naming the site, its features and what would fit.
    """
    outliers = 0 if recipe.outliers is None else recipe.outliers.features
    beside = f" that remain beside {outliers} outliers" if outliers else ""
    schemes = {"weights": recipe.weights and recipe.weights.scheme, "activations": recipe.activations}
    for site, features in widths.items():
        if outliers >= features:
            raise RecipeError(
                f"outliers.features is {outliers}, but {site} has only {features} features: "
                f"choose fewer than {features}."
            )
        for name, scheme in schemes.items():
            if scheme and scheme.group_size and (features - outliers) % scheme.group_size:
                raise RecipeError(
                    f"the group size {scheme.group_size} of {name} does not divide the {features - outliers} "
                    f"features of {site}{beside}: choose a divisor."
                )
