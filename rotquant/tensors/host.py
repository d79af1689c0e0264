"""Memory of the host that a GPU reads and writes at full speed."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

#: Bytes of a block of page-locked memory. torch rounds what it locks up to a power of two, which for single tensors
#: would waste up to a half.
_BLOCK_BYTES = 2**30


def host_tensors(like: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Tensors of zeros on the host of the shapes and types of others, each made when it is asked for.

    For a GPU they are page-locked, parts of larger blocks.
    """
    block, used = torch.empty(0, dtype=torch.uint8), 0
    for tensor in like:
        if device.type != "cuda":
            yield torch.zeros(tensor.shape, dtype=tensor.dtype)
            continue
        size = -(-tensor.nbytes // 256) * 256
        if used + size > block.numel():
            block, used = torch.zeros(max(_BLOCK_BYTES, size), dtype=torch.uint8, pin_memory=True), 0
        yield block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        used += size
