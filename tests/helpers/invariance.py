"""How much a rotation changes a model's logits: the claim of computational invariance (QuaRot Sec. 3.2) as a number.

Compares a model with a rotated and wrapped copy. A check, not a part of any pipeline.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rotquant.models.architectures import architecture_of, decoder_layers, final_norm
from rotquant.models.fitting import check_transforms
from rotquant.models.rotation.fusing import rotate
from rotquant.models.rotation.matrices import Rotations, initial_rotations
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import exact_norm
from rotquant.recipes.schemes import RotationScheme


@torch.no_grad()
def invariance_error(
    model: nn.Module,
    scheme: RotationScheme,
    seed: int,
    input_ids: Tensor,
    device: torch.device | str | None = None,
    rotations: Rotations | None = None,
) -> float:
    """Largest absolute difference between the logits of `model` and of its rotated copy on `input_ids` [batch, tokens].

    Seed, device and rotations are those of `rotate`. The model itself is unchanged; its copy needs as much memory
    again. In a float64 model the norms are computed in float64 on both sides: transformers' own compute in float32,
    whose rounding (1e-7) would hide the rotation's.

    Raises:
        RecipeError: the scheme needs a Hadamard matrix that is not known.
    """
    architecture = architecture_of(model)
    check_transforms(architecture, scheme.transforms)
    with norms_in_model_dtype(model):
        expected = model(input_ids=input_ids, use_cache=False).logits
    rotated, rotations = copy.deepcopy(model), rotations or initial_rotations(architecture, scheme, seed)
    rotate(rotated, scheme, seed, device, rotations=rotations)
    online = RuntimeQuantization(scheme.transforms, tensors=rotations.online(model.dtype))
    with norms_in_model_dtype(rotated), wrap(rotated, online):
        logits = rotated(input_ids=input_ids, use_cache=False).logits
    return (logits - expected).abs().max().item()


@contextmanager
def norms_in_model_dtype(model: nn.Module) -> Iterator[None]:
    """Recompute every RMSNorm of a float64 model in float64 while the block runs; other models are left alone."""
    architecture = architecture_of(model)
    norms = [layer.get_submodule(name) for layer in decoder_layers(model) for name in architecture.norms]
    exact = partial(exact_norm, architecture.norm_offset)
    hooks = [
        norm.register_forward_hook(exact, prepend=True)
        for norm in (*norms, final_norm(model))
        if norm.weight.dtype == torch.float64
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
