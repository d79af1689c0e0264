"""Methods by name: every public module of `rotquant.methods`, and those that other packages register.

A package registers a method by an entry point of the group `rotquant.methods`, whose name is the method's and whose
value is the class: `halving = "halving.method:Halving"`. Only what is named is imported.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rotquant.foundation.errors import RecipeError, nearest
from rotquant.recipes.method import ROLES, Method

if TYPE_CHECKING:
    from rotquant.recipes.recipe import Recipe

#: The package whose public modules are methods, and the group of entry points that register others.
GROUP = "rotquant.methods"


def method_names() -> tuple[str, ...]:
    """The names of all methods, the built-in ones first.

    Raises:
        RecipeError: two packages register one name, or one takes a built-in method's.
    """
    return (*built_in_names(), *_registered())


@functools.cache
def find_method(name: str) -> type[Method]:
    """The method of a name.

    Raises:
        RecipeError: there is none (the sentence lists the nearest), or the package that registers it has a defect.
    """
    if name in built_in_names():
        return _class_in(importlib.import_module(f"{GROUP}.{name}"), name)
    registered = _registered()
    if name not in registered:
        raise RecipeError(f"unknown method {name!r}{nearest(name, [*built_in_names(), *registered])}")
    return _loaded(registered[name])


def registered_presets() -> "dict[str, Callable[[], Recipe]]":
    """The recipes that come with methods, by name."""
    return {name: make for method in method_names() for name, make in find_method(method).presets().items()}


def settings_by_name(data: Any, kind: Callable[[type[Method]], Any]) -> Any:
    """What is written of methods, by their names and each validated as its `kind`; null leaves a method out.

    Args:
        data: settings by name; those that are a method already stay. What is no mapping is left to pydantic.
        kind: the type that a method's settings are validated as.

    Raises:
        RecipeError: an unknown method.
        ValidationError: a setting is unknown or impossible; its place begins with the method's name.
    """
    if not isinstance(data, Mapping):
        return data
    found, problems = {}, []
    for name, settings in data.items():
        try:
            if settings is not None:
                method = kind(find_method(name))
                found[name] = (
                    settings if isinstance(settings, Method) else TypeAdapter(method).validate_python(settings)
                )
        except ValidationError as error:
            problems += [_placed(name, problem) for problem in error.errors()]
    if problems:
        raise ValidationError.from_exception_data("methods", problems)
    return found


def _placed(name: str, problem: ErrorDetails) -> InitErrorDetails:
    """A problem of pydantic's as it tells it, with a name before its place."""
    context = {**problem.get("ctx", {}), "message": problem["msg"]}
    told = PydanticCustomError(problem["type"], "{message}", context)  # pyright: ignore[reportArgumentType]  # a literal
    return InitErrorDetails(type=told, loc=(name, *problem["loc"]), input=problem["input"])


@functools.cache
def built_in_names() -> tuple[str, ...]:
    """The public modules of `rotquant.methods`: a method each."""
    package = importlib.import_module(GROUP)
    return tuple(sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name[0] != "_"))


def _class_in(module: Any, name: str) -> type[Method]:
    """The method that a module of ours defines."""
    (method,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    )
    assert method.name == name
    return method


def _registered() -> dict[str, EntryPoint]:
    """The entry points of other packages by name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in built_in_names():
            raise RecipeError(f"{_of(point)} has the name of a built-in method: give it another.")
        if point.name in found and point.value != found[point.name].value:
            raise RecipeError(f"{_of(point)} is registered by {_package(found[point.name])} too: remove one of them.")
        found[point.name] = point
    return found


def _loaded(point: EntryPoint) -> type[Method]:
    """The class behind an entry point.

    Raises:
        RecipeError: it cannot be imported, is no method, or lacks something.
    """
    try:
        method = point.load()
    except Exception as error:  # whatever a foreign module does when it is imported
        problem = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(f"{_of(point)} cannot be imported from {point.value}: {problem}.") from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise RecipeError(f"{_of(point)} is no subclass of rotquant.recipes.method.Method: {point.value}.")
    missing = [name for name in ("name", "title", "source", "roles") if not hasattr(method, name)]
    if missing:
        raise RecipeError(f"{_of(point)} does not say its {missing[0]}: set {method.__name__}.{missing[0]}.")
    if method.name != point.name:
        raise RecipeError(f"{_of(point)} calls itself {method.name!r}: entry point and class need one name.")
    if not method.roles or not method.roles <= set(ROLES):
        raise RecipeError(f"{_of(point)} has the roles {sorted(method.roles)}: known are {', '.join(ROLES)}.")
    return method


def _of(point: EntryPoint) -> str:
    return f"the method {point.name!r} of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module
