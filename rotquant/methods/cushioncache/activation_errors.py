"""Quantization errors of a text's activations (Son et al. 2024, Eq. 6), measured while a model runs.

Of every sequence of a batch by itself, with the scales of its text alone: neither those of a prefix nor of other
sequences. Quantizers of the running network act after what is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.methods.cushioncache import CushionCache
from rotquant.models.architectures import Site, architecture_of, decoder_layers
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize_texts


class ActivationErrors:
    """The sum of the squared errors of what passes, by sequence: take it with `total`, which begins anew."""

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        self._parts: list[Tensor] = []

    def add(self, x: Tensor, scheme: QuantizationScheme | None) -> None:
        """Measure activations [batch, tokens, features], but for the first tokens of each sequence; without a scheme
        none."""
        if scheme is not None:
            self._parts.append(squared_error(x[:, self.skipped :], scheme))

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
    errors, schemes, head_dim = ActivationErrors(skipped), dynamic(recipe), architecture_of(model).head_dim
    blocks = CushionCache.of(recipe).measured == "blocks"

    def at_site(site: Site, x: Tensor) -> None:
        errors.add(x, schemes.scheme_of(site, head_dim))

    def after_layer(_module: nn.Module, _inputs: Any, output: Any) -> None:
        errors.add(output[0] if isinstance(output, tuple) else output, schemes.activations)

    with wrap(model, quantization, None if blocks else at_site) as handle:
        for layer in decoder_layers(model) if blocks else ():
            handle.add(layer.register_forward_hook(after_layer))
        yield errors


def dynamic(recipe: Recipe) -> RuntimeQuantization:
    """The recipe's quantizers of activations, with the scales of each text where theirs are static."""
    activations = recipe.activations
    if activations is not None:
        activations = activations.model_copy(update={"dynamic": True})
    return RuntimeQuantization(activations=activations, attention_output=recipe.attention_output)
