"""Which model families are known, and what a user of another one can do next: from config.json alone, without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import UnsupportedArchitectureError

#: The families that `rotquant.models.architectures` describes, by transformers' `model_type`.
FAMILIES = ("llama", "mistral", "phi3", "qwen2")

#: Words in config.json by which a mixture of experts is known.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: The same of LayerNorm, which subtracts a mean: with it no rotation is fused.
_LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine")
_ENTRY = "`_LAYOUTS` in rotquant/models/architectures.py"


def check_family(config: Mapping[str, Any]) -> None:
    """Refuse the content of a config.json whose family has no adapter, and say what to do next.

    Raises:
        UnsupportedArchitectureError: naming the family, the known ones, and an entry to write or a model to take.
    """
    family = config.get("model_type")
    if family in FAMILIES:
        return
    known = f"no adapter describes the model family {family!r}; known families: {', '.join(FAMILIES)}"
    raise UnsupportedArchitectureError(f"{known}. {_next_step(family, config)}.")


def check_family_of(checkpoint: str) -> None:
    """`check_family` of a local folder, at once. What cannot be read here is for those to tell who load the model."""
    path = Path(checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict) and isinstance(config.get("model_type"), str):
        check_family(config)


def _next_step(family: object, config: Mapping[str, Any]) -> str:
    """What its configuration says of how far the family is from the known ones."""
    if not isinstance(family, str):
        return "Its config.json names no family: take the one that the model was published with"
    if "auto_map" in config:
        return "Its code comes with the checkpoint and is never run: take a copy in Llama's or Qwen2's layout"
    if isinstance(config.get("text_config"), Mapping):
        return "It has more than a language model: save the language model by itself, if that is of a known family"
    if any(config.get(name) for name in _EXPERTS):
        return "Its experts have no layout here: take the family's dense model, such as Mistral-7B or Qwen2-7B"
    if family.startswith("gemma"):
        return "Its norms multiply by 1 + weight and its embeddings are scaled, which is not fused here: take a Llama"
    if any(name in config for name in _LAYER_NORM) and "rms_norm_eps" not in config:
        return "It has LayerNorm, and rotations are fused with RMSNorm alone: take a Llama or Qwen2 of its size"
    return (
        "Where its layers are Llama's (q_proj, k_proj, v_proj, o_proj behind an RMSNorm, gate_proj, up_proj, down_proj "
        f'behind another), write the entry "{family}": _separate into {_ENTRY} and the name into `FAMILIES` of '
        "families.py; tests/invariance.py then tells whether rotations keep its logits"
    )
