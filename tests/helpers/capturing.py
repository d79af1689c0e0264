"""What a CUDA graph cannot hold, seen on a CPU in the operators that torch dispatches."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rotquant.training.replay import WARM_UP, Compute, Replay

#: Operators that copy numbers from the host, or wait for the GPU to tell the host a number or a size.
NOT_CAPTURED = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
}


class Capturing(TorchDispatchMode):
    """Notes operators that no graph holds, and where the tensors lie that are read and were there before.

    A graph reads equal addresses each time, so `outside` must be equal for two steps of a training. Products are those
    that a GPU would take for float32 (`products`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused = set[str]()
        self.outside = set[int]()
        self._inside = set[int]()
        self.products = torch.backends.cuda.matmul.fp32_precision

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            part.dtype == torch.bool for part in tree_leaves(args[1:2]) if isinstance(part, Tensor)
        )
        if name in NOT_CAPTURED or by_mask:
            self.refused.add(name)
        self.outside |= self._addresses((args, kwargs)) - self._inside
        found = function(*args, **(kwargs or {}))
        self._inside |= self._addresses(found) - self.outside
        return found

    def _addresses(self, values: Any) -> set[int]:
        tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor) and value.numel())
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def as_recorded() -> AbstractContextManager[Any]:
    """While open, who asks is told that a stream is being recorded, as transformers asks where it makes masks."""
    return patch("torch.cuda.is_current_stream_capturing", return_value=True)


class Watched(Replay):
    """In place of a `Replay`: watches the parts that a GPU would take from a graph, computed at fixed addresses."""

    seen: list[Capturing]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._parts, self._inputs = 0, tuple[Tensor, ...]()

    def __call__(self, compute: Compute, part: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Compute the part."""
        self._parts += 1
        if not self.wanted or self._parts <= WARM_UP:
            return compute(part)
        self._inputs = self._inputs or tuple(tensor.clone() for tensor in part)
        for own, given in zip(self._inputs, part, strict=True):
            own.copy_(given)
        with Capturing() as capturing, as_recorded():
            found = compute(self._inputs)
        self.seen.append(capturing)
        return found
