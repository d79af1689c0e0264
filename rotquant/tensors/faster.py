"""Faster kernels than torch's choice for two operations of a network's pass, with the same mathematics."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rotquant.tensors.onednn import linear


class FasterKernels(TorchFunctionMode):
    """While open, two functions of `torch.nn.functional` take other kernels in this thread, modules' calls too.

    `linear` of float32 on a CPU goes through oneDNN. `scaled_dot_product_attention` of float32 on a GPU with fewer
    heads of keys than of queries gets them repeated: for that torch has a fused kernel, else it writes all scores out.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions; torch suspends the mode meanwhile."""
        named: dict[str, Any] = kwargs or {}
        if func is functional.linear:
            return linear(*args, **named)
        if func is functional.scaled_dot_product_attention and named.get("enable_gqa") and _is_written_out(args[0]):
            args, named = _repeated(*args), {**named, "enable_gqa": False}
        return func(*args, **named)


def _is_written_out(query: Tensor) -> bool:
    return query.is_cuda and query.dtype == torch.float32


def _repeated(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Any, ...]:
    """The arguments, with keys and values [batch, heads, tokens, head_dim] for each head of the queries."""
    times = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), *others
