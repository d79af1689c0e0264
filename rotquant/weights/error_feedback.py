"""Rounding with error feedback: the column updates that GPTQ, QoQ's GPTQ and QuIP#'s block LDLQ share.

Columns of a weight are rounded in turn, one by one or some at a time, and a triangular matrix `spread` says what part
of a column's error is taken off each later column. Updates are lazy: those beyond a block of columns wait for its end
and are one matrix product (Frantar et al. 2022, Sec. 3.3). How columns are rounded is the caller's business.

Weights and errors are views [columns, rows]. A `fused` update is subtracted with one rounding, the other rounds the
product first; which of them decides last bits, and so now and then a code.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rotquant.weights.hessian import inverse_factor


def error_spread(hessian: Tensor, damping: float) -> Tensor:
    """Row j, columns k > j: what part of an error in column j is taken off column k; float64 [n, n].

    GPTQ's U_jk / U_jj, divided here once: errors then need no scale of their own.

    Raises:
        RotquantError: when `hessian` [n, n] is not finite, or not positive definite after damping.
    """
    factor = inverse_factor(hessian, damping)
    return factor.div_(factor.diagonal().clone()[:, None])


def round_blocks(
    weight: Tensor,
    spread: Tensor,
    columns: range,
    block_size: int,
    round_block: Callable[[int, int], Tensor],
    *,
    fused: bool = True,
) -> None:
    """Round columns of a weight block by block; afterwards `weight` holds every column as it was before its rounding.

    Args:
        weight: [in, rows], overwritten; columns after the given ones are corrected for all errors.
        spread: [in, in], of the type of the weight.
        columns: which ones are rounded, step 1.
        block_size: how many at a time.
        round_block: rounds weight[start:stop] and gives its errors, [stop - start, rows].
        fused: how products are subtracted.
    """
    for start in range(columns.start, columns.stop, block_size):
        stop = min(start + block_size, columns.stop)
        errors, later = round_block(start, stop), spread[start:stop, stop:]
        if fused:
            weight[stop:].addmm_(later.T, errors, alpha=-1)
        else:
            weight[stop:] -= (errors.T @ later).T


def round_columns(
    block: Tensor, spread: Tensor, round_column: Callable[[int, Tensor], Tensor], *, fused: bool = True
) -> Tensor:
    """Round the columns of a block one after another: their errors [n, rows].

    Many small operations, hence as few as possible for each column.

    Args:
        block: [n, rows], overwritten by the columns as they were before their rounding.
        spread: the block on the diagonal of the whole, [n, n].
        round_column: the values that column j of the block, [rows], is rounded to.
        fused: how products are subtracted.
    """
    errors = torch.empty_like(block)
    for j, (column, error, row) in enumerate(zip(block, errors, spread, strict=True)):
        torch.sub(column, round_column(j, column), out=error)
        if fused:
            block[j + 1 :].addr_(row[j + 1 :], error, alpha=-1)
        else:
            block[j + 1 :] -= torch.outer(row[j + 1 :], error)
    return errors
