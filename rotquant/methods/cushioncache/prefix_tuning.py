"""Quantization-aware prefix tuning (Son et al. 2024, Sec. 4.2, Eq. 11).

Keys and values of a prefix follow the gradient of cross entropy and quantization error of a text after it; everything
else is frozen. The network's activations are quantized with scales of each text, also where those of the recipe are
static, which are taken after the tuned prefix later.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.foundation.errors import RecipeError
from rotquant.methods.cushioncache import CushionCache
from rotquant.methods.cushioncache.activation_errors import ActivationErrors, dynamic, measured
from rotquant.methods.cushioncache.greedy_prefix_search import search
from rotquant.models.architectures import Architecture, config_of
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.prefix import Prefix, bos_of, stored_prefix, stored_shapes, stored_tensors, without_bos
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.models.stream import on_device
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.faster import FasterKernels
from rotquant.training import loop
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.state import Record
from rotquant.weights.context import QuantizationContext


def tune(context: QuantizationContext, prefix: Prefix) -> tuple[Prefix, list[Record]]:
    """Tune a prefix for the context's model, which is the same afterwards.

    Returns:
        The prefix on the host, in the model's type, and of each step the number, loss, cross entropy in nats a token
        and quantization error of a sample; the prefix as it was, and nothing, where there is nothing to tune.

    Raises:
        RotquantError: the loss is not finite.
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
    """
    model, settings = context.model, CushionCache.of(context.recipe)
    if not prefix.tokens or not settings.steps:
        return prefix, []
    dtype = cast(torch.dtype, model.dtype)
    exact = torch.promote_types(dtype, torch.float32)
    trained = replace(
        prefix, **{name: getattr(prefix, name).to(context.device, exact, copy=True) for name in ("keys", "values")}
    )
    parts = {"keys": trained.keys.requires_grad_(), "values": trained.values.requires_grad_()}
    optimizer = torch.optim.AdamW(parts.values(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.steps)
    longest = ModelLimits.of(config_of(model)).context
    samples, bos = context.calibration_samples, bos_of(model)
    samples = without_bos(samples, bos) if bos in prefix.ids else samples
    samples = samples[:, : None if longest is None else longest - prefix.tokens]
    batches = shuffled_batches(len(samples), settings.batch_size, settings.steps, settings.seed + context.seed)
    with (
        on_device(model, context.device),
        frozen(model, exact),
        measured(model, network(context.recipe, context.online, trained), context.recipe) as errors,
    ):

        def loss(part: Tensor) -> dict[str, Tensor]:
            found = losses(model, errors, part.to(context.device), settings.error_weight)
            return {name: value / len(batches[0]) for name, value in found.items()}

        history = loop.train(
            GradientStep(lambda step: samples[batches[step]].split(1), loss, [optimizer], [schedule]),
            settings.steps,
            "prefix tuning",
            parts={**parts, "optimizer": optimizer, "schedule": schedule},
            checkpoint=context.checkpoint,
            not_finite="the loss of a prefix is {loss} after {step} steps: lower methods.cushioncache.learning_rate.",
        )
    keys, values = (parts[name].detach().to("cpu", dtype) for name in ("keys", "values"))
    return Prefix(keys, values, prefix.ids), history


def network(recipe: Recipe, online: RuntimeQuantization, prefix: Prefix) -> RuntimeQuantization:
    """The quantized network that a prefix is tuned in: weights as they are, rounding straight-through."""
    return replace(online, prefix=prefix, **recipe.quantizers | {"activations": dynamic(recipe).activations})


def losses(model: nn.Module, errors: ActivationErrors, ids: Tensor, error_weight: float) -> dict[str, Tensor]:
    """Eq. 11 of one text [1, tokens]: `loss`, and its parts `prediction`, a mean over tokens, and `error`, a sum.

    Args:
        model: in which `errors` measures.
    """
    with FasterKernels():
        logits = model(input_ids=ids, use_cache=False).logits
    prediction = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    error = errors.total().sum()
    return {"loss": prediction + error_weight * error, "prediction": prediction, "error": error}


@contextmanager
def frozen(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, no parameter asks for a gradient and all are of a type; then they are what they were, bit for bit."""
    kept = [(parameter, parameter.data, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, data, _ in kept:
            parameter.requires_grad_(False)
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data, wanted in kept:
            parameter.data = data
            parameter.requires_grad_(wanted)


def check_model(settings: CushionCache, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Raise RotquantError unless a text can stand after the longest prefix."""
    if limits.context is not None and limits.context <= settings.max_tokens + 1:
        raise RecipeError(
            f"a prefix of {settings.max_tokens} tokens leaves no room for a text in the model's context of "
            f"{limits.context} tokens: lower cushioncache.max_tokens."
        )


def apply(settings: CushionCache, context: QuantizationContext) -> None:
    """Search the prompt, tune its keys and values, and have all that follows see them."""
    ids, prefix = search(context)
    prefix, context.history = tune(context, prefix)
    context.tensors |= stored_tensors(ids, prefix)
    context.online = runtime(settings, context.online, context.tensors)


def tensors(settings: CushionCache, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The tokens that were found, and the keys and values of every layer, tuned."""
    return stored_shapes(architecture)


def runtime(
    settings: CushionCache, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]
) -> RuntimeQuantization:
    """Put the text after the prefix, if any token was found."""
    return replace(quantization, prefix=stored_prefix(tensors))
