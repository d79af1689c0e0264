"""What rotations are learned on: vectors of each rotation's own basis, of activations and of weights.

R1 acts on what norms give without their gain, an online rotation in its place on the whole input of its site, R2 on the
parts of each head. A weight that reads what a rotation gives counts by its rows, one that writes it by its columns.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import track
from rotquant.methods.rotation_calibration import RotationCalibration
from rotquant.models.architectures import Architecture, Site, architecture_of, decoder_layers, linear_of, norm_of
from rotquant.models.rotation.matrices import Rotations
from rotquant.models.stream import capture_layer_inputs, observed_inputs
from rotquant.models.transforms import Chain
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import INPUTS
from rotquant.recipes.transforms import at

#: By the name of a rotation, vectors [n, features] on the host.
Vectors = dict[str, Tensor]


def sampled_activations(
    model: nn.Module, recipe: Recipe, rotations: Rotations, samples: Tensor, seed: int, device: torch.device
) -> Vectors:
    """Activations that each rotation will act on, of a share of the tokens drawn for each layer and place.

    Layers run one after another on the device, unquantized. The model is left as it was.

    Args:
        samples: token ids, int64 [samples, tokens].
        seed: of the draw.
    """
    architecture, settings = architecture_of(model), RotationCalibration.of(recipe)
    generator, found = torch.Generator().manual_seed(seed), defaultdict[str, list[Tensor]](list)
    stream = capture_layer_inputs(model, samples, device)

    def keep(index: int, layer: nn.Module, name: str, x: Tensor) -> None:
        site = architecture.site(name)
        rows = x.reshape(-1, x.shape[-1])
        kept = torch.rand(len(rows), generator=generator) < settings.share
        rows = rows[kept.to(rows.device)]
        for rotation, of in _places(architecture, rotations, index, site):
            vectors = _ungained(layer, site, architecture, rows) if rotation == "residual" else rows
            found[rotation].append(vectors.reshape(-1, of).cpu())

    sites = [site for site in architecture.sites if site.name != "mlp_output"]
    for index, layer in stream.layers("sampling activations"):
        with observed_inputs(layer, sites, partial(keep, index, layer), raw=True):
            stream.advance(index)
    return {name: torch.cat(parts) for name, parts in found.items()}


def weight_vectors(model: nn.Module, recipe: Recipe, rotations: Rotations) -> Vectors:
    """Rows and columns of the weights that each rotation is fused into, embedding and head apart: they stay as they
    are.

    Of a weight that has more than one transform, the others act as the recipe and `rotations` have them.
    """
    architecture = architecture_of(model)
    found = defaultdict[str, list[Tensor]](list)
    for index, layer in enumerate(track(decoder_layers(model), "reading the weights", "layer")):
        matrices = {name: matrix.float() for name, matrix in rotations.of_layer(index).items()}
        for site in architecture.sites:
            heads = ("values", "across_heads") if site.name == "attention_output" else ()
            chain = Chain(at(recipe.transforms, *heads, site.name), matrices, architecture.num_heads)
            for name in site.linears:
                weight = linear_of(layer, name).weight.detach().float().cpu()
                for rotation, of in _places(architecture, rotations, index, site):
                    gained = weight * _gain(layer, site, architecture).cpu() if rotation == "residual" else weight
                    found[rotation].append(gained.reshape(-1, of))
                if rotations.residual is not None and site.norm is None:
                    found["residual"].append(chain.of_weight(weight).T.contiguous())
        if rotations.values is not None:
            value = linear_of(layer, architecture.value.name).weight.detach().float().cpu()
            rows = value[slice(*(architecture.value.rows or (None,)))]  # [kv heads * head_dim, hidden]
            found[f"values.{index}"].append(rows.T.reshape(-1, architecture.head_dim))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _places(architecture: Architecture, rotations: Rotations, index: int, site: Site) -> Iterator[tuple[str, int]]:
    """Rotations that act on a site's input in a layer, by their names, and features of each."""
    if site.name in INPUTS.values():
        if rotations.residual is not None and site.norm is not None:
            yield "residual", architecture.hidden_size
        if site.name in rotations.inputs:
            yield f"{site.name}.{index}", architecture.hidden_size
    elif site.name == "attention_output" and rotations.values is not None:
        yield f"values.{index}", architecture.head_dim


def _gain(layer: nn.Module, site: Site, architecture: Architecture) -> Tensor:
    """The gain of the norm before a site, float32 [features]."""
    return norm_of(layer, site).weight.detach().float() + architecture.norm_offset


def _ungained(layer: nn.Module, site: Site, architecture: Architecture, x: Tensor) -> Tensor:
    """What a norm gives without its gain; 0 where that is 0."""
    gain = _gain(layer, site, architecture)
    return torch.where(gain == 0, 0.0, x / torch.where(gain == 0, 1.0, gain)).to(x.dtype)
