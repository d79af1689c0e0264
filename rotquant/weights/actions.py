"""Actions of methods on a model: functions of the module that `Method.actions` names, which is imported when one acts.

That module has those of the functions below that its method needs, by the same names and with the method's settings
first; what it lacks does nothing. `learn_rotations` alone is given a recipe in their place.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.models.limits import ModelLimits
from rotquant.models.rotation.matrices import LearnedRotations
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization
from rotquant.recipes.recipe import Method, Recipe
from rotquant.weights.context import QuantizationContext


def check_model(method: Method, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Refuse, before expensive work, a method that does not fit a model.

    Raises:
        RecipeError: it does not, or says nothing of what its module does at run time.
    """
    module = importlib.import_module(method.actions)
    if not method.acts_at_run_time and (hasattr(module, "runtime") or hasattr(module, "attach")):
        raise RecipeError(f"the method {method.name} acts at run time: set {type(method).__name__}.acts_at_run_time.")
    _call("check_model", method, recipe, architecture, limits)


def apply(method: Method, context: QuantizationContext) -> None:
    """Do to the context's model what the method does, when its first role's turn has come (but for `rotations`)."""
    _call("apply", method, context)


def tensors(method: Method, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The shapes of what `apply` leaves in `context.tensors` to be stored next to the weights; -1 is any number."""
    return _call("tensors", method, architecture) or {}


def runtime(method: Method, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
    """Runtime quantization with the method's part added; it reads the stored tensors."""
    return _call("runtime", method, quantization, tensors) or quantization


def attach(method: Method, model: nn.Module, recipe: Recipe, handle: Handle) -> None:
    """Put into a model what acts while it runs and no `RuntimeQuantization` has; the handle removes it."""
    _call("attach", method, model, recipe, handle)


def learn_rotations(
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    samples: Tensor,
    *,
    device: torch.device | str | None = None,
    checkpoint: Path | None = None,
) -> LearnedRotations:
    """Learn the recipe's rotations, by its method with the role `rotations`.

    Args:
        model: in its original basis; unchanged afterwards.
        seed: of the rotations to start from, and of the order of the samples.
        samples: token ids, int64 [samples, tokens], of the method's `own_text`.
        checkpoint: file from which an interrupted learning continues with the same result. The caller deletes it.
    """
    module = importlib.import_module(recipe.learned_by[0].actions)
    return module.learn_rotations(model, recipe, seed, samples, device=device, checkpoint=checkpoint)


def _call(name: str, method: Method, *arguments: Any) -> Any:
    """Call the function of a name with a method's settings and arguments; None where its module has none."""
    function = getattr(importlib.import_module(method.actions), name, None)
    return None if function is None else function(method, *arguments)
