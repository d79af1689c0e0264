"""What the benchmarks of a CPU are asked, as validated data: the arguments of SpinQuant Table 6's cells.

They are apart from the functions so that tables are read, checked and rendered without torch.
"""

from reproduction.benchmarks.arguments.gpu import Size
from rotquant.foundation.data import Frozen


class CpuDecodeArguments(Frozen):
    """One token through a whole decoder with random weights, with `context` tokens in the cache, itself among them.

    layers_in_memory: so many layers have weights of their own, and the others take them in turn; far more than the
        caches hold.
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
