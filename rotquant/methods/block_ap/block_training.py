"""Block-AP (EfficientQAT Sec. 3.2): weights, their scales and static scales, trained block by block.

One decoder layer lies on the accelerator; two streams of hidden states pass it, those of the full-precision network and
those of the quantized one. A finished block is saved, so a killed tuning continues at the block it was at.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rotquant.kernels.rows.straight_through import fake_quantize
from rotquant.methods.block_ap import BlockAP
from rotquant.models.architectures import linear_of, norm_of
from rotquant.models.experts import stack_experts
from rotquant.models.simulation.runtime import wrap
from rotquant.models.stream import LayerStream, as_type
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, choose_qparams, quantize
from rotquant.training import loop
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.replay import Replay
from rotquant.training.state import Checkpoint, Record
from rotquant.weights.context import QuantizationContext
from rotquant.weights.hessian import observed_hessians
from rotquant.weights.reconstruction import trainable_type, tuned
from rotquant.weights.rtn import QuantizedWeight
from rotquant.weights.scale_search import ScaleSearch
from rotquant.weights.search import search_ratios

#: A learned scale stays above this share of where it begins.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class LearnedBlock:
    """Trainable tensors of one block, by name: leaves with gradient, float32 or float64.

    weights: of linear layers, [out, in]. scales, zero_points: theirs, as in `choose_qparams`; no zero points where the
        scheme is symmetric.
    static: scales of sites, `keys` and `values`.
    norms: gains of norms [features], by the norms' names; none unless the settings ask for them.
    """

    weights: dict[str, Tensor]
    scales: dict[str, Tensor]
    zero_points: dict[str, Tensor]
    static: dict[str, Tensor]
    norms: dict[str, Tensor]

    @property
    def full_precision(self) -> list[Tensor]:
        """All that has the learning rate of weights."""
        return [*self.weights.values(), *self.norms.values()]

    @property
    def steps(self) -> list[Tensor]:
        """All that has the learning rate of scales."""
        return [*self.scales.values(), *self.zero_points.values(), *self.static.values()]

    def state_dict(self) -> dict[str, Any]:
        """All tensors."""
        return {name: dict(tensors) for name, tensors in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` gave."""
        with torch.no_grad():
            for name, tensors in state.items():
                for key, tensor in tensors.items():
                    getattr(self, name)[key].copy_(tensor)

    def stay_positive(self) -> Callable[..., None]:
        """A hook after an optimizer's steps, by which no scale falls below a share of what it is now."""
        scales = [*self.scales.values(), *self.static.values()]
        bounds = [_LEAST_SHARE * scale.detach() for scale in scales]

        @torch.no_grad()
        def clamp(*_: Any) -> None:
            for scale, bound in zip(scales, bounds, strict=True):
                scale.clamp_(min=bound)

        return clamp

    def qparams(self, name: str) -> QParams:
        """Quantization parameters of a linear layer's weight: its zero point whole, with the gradient of what is
        rounded."""
        zero_point = self.zero_points.get(name)
        whole = None if zero_point is None else zero_point + (zero_point.round() - zero_point).detach()
        return QParams(self.scales[name], whole)


def apply(settings: BlockAP, context: QuantizationContext) -> None:
    """Tune and round all weights of the context's model in place; integers, static scales and history stay in it.

    Raises:
        RotquantError: the loss is not finite.
        ResultError: the checkpoint belongs to another tuning, is damaged or cannot be written.
    """
    with wrap(context.model, context.online):
        noisy = context.capture(context.texts[settings.name])
    clean = noisy.copy()
    search = ScaleSearch(context, noisy, settings.scales)
    for index, layer in noisy.layers(settings.title):
        targets = clean if settings.targets == "full_precision" else noisy.copy()
        with wrap(context.model, context.online):
            targets.advance(index)
        learned = start(context, noisy, search, settings, index, layer)
        context.history += tune_block(context, noisy, targets.hidden, learned, settings, index)
        round_block(context, learned, index, layer)
        with wrap(context.model, context.quantized(context.scales_of(index))):
            noisy.advance(index)


def start(
    context: QuantizationContext,
    stream: LayerStream,
    search: ScaleSearch,
    settings: BlockAP,
    index: int,
    layer: nn.Module,
) -> LearnedBlock:
    """Where a block's training begins: its weights, and the scales of both grid searches."""
    scheme, names = context.recipe.rounded.scheme, context.architecture.linears
    exact = torch.promote_types(next(layer.parameters()).dtype, torch.float32)
    weights = {name: linear_of(layer, name).weight.detach().to(exact, copy=True) for name in names}
    with torch.no_grad():
        if settings.weights is None:
            qparams = {name: choose_qparams(weight, scheme) for name, weight in weights.items()}
        else:
            with wrap(context.model, context.online), observed_hessians(layer, context.architecture) as hessians:
                for _ in stream.outputs(index, settings.scales.samples):
                    pass
            ratios = settings.weights.ratios(scheme)
            qparams = {
                name: choose_qparams(weight, scheme, search_ratios(weight, hessian, scheme, ratios))
                for names in (names for site in context.architecture.sites for names in site.sharing)
                for hessian in [hessians[names[0]].matrix.to(exact)]
                for name in names
                for weight in [weights[name]]
            }
        static = search.of_layer(index) if context.recipe.has_static_scales else {}
    learned = LearnedBlock(
        weights,
        {name: q.scale.clone() for name, q in qparams.items()},
        {name: q.zero_point.clone() for name, q in qparams.items() if q.zero_point is not None},
        {name: q.scale.clone() for name, q in static.items()},
        {
            site.norm: norm_of(layer, site).weight.detach().to(exact, copy=True)
            for site in context.architecture.sites
            if settings.norms and site.norm is not None
        },
    )
    for tensors in vars(learned).values():
        for tensor in tensors.values():
            tensor.requires_grad_()
    return learned


