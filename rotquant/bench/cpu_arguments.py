"""What the benchmarks of a CPU are asked, as validated data: the arguments of SpinQuant Table 6's cells.

They are apart from the functions so that tables are read, checked and rendered without torch.
"""

from typing import Literal

from rotquant.bench.arguments import Size
from rotquant.schemes import Frozen


class CpuDecodeArguments(Frozen):
    """One token through a whole decoder with random weights, with `context` tokens in the cache, itself among them.

    layers_in_memory: so many layers have weights of their own, and the others take them in turn; far more than the
        caches hold.
    """

    shape: str
    context: Size
    layers_in_memory: Size


class CpuLinearArguments(Frozen):
    """One linear layer on one token, from bfloat16 in to bfloat16 out.

    implementation: ours are bf16 and w4a8; torch's are bf16-torch, int8-weights (`_weight_int8pack_mm`, 16-bit
        activations), int4-torch (`_dyn_quant_matmul_4bit`, 8-bit activations) and int8-torch (dynamically quantized
        `Linear`). Activations of the last two are float32, which is all that they take.
    """

    in_features: Size
    out_features: Size
    implementation: Literal["bf16", "bf16-torch", "int8-weights", "int8-torch", "int4-torch", "w4a8"]


class CpuTransformArguments(Frozen):
    """The Hadamard transform of bfloat16 rows; torch is the library's own, in plain torch operations."""

    rows: Size
    features: Size
    implementation: Literal["ours", "torch"]
