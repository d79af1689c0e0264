"""GPTQ (Frantar et al. 2022) as QuaRot uses it: column by column, each rounding error spread over the columns to come.

For a linear layer with inputs X the weight error is measured by its output, tr(dW H dW^T) with H = X^T X. Rows of a
weight do not interact, so the linear layers that read one input are quantized together. This module sees matrices
only: it runs no model, and every rounding is done by `rotquant.tensors.quantization`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import cast

import torch
from torch import Tensor

from rotquant.methods.gptq import GPTQ
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.tensors.quantization import ColumnSplit, QParams, dequantize, fake_quantize, quantize
from rotquant.weights.clipping import choose_weight_qparams, largest_of
from rotquant.weights.context import QuantizationContext
from rotquant.weights.error_feedback import error_spread, round_blocks, round_columns
from rotquant.weights.rtn import OUTLIER_WEIGHT_SCHEME, QuantizedWeight, check_columns

#: Scales of the columns [start, stop) as QParams of shape [stop - start, rows].
ColumnScales = Callable[[int, int], QParams]


def quantize_gptq(
    weight: Tensor, hessian: Tensor, settings: WeightQuantization, gptq: GPTQ, split: ColumnSplit | None = None
) -> QuantizedWeight:
    """Quantize one weight [out, in]; see `quantize_gptq_site`."""
    return quantize_gptq_site([weight], hessian, settings, gptq, split)[0]


@torch.no_grad()
def quantize_gptq_site(
    weights: Sequence[Tensor],
    hessian: Tensor,
    settings: WeightQuantization,
    gptq: GPTQ,
    split: ColumnSplit | None = None,
) -> list[QuantizedWeight]:
    """Quantize the weights of all linear layers that read one input.

    Per-channel and per-tensor scales, and static ones of groups, are chosen once from the given weights; other group
    scales from weights corrected for the columns before, over groups that follow the order of processing
    (`GPTQ.group_scales`). Outlier columns come
    last: 16-bit ones only absorb the others' errors, 8-bit ones are rounded too, with scales from corrected weights.

    Args:
        weights: each [out_i, in], any floating-point type, on the hessian's device. Scales are float32 (float64 for
            float64); errors are spread in this type or the hessian's, the wider one.
        hessian: [in, in], symmetric, unscaled and undamped, float32 or float64.
        settings: scheme and clip search.
        gptq: the method's own settings.
        split: outlier columns or None.

    Raises:
        RecipeError: when the group size exceeds the number of normal columns.
        RotquantError: when the hessian is not finite, or not positive definite after damping.
    """
    check_columns(weights[0], settings.scheme, split)
    dtype = torch.promote_types(weights[0].dtype, hessian.dtype)
    device, features = weights[0].device, weights[0].shape[1]
    split = None if split is None else split.to(device)
    base = torch.arange(features, device=device) if split is None else split.permutation
    normal = features - (0 if split is None else split.outliers)
    grouped = gptq.forms_groups(settings.scheme)

    rank = torch.arange(normal, device=device)
    if gptq.act_order:
        rank = hessian.diagonal()[base[:normal]].argsort(descending=True, stable=True)
    order = torch.cat([base[:normal][rank], base[normal:]])
    natural = split is None and not gptq.act_order
    ordered = hessian if natural else hessian[order[:, None], order]
    spread = error_spread(ordered, gptq.damping).to(dtype)
    columns = torch.cat([weight.to(dtype).T for weight in weights], dim=1)[order]  # [in, all rows], to be overwritten
    if grouped:
        codes, qparams = _quantize_grouped(columns, spread, normal, weights, settings, gptq)
        columns_of_codes = order
    else:
        codes, qparams = _quantize_at_fixed_scales(columns, spread, base[:normal], rank, weights, settings, gptq)
        codes = _placed(codes, rank)
        columns_of_codes = base
    values, scale = _finish_outliers(columns, spread, normal, gptq.block_size, split, _scale_dtype(weights))
    if values is not None and scale is None:
        values = values.to(weights[0].dtype)
    in_place = natural or (split is None and not grouped)
    sizes = [len(weight) for weight in weights]
    return [
        QuantizedWeight(
            codes[:, rows].T.contiguous(),
            weight_qparams,
            settings.scheme,
            None if in_place else columns_of_codes,
            None if values is None else values[:, rows].T.contiguous(),
            None if scale is None else scale[rows].clone(),
        )
        for rows, weight_qparams in zip(_slices(sizes), qparams, strict=True)
    ]


def _quantize_at_fixed_scales(
    columns: Tensor,
    spread: Tensor,
    normal: Tensor,
    rank: Tensor,
    weights: Sequence[Tensor],
    settings: WeightQuantization,
    gptq: GPTQ,
) -> tuple[Tensor, list[QParams]]:
    """Codes [normal, all rows] under scales chosen once from the unchanged weights; scales of each weight.

    normal: the columns in the order in which groups are formed. rank: their places there, in the order of rounding.
    """
    clip_norm = settings.clip_norm if settings.clip_search else None
    dtype = _scale_dtype(weights)
    largest = largest_of(weights, settings.scheme)
    qparams = [choose_weight_qparams(w.to(dtype)[:, normal], settings.scheme, clip_norm, largest) for w in weights]
    sizes = [len(weight) for weight in weights]
    scales = _fixed_scales(qparams, sizes, rank // (settings.scheme.group_size or len(normal)))
    block_size = gptq.block_size
    return _quantize_columns(columns, spread, range(len(normal)), block_size, settings.scheme, scales), qparams


def _quantize_grouped(
    columns: Tensor,
    spread: Tensor,
    normal: int,
    weights: Sequence[Tensor],
    settings: WeightQuantization,
    gptq: GPTQ,
) -> tuple[Tensor, list[QParams]]:
    """Codes [normal, all rows] under scales [out, groups, 1] chosen on the way; scales of each weight."""
    scheme = settings.scheme
    block_size, group_size = gptq.block_size, cast(int, scheme.group_size)
    if gptq.group_scales == "updated":  # every group starts where all corrections are in; blocks change no result else
        block_size = max(size for size in range(1, min(block_size, group_size) + 1) if group_size % size == 0)
    clip_norm = settings.clip_norm if settings.clip_search else None
    scales = _GroupScales(columns[:normal], scheme, clip_norm, _scale_dtype(weights))
    codes = _quantize_columns(columns, spread, range(normal), block_size, scheme, scales)
    qparams = _each(lambda groups: torch.stack(groups, dim=1), scales.groups)  # [all rows, groups, 1]
    sizes = [len(weight) for weight in weights]
    return codes, [_each(lambda parts, rows=rows: parts[0][rows].clone(), [qparams]) for rows in _slices(sizes)]


def _scale_dtype(weights: Sequence[Tensor]) -> torch.dtype:
    """The type of stored scales: at least float32."""
    return torch.promote_types(weights[0].dtype, torch.float32)


def _placed(codes: Tensor, rank: Tensor) -> Tensor:
    """Row i of the codes, which are of one byte each, at row rank[i]; torch moves no float8 on a GPU but as bytes."""
    placed = torch.empty_like(codes)
    placed.view(torch.uint8).index_copy_(0, rank, codes.view(torch.uint8))
    return placed


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Row ranges of weights stacked above one another."""
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _each(function: Callable[[list[Tensor]], Tensor], qparams: Sequence[QParams]) -> QParams:
    """`function` applied to the scales and, where there are any, to the zero points of several QParams."""
    scale = function([part.scale for part in qparams])
    if qparams[0].zero_point is None:
        return QParams(scale)
    return QParams(scale, function([cast(Tensor, part.zero_point) for part in qparams]))


