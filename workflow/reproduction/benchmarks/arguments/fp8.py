"""Arguments of the float8 network's benchmark as validated data, separate from its function."""

from reproduction.benchmarks.arguments.gpu import Size
from rotquant.foundation.data import Frozen


class Fp8NetworkArguments(Frozen):
    """A whole network with random float8 weights (SpinQuant Table 14).

    tokens: length of each prompt, and of a decoded token's context, including itself. together: largest number of texts
    in one pass of the prefill. hadamard: with R4, the online transform before the down projection.
    """

    shape: str
    batch: Size
    tokens: Size
    together: Size
    hadamard: bool
