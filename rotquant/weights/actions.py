"""Actions of methods on a model: functions of the module that `Method.actions` names, which is imported when one acts.

That module has those functions of `Hooks` that its method needs, by the same names; what it lacks does nothing. A
public function that looks like one of them and has another name is refused: misspelt, it would never be called.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError, nearest
from rotquant.models.architectures import Architecture
from rotquant.models.limits import ModelLimits
from rotquant.models.rotation.matrices import LearnedRotations
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization
from rotquant.recipes.recipe import Method, Recipe
from rotquant.weights.context import QuantizationContext


class Hooks:
    """Functions of a method's module, each with the method's settings first, but for `learn_rotations`; here those that
    do nothing."""

    @staticmethod
    def check_model(settings: Any, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
        """Raise `RecipeError`, before expensive work, where the method does not fit a model."""

    @staticmethod
    def apply(settings: Any, context: QuantizationContext) -> None:
        """Change the context's model, when the method's first role has its turn (but for `rotations`)."""

    @staticmethod
    def tensors(settings: Any, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what `apply` leaves in `context.tensors` to be stored next to the weights; -1 is any number."""
        return {}

    @staticmethod
    def runtime(settings: Any, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
        """Runtime quantization with the method's part added; it reads the stored tensors."""
        return quantization

    @staticmethod
    def attach(settings: Any, model: nn.Module, recipe: Recipe, handle: Handle) -> None:
        """Put into a model what acts while it runs and no `RuntimeQuantization` has; the handle removes it."""

    @staticmethod
    def learn_rotations(
        model: nn.Module,
        recipe: Recipe,
        seed: int,
        samples: Tensor | None,
        *,
        device: torch.device | str | None = None,
        checkpoint: Path | None = None,
    ) -> LearnedRotations:
        """Learn the recipe's rotations: of a method with the role `rotations`.

        Args:
            model: in its original basis; unchanged afterwards.
            seed: of the rotations to start from, and of the order of the samples.
            samples: token ids, int64 [samples, tokens], of the method's `own_text`; None where it reads none.
            checkpoint: file from which an interrupted learning continues with the same result. The caller deletes it.
        """
        raise NotImplementedError


#: What the names of a hook and of a misspelt one have in common at least, by difflib.
_ALIKE = 0.75
_NAMES = tuple(name for name in vars(Hooks) if not name.startswith("_"))


def hooks(method: Method) -> Hooks:
    """The hooks of a method's module.

    Raises:
        RecipeError: it has none that acts, one that takes other arguments, a function that looks like a hook and is
            none, or one that acts at run time, which the class does not say.
    """
    if (problem := _problem(type(method))) is not None:
        raise RecipeError(f"the method {method.name} {problem}.")
    found = _found(importlib.import_module(method.actions))
    return type("Hooks", (Hooks,), {name: staticmethod(function) for name, function in found.items()})()


def _found(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The hooks of a module by name."""
    return {name: getattr(module, name) for name in _NAMES if hasattr(module, name)}


@functools.cache
def _problem(method: type[Method]) -> str | None:
    """What is wrong with the hooks of a method's module, as the end of a sentence."""
    module = importlib.import_module(method.actions)
    found = _found(module)
    for name, function in vars(module).items():
        own = inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if own and name not in _NAMES and _looks_like_a_hook(name, function, method):
            close = nearest(name, _NAMES)
            return (
                f"has a function {name} in {module.__name__}, and no hook is called so{close}; a helper begins with _"
            )
    for name, function in found.items():
        expected = inspect.signature(getattr(Hooks, name)).parameters.values()
        given = [parameter.name for parameter in expected if parameter.kind is not parameter.KEYWORD_ONLY]
        try:
            inspect.signature(function).bind(*given, **{p.name: None for p in expected if p.name not in given})
        except TypeError:
            return f"has a hook {name} in {module.__name__} with other arguments than ({', '.join(given)})"
    at_run_time = found.keys() & {"runtime", "attach"}
    if at_run_time and not method.acts_at_run_time:
        return f"acts at run time: set {method.__name__}.acts_at_run_time"
    if method.acts_at_run_time and not at_run_time:
        return f"acts at run time by its class, and {module.__name__} has neither runtime nor attach"
    acting = {"learn_rotations"} if "rotations" in method.roles else {"apply", *at_run_time}
    if not acting & found.keys():
        return f"does nothing: {module.__name__} has no function {min(acting)}"
    return None


def _looks_like_a_hook(name: str, function: Callable[..., Any], method: type[Method]) -> bool:
    """Whether a function has nearly a hook's name, or takes the method's settings first as hooks do."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    of_settings = first is not None and (
        first.name == "settings" or str(first.annotation).rpartition(".")[2].rstrip("'>") == method.__name__
    )
    return of_settings or bool(difflib.get_close_matches(name, _NAMES, n=1, cutoff=_ALIKE))
