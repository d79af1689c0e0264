"""The formats of GPTQ and AWQ: packed weights that GPTQModel, AutoGPTQ, auto-round and AutoAWQ write, read here.

A layer of `in` by `out` features has `qweight` and `qzeros`, int32, `scales` [groups, out] and, in GPTQ's format,
`g_idx` int [in], the group of each input feature; the weight is (code - zero point) scale. GPTQ packs codes along the
inputs, `qweight` [in bits / 32, out], AWQ along the outputs, [in, out bits / 32], in an order of its own; zero points
lie along the outputs in both. GPTQ's first version stores a zero point less one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rotquant.foundation.errors import CheckpointError
from rotquant.models.checkpoints import first_line

#: Quantization methods of such folders. auto-round says the layout in `packing_format`.
METHODS = ("gptq", "awq", "auto-round")
#: Parts of a packed weight, after the name of its layer.
PARTS = ("qweight", "qzeros", "scales", "g_idx")
#: Where each of eight neighbouring outputs lies in an integer of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Layout:
    """How codes are packed: their bits, 4 or 8 (GPTQ's also 2), in which format, and what is less in zero points."""

    bits: int
    awq: bool
    zero_point_less: int


def layout_of(config: Mapping[str, Any], where: object) -> Layout:
    """The layout that a quantization_config says.

    Raises:
        CheckpointError: one that is not read here.
    """
    words = str(config.get("packing_format") or config.get("quant_method")).removeprefix("auto_round:")
    version = config.get("checkpoint_format") or config.get("format") or config.get("version") or ""
    awq, bits = "awq" in words, config.get("bits", 0)
    known = version in (("", "gemm", "auto_round:auto_awq") if awq else ("", "gptq", "gptq_v2", "auto_round:auto_gptq"))
    named = words in ("gptq", "awq", "auto_gptq", "auto_awq")
    if not named or not known or bits not in ((4,) if awq else (2, 4, 8)) or config.get("dynamic"):
        raise CheckpointError(
            f"{where} has weights packed as {words} {version} of {bits} bits, which are not read here: GPTQ's of 2, 4 "
            "and 8 bits and AWQ's gemm of 4 are, with one width for all layers."
        )
    return Layout(bits, awq, 0 if awq or version == "gptq_v2" else 1)


def unpack_all(tensors: dict[str, Tensor], layout: Layout, dtype: torch.dtype, where: object) -> None:
    """Put floating-point weights [out, in] in the place of their parts, one after another.

    Raises:
        CheckpointError: parts of a weight are missing, or do not fit each other.
    """
    for layer in [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]:
        found = {part: tensors.pop(layer + part) for part in PARTS if layer + part in tensors}
        try:
            tensors[f"{layer}weight"] = unpacked(found, layout).to(dtype)
        except (LookupError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{where} is damaged: the parts of {layer}weight do not fit each other ({first_line(error)})."
            ) from None


def unpacked(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The weight, float32 [out, in], of its parts."""
    scales = parts["scales"].to(torch.float32)
    along = _codes(parts["qweight"], layout.bits, layout.awq)
    codes = along if layout.awq else _codes(parts["qweight"].mT, layout.bits, False).mT
    zero_points = _codes(parts["qzeros"], layout.bits, layout.awq) + layout.zero_point_less
    features, groups = len(codes), len(scales)
    group = parts.get("g_idx", torch.arange(features) // -(-features // groups)).long()
    if zero_points.shape != scales.shape or group.shape != (features,) or scales.shape[1] != codes.shape[1]:
        raise ValueError(f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, {group.numel()} groups")
    return ((codes - zero_points[group]) * scales[group]).mT.contiguous()


def _codes(packed: Tensor, bits: int, awq: bool) -> Tensor:
    """Codes of int32 [rows, columns] along the rows, int32 [rows, columns 32 / bits], from the lowest bit on."""
    shifts = torch.arange(0, 32, bits)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (codes[..., _AWQ_ORDER] if awq else codes).flatten(-2)
