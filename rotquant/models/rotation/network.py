"""The network that rotations are learned on (SpinQuant Sec. 3.2): the original one, each quantizer in a rotated basis.

Rotating every weight and quantizing gives, at each place, the function x -> Q(x R) R^T in the unrotated basis. Here
hooks put that into the unrotated model: the same network without a rotated weight or the gradient of one. With s the
scale and s n the rounding error of Q(x R), the place computes x + s n R^T. Where features are divided by scales S too
(`Rotations.scales`), it is Q(x R / S) S R^T. What is differentiated is described at `LearningNetwork.quantize`. No
weight is changed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rotquant.kernels.rows import rounding_errors
from rotquant.models.architectures import (
    Architecture,
    Projection,
    Site,
    architecture_of,
    decoder_layers,
    embedding,
    linear_of,
    norm_of,
)
from rotquant.models.equivalent import per_query_head
from rotquant.models.rotation.matrices import Rotations
from rotquant.models.simulation.kv_cache import TransientCache
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization
from rotquant.models.transforms import Chain
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import INPUTS, QuantizationScheme, RotationScheme
from rotquant.recipes.transforms import Location, Transform, at
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.onednn import linear
from rotquant.tensors.quantization import (
    choose_qparams,
    decibel,
    euclidean_norm,
    fake_quantize,
    grouped,
    ungrouped,
)
from rotquant.training.loop import recomputed

#: The clip ratios of a rotated weight [out, in] in float32 or float64, in the shape of its scales.
Clips = Callable[[Tensor], Tensor]
#: Where the gradient of a rotation comes from: see `LearningNetwork.quantize`.
Gradient = Literal["errors", "scales", "both"]


@dataclass(frozen=True)
class Basis:
    """A change of basis along the last axis of a tensor and its inverse, both linear; orthogonal without `scale`.

    forth, back: the same transforms; one may take the matrices without gradient.
    features: which of them it changes, from and up to; None all.
    scale: gives what features are divided by as it is then, broadcast over x: after the transforms where it is `last`,
        else before them.
    """

    forth: Chain
    back: Chain
    features: tuple[int, int] | None = None
    scale: Callable[[], Tensor] | None = None
    last: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """x R, x R / S or (x / S) R."""
        x = self._scaled(x, torch.div, not self.last)
        return self._scaled(self._change(self.forth, x), torch.div, self.last)

    def undo(self, x: Tensor) -> Tensor:
        """x R^T, x S R^T or x R^T S."""
        x = self._scaled(x, torch.mul, self.last)
        return self._scaled(self._change(self.back.inverse, x), torch.mul, not self.last)

    @property
    def dual(self) -> "Basis":
        """That of the columns of weights which read x R / S: W R S."""
        scale = self.scale
        return self if scale is None else replace(self, scale=lambda: 1 / scale())

    def _scaled(self, x: Tensor, operation: Callable[[Tensor, Tensor], Tensor], here: bool) -> Tensor:
        return operation(x, self.scale().to(x)) if self.scale is not None and here else x

    def _change(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.features is None:
            return function(x)
        start, stop = self.features
        return torch.cat([x[..., :start], function(x[..., start:stop]), x[..., stop:]], dim=-1)


def basis_at(
    architecture: Architecture,
    transforms: tuple[Transform, ...],
    gradient: Gradient,
    matrices: Mapping[str, Tensor],
    *locations: Location,
    features: tuple[int, int] | None = None,
    scale: Callable[[], Tensor] | None = None,
    last: bool = False,
) -> Basis:
    """The basis in which a layer is quantized that has these transforms; matrices: R1 and the layer's, by location.

    Each rotation comes twice, and has its gradient in one place or both: see `LearningNetwork.quantize`.
    """
    constant = {name: matrix.detach() for name, matrix in matrices.items()}
    chosen = at(transforms, *locations)
    forth, back = (
        Chain(chosen, matrices if gradient in ("both", place) else constant, architecture.num_heads, learned=True)
        for place in ("scales", "errors")
    )
    return Basis(forth, back, features, scale, last)


@dataclass
class RoundingErrors:
    """Quantization errors of the activations since the last `reset`, by place: norms of tensors and of their errors.

    counting: False where a layer is computed again, whose errors are known.
    """

    norms: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    counting: bool = True

    def reset(self) -> None:
        """Forget everything."""
        self.norms.clear()

    def add(self, place: str, signal: Tensor, noise: Tensor) -> None:
        """Count a tensor and its rounding error, by as few operations as may be: it is done at every place."""
        if self.counting:
            self.norms.setdefault(place, []).append((euclidean_norm(signal), euclidean_norm(noise)))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block in which nothing is counted."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def snr(self) -> dict[str, float]:
        """10 log10(sum of signal^2 / sum of noise^2) in dB by place; a GPU is waited for once, not for each."""
        if not self.norms:
            return {}
        counts = [len(pairs) for pairs in self.norms.values()]
        norms = [one for pairs in self.norms.values() for pair in pairs for one in pair]
        found = torch.stack([one.to(norms[0].device) for one in norms])  # layers may lie on several devices
        squares = found.cpu().double().square().unflatten(0, (-1, 2)).split(counts)
        signal, noise = torch.stack([part.sum(0) for part in squares], dim=1)
        return dict(zip(self.norms, decibel(signal, noise).tolist(), strict=True))


class LearningNetwork:
    """Handle that `quantized_network` yields: a switch, and what the quantizers did.

    quantizing: False lets the float network run, in the same hooks.
    errors: of the activations and the KV cache, where `quantizing`.
    """

    def __init__(self) -> None:
        self.quantizing = True
        self.errors = RoundingErrors()

    def quantize(self, x: Tensor, scheme: QuantizationScheme | None, basis: Basis, place: str) -> Tensor:
        """Q(x R) R^T as x + s n R^T, s the scales of x R and n its rounding errors over them.

        The straight-through estimator takes n, rounding's residue, for a constant: x gets the gradient of the output as
        it is. R gets one through one of its two places, the other being constant, or through both.
        Through the second, the error turns with R. That is what Eq. 5 has and the authors' code, but it turns
        differently for every token: on this project's models the gradients of two batches of 2048 tokens have a cosine
        of 0.00 (0.02 through both places). Through the first, R changes the ranges, hence the size of the error: 0.18.
        Both together are what autograd makes of the rotated network, but for x's own part in the ranges.
        """
        if scheme is None or not self.quantizing:
            return x
        signal = basis.apply(x.detach())  # what x's own range does to the error is of higher order
        error = _rounding_errors(signal, scheme)
        with torch.no_grad():
            self.errors.add(place, signal, error)
        return x + basis.undo(error)


def _rounding_errors(signal: Tensor, scheme: QuantizationScheme, clip: Tensor | None = None) -> Tensor:
    """The errors of rounding, as a function of the scales that they are in proportion to; clip: in place of the
    scheme's.

    Where `signal` has no gradient one kernel finds them on a GPU.
    """
    with torch.no_grad():
        if not signal.requires_grad and signal.is_cuda and not rounding_errors.problem(signal, scheme):
            return rounding_errors.errors_of(signal, scheme, clip)
    qparams = choose_qparams(signal, scheme, clip)
    with torch.no_grad():
        error = fake_quantize(signal, scheme, qparams).sub_(signal)
    return _of_scale(error, qparams.scale, scheme) if signal.requires_grad else error


def _of_scale(error: Tensor, scale: Tensor, scheme: QuantizationScheme) -> Tensor:
    """`error` as a function of the scales that it is in proportion to."""
    share = grouped(error, scheme) / scale.detach()
    return ungrouped(share * scale, error.shape).to(error.dtype)


@contextmanager
def quantized_network(
    model: nn.Module,
    recipe: Recipe,
    rotations: Rotations,
    checkpointing: bool = False,
    *,
    gradient: Gradient = "errors",
    weights: QuantizationScheme | None = None,
    clips: Clips | None = None,
) -> Iterator[LearningNetwork]:
    """While open, `model` computes what rotating and quantizing it by `recipe` would compute, differentiable in the
    rotations and their scales.

    Its parameters are frozen meanwhile, dropout is off, and all is as it was afterwards. Layers may lie on several
    devices: the rotations go where they are needed, and their gradients back.

    Args:
        model: of a supported family, in its original basis.
        recipe: its `rotation` (without the matrices themselves) and its quantizers of activations and KV cache.
        rotations: R1, R2, and online ones of inputs, with their scales, of any type.
        checkpointing: keep only the input of each decoder layer for the backward pass, and compute the layer again.
        gradient: what the rotations' is, see `LearningNetwork.quantize`.
        weights: the scheme by which weights are rounded to nearest too.
        clips: the ratios by which their ranges are clipped; default, the scheme's own. They must be those of the final
            weights: what learning gains by their rounding it gains on that grid alone.
    """
    architecture, network = architecture_of(model), LearningNetwork()
    rotation = cast(RotationScheme, recipe.rotation)
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        handle = stack.enter_context(Handle())
        if rotation.center_embeddings:
            handle.add(embedding(model).register_forward_hook(lambda _m, _i, x: x - x.mean(dim=-1, keepdim=True)))
        for index, layer in enumerate(decoder_layers(model)):
            matrices = rotations.of_layer(index)
            if rotations.residual is not None:
                matrices["residual"] = rotations.residual
            scales = rotations.scales_of(index)
            one = _Layer(network, architecture, recipe, matrices, scales, index, layer, gradient, weights, clips)
            one.install(stack, handle)
        stack.enter_context(recomputed(model, checkpointing, context_fn=lambda: (FasterKernels(), _again(network))))
        yield network


@contextmanager
def _again(network: LearningNetwork) -> Iterator[None]:
    """A block in which a layer is computed again, as the first time but without counting its errors."""
    with FasterKernels(), network.errors.left_out():
        yield


@dataclass(frozen=True)
class _Layer:
    """The quantizers of one decoder layer."""

    network: LearningNetwork
    architecture: Architecture
    recipe: Recipe
    matrices: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    index: int
    layer: nn.Module
    gradient: Gradient
    weights: QuantizationScheme | None
    clips: Clips | None
    found: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)

    def install(self, stack: ExitStack, handle: Handle) -> None:
        """Put them in until `stack` and `handle` are closed.

        Norms lose their gain where R1 comes between the two: the site's hook supplies it, or the weights do.
        """
        schemes = RuntimeQuantization(**self.recipe.runtime)
        for site in self.architecture.sites:
            scheme = schemes.scheme_of(site, self.architecture.head_dim)
            place, basis = f"{self.index}.{site.name}", self._basis_of(site)
            quantize = partial(self.network.quantize, scheme=scheme, basis=basis, place=place)
            gain = None
            if site.norm is not None:
                norm = norm_of(self.layer, site)
                if self.recipe.fuses_norms:
                    offset = self.architecture.norm_offset
                    gain = norm.weight + offset if offset else norm.weight
                    one = nn.Parameter(torch.full_like(gain, 1.0 - offset), False)
                    stack.enter_context(_replaced(norm, "weight", one))
                factor = 1 if gain is None or self.weights else gain
                handle.add(norm.register_forward_hook(lambda _m, _i, x, q=quantize, factor=factor: q(x) * factor))
            if gain is not None and self.weights and site.router is not None:
                router = self.layer.get_submodule(site.router)  # whose weight is not quantized, and lacks the gain
                handle.add(router.register_forward_pre_hook(lambda _m, inputs, gain=gain: (inputs[0] * gain,)))
            for name in site.linears:
                module = linear_of(self.layer, name)
                if site.norm is None:
                    handle.add(module.register_forward_pre_hook(lambda _m, inputs, q=quantize: (q(inputs[0]),)))
                if self.weights:
                    forward = partial(self._linear, name, module, basis.dual, self._basis_of_rows(name, module), gain)
                    stack.enter_context(_replaced(module, "forward", forward))
        if self.recipe.keys is not None or self.recipe.values is not None:
            attention = self.layer.get_submodule(self.architecture.attention)
            handle.add(attention.register_forward_pre_hook(self._cache, with_kwargs=True))

    def fake(self, keys: Tensor, values: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv heads, tokens, head_dim] as attention will see them."""
        recipe, quantize, of = self.recipe, self.network.quantize, self._of_cache
        return (
            quantize(keys, recipe.keys, of("queries_keys", "keys"), f"{self.index}.keys"),
            quantize(values, recipe.values, of("values", "values"), f"{self.index}.values"),
        )

    def _cache(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "past_key_values": TransientCache(self)}

    def _linear(
        self, name: str, module: nn.Linear, columns: Basis, rows: Basis, gain: Tensor | None, x: Tensor
    ) -> Tensor:
        """A linear layer of weight R_out Q(R_out^T W R_in) R_in^T, where W contains the norm's gain."""
        weight = module.weight if gain is None else module.weight * gain
        if self.network.quantizing:
            signal = columns.apply(rows.apply(weight.T).T)
            error = _rounding_errors(signal, cast(QuantizationScheme, self.weights), self._clip(name, signal))
            weight = weight + rows.undo(columns.undo(error).T).T
        return linear(x, weight, module.bias)

    @torch.no_grad()
    def _clip(self, name: str, weight: Tensor) -> Tensor | None:
        """The clip ratios of a linear layer's rotated weight, found once for the rotations and scales as they are: the
        parts of a step share them, and layers that are computed again."""
        if self.clips is None:
            return None
        version = tuple(one._version for one in (*self.matrices.values(), *self.scales.values()))
        known = self.found.get(name)
        if known is None or known[0] != version:
            exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
            known = self.found[name] = version, self.clips(exact)
        return known[1]

    def _basis(self, *locations: Location, features: tuple[int, int] | None = None, **scaling: Any) -> Basis:
        transforms = self.recipe.transforms
        return basis_at(
            self.architecture, transforms, self.gradient, self.matrices, *locations, features=features, **scaling
        )

    def _of_cache(self, location: Location, scaled: str) -> Basis:
        """The basis of keys or values [batch, kv heads, tokens, head_dim]."""
        scale = self.scales.get(scaled)
        return self._basis(location, scale=None if scale is None else lambda: scale.unsqueeze(1))

    def _basis_of(self, site: Site) -> Basis:
        """The basis of a linear layer's input: of what norms give that of the residual stream, unless it has one."""
        scale = self.scales.get("values" if site.name == "attention_output" else site.name)
        if site.name in INPUTS.values() and not at(self.recipe.transforms, site.name):
            return self._basis("residual", scale=None if scale is None else lambda: scale, last=True)
        if site.name != "attention_output":
            return self._basis(site.name, scale=None if scale is None else lambda: scale)
        of_heads = None if scale is None else lambda: per_query_head(scale, self.architecture)
        return self._basis("values", "across_heads", site.name, scale=of_heads)

    def _basis_of_rows(self, name: str, module: nn.Linear) -> Basis:
        """The basis of a linear layer's output as its weights know it: R3 acts later."""
        shape = self.architecture
        if name in (shape.attention_output, *shape.site("mlp_output").linears):
            return self._basis("residual")
        own = [(one.rows or (0, len(module.weight)), scale) for one, scale in self._scaled_rows() if one.name == name]
        scale = partial(_placed, module.weight, own) if own else None
        if name == shape.value.name:
            return self._basis("values", features=shape.value.rows, scale=scale)
        return self._basis(scale=scale)

    def _scaled_rows(self) -> Iterator[tuple[Projection, Callable[[], Tensor]]]:
        """Projections whose outputs are divided, and by what; of queries and keys with norms their gains are."""
        shape, scales = self.architecture, self.scales
        if "values" in scales:
            yield shape.value, lambda: scales["values"].flatten()
        if "keys" in scales and shape.head_norms is None:
            yield shape.key, lambda: scales["keys"].flatten()
            yield shape.query, lambda: 1 / per_query_head(scales["keys"], shape)
        if "mlp_output" in scales:
            for down in shape.site("mlp_output").linears:
                yield shape.up_of(down), lambda: scales["mlp_output"]


def _placed(weight: Tensor, parts: list[tuple[tuple[int, int], Callable[[], Tensor]]]) -> Tensor:
    """What each output of a weight [out, in] is divided by: parts of them by something, the others by one."""
    result = weight.new_ones(len(weight), dtype=torch.promote_types(weight.dtype, torch.float32))
    for (start, stop), scale in parts:
        result = torch.cat([result[:start], scale().to(result), result[stop:]])
    return result


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """While open, no parameter takes a gradient, and the model is in evaluation mode."""
    learnable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = model.training
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.train(training)
        for parameter in learnable:
            parameter.requires_grad_(True)


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """While open, `module` has another parameter, or an attribute of its own that hides its class's."""
    own = name in vars(module) or name in module._parameters
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if own:
            setattr(module, name, before)
        else:
            delattr(module, name)
