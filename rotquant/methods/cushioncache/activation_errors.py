"""Quantization errors of a text's activations (Son et al. 2024, Eq. 6), measured while a model runs.

Of every sequence of a batch by itself, with the scales of its text alone: neither those of a prefix nor of other
sequences. Quantizers of the running network act after what is measured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.methods.cushioncache import CushionCache
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.simulation.runtime import RuntimeQuantization, SiteKey, wrap
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize_texts


class ActivationErrors:
    """The sum of the squared errors of what passes, by sequence: take it with `total`, which begins anew."""

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        self._parts: list[Tensor] = []

    def add(self, x: Tensor, scheme: QuantizationScheme) -> Tensor:
        """Measure activations [batch, tokens, features], but for the first tokens of each sequence; returns `x`."""
        self._parts.append(squared_error(x[:, self.skipped :], scheme))
        return x

    def total(self) -> Tensor:
        """The errors since the last call, [batch]."""
        total = torch.stack(self._parts).sum(dim=0)
        self._parts.clear()
        return total


def squared_error(x: Tensor, scheme: QuantizationScheme) -> Tensor:
    """The sum of |x - q(x)|^2 of each text [batch, tokens, features] with dynamic scales: [batch], at least float32.

    Differentiable in x, for which q(x) is a constant: scale and zero point by the paper's stop-gradient (Sec. 4.2), the
    integers because rounding has derivative zero. Taken straight-through they would leave no gradient at all.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        rounded = fake_quantize_texts(exact, scheme)
    return (exact - rounded).square().sum(dim=(1, 2))


@contextmanager
def measured(
    model: nn.Module, quantization: RuntimeQuantization, recipe: Recipe, skipped: int = 0
) -> Iterator[ActivationErrors]:
    """While open, the model runs with a quantization and its activations' errors are measured.

    Args:
        recipe: with this method, whose `measured` says which activations; its schemes are taken as dynamic.
        skipped: how many tokens at the head of each sequence are a prefix.
    """
    errors, schemes = ActivationErrors(skipped), dynamic(recipe)
    if CushionCache.of(recipe).measured == "inputs":
        quantization = replace(quantization, inputs=_at_sites(model, errors, schemes))
    with wrap(model, quantization) as handle:
        if CushionCache.of(recipe).measured == "blocks":
            for layer in decoder_layers(model):
                handle.add(layer.register_forward_hook(_after_layer(errors, schemes)))
        yield errors


def dynamic(recipe: Recipe) -> RuntimeQuantization:
    """The recipe's quantizers of activations, with the scales of each text where theirs are static."""
    activations = recipe.activations
    if activations is not None:
        activations = activations.model_copy(update={"dynamic": True})
    return RuntimeQuantization(activations=activations, attention_output=recipe.attention_output)


def _at_sites(
    model: nn.Module, errors: ActivationErrors, schemes: RuntimeQuantization
) -> dict[SiteKey, Callable[[Tensor], Tensor]]:
    """Functions that measure each site's input, after the online transform, by layer and site."""
    architecture = architecture_of(model)
    return {
        (index, site.name): partial(errors.add, scheme=scheme)
        for index in range(architecture.num_layers)
        for site in architecture.sites
        if (scheme := schemes.scheme_of(site, architecture.head_dim)) is not None
    }


def _after_layer(errors: ActivationErrors, schemes: RuntimeQuantization) -> Callable[..., None]:
    """A hook that measures the output of a decoder layer."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if schemes.activations is not None:
            errors.add(output[0] if isinstance(output, tuple) else output, schemes.activations)

    return hook
