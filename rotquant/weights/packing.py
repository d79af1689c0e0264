"""Quantized weights as named tensors: packed, and taken back out of what a folder holds, checked part by part.

For a weight `<name>`: integers lie in `<name>.codes` (two codes of up to 4 bits a byte), `.scale`, `.zero_point` (bytes
where these hold it), `.columns` (int16 where it suffices), `.outlier_values`, `.outlier_scale`; 4-bit floats so, with
`.scale` of 8 bits and, of NVFP4, `.global_scale`; one on a lattice in
`.lattice`, `.scale`, `.rows`, `.columns`; one of levels in `.codes` (codes of 2 bits four to a byte, of 3 bits eight to
three) and `.levels`, or where these are float16 and follow from a few of them, these under the name of their
compression (`tensors.codebook_compression`).
"""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import CheckpointError
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.codebook import INDEX_BITS, CodebookWeight, pack_indices, packed_length, unpack_indices
from rotquant.tensors.codebook_compression import anchors_of, compressions
from rotquant.tensors.devices import row_blocks
from rotquant.tensors.fp4 import pack_scales, unpack_scales
from rotquant.tensors.lattice import WIDTH, LatticeWeight
from rotquant.tensors.quantization import QParams
from rotquant.weights.rtn import QuantizedWeight

