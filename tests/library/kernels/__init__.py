"""Tests of the kernels; most need a GPU, but what is compiled and declared is tested without one."""

import importlib
import pkgutil
from types import ModuleType

from rotquant import kernels


def owners() -> dict[str, ModuleType]:
    """The modules that own CUDA sources, by name: those that offer `sources` of their own."""
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "rotquant.kernels.")]
    names.append("reproduction.benchmarks.fp8_operators")
    modules = [importlib.import_module(name) for name in names]
    return {
        module.__name__.removeprefix("rotquant.kernels."): module
        for module in modules
        if getattr(getattr(module, "sources", None), "__module__", None) == module.__name__
    }
