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

from reproduction.benchmarks.arguments import cpu as cpu_arguments
from reproduction.benchmarks.arguments import files as file_arguments
from reproduction.benchmarks.arguments import fp8 as fp8_arguments
from reproduction.benchmarks.arguments import gpu as arguments
from reproduction.benchmarks.arguments import learning as learning_arguments
from reproduction.benchmarks.arguments import partition as partition_arguments
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

    @property
    def entry(self) -> str:
        """The entry of its code: `module:function`."""
        return f"{self.module}:{self.name}"

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


_ALL = (
    Benchmark("linear", arguments.LinearArguments, "reproduction.benchmarks.gpu.layers"),
    Benchmark("transform", arguments.TransformArguments, "reproduction.benchmarks.gpu.transforms"),
    Benchmark("quantize", arguments.QuantizeArguments, "reproduction.benchmarks.gpu.transforms"),
    Benchmark("decode_attention", arguments.DecodeAttentionArguments, "reproduction.benchmarks.gpu.attention"),
    Benchmark("prefixed_attention", arguments.PrefixedAttentionArguments, "reproduction.benchmarks.gpu.attention"),
    Benchmark("block", arguments.BlockArguments, "reproduction.benchmarks.gpu.models"),
    Benchmark("first_token", arguments.FirstTokenArguments, "reproduction.benchmarks.gpu.models"),
    Benchmark("generate", arguments.GenerateArguments, "reproduction.benchmarks.gpu.models"),
    Benchmark("whole_decoder", arguments.WholeDecoderArguments, "reproduction.benchmarks.gpu.models"),
    Benchmark("ceiling", arguments.CeilingArguments, "reproduction.benchmarks.gpu.ceilings"),
    Benchmark(
        "learn",
        learning_arguments.LearnRotationsArguments,
        "reproduction.benchmarks.learning.benchmarks",
        methods=("spinquant",),
    ),
    Benchmark(
        "prefixquant",
        learning_arguments.PrefixQuantArguments,
        "reproduction.benchmarks.learning.static",
        methods=("prefixed_outliers", "grid_weights", "grid_scales", "block_ap"),
    ),
    Benchmark(
        "distill",
        learning_arguments.DistillArguments,
        "reproduction.benchmarks.learning.distillation",
        methods=("rcp", "bitdistiller"),
    ),
    Benchmark(
        "gptq", learning_arguments.CalibrateArguments, "reproduction.benchmarks.learning.benchmarks", methods=("gptq",)
    ),
    Benchmark("fake_quantize", partition_arguments.FakeQuantizeArguments, "reproduction.benchmarks.gpu.partition"),
    Benchmark("round_rows", partition_arguments.RoundRowsArguments, "reproduction.benchmarks.gpu.partition"),
    Benchmark("fp8_network", fp8_arguments.Fp8NetworkArguments, "reproduction.benchmarks.gpu.fp8"),
    Benchmark("cpu_decode", cpu_arguments.CpuDecodeArguments, "reproduction.benchmarks.cpu.benchmarks", "cpu"),
    Benchmark("cpu_linear", cpu_arguments.CpuLinearArguments, "reproduction.benchmarks.cpu.benchmarks", "cpu"),
    Benchmark("checkpoint", file_arguments.CheckpointArguments, "reproduction.benchmarks.files.checkpoints", "cpu"),
    Benchmark("cpu_transform", cpu_arguments.CpuTransformArguments, "reproduction.benchmarks.cpu.benchmarks", "cpu"),
)

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


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
