"""Experts (Mixtral, Qwen3-MoE) as linear layers, one by one, of the weights that transformers stacks in one parameter.

A layer's experts are two parameters, `gate_up_proj` [experts, 2 width, hidden] and `down_proj` [experts, hidden,
width]. `open_experts` adds modules `<index>.gate_up_proj` and `<index>.down_proj` whose weights are views of them, and
lets the layer run through these. So an expert has a name, hooks and a weight as any linear layer has, while the
model's parameters, their names and files stay transformers' own.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

#: Name in transformers of the function by which experts run.
_NAME = "rotquant_experts"
_PARTS = ("gate_up_proj", "down_proj")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_up_proj|down_proj)\.weight")


class ExpertLinear(nn.Module):
    """A linear layer of one expert; `weight` [out, in] is a view of the stacked parameter.

    routed: numbers of the tokens that it reads now, among those of the layer, int64.
    """

    bias = None
    routed: Tensor

    def __init__(self, experts: nn.Module, part: str, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_experts", experts)  # no submodule: the stack is already the model's
        self._part, self._index = part, index

    @property
    def weight(self) -> Tensor:
        """The expert's part of the stack."""
        return getattr(self._experts, self._part)[self._index]

    def forward(self, x: Tensor) -> Tensor:
        """x W^T of [tokens, in]."""
        return nn.functional.linear(x, self.weight)


def open_experts(layers: nn.ModuleList) -> None:
    """Give every expert of these decoder layers its linear layers, unless they have them."""
    for layer in layers:
        experts = cast(Any, getattr(getattr(layer, "mlp", None), "experts", None))
        if experts is None or "0" in dict(experts.named_children()):
            continue
        for index in range(experts.num_experts):
            expert = nn.Module()
            for part in _PARTS:
                expert.add_module(part, ExpertLinear(experts, part, index))
            experts.add_module(str(index), expert)
        _register()
        experts.config._experts_implementation = _NAME


def _register() -> None:
    """Make the function known to transformers, whose models take a second to import."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _run)


def _run(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum of what the chosen experts give, each times its weight: hidden [tokens, hidden], choices [tokens, k]."""
    result = torch.zeros_like(hidden)
    for index in range(experts.num_experts):
        tokens, choice = torch.where(top_k_index == index)
        if len(tokens) == 0:
            continue
        expert = experts.get_submodule(str(index))
        expert.gate_up_proj.routed = expert.down_proj.routed = tokens
        gate, up = expert.gate_up_proj(hidden[tokens]).chunk(2, dim=-1)
        output = expert.down_proj(experts.act_fn(gate) * up)
        weighted = output * top_k_weights[tokens, choice, None]
        result.index_add_(0, tokens, weighted.to(result.dtype))
    return result


def stacked_names(names: Iterable[str]) -> set[str]:
    """Names of the stacked parameters that weights of experts are parts of; other weights keep their own names."""
    return {_EXPERT.sub(r"\g<experts>.\g<part>", name) for name in names}


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """Put weights of single experts together, in place, under the names of the stacked parameters."""
    found: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            found.setdefault(f"{match['experts']}.{match['part']}", {})[int(match["index"])] = name
    for stacked, names in found.items():
        tensors[stacked] = torch.stack([tensors.pop(names[index]) for index in sorted(names)])
