"""Advice for a user of a model family that has no adapter, as far as config.json tells."""

from collections.abc import Mapping
from typing import Any

#: Words in config.json by which a mixture of experts is known.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: The same of LayerNorm, which subtracts a mean: with it no rotation is fused.
_LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine")


def next_step(family: object, config: Mapping[str, Any]) -> str:
    """Describe how far the family is from the known ones, by its configuration."""
    if not isinstance(family, str):
        return "Its config.json names no family: take the one that the model was published with"
    if "auto_map" in config:
        return "Its code comes with the checkpoint and is never run: take a copy in Llama's or Qwen2's layout"
    if any(isinstance(config.get(part), Mapping) for part in ("text_config", "vision_config")):
        return "It has more than a language model: save the language model by itself, if that is of a known family"
    if any(config.get(name) for name in _EXPERTS):
        return "Its experts have no layout here: take the family's dense model, or a Mixtral or Qwen3 with experts"
    if any(name in config for name in _LAYER_NORM) and "rms_norm_eps" not in config:
        return "It has LayerNorm, and rotations are fused with RMSNorm alone: take a Llama or Qwen2 of its size"
    return (
        "Where its layers are Llama's (q_proj, k_proj, v_proj, o_proj after an RMSNorm, gate_proj, up_proj, down_proj "
        f'after another), write the entry "{family}": Family() into `FAMILIES` in '
        "rotquant/models/architectures.py; tests/helpers/invariance.py then tells whether rotations keep its logits"
    )
