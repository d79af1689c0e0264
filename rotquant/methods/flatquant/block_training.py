"""FlatQuant's learning (Sun et al. 2024): matrices that flatten weights and inputs, one decoder block after another.

A block is trained to give its own full-precision outputs (Eq. 4) with inputs, weights and KV cache quantized. Learned
are at each site a scale of every feature and two matrices P = U diag(v) V^T, U and V orthogonal by Cayley transforms,
and clip ratios of weights and inputs. Weights are cut to their clips before they are rounded, as in the authors' code,
unless the recipe searches ratios of its own then. A killed training continues at the block it was at.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.kernels.rows.straight_through import fake_quantize
from rotquant.methods.flatquant import FlatQuant, factor_sizes
from rotquant.models.architectures import Architecture, Site, linear_of
from rotquant.models.equivalent import smoothing_scale, weight_maxima
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.simulation.runtime import Handle, RuntimeQuantization, hook_site, wrap
from rotquant.models.statistics import observe
from rotquant.models.stream import as_type
from rotquant.models.transforms import Chain
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.hadamard import random_orthogonal_matrix
from rotquant.tensors.quantization import choose_qparams
from rotquant.training import loop
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.replay import Replay
from rotquant.training.state import Checkpoint, Record
from rotquant.weights.context import QuantizationContext
from rotquant.weights.reconstruction import (
    INITIAL_CLIPPING,
    DecoderBlock,
    Parameters,
    clipped,
    exact_parameters,
    initial_clipping,
    restore_clipping,
    trainable_type,
    tuned,
)

#: Share of the learning rates that is left at the end.
_LAST = 1e-3
#: Weight decay: AdamW's default, which the authors' code leaves.
_DECAY = 1e-2
#: Factors of features stay above this.
_SMALLEST = 1e-3


class LearnedMatrix(nn.Module):
    """P = U diag(v) V^T [n, n]; U and V are Cayley transforms of matrices that start orthogonal (authors' code)."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Parameter(random_orthogonal_matrix(size, generator).float().contiguous()) for _ in range(2)
        )
        self.values = nn.Parameter(torch.ones(size))


def with_duals(learned: Sequence[LearnedMatrix]) -> list[tuple[Tensor, Tensor]]:
    """Each P [n, n] and P^-T, by which weights are multiplied where inputs are by P.

    Those of one size are computed at once: a GPU takes nearly as long for one small system as for many.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for size in {len(one.values) for one in learned}:
        places = [place for place, one in enumerate(learned) if len(one.values) == size]
        free = torch.stack([side for place in places for side in (learned[place].left, learned[place].right)])
        u, v = _orthogonal(free).unflatten(0, (-1, 2)).unbind(1)
        values = torch.stack([learned[place].values for place in places])[:, None]
        matrices = (u * values) @ v.mT
        # Whether there is an inverse is not asked: that waits for the GPU, and the loss shows it.
        duals = torch.linalg.inv_ex(matrices.double()).inverse.mT.to(matrices.dtype)
        found |= zip(places, zip(matrices, duals, strict=True), strict=True)
    return [found[place] for place in range(len(learned))]


def _orthogonal(free: Tensor) -> Tensor:
    """(I - S/2)^-1 (I + S/2) with the skew-symmetric S of the lower triangle of each free matrix [..., n, n]."""
    skew = free.tril(-1)
    skew, one = (skew - skew.mT) / 2, torch.eye(free.shape[-1], dtype=free.dtype, device=free.device)
    # Not `solve`, which waits for the GPU to see whether there is a solution: 1 - S/2 of a skew S always has one.
    return torch.linalg.solve_ex(one - skew, one + skew).result


class LearnedSite(nn.Module):
    """What stands before the linear layers of a site while its block is trained.

    factor: by which features [features] are multiplied; clip: the logit of the share of each token's range that is
    kept.
    """

    def __init__(
        self, settings: FlatQuant, site: Site, scale: Tensor, scheme: QuantizationScheme | None, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.transforms = settings.transforms_at(site.name)
        # Channels are rows of any tensor, as tokens are, and what the kernels know.
        self.scheme = scheme and scheme.model_copy(update={"granularity": "channel"})
        self.factor = nn.Parameter(1 / scale)
        self.left, self.right = (LearnedMatrix(size, generator) for size in factor_sizes(site.features))
        self.clip = nn.Parameter(scale.new_full((), INITIAL_CLIPPING))
        self.to(scale.device)
        self._chain = self._dual = Chain(())

    def renew(self, tensors: Mapping[str, Tensor], duals: Mapping[str, Tensor]) -> None:
        """Take what `FlatBlock.tensors` gives: before a pass, of weights and inputs."""
        self._chain, self._dual = Chain(self.transforms, tensors), Chain(self.transforms, duals)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed and quantized input."""
        y = self._chain(x)
        if self.scheme is None:
            return y
        qparams = choose_qparams(y, self.scheme, torch.sigmoid(self.clip))
        return fake_quantize(y.to(self.clip.dtype), self.scheme, qparams, y.dtype)

    def of_weight(self, weight: Tensor) -> Tensor:
        """A weight [out, in] that reads the transformed input."""
        return self._dual(weight)


