"""Benchmarks by name: the arguments of each, as validated data, and the function that measures it, mostly on a GPU.

A cell of a speed table names a benchmark and gives its arguments. A function is imported when it is called, so tables
can be read without torch. Every function takes one argument object and returns its measurements by quantity, in SI
units (`records.Measurement`).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from reproduction.benchmarks import cpu, files, gpu, learning
from reproduction.benchmarks.records import Measurement
from reproduction.identity.code import code_digest
from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.recipes.recipe import find_method

#: Modules that decide no time: recipes are data, and a benchmark's arguments are in the cell's key.
_NOT_TIMED = ("rotquant.recipes",)

Device = Literal["gpu", "cpu"]
"""The device that a benchmark measures."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its arguments, what it measures, and the module that holds its function, which has its name.

    methods: the methods of the recipe that it times, if any.
    """

    name: str
    arguments: type[Frozen]
    module: str
    device: Device = "gpu"
    methods: tuple[str, ...] = ()

    def function(self) -> Callable[[Any], dict[str, Measurement]]:
        """The function; importing it needs torch."""
        return getattr(importlib.import_module(self.module), self.name)

    def parse(self, fields: dict[str, Any], where: str) -> Frozen:
        """Validated arguments.

        Raises:
            ConfigError: a missing, unknown or impossible argument; the sentence begins with `where`.
        """
        try:
            return self.arguments.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{where}: benchmark {self.name}: {first_problem(error)}.") from None


_MODULES: dict[str, dict[str, type[Frozen]]] = {
    "gpu.layers": {"linear": gpu.LinearArguments},
    "gpu.transforms": {"transform": gpu.TransformArguments, "quantize": gpu.QuantizeArguments},
    "gpu.attention": {
        "decode_attention": gpu.DecodeAttentionArguments,
        "prefixed_attention": gpu.PrefixedAttentionArguments,
    },
    "gpu.models": {
        "block": gpu.BlockArguments,
        "first_token": gpu.FirstTokenArguments,
        "generate": gpu.GenerateArguments,
        "whole_decoder": gpu.WholeDecoderArguments,
    },
    "gpu.ceilings": {"ceiling": gpu.CeilingArguments},
    "gpu.partition": {"fake_quantize": gpu.FakeQuantizeArguments, "round_rows": gpu.RoundRowsArguments},
    "gpu.fp8": {"fp8_network": gpu.Fp8NetworkArguments},
    "learning.benchmarks": {"learn": learning.LearnRotationsArguments, "gptq": learning.CalibrateArguments},
    "learning.static": {"prefixquant": learning.PrefixQuantArguments},
    "learning.distillation": {"distill": learning.DistillArguments},
    "learning.sharing": {"distill_shared": learning.SharedDistillArguments},
    "cpu.benchmarks": {
        "cpu_decode": cpu.CpuDecodeArguments,
        "cpu_linear": cpu.CpuLinearArguments,
        "cpu_transform": cpu.CpuTransformArguments,
    },
    "files.checkpoints": {"checkpoint": files.CheckpointArguments},
}
"""The arguments of each benchmark by its module; packages other than `cpu` and `files` measure a GPU."""

_METHODS = {
    "learn": ("spinquant",),
    "gptq": ("gptq",),
    "prefixquant": ("prefixed_outliers", "grid_weights", "grid_scales", "block_ap"),
    "distill": ("rcp", "bitdistiller"),
    "distill_shared": ("rcp", "bitdistiller"),
}

BENCHMARKS: dict[str, Benchmark] = {
    name: Benchmark(
        name,
        arguments,
        f"reproduction.benchmarks.{module}",
        "cpu" if module.startswith(("cpu.", "files.")) else "gpu",
        _METHODS.get(name, ()),
    )
    for module, several in _MODULES.items()
    for name, arguments in several.items()
}


def benchmark_digest(name: str) -> str:
    """Digest of the code that a benchmark's time depends on, including its kernels and the methods that it times.

    Raises:
        ConfigError: for an unknown benchmark.
    """
    benchmark = find(name, "digest")
    methods = (find_method(method) for method in benchmark.methods)
    modules = (module for method in methods for module in (method.__module__, method.actions))
    return code_digest(benchmark.module, *modules, aside=_NOT_TIMED)


def find(name: str, where: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: for an unknown one; the sentence begins with `where` and lists the nearest names.
    """
    return lookup(BENCHMARKS, name, f"{where}: unknown benchmark")
