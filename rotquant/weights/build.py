"""The weights stage: what a recipe does to a model before it runs, phase by phase in the order of the papers.

Rotation (QuaRot stage 1), then the recipe's methods by their roles (transformation or training, selection of features,
rounding; to nearest where no method rounds), then static activation scales. It knows no method by name.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.environment import versions
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import silenced
from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.fitting import check_fits
from rotquant.models.integrity import check_changed, check_finite
from rotquant.models.limits import ModelLimits
from rotquant.models.rotation.fusing import rotate
from rotquant.models.rotation.matrices import Rotations, initial_rotations
from rotquant.models.simulation.kv_cache import check_cache_scheme
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, wrap
from rotquant.models.stream import memory_peak, reset_memory_peak
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import ROLES, Method, Recipe, check_widths
from rotquant.training.state import Checkpoint
from rotquant.weights.actions import hooks
from rotquant.weights.context import QuantizationContext
from rotquant.weights.packing import has_shape
from rotquant.weights.storage import Manifest, QuantizedState, StoredModel, check_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_weights(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    recipe: Recipe,
    seed: int,
    samples: Tensor | None = None,
    *,
    texts: Mapping[str, Tensor] = MappingProxyType({}),
    rotations: Rotations | None = None,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    companions: Mapping[str, bytes] = MappingProxyType({}),
    progress: bool = True,
) -> StoredModel:
    """Apply the stored part of a recipe to `model`, in place.

    Args:
        model: a causal language model of a supported family; it may lie on the host and stays where it is.
        tokenizer: only passed on to the result.
        recipe: what to do.
        seed: of the random rotation, and of the order of samples in methods that train.
        samples: calibration token ids, int64 [samples, tokens]; needed where `recipe.needs_calibration`.
        texts: token ids of methods' own texts by their names, int64 [samples, tokens]; needed where `recipe.own_texts`.
        rotations: learned ones; needed where a method of the recipe learns its rotations.
        device: where the work is done.
        batch_size: calibration samples at once; default by their length.
        checkpoint: where a method that trains continues, with the same result, if it was interrupted.
        companions: the checkpoint's other files (`rotquant.models.companions`), only passed on to the result.
        progress: say how far it is (`rotquant.foundation.progress`).

    Raises:
        RecipeError: the recipe does not fit the model, or samples are missing; before anything is changed.
        CheckpointError: the model's weights are not finite, or no longer so in its type, or its configuration or
            tokenizer could not be saved with them.
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
        RotquantError: calibration activations are not finite.
    """
    check_recipe(model, recipe, samples, texts)
    if (recipe.learner is None) != (rotations is None):
        problem = "learns its rotations: pass those that learn_rotations found" if recipe.learner else "learns none"
        raise RecipeError(f"the recipe {problem}.")
    check_finite("the model", model.named_parameters())
    check_settings(model, tokenizer, companions)
    context = QuantizationContext(model, recipe, samples, seed, torch.device(device), batch_size, checkpoint, texts)
    with silenced(not progress):
        return replace(_build(context, tokenizer, rotations), companions=companions)


def _build(
    context: QuantizationContext, tokenizer: "PreTrainedTokenizerBase | None", rotations: Rotations | None
) -> StoredModel:
    """The stored part of the context's recipe, one phase after the other."""
    model, recipe, device = context.model, context.recipe, context.device
    costs, tensors, matrices = _Costs(device), {}, dict[str, Tensor]()
    if recipe.rotation is not None:
        with costs.of("rotation"):
            rotations = rotations or initial_rotations(context.architecture, recipe.rotation, context.seed)
            rotate(model, recipe.rotation, context.seed, device, rotations=rotations)
            exact = torch.promote_types(model.dtype, torch.float32)
            matrices = rotations.online(exact)
            context.online = replace(context.online, tensors=matrices)
        check_changed(model, "rotation")
    for role in ROLES:
        for name, method in recipe.methods.items():
            if method.first_role == role and method is not recipe.learner:  # whose part is in the rotations
                context.tensors = tensors[name] = {}
                with costs.of(method.title):
                    hooks(method).apply(method, context)
                _check_tensors(method, context)
        if role == "rounding" and recipe.weights is not None and not recipe.has_role(role):
            with costs.of("round-to-nearest"):
                context.round_to_nearest()
        if role == "scales" and recipe.has_static_scales and not recipe.has_role(role):
            with costs.of("static scales"):
                context.cover_with_scales()
    _check_integers(context)
    check_changed(model, "quantization")
    manifest = Manifest(
        recipe=recipe,
        seed=context.seed,
        dtype=cast(Any, str(model.dtype).removeprefix("torch.")),
        quantized=dict(context.weights.shapes),
        seconds=costs.seconds,
        peak_bytes=costs.peak_bytes,
        versions={**versions(recipe.methods)},
    )
    state = QuantizedState(manifest, tensors, context.static, matrices)
    return StoredModel(model, tokenizer, context.weights, state, context.history)


