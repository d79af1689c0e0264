"""How near the inputs of quantizers come to the borders between codes.

Two ways to compute one quantized network agree up to the last bits of their sums, unless an input lies so near a border
that these bits decide its code. Such inputs need not be rare: where a row of the values' cache attends to two positions
only, its elements are p a s + (1 - p) b t with whole numbers a and b, and one of them may lie just half way between two
codes for every p.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.models import tiny_tokens

#: Steps of a quantizer, between the noise of float64 in a tiny model (1e-12) and the nearest of 10^5 inputs (1e-5).
MARGIN = 1e-9


class Borders(TorchDispatchMode):
    """While open, keeps how near a number comes to half way between two whole ones before it is rounded to one."""

    margin: float = 0.5

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its operators."""
        if func.overloadpacket in (torch.ops.aten.round, torch.ops.aten.round_) and args[0].numel():
            ratio = args[0].detach().double()
            self.margin = min(self.margin, (ratio - ratio.floor() - 0.5).abs().min().item())
        return func(*args, **(kwargs or {}))


def tokens_off_borders(compute: Callable[[Tensor], Any]) -> Tensor:
    """The first of the drawn token ids [2, 24] on which all that `compute` rounds keeps its margin from a border."""
    for seed in range(20):
        tokens = tiny_tokens(seed=seed)
        with Borders() as borders:
            compute(tokens)
        if borders.margin >= MARGIN:
            return tokens
    raise AssertionError(f"on each of 20 texts some quantizer's input lies within {MARGIN} steps of a border.")
