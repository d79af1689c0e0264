"""Linear layers of other libraries, where they are installed: vLLM's and Humming's, on random codes and scales.

vLLM (`vllm._custom_ops`): Marlin and Machete have 4-bit weights and 16-bit inputs, CUTLASS's products 8-bit ones of
either kind. Humming compiles a kernel for each shape. Inputs of fewer than 16 bits arrive quantized, as ours do. What
they compute is not tested here: these are times.
"""

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.arguments import LinearArguments
from rotquant.foundation.errors import KernelError

Built = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""A layer as a function of tensors, and the tensors."""

_GROUP = 128


def _library(name: str) -> Any:
    """A module of another library.

    Raises:
        KernelError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise KernelError(f"{name} is not installed here: {str(error).splitlines()[0]}.") from None


def _half(a: LinearArguments, device: torch.device) -> Tensor:
    return torch.randn(a.tokens, a.in_features, dtype=torch.float16, device=device)


def _codes(a: LinearArguments, device: torch.device) -> Tensor:
    """Random 4-bit codes, eight inputs to a word: int32 [in / 8, out]."""
    shape = (a.in_features // 8, a.out_features)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)


def _group_scales(a: LinearArguments, device: torch.device) -> Tensor:
    return torch.rand(a.in_features // _GROUP, a.out_features, device=device).half()


def _marlin(a: LinearArguments, device: torch.device) -> Built:
    ops, kind = _library("vllm._custom_ops"), _library("vllm.scalar_type").scalar_types.uint4b8
    none = torch.empty(0, dtype=torch.int32, device=device)
    weight = ops.gptq_marlin_repack(_codes(a, device), none, a.in_features, a.out_features, 4)
    locks = torch.zeros(
        torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device
    )

    def run(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        without = (None, scales, None, None, None, None, None)
        shape = (a.tokens, a.out_features, a.in_features)
        return ops.marlin_gemm(x, None, weight, *without, locks, kind, *shape, use_fp32_reduce=True)

    return run, (_half(a, device), weight, _group_scales(a, device))


def _machete(a: LinearArguments, device: torch.device) -> Built:
    ops, kind = _library("vllm._custom_ops"), _library("vllm.scalar_type").scalar_types.uint4b8
    codes = _codes(a, device).t().contiguous().t()
    weight = ops.machete_prepack_B(codes, torch.float16, kind, torch.float16)

    def run(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return ops.machete_mm(x, weight, kind, torch.float16, scales, None, _GROUP)

    return run, (_half(a, device), weight, _group_scales(a, device))


def _cutlass(a: LinearArguments, device: torch.device) -> Built:
    ops = _library("vllm._custom_ops")
    dtype = torch.float8_e4m3fn if a.implementation == "cutlass-fp8" else torch.int8
    x = (100 * _half(a, device)).clamp(-127, 127).to(dtype)
    weight = torch.randn(a.out_features, a.in_features, device=device).mul_(100).clamp_(-127, 127).to(dtype)
    rows, columns = torch.rand(a.tokens, 1, device=device), torch.rand(1, a.out_features, device=device)

    def run(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return ops.cutlass_scaled_mm(x, weight.t(), rows, columns, torch.float16)

    return run, (x, weight, rows, columns)


#: Types of the weight and the input of Humming's layers, and whether the weight has groups.
_HUMMING = {
    "humming-w4a16": ("int4", "float16", True),
    "humming-w2a16": ("int2", "float16", True),
    "humming-w4a8": ("int4", "int8", False),
    "humming-w4a4": ("int4", "int4", False),
}


def _humming(a: LinearArguments, device: torch.device) -> Built:
    library, forward = _library("humming.layer"), _library("humming.forward").humming_forward
    heuristics = _library("humming.tune").get_heuristics_config
    weight_type, input_type, grouped = _HUMMING[a.implementation]
    sizes = {"shape_n": a.out_features, "shape_k": a.in_features, "torch_dtype": torch.float16}
    config: dict[str, Any] = {"dtype": weight_type} | ({"group_size": _GROUP} if grouped else {})
    layer = library.HummingLayer(weight_config=config, input_config={"dtype": input_type}, **sizes).to(device)
    layer.load_from_unquantized(torch.randn(a.out_features, a.in_features, dtype=torch.float16, device=device))
    layer.transform()
    meta, locks = layer.humming_metas[""], layer.locks
    # The kernel that it takes for so many tokens; without it, it compiles those of every number of tokens first.
    tuning = json.dumps(heuristics(meta, shape_m=a.tokens, device=device))
    x, scale = library.HummingLayerMethod.may_quant_input(layer, _half(a, device))

    def run(x: Tensor, weight: Tensor, weight_scale: Tensor, *scales: Tensor) -> Tensor:
        given = {"weight_scale": weight_scale, "input_scale": scales[0] if scales else None, "locks": locks}
        return forward(meta, x, weight, **given, tuning_config=tuning)

    return run, (x, layer.weight.detach(), layer.weight_scale.detach(), *([] if scale is None else [scale]))


BUILDERS: dict[str, Callable[[LinearArguments, torch.device], Built]] = {
    "marlin": _marlin,
    "machete": _machete,
    "cutlass-fp8": _cutlass,
    "cutlass-int8": _cutlass,
    **dict.fromkeys(_HUMMING, _humming),
}
"""What makes the layer of each implementation."""
