"""The weights stage: what a recipe does to a model before it runs, in the order in which the papers do it.

Rotation (QuaRot stage 1), SmoothQuant, OmniQuant, AWQ or LLM-QAT, choice of outlier features, then round-to-nearest,
GPTQ or QuIP# layer by layer, then static activation scales. One decoder layer at a time lies on the accelerator, but
for LLM-QAT. Methods live in their own modules; this one only calls them.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rotquant.foundation.environment import versions
from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.foundation.progress import silenced, task
from rotquant.methods import awq, llm_qat, omniquant
from rotquant.methods.outliers import check_outliers, select_outliers
from rotquant.methods.quip import check_quip, quantize_quip_site
from rotquant.methods.smoothquant import smooth
from rotquant.models.architectures import Architecture, Site, architecture_of, decoder_layers
from rotquant.models.integrity import check_changed, check_finite
from rotquant.models.limits import Limits
from rotquant.models.rotation.fusing import check_rotation, rotate
from rotquant.models.simulation.kv_cache import check_cache_scheme
from rotquant.models.simulation.wrapping import Handle, SiteKey, Wrapping, wrap
from rotquant.models.statistics import Statistic, collect_statistics
from rotquant.models.stream import LayerStream, capture_layer_inputs, on_device
from rotquant.recipes.recipe import RUNTIME_FIELDS, Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.lattice import LatticeWeight
from rotquant.tensors.quantization import ColumnSplit, QParams, check_groups, choose_qparams
from rotquant.weights.gptq import Hessian, quantize_gptq_site, release_graphs
from rotquant.weights.rtn import QuantizedWeight, quantize_rtn
from rotquant.weights.storage import Manifest, QuantizedState, StoredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.models.rotation.matrices import Rotations

Splits = dict[SiteKey, ColumnSplit]
Weight = QuantizedWeight | LatticeWeight
Weights = dict[str, Weight]


def build_weights(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    recipe: Recipe,
    seed: int,
    samples: Tensor | None = None,
    *,
    rotations: "Rotations | None" = None,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    progress: bool = True,
) -> StoredModel:
    """Apply the stored part of a recipe to `model`, in place.

    Args:
        model: a causal language model of a supported family; it may lie on the host and stays where it is.
        tokenizer: only passed on to the result.
        recipe: what to do.
        seed: of the random rotation, and of the order of OmniQuant's samples.
        samples: calibration token ids, int64 [samples, tokens]; needed where `recipe.needs_calibration`.
        rotations: learned ones (`rotquant.methods.spinquant`); needed where the recipe learns its rotations.
        device: where the work is done.
        batch_size: calibration samples at once; default by their length.
        progress: say how far it is (`rotquant.foundation.progress`).

    Raises:
        RecipeError: the recipe does not fit the model, or samples are missing; before anything is changed.
        CheckpointError: the model's weights are not finite, or no longer so in its type.
        RotquantError: calibration activations are not finite.
    """
    check_recipe(model, recipe, samples)
    if (recipe.learning is None) != (rotations is None):
        problem = "learns its rotations: pass those that learn_rotations found" if recipe.learning else "learns none"
        raise RecipeError(f"the recipe {problem}.")
    check_finite("the model", model.named_parameters())
    stage = _Stage(model, recipe, samples, torch.device(device), batch_size)
    with silenced(not progress):
        return _build(stage, tokenizer, seed, rotations)


def _build(
    stage: "_Stage", tokenizer: "PreTrainedTokenizerBase | None", seed: int, rotations: "Rotations | None"
) -> StoredModel:
    """The stored part of the stage's recipe, one method after the other."""
    model, recipe, device = stage.model, stage.recipe, stage.device
    seconds: dict[str, float] = {}
    weights: Weights = {}
    splits: Splits = {}
    static: dict[SiteKey, QParams] = {}
    if recipe.rotation is not None:
        with _timed(seconds, "rotation"):
            rotate(model, recipe.rotation, seed, device, rotations=rotations)
        check_changed(model, "rotation")
    if recipe.smoothing is not None:
        with _timed(seconds, "smoothing"):
            smooth(model, recipe.smoothing, stage.statistics("max"))
    if recipe.llm_qat is not None:
        with _timed(seconds, "LLM-QAT"):
            llm_qat.train_model(model, recipe, device)
    if recipe.outliers is not None:
        with _timed(seconds, "outliers"):
            for index, measured in enumerate(stage.statistics(recipe.outliers.statistic)):
                splits |= {(index, site): select_outliers(x, recipe.outliers) for site, x in measured.items()}
    if recipe.weights is not None:
        with _timed(seconds, "weights"):
            if recipe.omniquant is not None:
                weights = stage.omniquant(seed)
            elif recipe.awq is not None:
                weights = stage.awq()
            elif recipe.weights.gptq is not None or recipe.quip is not None:
                weights = stage.site_by_site(splits)
            else:
                weights = stage.round_to_nearest(splits)
    if recipe.activations is not None and not recipe.activations.dynamic:
        with _timed(seconds, "static scales"):
            static = stage.static_scales(splits)
    check_changed(model, "quantization")
    manifest = Manifest(
        recipe=recipe,
        seed=seed,
        dtype=str(model.dtype).removeprefix("torch."),
        quantized={name: weight.shape for name, weight in weights.items()},
        seconds=seconds,
        versions=versions(),
    )
    return StoredModel(model, tokenizer, weights, QuantizedState(manifest, splits, static))