def _check_integers(context: QuantizationContext) -> None:
    """Raise `RecipeError` where a linear layer of a recipe with weights has no integers: it would be stored as it was,
    and called quantized."""
    due = context.recipe.weights is not None and not context.kept_elsewhere
    names = context.linear_weights if due else ()
    missing = [name for name in names if name not in context.weights]
    if missing:
        rounding = next((one.name for one in context.recipe.methods.values() if "rounding" in one.roles), None)
        whose = f"the method {rounding}" if rounding else "the recipe"
        raise RecipeError(
            f"{whose} leaves {len(missing)} of {len(names)} weights without integers, such as {missing[0]}: store each "
            "by `context.store`."
        )


def _check_tensors(method: Method, context: QuantizationContext) -> None:
    """Raise `RecipeError` where a method keeps other tensors than it declares, which could not be loaded again."""
    stored, declared = context.tensors, hooks(method).tensors(method, context.architecture)
    same = stored.keys() == declared.keys()
    if not (same and all(has_shape(tuple(stored[name].shape), tuple(shape)) for name, shape in declared.items())):
        raise RecipeError(f"the method {method.name} keeps other tensors than its `tensors` declares.")


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
        made = [name for name, value in recipe.stored().items() if value]
        if made:
            raise RecipeError(f"the recipe changes weights ({', '.join(made)}): build and load its weights first.")
        return wrap(model, RuntimeQuantization(**recipe.runtime))
    if recipe.stored() != state.recipe.stored():
        raise RecipeError("the weights were made by another recipe: build those of this one, or evaluate that one.")
    handle = wrap(model, runtime_quantization(recipe, state))
    for method in recipe.methods.values():
        hooks(method).attach(method, model, recipe, handle)
    return handle


def runtime_quantization(recipe: Recipe, state: QuantizedState) -> RuntimeQuantization:
    """All transforms and quantizers that act while a model of stored weights runs, with their tensors, as data."""
    quantization = RuntimeQuantization(static=state.static, tensors=state.rotations, **recipe.runtime)
    for name, method in recipe.methods.items():
        quantization = hooks(method).runtime(method, quantization, state.tensors.get(name, {}))
    return quantization


def declared_runtime(recipe: Recipe, architecture: Architecture) -> RuntimeQuantization:
    """The transforms and quantizers of a recipe without a prefix before there are weights: their tensors have shapes
    and take no memory."""
    quantization, shapes = RuntimeQuantization(**recipe.runtime), tensor_shapes(architecture, recipe.transforms)
    for method in recipe.methods.values():
        if method.acts_beyond_quantizers:
            own = hooks(method).tensors(method, architecture)
            empty = {name: torch.zeros(()).expand(shape) for name, shape in own.items()}
            quantization = hooks(method).runtime(method, quantization, empty)
    return quantization.with_transforms((), {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()})


def check_recipe(
    model: nn.Module, recipe: Recipe, samples: Tensor | None, texts: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Raise `RecipeError` for whatever in the recipe does not fit the model or its texts, before expensive work."""
    limits = ModelLimits.of(model.config)
    check_recipe_for(recipe, architecture_of(model), limits)
    if recipe.needs_calibration and samples is None:
        raise RecipeError("the recipe needs calibration text, but no samples were given.")
    if samples is not None:
        limits.check(samples, "calibration samples")
    for name in recipe.own_texts:
        if name not in texts:
            raise RecipeError(f"{name} reads a text of its own, but no samples of it were given.")
        limits.check(texts[name], f"samples of {name}")


def check_recipe_for(recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Raise `RecipeError` for whatever in a recipe does not fit a model, which needs neither its weights nor texts.

    Args:
        architecture: the layers of the model. limits: the texts that it can read.
    """
    check_fits(recipe, architecture)
    check_widths(recipe, {site.name: site.features for site in architecture.sites})
    if recipe.prefix_tokens:
        limits.check_prefix(recipe.prefix_tokens, recipe.longest_text)
    for method in recipe.methods.values():
        hooks(method).check_model(method, recipe, architecture, limits)
    for what in ("keys", "values"):
        check_cache_scheme(getattr(recipe, what), architecture.head_dim, what)
    activations = recipe.activations
    whole = activations is None or activations.granularity == "tensor" or activations.fp4
    if activations is not None and not activations.dynamic and not whole:
        raise RecipeError(
            f"static activation scales are per tensor, not per {activations.granularity}: "
            "set activations.granularity to tensor or activations.dynamic to true."
        )


@dataclass(frozen=True)
class _Costs:
    """Costs of each part of the making, by its name: seconds, and on a GPU the largest memory allocated by torch."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measure the block."""
        reset_memory_peak(self.device)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes[name] = memory_peak(self.device)
        self.seconds[name] = time.perf_counter() - start
