"""SpinQuant's learning of rotations (Liu et al. 2024, Sec. 3.2): Cayley SGD on the loss of the quantized network.

R1, every layer's R2, and the online rotations of its inputs that stand in for R1, minimise the next-token cross entropy
of the network in which activations and KV cache, and if the recipe says so weights, are quantized (Eq. 2). What the
quantized network is stands in `rotquant.models.rotation.network`, how a rotation moves in `rotquant.tensors.stiefel`.
"""

import math
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.methods.spinquant import SpinQuant
from rotquant.models.architectures import architecture_of
from rotquant.models.rotation.learning import LearningOptions, NetworkLearning, learn_through_network
from rotquant.models.rotation.matrices import LearnedRotations, initial_rotations
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.stiefel import CayleySGD
from rotquant.weights.clipping import clips_of


def learn_rotations(
    model: nn.Module, recipe: Recipe, seed: int, samples: Tensor | None, **options: Any
) -> LearnedRotations:
    """Learn the rotations of a recipe by its `methods.spinquant`.

    Args:
        model, samples: as in `learn_through_network`.
        seed: of the rotations to start from, and of the order of the samples.
        options: fields of `rotation.learning.LearningOptions`.

    Raises:
        RecipeError, ResultError, RotquantError: as `learn_through_network`.
    """
    settings, architecture = SpinQuant.of(recipe), architecture_of(model)
    rounded = recipe.rounded if settings.network == "all" else None
    scheme = cast(RotationScheme, recipe.rotation)

    def start() -> dict[str, Tensor]:
        return initial_rotations(architecture, scheme, seed).tensors()

    learning = NetworkLearning(
        settings.steps,
        settings.batch_size,
        _of_predictions if settings.targets == "predictions" else _of_tokens,
        settings.targets == "predictions",
        # The schedule gives the rate itself, as a multiple of one.
        lambda rotations: [CayleySGD(rotations.values(), 1.0, settings.momentum)],
        partial(learning_rate, settings=settings),
        gradient=settings.gradient,
        weights=rounded and rounded.scheme,
        clips=rounded and clips_of(rounded),
    )
    return learn_through_network(
        model, recipe, seed, cast(Tensor, samples), learning, start, LearningOptions(**options)
    )


def _of_tokens(logits: Tensor, _: Tensor | None, tokens: Tensor) -> Tensor:
    """Cross entropy with the text's tokens."""
    return cross_entropy(logits, tokens, reduction="sum")


def _of_predictions(logits: Tensor, exact: Tensor | None, _: Tensor) -> Tensor:
    """Cross entropy with what the float network predicts."""
    return cross_entropy(logits, cast(Tensor, exact).softmax(dim=-1), reduction="sum")


def learning_rate(step: int, settings: SpinQuant) -> float:
    """The rate of a step, counted from zero: from the first one's to zero after the last."""
    done = step / settings.steps
    share = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share
