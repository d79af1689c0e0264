"""Codebooks in float16, and those of their levels from which the others follow: what a stored weight keeps of each.

Look-up tables are float16 (RCP Sec. 4.4). Levels at equal distances follow from the first and the last (BitDistiller's
two bits: a scale and a zero point), NormalFloat's from the ends and the centre (Eq. 12: two scales and a centre); those
of learned partitions are four numbers of their own. RCP's Table 6 counts them so.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rotquant.tensors.codebook import CodebookWeight
from rotquant.tensors.normal_float import normal_float


@dataclass(frozen=True)
class Compression:
    """Levels that lie between fixed ones, the anchors.

    anchors: codes of the fixed levels, ascending, the first and the last among them.
    shares: of every level, float64 [2^bits, anchors], that it has of the anchors.
    """

    anchors: tuple[int, ...]
    shares: Tensor

    def levels(self, anchors: Tensor) -> Tensor:
        """float16 anchors [..., n] -> float16 levels [..., 2^bits], computed in float64, equal on every machine."""
        found = torch.zeros(*anchors.shape[:-1], len(self.shares), dtype=torch.float64, device=anchors.device)
        for index, share in enumerate(self.shares.to(anchors.device).unbind(-1)):
            found += share * anchors[..., index, None].double()
        return found.half()

    def of(self, levels: Tensor) -> Tensor:
        """The anchors [..., n] of levels [..., 2^bits], rounded to float16."""
        return levels[..., list(self.anchors)].half()


@functools.cache
def compressions(bits: int) -> dict[str, Compression]:
    """The compressions of 2- and 3-bit quantizers by name, those with fewer anchors first.

    ends: equal distances. sides: NormalFloat's about zero. centred: NormalFloat's about a third anchor.
    """
    last = 2**bits - 1
    even = torch.arange(last + 1, dtype=torch.float64) / last
    found = {"ends": Compression((0, last), torch.stack([1 - even, even], -1))}
    if bits == 3:
        values, zero = normal_float(bits), last // 2
        below, above = -values.clamp(max=0), values.clamp(min=0)
        found["sides"] = Compression((0, last), torch.stack([below, above], -1))
        found["centred"] = Compression((0, zero, last), torch.stack([below, 1 - below - above, above], -1))
    return found


def in_float16(weight: CodebookWeight) -> CodebookWeight:
    """Round the levels to float16, each moved by no more than rounding the largest of its table does.

    Levels that lie at equal distances or as NormalFloat's are computed from their rounded ends, so that they still do.
    """
    levels = weight.levels.double()
    allowed = 2**-10 * levels.abs().amax(-1, keepdim=True)
    for compression in compressions(weight.bits).values():
        spaced = compression.levels(compression.of(levels))
        if ((spaced.double() - levels).abs() <= allowed).all():
            return CodebookWeight(weight.codes, spaced)
    return CodebookWeight(weight.codes, levels.half())


def anchors_of(weight: CodebookWeight) -> tuple[str, Tensor] | None:
    """A compression's name and anchors [out, groups, n] from which all levels follow exactly; None if there is none."""
    if weight.levels.dtype != torch.float16:
        return None
    for name, compression in compressions(weight.bits).items():
        anchors = compression.of(weight.levels)
        if torch.equal(compression.levels(anchors), weight.levels):
            return name, anchors
    return None
