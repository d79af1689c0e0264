"""Low-rank deltas of linear layers (Hu et al. 2021, Eq. 3): training them next to frozen weights, and writing them.

A delta is written as an adapter in the format of the library peft, which `rotquant.models.deltas` reads.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rotquant.models.deltas import CONFIG, FIRST, PREFIX, SECOND, WEIGHTS


class LowRank(nn.Module):
    """W + (alpha / rank) B A for a weight W [out, in]: `first` is A [rank, in], `second` is B [out, rank].

    generator: draws A, from the uniform distribution of linear layers; B is zero at first.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        (out_features, in_features), self.scale = weight.shape, alpha / rank
        bound = 1 / math.sqrt(in_features)
        drawn = torch.rand(rank, in_features, generator=generator) * 2 * bound - bound
        self.first = nn.Parameter(drawn.to(weight.device))
        self.second = nn.Parameter(torch.zeros(out_features, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with the delta."""
        return weight + self.scale * (self.second @ self.first)


@contextmanager
def with_deltas(
    model: nn.Module, targets: Sequence[str], rank: int, alpha: float, seed: int
) -> Iterator[dict[str, LowRank]]:
    """While open, the linear layers whose names end with one of `targets` compute with deltas, which alone are trained.

    Yields:
        The deltas by the names of the layers.
    """
    asked = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers = {name: layer for name, layer in model.named_modules() if name.rpartition(".")[2] in targets}
    deltas: dict[str, LowRank] = {}
    for name, layer in layers.items():
        deltas[name] = LowRank(layer.weight, rank, alpha, generator)  # pyright: ignore[reportArgumentType]
        parametrize.register_parametrization(layer, "weight", deltas[name])
    try:
        yield deltas
    finally:
        for layer in layers.values():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        for parameter, wanted in asked.items():
            parameter.requires_grad_(wanted)


def write_deltas(
    folder: Path, deltas: dict[str, LowRank], targets: Sequence[str], rank: int, alpha: float, base: str, digest: str
) -> None:
    """Write deltas, in bf16, and what they are deltas of.

    Args:
        base: the checkpoint's folder, from `folder` or whole, or its hub id. digest: of its content.
    """
    tensors = {}
    for name, delta in deltas.items():
        tensors[PREFIX + name + FIRST] = delta.first.detach().to("cpu", torch.bfloat16).contiguous()
        tensors[PREFIX + name + SECOND] = delta.second.detach().to("cpu", torch.bfloat16).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "base_digest": digest})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