def _quantize_columns(
    weight: Tensor, spread: Tensor, columns: range, block_size: int, scheme: QuantizationScheme, scales: ColumnScales
) -> Tensor:
    """Quantize the given columns of `weight` [in, rows], which is overwritten, one after another: codes."""
    codes = []

    def round_block(start: int, stop: int) -> Tensor:
        block, qparams = weight[start:stop], scales(start, stop)
        block_codes, errors = _quantize_block(block, spread[start:stop, start:stop], qparams, scheme)
        codes.append(block_codes.clone())
        return errors

    round_blocks(weight, spread, columns, block_size, round_block)
    return torch.cat(codes)


def _quantize_block(
    block: Tensor, spread: Tensor, qparams: QParams, scheme: QuantizationScheme
) -> tuple[Tensor, Tensor]:
    """Codes and errors, both [n, rows], of a block; on CUDA as one captured graph (~6 kernels a column)."""
    scheme = by_column(scheme)
    if not block.is_cuda:
        return column_loop(block, spread, qparams, scheme)
    replay = _captured_column_loop(
        tuple(block.shape),
        block.dtype,
        block.device,
        scheme,  # pyright: ignore[reportArgumentType]  # frozen, hence hashable
    )
    return replay(block, spread, qparams)


def by_column(scheme: QuantizationScheme) -> QuantizationScheme:
    """A scheme whose scales are given for each column."""
    return scheme.model_copy(update={"granularity": "channel", "group_size": None})


