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

from reproduction.benchmarks import arguments as a
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


_OF: dict[str, tuple[tuple[type[Frozen], str], ...]] = {
    "layers": ((a.LinearArguments, "linear"), (a.CeilingArguments, "ceiling")),
    "rows": (
        (a.TransformArguments, "transform"),
        (a.QuantizeArguments, "quantize"),
        (a.FakeQuantizeArguments, "fake_quantize"),
        (a.RoundRowsArguments, "round_rows"),
    ),
    "attention": (
        (a.DecodeAttentionArguments, "decode_attention"),
        (a.PrefixedAttentionArguments, "prefixed_attention"),
    ),
    "models": (
        (a.BlockArguments, "block"),
        (a.FirstTokenArguments, "first_token"),
        (a.GenerateArguments, "generate"),
        (a.WholeDecoderArguments, "whole_decoder"),
    ),
    "fp8": ((a.Fp8NetworkArguments, "fp8_network"),),
    "learning": (
        (a.LearnRotationsArguments, "learn"),
        (a.CalibrateArguments, "gptq"),
        (a.PrefixQuantArguments, "prefixquant"),
    ),
    "distillation": ((a.DistillArguments, "distill"), (a.SharedDistillArguments, "distill_shared")),
    "cpu": (
        (a.CpuDecodeArguments, "cpu_decode"),
        (a.CpuLinearArguments, "cpu_linear"),
        (a.CpuTransformArguments, "cpu_transform"),
    ),
    "checkpoints": ((a.CheckpointArguments, "checkpoint"),),
}
"""The benchmarks of each module with their arguments; modules other than `cpu` and `checkpoints` measure a GPU."""

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
        "cpu" if module in ("cpu", "checkpoints") else "gpu",
        _METHODS.get(name, ()),
    )
    for module, several in _OF.items()
    for arguments, name in several
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