#: What a weight may be stored as.
Weight = QuantizedWeight | LatticeWeight | CodebookWeight
_PARTS = ("codes", "scale", "zero_point", "global_scale", "columns", "outlier_values", "outlier_scale")


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Two codes a byte along the last axis, the even one in the low half: [..., n] -> uint8 [..., ceil(n / 2)].

    Codes of more than 4 bits (int8 or uint8) are returned as they are.
    """
    if bits > 4:
        return codes
    if codes.shape[-1] % 2:
        codes = nn.functional.pad(codes, (0, 1))
    flat = codes.contiguous().view(-1, codes.shape[-1]).view(torch.int16)  # of two codes the first in the low byte
    packed = torch.empty(flat.shape, dtype=torch.uint8, device=codes.device)
    for rows in row_blocks(flat):
        pairs = flat[rows] & 0x0F0F  # two's complement of a negative code
        packed[rows] = (pairs | pairs >> 4).bitwise_and_(0xFF)
    return packed.view(*codes.shape[:-1], -1)


def unpack_codes(packed: Tensor, bits: int, symmetric: bool, length: int) -> Tensor:
    """The inverse of `pack_codes`: int8 (symmetric) or uint8, `length` codes along the last axis."""
    if bits > 4:
        return packed
    flat = packed.reshape(-1, packed.shape[-1])
    kind = torch.int8 if symmetric else torch.uint8
    codes = torch.empty(len(flat), 2 * flat.shape[1], dtype=kind, device=flat.device)
    for rows in row_blocks(flat):
        pairs = flat[rows].to(torch.int16)  # the low byte of a pair lies first, as in the file
        nibbles = (pairs | pairs << 4).bitwise_and_(0x0F0F).view(kind)
        # 8..15 stand for -8..-1: shift the sign into place and back
        codes[rows] = nibbles.bitwise_left_shift_(4).bitwise_right_shift_(4) if symmetric else nibbles
    return codes[:, :length].contiguous().reshape(*packed.shape[:-1], length)


class HostWeights(MutableMapping[str, Weight]):
    """Weights by their names on the host, of which integers of up to 4 bits take half a byte each.

    They are packed where they lie before, and unpacked whenever one is asked for: of 70 billion, 35 GB and not 70.

    packed: the weights with packed codes. shapes: (out, in) of each.
    """

    def __init__(self) -> None:
        self.packed: dict[str, Weight] = {}
        self.shapes: dict[str, tuple[int, int]] = {}

    def __setitem__(self, name: str, weight: Weight) -> None:
        self.shapes[name] = weight.shape
        if isinstance(weight, QuantizedWeight):
            weight = replace(weight, codes=pack_codes(weight.codes, weight.scheme.bits))
        self.packed[name] = weight.to("cpu")

    def __getitem__(self, name: str) -> Weight:
        weight = self.packed[name]
        if not isinstance(weight, QuantizedWeight):
            return weight
        outliers = 0 if weight.outlier_values is None else weight.outlier_values.shape[1]
        scheme, length = weight.scheme, self.shapes[name][1] - outliers
        return replace(weight, codes=unpack_codes(weight.codes, scheme.bits, scheme.signed, length))

    def __delitem__(self, name: str) -> None:
        del self.packed[name], self.shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)


def all_weight_tensors(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """The parts of all weights as they are stored, by their full names; codes that are packed are not copied."""
    packed = isinstance(weights, HostWeights)
    found = {}
    for name, weight in (weights.packed if packed else weights).items():
        found |= weight_tensors(name, weight, packed)
    return found


def weight_tensors(name: str, weight: Weight, packed: bool = False) -> dict[str, Tensor]:
    """The parts of a weight as they are stored, by their full names; `packed` integers are so already."""
    if isinstance(weight, LatticeWeight):
        parts = {"lattice": weight.codes, "scale": weight.scale, "rows": weight.rows, "columns": weight.columns}
        return named(name, parts)
    if isinstance(weight, CodebookWeight):
        table = dict([anchors_of(weight) or ("levels", weight.levels)])
        return named(name, {"codes": pack_indices(weight.codes, weight.bits), **table})
    scale, whole = weight.qparams.scale, weight.qparams.global_scale
    parts = {
        "codes": weight.codes if packed else pack_codes(weight.codes, weight.scheme.bits),
        "scale": pack_scales(scale, whole) if weight.scheme.fp4 else scale,
        "global_scale": whole,
        "zero_point": None if weight.qparams.zero_point is None else _in_bytes(weight.qparams.zero_point),
        "columns": None if weight.columns is None else _short(weight.columns),
        "outlier_values": weight.outlier_values,
        "outlier_scale": weight.outlier_scale,
    }
    return named(name, parts)


def _in_bytes(zero_point: Tensor) -> Tensor:
    """Zero points as uint8 where these are the same numbers, else as they are."""
    small = zero_point.clamp(0, 255).to(torch.uint8)
    return small if torch.equal(small.to(zero_point.dtype), zero_point) else zero_point


def _short(columns: Tensor) -> Tensor:
    """An order of columns in the shortest type that holds it; in new memory, for the weights of a site share it."""
    return columns.to(torch.int16 if columns.numel() <= 2**15 else torch.int32, copy=True)


def take_weight(
    folder: Path,
    name: str,
    shape: tuple[int, int],
    scheme: QuantizationScheme,
    tensors: dict[str, Tensor],
    device: torch.device | str = "cpu",
) -> Weight:
    """Take the parts of one weight out of `tensors`, checked against its shape and scheme.

    Args:
        device: where codes are unpacked and the weight then is. One on a lattice stays on the host: its values are
            sums, whose last bit depends on the device.

    Raises:
        CheckpointError: a part is missing, too many, or of another shape or type.
    """
    if f"{name}.lattice" in tensors:
        return _take_lattice_weight(folder, name, shape, scheme.bits, tensors)
    for table in ("levels", *(compressions(scheme.bits) if scheme.bits in INDEX_BITS else ())):
        if f"{name}.{table}" in tensors:
            return _take_codebook_weight(folder, name, shape, scheme, table, tensors, device)
    rows, features = shape
    parts = {part: tensors.pop(f"{name}.{part}", None) for part in _PARTS}
    outliers = 0 if parts["outlier_values"] is None else parts["outlier_values"].shape[-1]
    normal = features - outliers
    groups = {"tensor": (), "channel": (rows, 1), "group": (rows, -(-normal // (scheme.group_size or 1)), 1)}
    expected = {
        "codes": (rows, (normal + 1) // 2 if scheme.bits <= 4 else normal),
        "scale": groups[scheme.granularity],
        "zero_point": None if scheme.symmetric else groups[scheme.granularity],
        "global_scale": () if scheme.fp4 == "NVFP4" else None,
        "columns": (features,) if outliers or parts["columns"] is not None else None,
        "outlier_values": (rows, outliers) if outliers else None,
        "outlier_scale": (rows, 1) if parts["outlier_scale"] is not None else None,
    }
    for part, tensor in parts.items():
        check_shape(folder, f"{name}.{part}", tensor, expected[part])
    scale = cast(Tensor, parts["scale"])
    if scheme.fp4:
        kind = torch.uint8 if scheme.fp4 == "MXFP4" else torch.float8_e4m3fn
        _check_type(folder, f"{name}.scale", scale, scale.dtype == kind)
        scale = unpack_scales(scale, parts["global_scale"])
    return QuantizedWeight(
        unpack_codes(cast(Tensor, parts["codes"]).to(device), scheme.bits, scheme.signed, normal),
        QParams(
            scale,
            None if parts["zero_point"] is None else parts["zero_point"].to(scale.dtype),
            parts["global_scale"],
        ),
        scheme,
        None if parts["columns"] is None else parts["columns"].long(),
        parts["outlier_values"],
        parts["outlier_scale"],
    ).to(device)


def _take_lattice_weight(
    folder: Path, name: str, shape: tuple[int, int], bits: int, tensors: dict[str, Tensor]
) -> LatticeWeight:
    rows, columns = shape
    expected = {"lattice": (bits // 2, rows, columns // WIDTH), "scale": (), "rows": (rows,), "columns": (columns,)}
    parts = {part: tensors.pop(f"{name}.{part}", None) for part in expected}
    for part, tensor in parts.items():
        check_shape(folder, f"{name}.{part}", tensor, expected[part])
    return LatticeWeight(*cast("dict[str, Tensor]", parts).values())


def _take_codebook_weight(
    folder: Path,
    name: str,
    shape: tuple[int, int],
    scheme: QuantizationScheme,
    table: str,
    tensors: dict[str, Tensor],
    device: torch.device | str,
) -> CodebookWeight:
    """table: `levels`, or the name of the compression whose anchors are stored."""
    (rows, columns), bits = shape, scheme.bits
    compression = None if table == "levels" else compressions(bits)[table]
    numbers = (rows, columns // (scheme.group_size or columns), len(compression.anchors) if compression else 2**bits)
    check_shape(folder, f"{name}.{table}", tensors.get(f"{name}.{table}"), numbers if bits in INDEX_BITS else None)
    codes = take(folder, f"{name}.codes", (rows, packed_length(columns, bits)), tensors)
    found = tensors.pop(f"{name}.{table}")
    _check_type(folder, f"{name}.codes", codes, codes.dtype == torch.uint8)
    right = found.is_floating_point() if compression is None else found.dtype == torch.float16
    _check_type(folder, f"{name}.{table}", found, right)
    levels = compression.levels(found) if compression else found
    return CodebookWeight(unpack_indices(codes.to(device), bits, columns), levels.to(device))


def named(prefix: str, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Select the parts that exist, by their full names."""
    return {f"{prefix}.{part}": tensor for part, tensor in parts.items() if tensor is not None}


