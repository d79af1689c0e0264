"""Benchmarks of SpinQuant's Table 6 on a CPU."""

from reproduction.benchmarks import Size
from rotquant.foundation.data import Frozen


class CpuDecodeArguments(Frozen):
    """One token through a whole decoder with random weights, with `context` tokens in the cache, including itself.

    layers_in_memory: number of layers with their own weights, which the others reuse in turn; far more than the caches
        hold.
    """

    shape: str
    context: Size
    layers_in_memory: Size


class CpuLinearArguments(Frozen):
    """One linear layer on one token, by every implementation there is."""

    in_features: Size
    out_features: Size


class CpuTransformArguments(Frozen):
    """The Hadamard transform of bfloat16 rows, ours and in torch operations."""

    rows: Size
    features: Size