def block_output(
    layer: nn.Module, learned: LearnedBlock, scheme: QuantizationScheme, hidden: Tensor, kwargs: Mapping[str, Any]
) -> Tensor:
    """Outputs [batch, tokens, hidden] of a wrapped layer with rounded weights; differentiable in what is learned."""
    dtype = trainable_type(hidden.dtype)
    parameters = {name: parameter.detach().to(dtype) for name, parameter in layer.named_parameters()}
    for name, weight in learned.weights.items():
        parameters[f"{name}.weight"] = fake_quantize(weight, scheme, learned.qparams(name), dtype)
    parameters |= {f"{name}.weight": gain.to(dtype) for name, gain in learned.norms.items()}
    stack_experts(parameters)
    output = functional_call(layer, parameters, (hidden.to(dtype),), as_type(dict(kwargs), dtype))
    return output[0] if isinstance(output, tuple) else output


def tune_block(
    context: QuantizationContext,
    stream: LayerStream,
    targets: Tensor,
    learned: LearnedBlock,
    settings: BlockAP,
    index: int,
) -> list[Record]:
    """Train a block's `learned` in place, or take it from the context's checkpoint, where it is done.

    Args:
        stream: what the quantized network so far feeds the block, which lies on the stream's device.
        targets: what its outputs should be, [samples, tokens, hidden].

    Returns:
        The loss of the outputs by step: their mean squared error, or that over each token's mean square.
    """

    def train(checkpoint: Checkpoint | None) -> list[Record]:
        history = _train(context, stream, targets, learned, settings, index, checkpoint)
        return [{"block": index, **record} for record in history]

    return tuned(context.checkpoint, index, learned, train)


def _train(
    context: QuantizationContext,
    stream: LayerStream,
    targets: Tensor,
    learned: LearnedBlock,
    settings: BlockAP,
    index: int,
    checkpoint: Checkpoint | None,
) -> list[Record]:
    scheme, layer, device = context.recipe.rounded.scheme, stream.modules[index], stream.device
    steps = settings.steps
    batches = shuffled_batches(len(targets), settings.batch_size, steps, context.seed + index)
    weights, limit = learned.full_precision, settings.clip_gradients
    optimizer = torch.optim.AdamW(
        [{"params": learned.steps, "lr": settings.scale_lr}, {"params": weights, "lr": settings.weight_lr}],
        weight_decay=0.0,
        fused=device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share, settings, steps))
    optimizer.register_step_post_hook(learned.stay_positive())

    def parts(step: int) -> list[tuple[Tensor, Tensor]]:
        return [(stream.hidden[batches[step]].to(device), targets[batches[step]].to(device))]

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        output, wanted = block_output(layer, learned, scheme, part[0], stream.kwargs[index]), part[1].float()
        if settings.loss == "mse":
            return nn.functional.mse_loss(output.float(), wanted)
        square = wanted.square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return ((output.float() - wanted).square() / square).mean()

    def clip() -> None:
        if limit is not None:
            nn.utils.clip_grad_norm_([*learned.steps, *weights], limit)

    static = {name: QParams(scale) for name, scale in learned.static.items()}
    with (
        wrap(context.model, context.quantized(static)),
        Replay([*learned.steps, *weights], steps, pure="experts" not in context.architecture.traits) as replay,
    ):
        return loop.train(
            GradientStep(parts, loss, [optimizer], [schedule], clip, replay=replay),
            steps,
            f"block {index}",
            parts={"learned": learned, "optimizer": optimizer, "schedule": schedule},
            checkpoint=checkpoint,
            noted={"loss": ".3g"},
            not_finite="the loss of block-wise fine-tuning is {loss} in {description} after {step} steps: lower "
            "methods.block_ap.weight_lr or scale_lr.",
        )


def _share(settings: BlockAP, steps: int, step: int) -> float:
    """The share of the learning rates at a step."""
    if settings.schedule == "constant":
        return 1.0
    return 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def round_block(context: QuantizationContext, learned: LearnedBlock, index: int, layer: nn.Module) -> None:
    """Round a block's learned weights, put their values into the layer, and keep integers and static scales."""
    scheme = context.recipe.rounded.scheme
    for site in context.architecture.sites:
        rounded = []
        for name in site.linears:
            qparams = learned.qparams(name).detach()
            rounded.append(QuantizedWeight(quantize(learned.weights[name], qparams, scheme), qparams, scheme))
        context.store(index, layer, site, rounded)
    for name, gain in learned.norms.items():
        layer.get_parameter(f"{name}.weight").copy_(gain)
    context.keep_scales(index, {name: QParams(scale.detach()) for name, scale in learned.static.items()})