def take(folder: Path, name: str, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> Tensor:
    """Take one tensor out of `tensors`; raises CheckpointError where it is missing or of another shape."""
    check_shape(folder, name, tensors.get(name), shape)
    return tensors.pop(name)


def has_shape(found: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> bool:
    """Whether a shape is the expected one, in which -1 stands for any number."""
    if found is None or expected is None:
        return found == expected
    return len(found) == len(expected) and all(size in (-1, own) for own, size in zip(found, expected, strict=True))


def check_shape(folder: Path, name: str, tensor: Tensor | None, expected: tuple[int, ...] | None) -> None:
    """Raise CheckpointError unless a tensor is there, and of this shape, exactly when it should be."""
    found = None if tensor is None else tuple(tensor.shape)
    if not has_shape(found, expected):
        problem = "is missing" if found is None else "should not be there"
        if found is not None and expected is not None:
            problem = f"has shape {list(found)}, expected {list(expected)}"
        raise CheckpointError(f"{folder} is damaged: tensor {name} {problem}; quantize the model again.")


def _check_type(folder: Path, name: str, tensor: Tensor, right: bool) -> None:
    if not right:
        raise CheckpointError(
            f"{folder} is damaged: tensor {name} is of type {str(tensor.dtype).removeprefix('torch.')}; "
            "quantize the model again."
        )
