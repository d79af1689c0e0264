"""OSCAR's rotations (Zhou et al. 2026): of cached keys and values, by what attention reads of them.

Keys are turned by the eigenvectors of the queries' covariance, since scores are q k^T; values by those of their own
covariance, each token weighted by how queries score its key. A Hadamard matrix then spreads what these directions hold
over all codes of a head. Covariances are means over a layer's heads of keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.methods.oscar import LOCATIONS, Oscar
from rotquant.models.architectures import Architecture
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.queries import observed_queries
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.hadamard import hadamard_matrix, is_supported
from rotquant.weights.context import QuantizationContext


def check_model(settings: Oscar, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Refuse heads of a size that no Hadamard matrix has."""
    if settings.hadamard and not is_supported(architecture.head_dim):
        raise RecipeError(
            f"oscar: no Hadamard matrix of {architecture.head_dim} features is known: set methods.oscar.hadamard to "
            "false."
        )


def apply(settings: Oscar, context: QuantizationContext) -> None:
    """Find the rotations of every layer in the model as it is, its cache in full precision."""
    stream, found = context.capture(), dict[str, list[Tensor]](keys=[], values=[])
    dtype = torch.promote_types(stream.hidden.dtype, torch.float32)
    for index, _ in stream.layers(settings.title):
        sums = _Sums()
        with observed_queries(context.model, sums.add_queries):
            for _ in stream.outputs(index):
                pass
        with observed_queries(context.model, sums.add_values):
            stream.advance(index)
        for name, covariances in (("keys", sums.queries), ("values", sums.values / sums.weights)):
            found[name].append(_rotation(covariances.mean(0).cpu(), settings.hadamard).to(dtype))
    context.tensors.update({name: torch.stack(layers) for name, layers in found.items()})
    context.online = runtime(settings, context.online, context.tensors)


class _Sums:
    """Sums over the tokens of a layer's text, float64: queries first, since all of them weight each value.

    queries: q q^T, of all heads that read one of keys, [kv heads, head_dim, head_dim].
    values, weights: w v v^T and w = k (sum q q^T) k^T, [kv heads, head_dim, head_dim] and [kv heads, 1, 1].
    """

    queries: Any = 0.0
    values: Any = 0.0
    weights: Any = 0.0

    def add_queries(self, query: Tensor, key: Tensor, _value: Tensor, _scores: object) -> None:
        """Queries [batch, heads, tokens, head_dim], keys [batch, kv heads, tokens, head_dim]."""
        rows = _by_head(query.unflatten(1, (key.shape[1], -1)))
        self.queries = self.queries + rows.mT @ rows

    def add_values(self, _query: Tensor, key: Tensor, value: Tensor, _scores: object) -> None:
        """Keys and values [batch, kv heads, tokens, head_dim]."""
        key, value = _by_head(key), _by_head(value)
        weight = (key @ self.queries * key).sum(-1, keepdim=True)
        self.values = self.values + (weight * value).mT @ value
        self.weights = self.weights + weight.sum(1, keepdim=True)


def _by_head(x: Tensor) -> Tensor:
    """[batch, kv heads, ..., head_dim] as rows of each head, float64 [kv heads, rows, head_dim]."""
    return x.double().transpose(0, 1).flatten(1, -2)


def _rotation(covariance: Tensor, hadamard: bool) -> Tensor:
    """R, eigenvectors in columns by falling eigenvalues, or R H / sqrt(n), [head_dim, head_dim].

    An eigenvector's largest component is positive, so that equal covariances give equal rotations.
    """
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    size = len(vectors)
    return vectors @ hadamard_matrix(size, dtype=vectors.dtype) / size**0.5 if hadamard else vectors


def tensors(settings: Oscar, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """A matrix for each layer's keys and one for its values."""
    size = architecture.head_dim
    return dict.fromkeys(LOCATIONS, (architecture.num_layers, size, size))


def runtime(settings: Oscar, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
    """Keys and values are turned before they are quantized, and turned back."""
    return quantization.with_transforms(settings.transforms, tensors)