def quantized_forward(model: nn.Module, recipe: Recipe, state: QuantizedState | None = None) -> Handle:
    """Install the running half of a recipe (online transforms, activation and KV quantizers) for evaluation.

    Args:
        model: from `load_quantized` or `build_weights`, or a plain checkpoint where the recipe stores nothing.
        recipe: may differ from the weights' own in what acts at run time.
        state: of the stored weights, from the same; None for a plain checkpoint.

    Raises:
        RecipeError: the weights were made by another recipe, or the recipe needs weights that were not made.
    """
    if state is None:
        made = [name for name, value in recipe.stored().items() if value is not None]
        if made:
            raise RecipeError(f"the recipe changes weights ({', '.join(made)}): build and load its weights first.")
        return wrap(model, Wrapping(**_runtime(recipe)))
    if recipe.stored() != state.recipe.stored():
        raise RecipeError("the weights were made by another recipe: build those of this one, or evaluate that one.")
    return wrap(
        model,
        Wrapping(rotation=recipe.rotation, outliers=state.splits, static=state.static, **_runtime(recipe)),
    )


def _runtime(recipe: Recipe) -> dict[str, QuantizationScheme | None]:
    """The quantizers that act while the model runs, by their names in `Recipe` and `Wrapping`."""
    return {name: getattr(recipe, name) for name in RUNTIME_FIELDS}


def check_recipe(model: nn.Module, recipe: Recipe, samples: Tensor | None) -> None:
    """Raise `RecipeError` for whatever in the recipe does not fit the model, before expensive work."""
    architecture = architecture_of(model)
    if recipe.rotation is not None:
        check_rotation(architecture, recipe.rotation)
    omniquant.check_omniquant(recipe)
    check_outliers(architecture, recipe)
    check_quip(architecture, recipe)
    if recipe.needs_calibration and samples is None:
        raise RecipeError("the recipe needs calibration text, but no samples were given.")
    limits = Limits.of(model.config)
    if recipe.llm_qat is not None:
        limits.check_length(recipe.llm_qat.sequence_length, "texts that LLM-QAT trains on")
    if samples is not None:
        limits.check(samples, "calibration samples")
    outliers = recipe.outliers.features if recipe.outliers else 0
    for site in architecture.sites:
        for scheme in (recipe.weights and recipe.weights.scheme, recipe.activations):
            if scheme is not None:
                check_groups(site.features - outliers, scheme, f"{' and '.join(site.linears)}")
    for what in ("keys", "values"):
        check_cache_scheme(getattr(recipe, what), architecture.head_dim, what)
    activations = recipe.activations
    if activations is not None and not activations.dynamic and activations.granularity != "tensor":
        raise RecipeError(
            f"static activation scales are per tensor, not per {activations.granularity}: "
            "set activations.granularity to tensor or activations.dynamic to true."
        )


