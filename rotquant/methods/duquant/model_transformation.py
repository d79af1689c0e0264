"""DuQuant on a whole model (Lin et al. 2024, Sec. 3.2): smoothing, every site's transform, and weights turned back.

First all layers are smoothed by the maxima of the calibration text. Then this text passes the model once more, layer by
layer, and each site's transform is found on what it reads there; inputs are never quantized meanwhile. Nothing changes
the model's function: what is done to an input is undone by the weights that read it.
"""

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RotquantError
from rotquant.methods.duquant import DuQuant
from rotquant.methods.duquant.rotation_and_permutation import find_transform
from rotquant.models.architectures import Architecture, Site, decoder_layers, linear_of
from rotquant.models.equivalent import (
    InPlace,
    divide_norm,
    divide_rows,
    held_scale,
    producers,
    smoothing_scale,
    weight_maxima,
)
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.simulation.queries import quantized_queries
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, SiteKey, wrap
from rotquant.models.stream import LayerStream, on_device
from rotquant.models.transforms import Chain, of_layer, scaling
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.transforms import SiteName, Transform
from rotquant.tensors.devices import of_device
from rotquant.weights.context import QuantizationContext

#: Smallest scale of a feature, so that a dead one divides nothing by zero (authors' code).
SMALLEST_SCALE = 1e-2
#: Inputs of a site up to this size stay on the device until its transform is found; larger ones wait on the host.
_KEPT_BYTES = {"cpu": 2**62, "cuda": 8 * 2**30}


def fit(context: QuantizationContext, settings: DuQuant) -> dict[str, Tensor]:
    """Smooth and transform the context's model, in place; what its inputs need at run time, as `DuQuant.tensors` says.

    Rotations have the type of the model, at least float32, and weights are turned back by what is stored.

    Raises:
        RotquantError: calibration activations are not finite.
    """
    scales = {} if settings.alpha is None else smooth(context, settings, settings.alpha)
    dtype = torch.promote_types(context.model.dtype, torch.float32)
    found: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(context.seed)
    sites = dict.fromkeys(site for _, site in scales)
    divided = [_division(settings, site) for site in sites]
    stacked = {f"{site}.scale": torch.stack([scales[key] for key in scales if key[1] == site]) for site in sites}
    with wrap(context.model, context.online.with_transforms(divided, stacked)):
        stream = context.capture()
        if settings.inputs == "mean":
            stream.hidden = stream.hidden.double().mean(dim=0, keepdim=True).to(stream.hidden.dtype)
        for index, _, site in stream.sites_of_layers(settings.title):
            inputs = _inputs(stream, index, site)
            try:
                found_here = find_transform(site.name, inputs, settings, generator, context.device)
            except RotquantError as error:
                raise RotquantError(f"layer {index}, {site.name}: {error}") from None
            for name, tensor in found_here.items():
                of_type = tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()
                found.setdefault(name, []).append(of_type)
    tensors = stacked | {name: torch.stack(layers) for name, layers in found.items()}
    for index, layer in enumerate(decoder_layers(context.model)):
        with on_device(layer, context.device):
            for site in context.architecture.sites:
                transforms = settings.transforms_at(site.name, settings.block(site.features))
                fuse_inverse(layer, site, Chain(transforms, of_layer(tensors, index)))
    return tensors


@torch.no_grad()
def smooth(context: QuantizationContext, settings: DuQuant, alpha: float) -> dict[SiteKey, Tensor]:
    """Divide what sites read by SmoothQuant's scales (its Eq. 4) and multiply their weights by them, in place.

    A norm, v_proj or up_proj before a site takes the division, as in the authors' code. Where query heads share value
    heads, nothing before o_proj can, and where there is no norm, nothing before q_proj or gate_proj.

    Returns:
        The scales by which inputs are still to be divided, [features] by layer and site, on the host, of a type of at
        least float32.
    """
    architecture, online = context.architecture, {}
    layers = zip(decoder_layers(context.model), context.statistics("max"), strict=True)
    for index, (layer, maxima) in enumerate(layers):
        scales = {}
        for site in architecture.sites:
            weights = _weight_maxima(layer, architecture, site, settings).double()
            activations = maxima[site.name].to(weights)
            scales[site.name] = smoothing_scale(activations, weights, alpha).clamp(min=SMALLEST_SCALE)
        for site in architecture.sites:
            scale = scales[site.name]
            if _divides_online(settings, architecture, site):
                scale = scale.to("cpu", torch.promote_types(context.model.dtype, torch.float32))
                online[index, site.name] = scale
                fuse_inverse(layer, site, scaling(site.name, scale))
            elif site.norm is not None:
                divide_norm(InPlace(layer), architecture, site, held_scale(layer, architecture, site, scale))
            for name, before in (producers(architecture, site) or {}).items():
                divide_rows(InPlace(layer), before, [name], scale.double())
    return online


