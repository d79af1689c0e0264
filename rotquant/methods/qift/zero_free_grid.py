"""Rounding to a grid without zero (Qift): levels at (c + 1/2) scales, c = -2 to 1, one scale for each group or row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rotquant.methods.qift import Qift
from rotquant.tensors.codebook import CodebookWeight
from rotquant.tensors.codebook_compression import in_float16
from rotquant.tensors.quantization import ColumnSplit, check_groups
from rotquant.weights.context import QuantizationContext
from rotquant.weights.error_feedback import error_spread, round_blocks, round_columns

#: The levels in scales.
LEVELS = (-1.5, -0.5, 0.5, 1.5)


def apply(settings: Qift, context: QuantizationContext) -> None:
    """Round every weight, by the second moments of its input."""
    size = context.recipe.rounded.scheme.group_size

    def rounding(weights: Sequence[Tensor], hessian: Tensor, _: ColumnSplit | None) -> list[CodebookWeight]:
        check_groups(weights[0].shape[1], context.recipe.rounded.scheme)
        spread = error_spread(hessian, settings.damping).to(torch.promote_types(weights[0].dtype, torch.float32))
        return [_quantize(weight, spread, size or weight.shape[1], settings) for weight in weights]

    context.round_by_site(settings.title, rounding)


@torch.no_grad()
def _quantize(weight: Tensor, spread: Tensor, size: int, settings: Qift) -> CodebookWeight:
    """One weight [out, in] in groups of `size` columns; with feedback, scales of a group are of corrected weights.

    spread: [in, in], see `error_spread`.
    """
    columns = weight.to(spread.dtype).T.contiguous()  # [in, out], overwritten
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=weight.device)
    scales: list[Tensor] = []

    def round_group(start: int, stop: int) -> Tensor:
        block = columns[start:stop]
        scale = search_scales(block, settings)  # [out]
        scales.append(scale)

        def round_column(j: int, column: Tensor) -> Tensor:
            code = (column / scale).floor_().clamp_(-2, 1)
            codes[start + j] = (code + 2).to(torch.uint8)
            return (code + 0.5) * scale

        if settings.rounding == "gptq":
            return round_columns(block, spread[start:stop, start:stop], round_column)
        for j, column in enumerate(block):
            round_column(j, column)
        return torch.zeros_like(block)

    round_blocks(columns, spread, range(len(columns)), size, round_group)
    levels = torch.stack(scales, dim=-1)[..., None] * torch.tensor(LEVELS, device=weight.device)  # [out, groups, 4]
    return in_float16(CodebookWeight(codes.T.contiguous(), levels))


def search_scales(block: Tensor, settings: Qift) -> Tensor:
    """The scale of each column [n, rows] -> [rows] with the least squared error to the nearest level."""
    largest = block.abs().amax(dim=0).clamp_min(torch.finfo(block.dtype).tiny) / LEVELS[-1]
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in torch.linspace(1.0, settings.smallest, settings.shares).tolist():
        scale = share * largest
        nearest = ((block / scale).floor_().clamp_(-2, 1) + 0.5) * scale
        error = (nearest - block).square().sum(dim=0)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