def column_loop(block: Tensor, spread: Tensor, qparams: QParams, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """GPTQ's inner loop: codes and errors of a block [n, rows], which is overwritten; `spread` is [n, n]."""
    zero_points = repeat(None) if qparams.zero_point is None else qparams.zero_point
    columns = [QParams(*column) for column in zip(qparams.scale, zero_points, strict=False)]
    errors = round_columns(block, spread, lambda j, column: fake_quantize(column, scheme, columns[j]))
    return quantize(block, qparams, scheme), errors


@lru_cache(maxsize=8)
def _captured_column_loop(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, scheme: QuantizationScheme
) -> Callable[[Tensor, Tensor, QParams], tuple[Tensor, Tensor]]:
    """`column_loop` for one shape as a CUDA graph, which removes the launch cost of its many small kernels.

    The returned function's results are overwritten by its next call.
    """
    block = torch.zeros(shape, dtype=dtype, device=device)
    spread = torch.eye(shape[0], dtype=dtype, device=device)
    zero_point = None if scheme.symmetric else torch.zeros_like(block)
    qparams = QParams(torch.ones_like(block), zero_point)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # kernels load and libraries initialise outside of the capture
        column_loop(block, spread, qparams, scheme)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = column_loop(block, spread, qparams, scheme)

    def replay(new_block: Tensor, new_spread: Tensor, new_qparams: QParams) -> tuple[Tensor, Tensor]:
        block.copy_(new_block)
        spread.copy_(new_spread)
        qparams.scale.copy_(new_qparams.scale)
        if zero_point is not None:
            zero_point.copy_(cast(Tensor, new_qparams.zero_point))
        graph.replay()
        return results

    return replay


def _fixed_scales(qparams: Sequence[QParams], sizes: Sequence[int], groups: Tensor) -> ColumnScales:
    """Scales of each column by its group, of weights with so many rows.

    Args:
        qparams: of each weight, of the shapes of `choose_qparams`.
        groups: the number of each column's group, int64 [columns].
    """
    rows = _each(
        lambda parts: torch.cat(
            [(t.flatten(1) if t.ndim else t.expand(n, 1)).T for t, n in zip(parts, sizes, strict=True)], dim=1
        ),
        qparams,
    )  # [groups, all rows]
    return lambda start, stop: _each(lambda parts: parts[0][groups[start:stop]], [rows])


class _GroupScales:
    """Scales of consecutive groups of columns, each chosen when the block begins in which its first column lies.

    weight: the columns that are in groups, [n, rows], overwritten on the way; the last group may have fewer.
    """

    def __init__(self, weight: Tensor, scheme: QuantizationScheme, clip_norm: float | None, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.group_size = cast(int, scheme.group_size)
        self.scheme = scheme.model_copy(update={"granularity": "channel", "group_size": None})
        self.clip_norm = clip_norm
        self.groups: list[QParams] = []  # each [rows, 1]

    def __call__(self, start: int, stop: int) -> QParams:
        size = self.group_size
        while len(self.groups) * size < stop:
            first = len(self.groups) * size
            group = self.weight[first : first + size].T.to(self.dtype).contiguous()
            self.groups.append(choose_weight_qparams(group, self.scheme, self.clip_norm))
        involved = range(start // size, (stop - 1) // size + 1)
        widths = [min((i + 1) * size, stop) - max(i * size, start) for i in involved]
        return _each(
            lambda parts: torch.cat([t.T.expand(n, -1) for t, n in zip(parts, widths, strict=True)]),
            [self.groups[i] for i in involved],
        )


def _finish_outliers(
    weight: Tensor, spread: Tensor, normal: int, block_size: int, split: ColumnSplit | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Outlier columns [k, rows] after all corrections: values, or 8-bit codes with their scales [rows, 1]."""
    if split is None:
        return None, None
    if split.outlier_bits == 16:
        return weight[normal:], None
    qparams = choose_weight_qparams(weight[normal:].T.to(dtype).contiguous(), OUTLIER_WEIGHT_SCHEME, None)
    outliers, groups = range(normal, len(weight)), torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    scales = _fixed_scales([qparams], [weight.shape[1]], groups)
    return _quantize_columns(weight, spread, outliers, block_size, OUTLIER_WEIGHT_SCHEME, scales), qparams.scale


@torch.no_grad()
def gptq_reference(weight: Tensor, hessian: Tensor, settings: WeightQuantization, gptq: GPTQ) -> Tensor:
    """GPTQ as its paper derives it (Eqs. 2-3), slow and obvious: the inverse Hessian is reduced by each column.

    No blocks, no Cholesky factor, no outliers, float64. Returns codes [out, in] in the order of rounding.
    """
    scheme, clip_norm = settings.scheme, settings.clip_norm if settings.clip_search else None
    given, hessian = weight.double(), hessian.double()
    features = weight.shape[1]
    group_size = scheme.group_size or features
    per_row = scheme.model_copy(update={"granularity": "channel", "group_size": None})
    order = hessian.diagonal().argsort(descending=True, stable=True) if gptq.act_order else torch.arange(features)
    weight, hessian = given[:, order], hessian[order][:, order]
    damped = hessian + gptq.damping * hessian.diagonal().mean() * torch.eye(features, dtype=hessian.dtype)
    inverse = torch.linalg.inv(damped)
    codes, scales = [], {}
    for j in range(features):
        static = gptq.group_scales == "static"
        group = int(order[j] if static else j) // group_size
        if group not in scales:
            members = slice(group * group_size, (group + 1) * group_size)
            scales[group] = choose_weight_qparams((given if static else weight)[:, members], per_row, clip_norm)
        column = weight[:, j : j + 1].clone()
        codes.append(quantize(column, scales[group], per_row))
        error = column - dequantize(codes[-1], scales[group], per_row, column.dtype)
        weight -= error / inverse[j, j] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return torch.cat(codes, dim=1)


def apply(settings: GPTQ, context: QuantizationContext) -> None:
    """Round site by site, on inputs of layers that are rounded already."""
    weights = context.recipe.rounded
    context.round_by_site(
        settings.title,
        lambda linears, hessian, split: quantize_gptq_site(linears, hessian, weights, settings, split),
        quantized_inputs=settings.sees_quantizers,
        exact=settings.arithmetic == "float64",
    )
    _captured_column_loop.cache_clear()  # frees the memory of graphs