class _Stage:
    """One call of `build_weights`: the model, and how calibration text passes through it."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        samples: Tensor | None,
        device: torch.device,
        batch_size: int | None,
    ) -> None:
        self.model = model
        self.architecture: Architecture = architecture_of(model)
        self.recipe = recipe
        self.samples = samples
        self.device = device
        self.batch_size = batch_size
        self.online = Wrapping(rotation=recipe.rotation)
        self.generator = torch.Generator().manual_seed(recipe.quip.seed if recipe.quip else 0)  # QuIP#'s signs

    def capture(self) -> LayerStream:
        """Calibration samples at the entrance of the first layer."""
        return capture_layer_inputs(self.model, self.samples, self.device, self.batch_size)

    def statistics(self, statistic: Statistic) -> list[dict[str, Tensor]]:
        """A statistic of every site's features by layer, of the model as it is now, on the host."""
        with wrap(self.model, self.online):
            return collect_statistics(self.capture(), statistic)

    def round_to_nearest(self, splits: Splits) -> Weights:
        """Round every weight; no calibration, no forward pass."""
        weights: Weights = {}
        layers = decoder_layers(self.model)
        with task("rounding to nearest", "layer", len(layers)) as under_way:
            for index, layer in enumerate(layers):
                with on_device(layer, self.device):
                    for site in under_way.parts(self.architecture.sites):
                        split = splits.get((index, site.name))
                        rounded = [
                            quantize_rtn(layer.get_submodule(name).weight.detach(), self.recipe.weights, split)
                            for name in site.linears
                        ]
                        weights |= self._store(index, layer, site, rounded)
                under_way.advance()
        return weights

    def site_by_site(self, splits: Splits) -> Weights:
        """GPTQ or QuIP#: inputs come from layers and sites whose weights are quantized already."""
        weights: Weights = {}
        with wrap(self.model, self._seen_inputs(splits)):
            stream = self.capture()
            for index, layer in stream.layers("QuIP#" if self.recipe.quip else "GPTQ"):
                for site in stream.sites():
                    weights |= self._site(stream, index, layer, site, splits.get((index, site.name)))
                if index + 1 < self.architecture.num_layers:
                    stream.advance(index)
        release_graphs()
        return weights

    def _seen_inputs(self, splits: Splits) -> Wrapping:
        """What acts on the inputs that GPTQ (`GPTQ.hessian_inputs`) and QuIP# calibrate on."""
        recipe = self.recipe
        if recipe.quip is not None or recipe.weights.gptq.hessian_inputs == "float":
            return self.online
        return replace(self.online, outliers=splits, **_runtime(recipe))

    def omniquant(self, seed: int) -> Weights:
        """OmniQuant block by block, along a full-precision and a quantized stream of hidden states."""
        stream = self.capture()
        return self._named(omniquant.quantize_model(self.model, stream, self.recipe, seed=seed))

    def awq(self) -> Weights:
        """AWQ layer by layer, on inputs of the full-precision model."""
        return self._named(awq.quantize_model(self.model, self.capture(), self.recipe))

    def static_scales(self, splits: Splits) -> dict[SiteKey, QParams]:
        """Per-tensor scales of every site from the smallest and largest normal feature over the calibration text."""
        static: dict[SiteKey, QParams] = {}
        with wrap(self.model, self.online):
            stream = self.capture()
            for index, layer in stream.layers("static scales"):
                with _ranges(layer, self.architecture, index, splits) as ranges:
                    stream.advance(index)
                for site, extremes in ranges.items():
                    static[index, site] = choose_qparams(extremes, self.recipe.activations).to("cpu")
        return static

    @torch.no_grad()
    def _site(
        self, stream: LayerStream, index: int, layer: nn.Module, site: Site, split: ColumnSplit | None
    ) -> Weights:
        linears = [layer.get_submodule(name).weight for name in site.linears]
        dtype = torch.promote_types(linears[0].dtype, torch.float32)
        hessian = Hessian(site.features, self.device, dtype)
        stream.feed(index, site, hessian.add)
        try:
            quantized = self._rounded(linears, hessian.matrix, split)
        except RecipeError:
            raise
        except RotquantError as error:
            raise RotquantError(f"layer {index}, {site.name}: {error}") from None
        return self._store(index, layer, site, quantized)

    def _rounded(self, linears: list[Tensor], hessian: Tensor, split: ColumnSplit | None) -> Sequence[Weight]:
        settings, quip = self.recipe.weights, self.recipe.quip
        if quip is None:
            return quantize_gptq_site(linears, hessian, settings, split)
        return quantize_quip_site(linears, hessian, settings.scheme.bits, quip.damping, self.generator)

    @torch.no_grad()
    def _store(self, index: int, layer: nn.Module, site: Site, quantized: Sequence[Weight]) -> Weights:
        """Put the dequantized weights into the layer; the integers, by full name, go to the host."""
        for name, weight in zip(site.linears, quantized, strict=True):
            parameter = layer.get_submodule(name).weight
            parameter.copy_(weight.dequantize(parameter.dtype))
        names = [self._name(index, name) for name in site.linears]
        return {name: weight.to("cpu") for name, weight in zip(names, quantized, strict=True)}

    def _named(self, layers: Iterable[Weights]) -> Weights:
        """The integers of all layers, given by names within each, by full name on the host."""
        return {
            self._name(index, name): weight.to("cpu")
            for index, quantized in enumerate(layers)
            for name, weight in quantized.items()
        }

    def _name(self, index: int, linear: str) -> str:
        return f"{self.model.base_model_prefix}.layers.{index}.{linear}.weight"


@contextmanager
def _ranges(
    layer: nn.Module, architecture: Architecture, index: int, splits: Mapping[SiteKey, ColumnSplit]
) -> Iterator[dict[str, Tensor]]:
    """While open, track each site's smallest and largest input, without outlier features: by site name, [2]."""
    ranges: dict[str, Tensor] = {}

    def update(site: str, x: Tensor) -> None:
        split = splits.get((index, site))
        if split is not None:
            x = x[..., split.normal_columns.to(x.device)]
        low, high = x.aminmax()
        if site in ranges:
            low, high = torch.minimum(low, ranges[site][0]), torch.maximum(high, ranges[site][1])
        ranges[site] = torch.stack([low, high])

    hooks = [
        layer.get_submodule(site.linears[0]).register_forward_pre_hook(
            lambda _module, inputs, site=site.name: update(site, inputs[0])
        )
        for site in architecture.sites
    ]
    try:
        yield ranges
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block to `seconds`."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - start
