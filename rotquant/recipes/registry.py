"""Methods by name: every public module of `rotquant.methods`, and those that other packages register.

A package registers a method by an entry point of the group `rotquant.methods`, whose name is the method's and whose
value is the class: `halving = "halving.method:Halving"`. Only what is named is imported. What a method is, `Method`
says (`rotquant.recipes.recipe`); here it is any class with a name and a `defect`.
"""

import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, TypeVar

from rotquant.foundation.errors import RecipeError, nearest

#: The package whose public modules are methods, and the group of entry points that register others.
GROUP = "rotquant.methods"


class Named(Protocol):
    """Interface of the classes that a registry finds."""

    name: ClassVar[str]

    @classmethod
    def defect(cls) -> str | None:
        """Describe what the class lacks, as the end of a sentence; None where it lacks nothing."""


Class = TypeVar("Class", bound=Named)


def method_names() -> tuple[str, ...]:
    """The names of all methods, the built-in ones first.

    Raises:
        RecipeError: two packages register one name, or one takes a built-in method's.
    """
    return (*built_in_names(), *_registered())


def find_class(name: str, base: type[Class]) -> type[Class]:
    """The class of a name, which is a subclass of `base`.

    Raises:
        RecipeError: there is none (the sentence lists the nearest), or the package that registers it has a defect.
    """
    if name in built_in_names():
        return _class_in(importlib.import_module(f"{GROUP}.{name}"), name, base)
    registered = _registered()
    if name not in registered:
        raise RecipeError(f"unknown method {name!r}{nearest(name, [*built_in_names(), *registered])}")
    return _loaded(registered[name], base)


@functools.cache
def built_in_names() -> tuple[str, ...]:
    """The public modules of `rotquant.methods`: a method each."""
    package = importlib.import_module(GROUP)
    return tuple(sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name[0] != "_"))


def _class_in(module: Any, name: str, base: type[Class]) -> type[Class]:
    """The subclass that a module of ours defines."""
    (method,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
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


def _loaded(point: EntryPoint, base: type[Class]) -> type[Class]:
    """The class of an entry point.

    Raises:
        RecipeError: it cannot be imported, is no method, or lacks something.
    """
    try:
        method = point.load()
    except Exception as error:  # whatever a foreign module does when it is imported
        problem = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(f"{_of(point)} cannot be imported from {point.value}: {problem}.") from error
    if not (isinstance(method, type) and issubclass(method, base)):
        raise RecipeError(f"{_of(point)} is no subclass of {base.__module__}.{base.__name__}: {point.value}.")
    if (defect := method.defect()) is not None:
        raise RecipeError(f"{_of(point)} {defect}")
    if method.name != point.name:
        raise RecipeError(f"{_of(point)} calls itself {method.name!r}: entry point and class need one name.")
    return method


def _of(point: EntryPoint) -> str:
    return f"the method {point.name!r} of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module
