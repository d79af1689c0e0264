"""Where quantization-aware training starts: clips of every group's range by the error of the layer's output.

BitDistiller's asymmetric clipping (Du et al. 2024, Sec. 3.1), in the rotated network RCP's start (Choi et al. 2025,
Eq. 6): a grid of shares of the largest and of the smallest weight, each pair judged by what the rounded group adds to
the output. The one clips its weights by it (`clip_weight`), the other starts sigma(gamma) and sigma(beta) from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from rotquant.kernels.rows.partition import Kind
from rotquant.tensors.codebook import LevelTable
from rotquant.tensors.devices import of_device
from rotquant.tensors.normal_float import normal_float_asymmetric
from rotquant.tensors.value_range import ValueRange, dynamic_range, uniform
from rotquant.weights.search import group_moments, output_error, search_grid

#: Shares of the largest and of the smallest weight (BitDistiller's code): 1.0, 0.95, ..., 0.55.
SHARES = tuple(1 - step / 20 for step in range(10))
#: Elements of the weight that are rounded at once: what a CPU core's cache holds, and what keeps a GPU busy.
_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
#: How groups [rows, groups, size] are rounded over a range.
Rounding = Callable[[Tensor, ValueRange], Tensor]
#: From what an error is measured, see `search_clips`.
Target = Literal["weight", "clipped"]


@dataclass(frozen=True)
class Clips:
    """Shares of the smallest and of the largest weight of every group that are kept, [rows, groups, 1]."""

    low: Tensor
    high: Tensor

    def value_range(self, view: Tensor) -> ValueRange:
        """The range that is kept of groups [rows, groups, size], in their arithmetic."""
        low, high = dynamic_range(view)
        return ValueRange(self.low.to(low) * low, self.high.to(high) * high)


def uniform_rounding(bits: int) -> Rounding:
    """Uniform, Eq. 1, with a zero point that is a whole number: the Q of RCP's Eq. 6."""
    return lambda view, value_range: uniform(view, value_range, bits)


def level_rounding(bits: int) -> Rounding:
    """Uniform with the range's ends as the outer levels: what LDP is at its start, and Eq. 1 but for its zero point."""
    steps = 2**bits - 1

    def rounded(view: Tensor, value_range: ValueRange) -> Tensor:
        places = torch.arange(steps + 1, dtype=value_range.low.dtype, device=view.device)
        step = value_range.span / steps
        table = LevelTable(value_range.low + step * (places[:-1] + 0.5), value_range.low + step * places)
        return table.decode(table.encode(view), view.dtype)

    return rounded


def float_rounding(bits: int) -> Rounding:
    """NormalFloat, with the scales of either side of zero."""

    def rounded(view: Tensor, value_range: ValueRange) -> Tensor:
        over_zero = ValueRange(value_range.low.clamp(max=0), value_range.high.clamp(min=0))
        return normal_float_asymmetric(view, over_zero, torch.zeros_like(value_range.low), bits)

    return rounded


def own_rounding(kind: Kind, bits: int) -> Rounding:
    """Round as a quantizer of this kind does before anything is learned."""
    match kind:
        case "range" | "learned_range":
            return uniform_rounding(bits)
        case "ldp" | "n2uq":
            return level_rounding(bits)
        case "nf3" | "nf3_ldp":
            return float_rounding(bits)


@torch.no_grad()
def search_clips(
    weight: Tensor,
    moment: Tensor,
    group_size: int,
    rounded: Rounding,
    shares: Sequence[float] = SHARES,
    target: Target = "weight",
) -> Clips:
    """The shares with the least error of what each group adds to the output, of all pairs.

    Args:
        weight: [out, in], any floating-point type.
        moment: X^T X of the layer's inputs, [in, in], in whose type errors are computed; of the rotated network's
            inputs the search is rotation-aware.
        rounded: how a group is rounded over a range.
        shares: to choose among, for either end; of equally good pairs the first wins, in the order
            of the largest weight's, then of the smallest's.
        target: `weight`, the output of the weight itself, as BitDistiller's code does; `clipped`, that of the clipped
            weight, as RCP's Eq. 6 prints, which takes no notice of what clipping itself does.

    Returns:
        Shares of the type of `moment`, on its device.
    """
    blocks = group_moments(moment, group_size)
    budget = of_device(_ELEMENTS, weight.device)
    rows = weight.split(max(1, budget // weight.shape[1]))
    found = []
    for part in rows:
        view = part.unflatten(1, (-1, group_size)).to(moment)
        # A CPU works from its caches; on a GPU a small weight under one pair at a time is all launches.
        at_once = max(1, budget // view.numel()) if view.is_cuda else 1
        found.append(_search(view, blocks, rounded, shares, target, at_once))
    return Clips(torch.cat([clips.low for clips in found]), torch.cat([clips.high for clips in found]))


def _search(
    view: Tensor, blocks: Tensor, rounded: Rounding, shares: Sequence[float], target: Target, at_once: int
) -> Clips:
    """The best shares of groups [rows, groups, size], given X^T X of each group; so many pairs are tried at once."""
    whole = dynamic_range(view)
    pairs = torch.tensor(list(product(shares, shares)), dtype=view.dtype, device=view.device)

    def errors(some: Tensor) -> Tensor:
        """Of some pairs [n, 2], [n, rows, groups, 1]: the rows are repeated for each."""
        high, low = some[:, :, None, None, None].unbind(1)
        value_range = ValueRange((low * whole.low).flatten(0, 1), (high * whole.high).flatten(0, 1))
        repeated = view.expand(len(some), *view.shape).flatten(0, 1)  # one pair copies nothing
        aim = repeated if target == "weight" else torch.clamp(repeated, value_range.low, value_range.high)
        difference = rounded(repeated, value_range) - aim
        return output_error(difference.transpose(0, 1), blocks).T.unflatten(0, (len(some), -1)).unsqueeze(-1)

    every = (error for some in pairs.split(at_once) for error in errors(some))
    high, low = search_grid(pairs, lambda _: next(every))[0].split(1, dim=-1)
    return Clips(low, high)


@torch.no_grad()
def clip_weight(weight: Tensor, clips: Clips, group_size: int) -> Tensor:
    """The weight [out, in] with each group clipped to the range that is kept, of its own type."""
    view = weight.unflatten(1, (-1, group_size))
    low, high = clips.value_range(view)
    return torch.clamp(view, low.to(weight.dtype), high.to(weight.dtype)).flatten(1)
