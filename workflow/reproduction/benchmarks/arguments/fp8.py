"""What the benchmark of the float8 network is asked, as validated data; apart from its function, as `arguments` is."""

from reproduction.benchmarks.arguments.gpu import Size
from rotquant.foundation.data import Frozen


class Fp8NetworkArguments(Frozen):
    """A whole network with random float8 weights (SpinQuant Table 14).

    tokens: of each text's prompt, and what a decoded token attends to, itself among them. together: texts that pass
    the network at once in the prefill, at most. hadamard: with R4, the online transform before the down projection.
    """

    shape: str
    batch: Size
    tokens: Size
    together: Size
    hadamard: bool
