"""The GPU's maximum rates, measured on the same GPU as the kernels: bytes per second and operations per second.

The rates are those of torch's own calls at a size that fills the GPU, on random data; the kernels' reports are drawn
against them.
"""

import torch

from reproduction.benchmarks.gpu import CeilingArguments, LinearArguments
from reproduction.benchmarks.gpu.baselines import copy_case
from reproduction.benchmarks.gpu.layers import linear
from reproduction.benchmarks.timing.case import Case, Measurements, gpu, measure

#: Elements of the float32 tensor that is copied or summed: its bytes are many times the L2 cache.
_ELEMENTS = 2**28
#: Elements that are summed at a time: of the readings tried, sums of rows were the fastest.
_ROW = 2**16
#: Rows, inputs and outputs of the product.
_PRODUCT = 8192


def ceiling(arguments: CeilingArguments) -> Measurements:
    """Seconds with the bytes (copy: read and written) or operations (products) of which they make a rate.

    Raises:
        KernelError: there is no GPU.
    """
    if arguments.what == "copy":
        return measure(copy_case(torch.randn(_ELEMENTS, device=gpu())))
    if arguments.what == "read":
        return measure(Case(lambda x: x.sum(dim=1), (torch.randn(_ELEMENTS // _ROW, _ROW, device=gpu()),)))
    size = dict.fromkeys(("tokens", "in_features", "out_features"), _PRODUCT)
    return linear(LinearArguments(**size, implementation=arguments.what))