@dataclass(frozen=True)
class FlatBlock:
    """All sites of a block by name, and for each the logits of its weights' clips (`clipped`).

    The weights that read a site are rows of one: a GPU takes nearly as long for one as for all.
    """

    sites: dict[str, LearnedSite]
    clipping: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def start(
        cls, block: DecoderBlock, parameters: Parameters, maxima: Parameters, recipe: Recipe, seed: int
    ) -> "FlatBlock":
        """Where training starts: SmoothQuant's scales, random orthogonal matrices, clips at 0.98 of each range.

        maxima: max |x| per feature by site name, of the full-precision block.
        """
        settings, sites = FlatQuant.of(recipe), {}
        for number, site in enumerate(block.architecture.sites):
            weights = weight_maxima(linear_of(block.layer, name) for name in site.linears)
            like = parameters[f"{site.linears[0]}.weight"]
            scale = smoothing_scale(maxima[site.name].to(like), weights.to(like), settings.smoothing_alpha)
            sites[site.name] = LearnedSite(settings, site, scale.to(like), recipe.activations, 4 * seed + number)
        if recipe.weights is None:
            return cls(sites)
        stacked = {f"{site.name}.weight": _stacked(parameters, site) for site in block.architecture.sites}
        return cls(sites, initial_clipping(stacked, sites, recipe.rounded.scheme))

    def state_dict(self) -> dict[str, Any]:
        """All tensors that are learned."""
        return {"sites": {name: site.state_dict() for name, site in self.sites.items()}, "clipping": self.clipping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` gave."""
        for name, stored in state["sites"].items():
            self.sites[name].load_state_dict(stored)
        restore_clipping(self.clipping, state["clipping"])

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of all transforms by the names that they are stored as, and those of what weights take."""
        computed = iter(with_duals([one for site in self.sites.values() for one in (site.left, site.right)]))
        found, duals = {}, {}
        for name, site in self.sites.items():
            found[f"{name}.scale"], duals[f"{name}.scale"] = 1 / site.factor, site.factor
            for side in ("left", "right"):
                found[f"{name}.{side}"], duals[f"{name}.{side}"] = next(computed)
        return found, duals

    def weights(
        self, parameters: Parameters, architecture: Architecture, scheme: QuantizationScheme | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The block's parameters in a type, with transformed and rounded weights, differentiable in what is learned."""
        tensors, result = self.tensors(), {}
        for site in architecture.sites:
            self.sites[site.name].renew(*tensors)
            weight = self.sites[site.name].of_weight(_stacked(parameters, site))
            if scheme is not None:
                weight = clipped(weight, scheme, *self.clipping[site.name])
                weight = fake_quantize(weight, scheme, choose_qparams(weight, scheme), dtype)
            result |= _by_linear(weight.to(dtype), parameters, site)
        return {name: result[name] if name in result else one.to(dtype) for name, one in parameters.items()}


def _stacked(parameters: Parameters, site: Site) -> Tensor:
    """The weights of a site's linear layers as the rows of one."""
    return torch.cat([parameters[f"{name}.weight"] for name in site.linears])


def _by_linear(rows: Tensor, parameters: Parameters, site: Site) -> dict[str, Tensor]:
    """What has a row for each row of `_stacked`, by the names of the weights."""
    names = [f"{name}.weight" for name in site.linears]
    return dict(zip(names, rows.split([len(parameters[name]) for name in names]), strict=True))


def train_block(
    block: DecoderBlock,
    parameters: Parameters,
    learned: FlatBlock,
    inputs: Tensor,
    targets: Tensor,
    recipe: Recipe,
    seed: int,
    description: str = "training",
    checkpoint: Checkpoint | None = None,
) -> list[Record]:
    """Train `learned` in place: AdamW on the mean squared error of the block's output; the history of that error.

    Args:
        block: the decoder layer, wrapped by the quantizers of the KV cache; `learned` stands before its linear layers.
            Its arguments have the type in which it computes.
        parameters: its own, in the type in which weights are rounded.
        inputs, targets: what the full-precision model feeds the block and what it gives, [n, tokens, hidden].

    Raises:
        RotquantError: the loss is not finite.
    """
    settings, like = FlatQuant.of(recipe), block.kwargs["position_embeddings"][0]
    exact = next(iter(parameters.values())).dtype
    scheme = None if recipe.weights is None else recipe.weights.scheme
    clips = [logit for pair in learned.clipping.values() for logit in pair]
    matrices = []
    for site in learned.sites.values():
        clips.append(site.clip)
        matrices += [parameter for parameter in site.parameters() if parameter is not site.clip]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": settings.transformation_lr}, {"params": clips, "lr": settings.clipping_lr}],
        weight_decay=_DECAY,
        fused=like.is_cuda,
    )

    @torch.no_grad()
    def clamp(*_: object) -> None:
        for site in learned.sites.values():
            site.factor.clamp_(min=_SMALLEST)

    optimizer.register_step_post_hook(clamp)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, settings.steps))
    batches = shuffled_batches(len(inputs), settings.batch_size, settings.steps, seed)

    def parts(step: int) -> list[tuple[Tensor, Tensor]]:
        return [(inputs[batches[step]].to(like), targets[batches[step]].to(like))]

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        weights = learned.weights(parameters, block.architecture, scheme, like.dtype)
        return nn.functional.mse_loss(block(weights, part[0]).to(exact), part[1].to(exact))

    not_finite = (
        "the loss of a block of FlatQuant is {loss} after {step} steps: lower methods.flatquant.transformation_lr."
    )
    with Replay([*matrices, *clips], settings.steps) as replay:
        gradient = GradientStep(parts, loss, [optimizer], [schedule], backward=_backward, replay=replay)
        return loop.train(
            gradient,
            settings.steps,
            description,
            parts={"learned": learned, "optimizer": optimizer, "schedule": schedule},
            checkpoint=checkpoint,
            noted={},
            not_finite=not_finite,
        )


def _backward(loss: Tensor) -> None:
    """Gradients of the loss over itself: of equal size in all blocks and steps, beside Adam's epsilon too."""
    (loss / loss.detach().clamp(min=torch.finfo(loss.dtype).tiny)).backward()


def _share(step: int, steps: int) -> float:
    """The share of the learning rates at a step: along a cosine."""
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * step / steps)) / 2


def apply(settings: FlatQuant, context: QuantizationContext) -> None:
    """Learn every block's matrices on full-precision inputs, and turn its weights back."""
    recipe, stream, architecture = context.recipe, context.capture(), context.architecture
    cache = replace(context.online, scale_gradients=True, keys=recipe.keys, values=recipe.values)
    found = defaultdict[str, list[Tensor]](list)
    cut = recipe.weights is not None and not recipe.weights.clip_search
    for index, layer in stream.layers(settings.title):
        exact = torch.promote_types(stream.hidden.dtype, torch.float32)
        block = DecoderBlock(layer, architecture, as_type(stream.kwargs[index], exact))
        trained = replace(block, kwargs=as_type(stream.kwargs[index], trainable_type(stream.hidden.dtype)))
        parameters = exact_parameters(layer, architecture)
        with wrap(context.model, context.online), observe(layer, architecture, "max") as maxima:
            targets = block.map(parameters, stream.hidden, stream.batch_size)
        learned = FlatBlock.start(block, parameters, maxima, recipe, context.seed * architecture.num_layers + index)
        with wrap(context.model, cache), Handle() as handle:
            for site in architecture.sites:
                hook_site(handle, layer, site, learned.sites[site.name])
            about = recipe, context.seed + index, f"block {index}"
            train = partial(train_block, trained, parameters, learned, stream.hidden, targets, *about)
            tuned(context.checkpoint, index, learned, train)
        every = {name: tensor.detach().cpu() for name, tensor in learned.tensors()[0].items()}
        for site in architecture.sites:
            one = learned.sites[site.name]
            tensors = {name: every[name] for transform in one.transforms for name in transform.tensors}
            fuse_inverse(layer, site, Chain(one.transforms, tensors))
            if cut:
                upper, lower = (_by_linear(logits.detach(), parameters, site) for logits in learned.clipping[site.name])
                for name in site.linears:
                    weight = linear_of(layer, name).weight.data
                    clips = (logits[f"{name}.weight"].to(weight.device) for logits in (upper, lower))
                    weight.copy_(clipped(weight.to(exact), recipe.rounded.scheme, *clips))
            for name, tensor in (tensors | {f"{site.name}.clip": torch.sigmoid(one.clip.detach()).cpu()}).items():
                found[name].append(tensor)
        stream.hidden = targets
    context.tensors.update({name: torch.stack(layers) for name, layers in found.items()})
    context.online = runtime(settings, context.online, context.tensors)


def tensors(settings: FlatQuant, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Tensors of every site, stacked over layers: scales of features, two matrices, the clip ratio of inputs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for site in architecture.sites:
        left, right = factor_sizes(site.features)
        sizes = {"scale": (site.features,), "left": (left, left), "right": (right, right), "clip": ()}
        shapes |= {f"{site.name}.{name}": (architecture.num_layers, *size) for name, size in sizes.items()}
    return shapes


def runtime(
    settings: FlatQuant, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]
) -> RuntimeQuantization:
    """Every site's input is transformed, and quantized with its layer's clip ratio."""
    sites = {name.partition(".")[0]: clip for name, clip in tensors.items() if name.endswith(".clip")}
    clips = {(layer, site): one.item() for site, clip in sites.items() for layer, one in enumerate(clip)}
    transforms = [one for site in sites for one in settings.transforms_at(site)]  # pyright: ignore[reportArgumentType]
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".clip")}
    return replace(quantization.with_transforms(transforms, found), clips={**quantization.clips, **clips})
