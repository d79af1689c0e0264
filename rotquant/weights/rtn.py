"""Quantized weight matrices, and round-to-nearest, the simplest way to one (QuaRot Sec. 5 and Table 3).

`QuantizedWeight` is what every weight quantizer returns: integer codes and scales, plus the outlier columns that QUIK
and Atom keep in higher precision. Integers are packed where they are kept (`rotquant.weights.packing`), never here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.tensors.devices import row_blocks
from rotquant.tensors.quantization import ColumnSplit, QParams, check_groups, dequantize, quantize
from rotquant.weights.clipping import choose_weight_qparams

#: Outlier columns of 8 bits: symmetric, one scale per output channel (Atom Sec. 4.1).
OUTLIER_WEIGHT_SCHEME = QuantizationScheme(bits=8, symmetric=True, granularity="channel")


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight matrix [out, in] as integers.

    codes: as `quantize` gives them, [out, n], the normal columns; n = in without outliers.
    qparams: scales of `codes`, shapes as in `choose_qparams`.
    columns: int64 [in] or None. None: codes lie in natural order. Else columns[:n] are the weight's columns in the
        order of `codes`, which is the order of the groups, and columns[n:] the outlier columns.
    outlier_values: [out, in - n], int8 codes when `outlier_scale` [out, 1] is there, else floats.
    """

    codes: Tensor
    qparams: QParams
    scheme: QuantizationScheme
    columns: Tensor | None = None
    outlier_values: Tensor | None = None
    outlier_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the whole weight."""
        outliers = 0 if self.outlier_values is None else self.outlier_values.shape[1]
        return self.codes.shape[0], self.codes.shape[1] + outliers

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] as floating-point numbers of `dtype`, columns in natural order."""
        values = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        for rows in row_blocks(self.codes):
            values[rows] = dequantize(self.codes[rows], self.qparams.of_rows(rows), self.scheme, dtype)
        if self.columns is None:
            return values
        if self.outlier_values is not None:
            values = torch.cat([values, self._outliers(self.outlier_values, dtype)], dim=1)
        return torch.empty_like(values).index_copy_(1, self.columns, values)

    def _outliers(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if self.outlier_scale is None:
            return values.to(dtype)
        return dequantize(values, QParams(self.outlier_scale), OUTLIER_WEIGHT_SCHEME, dtype)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """Move the weight to another device."""
        parts = {name: part for name, part in vars(self).items() if isinstance(part, Tensor | QParams)}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})


@torch.no_grad()
def quantize_rtn(
    weight: Tensor, settings: WeightQuantization, split: ColumnSplit | None = None, largest: Tensor | None = None
) -> QuantizedWeight:
    """Round every weight to its nearest code, after clip search when the settings ask for it.

    Args:
        weight: [out, in], any floating-point type; scales are searched and computed in float32 (float64 for float64).
        settings: scheme and clip search.
        split: outlier columns, kept as they are (16 bits) or rounded to 8 bits per output channel.
        largest: see `choose_weight_qparams`.

    Raises:
        RecipeError: when the group size exceeds the number of normal columns.
    """
    check_columns(weight, settings.scheme, split)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    split = None if split is None else split.to(weight.device)
    normal = exact if split is None else exact[:, split.normal_columns]
    norm = settings.clip_norm if settings.clip_search else None
    qparams = choose_weight_qparams(normal, settings.scheme, norm, largest)
    codes = quantize(normal, qparams, settings.scheme)
    if split is None:
        return QuantizedWeight(codes, qparams, settings.scheme)
    outliers, scale = weight[:, split.outlier_columns], None
    if split.outlier_bits == 8:
        scale = choose_weight_qparams(exact[:, split.outlier_columns], OUTLIER_WEIGHT_SCHEME, None).scale
        outliers = quantize(exact[:, split.outlier_columns], QParams(scale), OUTLIER_WEIGHT_SCHEME)
    return QuantizedWeight(codes, qparams, settings.scheme, split.permutation, outliers, scale)


def check_columns(weight: Tensor, scheme: QuantizationScheme, split: ColumnSplit | None) -> None:
    """Raise `RecipeError` unless the columns that are quantized (all but the outliers) hold a group."""
    outliers = 0 if split is None else split.outliers
    normal = weight.shape[1] - outliers
    if normal <= 0:
        raise RecipeError(f"{outliers} outlier features leave nothing to quantize of {weight.shape[1]} input features.")
    without = f" (of {weight.shape[1]}, less {outliers} outliers)" if outliers else ""
    check_groups(normal, scheme, f"a weight's rows{without}")