def _weight_maxima(layer: nn.Module, architecture: Architecture, site: Site, settings: DuQuant) -> Tensor:
    """max |w| of each input feature over the linear layers that read a site, or over q_proj or up_proj alone."""
    if settings.smoothed_by == "query_up" and site.norm is not None:
        downs = architecture.site("mlp_output").linears
        ups = [architecture.query] if site.name == "attention_input" else map(architecture.up_of, downs)
        rows = [linear_of(layer, one.name).weight[slice(*(one.rows or (None,)))].detach().abs() for one in ups]
        return torch.cat(rows).amax(dim=0)
    return weight_maxima(linear_of(layer, name) for name in site.linears)


def _division(settings: DuQuant, site: str) -> Transform:
    """The division of a site's input by its stored scales, as the model runs."""
    about = {"name": settings.name, "location": site, "online": True, "origin": "learned"}
    return Transform(kind="scaling", tensors=(f"{site}.scale",), **about)


def _inputs(stream: LayerStream, index: int, site: Site) -> list[Tensor]:
    """Inputs of a site as its linear layers read them, batch by batch, [tokens, features] each."""
    pieces: list[Tensor] = []
    tokens = stream.hidden.shape[0] * stream.hidden.shape[1]
    room = of_device(_KEPT_BYTES, stream.device)

    def receive(x: Tensor) -> None:
        x = x.flatten(0, -2)
        stays = tokens * x.shape[1] * x.element_size() <= room
        pieces.append(x if stays else x.cpu())

    if site.experts:
        stream.feed_experts(index, site, lambda _, x: receive(x))
    else:
        stream.feed(index, site, receive)
    return pieces


def apply(settings: DuQuant, context: QuantizationContext) -> None:
    """Smooth, find every site's transform on calibration text, and turn the weights back."""
    context.tensors.update(fit(context, settings))
    context.online = runtime(settings, context.online, context.tensors)


def tensors(settings: DuQuant, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Tensors of every site, stacked over layers: rotations, permutations, and scales that no layer could absorb."""
    layers, shapes = architecture.num_layers, {}
    for site in architecture.sites:
        size = settings.block(site.features)
        blocks = site.features // size if settings.rotations == "blocks" else 1
        shapes[f"{site.name}.rotations"] = (layers, settings.permutations + 1, blocks, size, size)
        if settings.permutations:
            shapes[f"{site.name}.permutations"] = (layers, settings.permutations, site.features)
        if _divides_online(settings, architecture, site):
            shapes[f"{site.name}.scale"] = (layers, site.features)
    return shapes


def _divides_online(settings: DuQuant, architecture: Architecture, site: Site) -> bool:
    """Whether smoothing divides a site's input as the model runs, since nothing before it can: o_proj's where query
    heads share value heads, and what linear layers read of the residual stream itself."""
    return settings.alpha is not None and site.norm is None and producers(architecture, site) is None


def runtime(settings: DuQuant, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
    """Every site's input is transformed: divided by a stored scale, if there is one, then rotated and permuted."""
    found: list[Transform] = []
    for site in get_args(SiteName):
        if f"{site}.scale" in tensors:
            found.append(_division(settings, site))
        found += settings.transforms_at(site, tensors[f"{site}.rotations"].shape[-1])
    return quantization.with_transforms(found, tensors)


def attach(settings: DuQuant, model: nn.Module, recipe: Recipe, handle: Handle) -> None:
    """Queries are quantized where keys are."""
    if settings.queries and recipe.keys is not None:
        handle.add(quantized_queries(model, recipe.keys, recipe.transforms))
