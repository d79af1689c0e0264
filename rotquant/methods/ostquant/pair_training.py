"""OSTQuant's learning (Hu et al. 2025): Riemannian Adam for rotations, Adam for scales, on KL-Top of the network.

The quantized network is `rotquant.models.rotation.network`'s. Its gradient goes through both places of a pair, since
the scale of a feature decides the ranges and multiplies the feature's rounding errors.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rotquant.foundation.progress import track
from rotquant.methods.ostquant import OSTQuant
from rotquant.models.architectures import Architecture, architecture_of, decoder_layers, linear_of, norm_of
from rotquant.models.equivalent import rotary_pairs
from rotquant.models.rotation.learning import LearningOptions, NetworkLearning, learn_through_network
from rotquant.models.rotation.matrices import SCALE, LearnedRotations, initial_rotations
from rotquant.models.rotation.scales import scale_shapes
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.stiefel import RiemannianAdam
from rotquant.weights.clipping import clips_of

#: Scales stay above this, whatever the rate.
_SMALLEST = 1e-2


def learn_rotations(
    model: nn.Module, recipe: Recipe, seed: int, samples: Tensor | None, **options: Any
) -> LearnedRotations:
    """Learn the rotations and scales of a recipe by its `methods.ostquant`.

    Args:
        model, samples: as in `learn_through_network`.
        seed: of the rotations to start from, and of the order of the samples.
        options: fields of `rotation.learning.LearningOptions`.

    Raises:
        RecipeError, ResultError, RotquantError: as `learn_through_network`.
    """
    settings, texts = OSTQuant.of(recipe), cast(Tensor, samples)
    rounded = recipe.rounded if settings.network == "all" else None
    learning = NetworkLearning(
        settings.steps,
        settings.batch_size,
        partial(kl_top, likeliest=settings.likeliest),
        True,
        partial(_optimizers, settings, lambda: _pairs(model, texts)),
        partial(_share, settings=settings),
        gradient="both",
        weights=rounded and rounded.scheme,
        clips=rounded and clips_of(rounded),
        clip=settings.gradient_norm,
    )
    start = partial(_start, model, recipe, seed)
    return learn_through_network(model, recipe, seed, texts, learning, start, LearningOptions(**options))


def kl_top(logits: Tensor, exact: Tensor | None, _: Tensor, likeliest: int) -> Tensor:
    """The sum over predictions of sum_i p_i (log p_i - log q_i), i the likeliest tokens of p (KL-Top, Eqs. 12 and 13).

    Both distributions are of all tokens, so it is no divergence of those alone and may be negative.

    Args:
        logits: of q, [predictions, vocabulary].
        exact: of p, the same shape.
        likeliest: how many tokens count, at most all.
    """
    log_p = cast(Tensor, exact).log_softmax(dim=-1)
    log_p, chosen = log_p.topk(min(likeliest, log_p.shape[-1]), dim=-1, sorted=False)
    return (log_p.exp() * (log_p - logits.log_softmax(dim=-1).gather(-1, chosen))).sum()


def _share(step: int, settings: OSTQuant) -> float:
    """The share of the learning rates at a step: from one to zero after the last."""
    done = step / settings.steps
    return 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def _optimizers(settings: OSTQuant, pairs: Any, parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """Riemannian Adam for what is a rotation, Adam for scales; only of what is learned."""
    scales = [one for name, one in parameters.items() if name.startswith(SCALE)]
    rotations = [one for name, one in parameters.items() if not name.startswith(SCALE)]
    found: list[Optimizer] = []
    if settings.learned == "scales":
        for one in rotations:
            one.requires_grad_(False)
    else:
        found.append(RiemannianAdam(rotations, settings.rotation_lr))
    if settings.learned != "rotations":
        adam = torch.optim.Adam(scales, settings.scale_lr)
        adam.register_step_post_hook(partial(_clamp, scales))
        found.append(adam)
        tied = pairs()
        for name, one in parameters.items():
            if name.startswith(f"{SCALE}keys."):
                one.register_hook(partial(_paired, tied.to(one.device)))
    return found


@torch.no_grad()
def _clamp(scales: list[nn.Parameter], *_: object) -> None:
    for scale in scales:
        scale.clamp_(min=_SMALLEST)


def _pairs(model: nn.Module, samples: Tensor) -> Tensor:
    """Index of the scale of each dimension of a head (`rotary_pairs`)."""
    place = next(model.parameters()).device
    rotary = capture_layer_inputs(model, samples[:1, :2], place).kwargs[0]["position_embeddings"][0].shape[-1]
    return rotary_pairs(architecture_of(model).head_dim, rotary)


def _paired(pairs: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of scales of keys [heads, head_dim] that two dimensions share, given to both, so that they stay
    equal."""
    sums = gradient.new_zeros(len(gradient), int(pairs.max()) + 1).index_add(-1, pairs, gradient)
    return sums[:, pairs]


def _start(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, Tensor]:
    """Rotations as drawn or behind the weights' principal directions, and scales of one."""
    settings, architecture = OSTQuant.of(recipe), architecture_of(model)
    drawn = initial_rotations(architecture, cast(RotationScheme, recipe.rotation), seed)
    start = drawn.tensors()
    if settings.start == "weights":
        moments = _moments(model, architecture, drawn.residual is not None, drawn.values is not None)
        for name, moment in moments.items():
            start[name] = torch.linalg.eigh(moment).eigenvectors @ start[name]
    shapes = scale_shapes(architecture, drawn.residual is not None) if settings.learned != "rotations" else {}
    ones = {f"{SCALE}{name}": torch.ones(shape) for name, shape in shapes.items()}
    return start | {f"{name}.{index}": one for name, one in ones.items() for index in range(architecture.num_layers)}


@torch.no_grad()
def _moments(model: nn.Module, architecture: Architecture, residual: bool, values: bool) -> dict[str, Tensor]:
    """Covariances, float64, of the rows of weights that read R1, with norms' gains, and of o_proj's rows in pieces of a
    head for each R2 (WOMI, Sec. 4.1)."""
    found, rows = {}, _Covariance(architecture.hidden_size)
    for index, layer in enumerate(track(decoder_layers(model), "reading the weights", "layer")):
        for site in architecture.sites:
            if residual and site.norm is not None:
                gain = norm_of(layer, site).weight.double() + architecture.norm_offset
                for name in site.linears:
                    rows.add(linear_of(layer, name).weight.double() * gain)
        if values:
            of_heads = _Covariance(architecture.head_dim)
            of_heads.add(linear_of(layer, architecture.attention_output).weight.double())
            found[f"values.{index}"] = of_heads.matrix()
    return found | ({"residual": rows.matrix()} if residual else {})


class _Covariance:
    """Sums of vectors and of their products, on the host."""

    def __init__(self, size: int) -> None:
        self._number, self._size = 0, size
        self._sum, self._products = torch.zeros(size).double(), torch.zeros(size, size).double()

    def add(self, vectors: Tensor) -> None:
        """Count vectors [..., multiples of size]."""
        vectors = vectors.reshape(-1, self._size)
        self._number += len(vectors)
        self._sum += vectors.sum(dim=0).cpu()
        self._products += (vectors.T @ vectors).cpu()

    def matrix(self) -> Tensor:
        """The covariance."""
        mean = self._sum / self._number
        return self._products / self._number - mean.outer(mean)
