"""Block reconstruction (OmniQuant, Shao et al. 2023): learnable weight clipping (LWC, Eq. 2) and equivalent
transformation (LET, Eqs. 3-5), or clipping alone.

Block by block, the clipping of every weight and the channel scales between layers are trained so that the quantized
block gives the outputs of the full-precision block (Eq. 1); then the scales are fused and the weights rounded.
As in the authors' code for Llama there is no shift, and no transformation before down_proj. Weights are never trained.

What is learned of a finished block is saved, so a killed training continues at the block it was at (`tuned`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rotquant.kernels.rows.straight_through import fake_quantize
from rotquant.models.architectures import Architecture, linear_of
from rotquant.models.equivalent import (
    divide_norm,
    divide_values,
    held_scale,
    rotary_pairs,
    scale_keys,
)
from rotquant.models.experts import stack_experts, stacked_names
from rotquant.models.simulation.runtime import wrap
from rotquant.models.statistics import observe
from rotquant.models.stream import as_type
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.quantization import QParams, choose_qparams, grouped, quantize, ungrouped
from rotquant.training import loop
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.replay import Replay
from rotquant.training.state import Checkpoint, Part, Record
from rotquant.weights.actions import hooks
from rotquant.weights.context import QuantizationContext
from rotquant.weights.rtn import QuantizedWeight

#: Logit at which clipping starts: sigmoid(4) = 0.982 of the range (authors' code).
INITIAL_CLIPPING = 4.0
#: Learned scales stay above this (authors' code).
SMALLEST_SCALE = 1e-2

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class LearnedTransformation:
    """Trainable tensors of one block; every tensor is a leaf with gradient.

    scales: the s of LET by place. `attention_input` and `mlp_input` [hidden] divide a norm's output; `value`
        [kv heads, head_dim] divides v_proj's output; `query_key` [`key_scales`, pairs] divides queries and multiplies
        keys.
    clipping: for each linear layer the logits of gamma and beta, LWC's shares of the largest and the smallest weight,
        of the shape of the weight's scales.
    """

    scales: dict[str, Tensor]
    clipping: dict[str, tuple[Tensor, Tensor]]

    def clamp(self) -> None:
        """Keep the scales positive after an optimizer step."""
        with torch.no_grad():
            for scale in self.scales.values():
                scale.clamp_(min=SMALLEST_SCALE)

    def state_dict(self) -> dict[str, Any]:
        """All tensors."""
        return {"scales": self.scales, "clipping": self.clipping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` gave."""
        with torch.no_grad():
            for name, scale in state["scales"].items():
                self.scales[name].copy_(scale)
        restore_clipping(self.clipping, state["clipping"])


def restore_clipping(clipping: Mapping[str, tuple[Tensor, Tensor]], state: Mapping[str, Sequence[Tensor]]) -> None:
    """Bring pairs of logits to stored ones, in place."""
    with torch.no_grad():
        for name, pair in state.items():
            for own, stored in zip(clipping[name], pair, strict=True):
                own.copy_(stored)


def clipped_qparams(weight: Tensor, scheme: QuantizationScheme, upper: Tensor, lower: Tensor) -> QParams:
    """LWC's scales (Eq. 2): h = (gamma max W - beta min W) / (2^N - 1), z = -round(beta min W / h).

    gamma = sigmoid(upper), beta = sigmoid(lower). Symmetric schemes take the larger end of the clipped range,
    h = max(gamma max W, -beta min W) / (2^(N-1) - 1). Differentiable in all tensors; ignores the scheme's clip ratio.

    Args:
        weight: [out, in].
        scheme: of granularity tensor, channel or group.
        upper, lower: logits of the shape of the scales that `choose_qparams(weight, scheme)` gives.
    """
    low, high = _clipped_range(weight, scheme, upper, lower)
    ends = torch.stack([low.flatten(), high.flatten()], dim=-1)  # one row per scale
    rows = scheme.model_copy(update={"granularity": "channel", "group_size": None})
    qparams = choose_qparams(ends, rows, clip_ratio=1.0)
    zero_point = None if qparams.zero_point is None else qparams.zero_point.reshape(upper.shape)
    return QParams(qparams.scale.reshape(upper.shape), zero_point)


def clipped(weight: Tensor, scheme: QuantizationScheme, upper: Tensor, lower: Tensor) -> Tensor:
    """A weight [out, in] cut at both ends of LWC's range, whose scales are then those of `clipped_qparams`.

    Arguments as there. Symmetric scales have codes beyond the nearer end, which FlatQuant's authors give up.
    """
    low, high = _clipped_range(weight, scheme, upper, lower)
    return ungrouped(grouped(weight, scheme).clamp(low, high), weight.shape)


def _clipped_range(weight: Tensor, scheme: QuantizationScheme, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    view = grouped(weight, scheme)
    if scheme.granularity == "tensor":
        view = view.flatten()
    high = view.amax(-1, keepdim=True).clamp(min=0) * torch.sigmoid(upper)
    low = view.amin(-1, keepdim=True).clamp(max=0) * torch.sigmoid(lower)
    return low, high


def transformed(
    parameters: Parameters, architecture: Architecture, scales: Parameters, rotary_dim: int
) -> dict[str, Tensor]:
    """A block's parameters after LET: another set of numbers for the same function (Eqs. 3-5 without shifts).

    Args:
        parameters: of one decoder layer, by name.
        architecture: of the model.
        scales: as in `LearnedTransformation.scales`; a place left out is not transformed.
        rotary_dim: how many dimensions of a head RoPE turns, always the first ones.
    """
    result = dict(parameters)
    for site in architecture.sites:
        if site.norm is not None and site.name in scales:
            divide_norm(result, architecture, site, scales[site.name])
    if "value" in scales:
        divide_values(result, architecture, scales["value"])
    if "query_key" in scales:
        pairs = rotary_pairs(architecture.head_dim, rotary_dim, scales["query_key"].device)
        scale_keys(result, architecture, scales["query_key"][:, pairs])
    return result


def initial_clipping(
    parameters: Parameters, linears: Iterable[str], scheme: QuantizationScheme
) -> dict[str, tuple[Tensor, Tensor]]:
    """LWC's logits where training starts, at 0.98 of every range."""
    clipping = {}
    for name in linears:
        weight = parameters[f"{name}.weight"]
        logits = weight.new_full(choose_qparams(weight, scheme).scale.shape, INITIAL_CLIPPING)
        clipping[name] = (logits.clone().requires_grad_(), logits.requires_grad_())
    return clipping


def quantized_parameters(
    parameters: Parameters,
    architecture: Architecture,
    scheme: QuantizationScheme,
    learned: LearnedTransformation,
    rotary_dim: int,
) -> dict[str, Tensor]:
    """The parameters that the quantized block uses: transformed, clipped, rounded; differentiable in `learned`."""
    result = transformed(parameters, architecture, learned.scales, rotary_dim)
    for name, (upper, lower) in learned.clipping.items():
        weight = result[f"{name}.weight"]
        qparams = clipped_qparams(weight, scheme, upper, lower)
        result[f"{name}.weight"] = fake_quantize(weight, scheme, qparams, weight.dtype)
    return result


@dataclass(frozen=True)
class DecoderBlock:
    """Decoder layer with the arguments of its forward pass other than hidden states and parameters.

    kwargs: keyword arguments of the layer for one sample (position embeddings, mask), on the layer's device.
    """

    layer: nn.Module
    architecture: Architecture
    kwargs: Mapping[str, Any]

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head RoPE turns."""
        return self.kwargs["position_embeddings"][0].shape[-1]

    def __call__(self, parameters: Parameters, hidden: Tensor) -> Tensor:
        """The layer's output [batch, tokens, hidden] with `parameters` in place of its own."""
        own = dict(parameters)
        stack_experts(own)
        with FasterKernels():
            output = functional_call(self.layer, own, (hidden,), dict(self.kwargs))
        return output[0] if isinstance(output, tuple) else output

    def map(self, parameters: Parameters, inputs: Tensor, batch_size: int) -> Tensor:
        """Outputs for all samples [n, tokens, hidden], batch by batch, where the inputs lie."""
        like = next(iter(parameters.values()))
        with torch.no_grad():
            batches = [self(parameters, batch.to(like)).to(inputs) for batch in inputs.split(batch_size)]
        return torch.cat(batches)


def tuned(
    checkpoint: Checkpoint | None, index: int, learned: Part, train: Callable[[Checkpoint | None], list[Record]]
) -> list[Record]:
    """Train a block's tensors in place, or restore them where they are done; the history of the steps.

    Args:
        checkpoint: of the whole model's training; each block has a file next to it.
        train: takes a checkpoint of the block under way, whose file goes with the last step: with moments it is three
            times as large as what was learned.

    Raises:
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
    """
    if checkpoint is None:
        return train(None)
    under_way, done = checkpoint.of(f"block-{index}-under-way"), checkpoint.of(f"block-{index}")
    if done.path.is_file():
        return done.load({"learned": learned})[1]
    history = train(under_way)
    done.save(len(history), {"learned": learned}, history)
    under_way.path.unlink(missing_ok=True)
    return history


def train(
    block: DecoderBlock,
    parameters: Parameters,
    learned: LearnedTransformation,
    inputs: Tensor,
    targets: Tensor,
    scheme: QuantizationScheme,
    settings: Any,
    seed: int,
    description: str = "training",
    checkpoint: Checkpoint | None = None,
) -> list[Record]:
    """Train `learned` in place: AdamW without weight decay on the mean squared error of the block's output (Eq. 1).

    The block must be wrapped by its quantizers. Samples are drawn in random order, every one before any comes again.

    Args:
        block, parameters: the decoder layer and its untransformed parameters.
        inputs: what the quantized model so far feeds the block, [n, tokens, hidden].
        targets: what the full-precision model's block gives, [n, tokens, hidden].
        scheme: of the weights.
        settings: `steps`, `batch_size`, and learning rates, of which the first of `rates` is that of clipping and the
            last that of transformation.
        seed: decides the order of the samples. description: of the training, as progress shows it.

    Returns:
        The history of that error.

    Raises:
        RotquantError: the loss is not finite.
    """
    like, steps = next(iter(parameters.values())), settings.steps
    clipping_lr, transformation_lr = (getattr(settings, settings.rates[end]) for end in (0, -1))
    logits = [logit for pair in learned.clipping.values() for logit in pair]
    optimizer = torch.optim.AdamW(
        [
            {"params": list(learned.scales.values()), "lr": transformation_lr},
            {"params": logits, "lr": clipping_lr},
        ],
        weight_decay=0.0,
        fused=like.is_cuda,
    )
    optimizer.register_step_post_hook(lambda *_: learned.clamp())
    batches = shuffled_batches(len(inputs), settings.batch_size, steps, seed)

    def parts(step: int) -> list[tuple[Tensor, Tensor]]:
        return [(inputs[batches[step]].to(like), targets[batches[step]].to(like))]

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        quantized = quantized_parameters(parameters, block.architecture, scheme, learned, block.rotary_dim)
        return nn.functional.mse_loss(block(quantized, part[0]), part[1])

    remedy = f"lower methods.{settings.name}.{settings.rates[-1]}"
    not_finite = f"the loss of a block of {settings.title} is {{loss}} after {{step}} steps: {remedy}."
    pure = "experts" not in block.architecture.traits
    with Replay([*learned.scales.values(), *logits], steps, pure=pure) as replay:
        return loop.train(
            GradientStep(parts, loss, [optimizer], replay=replay),
            steps,
            description,
            parts={"learned": learned, "optimizer": optimizer},
            checkpoint=checkpoint,
            noted={},
            not_finite=not_finite,
        )


@torch.no_grad()
def fuse(block: DecoderBlock, learned: LearnedTransformation, scheme: QuantizationScheme) -> dict[str, QuantizedWeight]:
    """Write the transformed and rounded parameters into the decoder layer and return its integer weights by name.

    For a float32 model they are exactly what training saw last; a half-precision model stores transformed parameters
    rounded to its type, and scales and codes are taken from those.
    """
    layer, architecture, stored = block.layer, block.architecture, named_parameters(block.layer, block.architecture)
    held = {
        site.name: held_scale(layer, architecture, site, learned.scales[site.name]).to(learned.scales[site.name])
        for site in architecture.sites
        if site.norm is not None and site.name in learned.scales
    }
    parameters = exact_parameters(layer, architecture)
    for name, value in transformed(parameters, architecture, learned.scales | held, block.rotary_dim).items():
        stored[name].copy_(value)
    weights = {}
    for name, (upper, lower) in learned.clipping.items():
        weight = stored[f"{name}.weight"]
        qparams = clipped_qparams(_exact(weight), scheme, upper, lower)
        weights[name] = QuantizedWeight(quantize(_exact(weight), qparams, scheme), qparams, scheme)
        weight.copy_(weights[name].dequantize(weight.dtype))
    return weights


def _exact(parameter: Tensor) -> Tensor:
    """The parameter in at least float32, outside the graph."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def trainable_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which a block of a model of a type is trained: bfloat16 for float16.

    Gradients of a mean over millions of elements underflow in float16.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def named_parameters(layer: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """A decoder layer's parameters by name, of experts each linear layer's own part of what is stacked."""
    parameters: dict[str, Tensor] = {f"{name}.weight": linear_of(layer, name).weight for name in architecture.linears}
    stacked = stacked_names(parameters)
    return parameters | {name: one for name, one in layer.named_parameters() if name not in stacked - set(parameters)}


def exact_parameters(layer: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """The same in at least float32, outside the graph."""
    return {name: _exact(parameter) for name, parameter in named_parameters(layer, architecture).items()}


def quantize_blocks(
    context: QuantizationContext,
    settings: Any,
    start: Callable[[DecoderBlock, Parameters, Parameters], LearnedTransformation],
) -> Iterator[dict[str, QuantizedWeight]]:
    """Train, fuse and round the context's model, in place, one decoder layer at a time on the context's device.

    Two streams of hidden states pass the blocks, those of the full-precision and those of the quantized model.

    Args:
        start: where training starts, from a block, its parameters, and max |x| of its sites' features by name.

    Yields:
        For each layer its integer weights by name; the layer holds their values, its norms absorbed the scales.
    """
    recipe, scheme, stream = context.recipe, context.recipe.rounded.scheme, context.capture()
    # Transformation and clipping change the ranges of activations: training must see how their scales follow.
    quantizers = replace(context.online, scale_gradients=True, **recipe.quantizers)
    clean = noisy = stream.hidden
    for index, layer in stream.layers(settings.title):
        exact = torch.promote_types(stream.hidden.dtype, torch.float32)
        block = DecoderBlock(layer, context.architecture, as_type(stream.kwargs[index], exact))
        parameters = exact_parameters(layer, context.architecture)
        with wrap(context.model, context.online), observe(layer, context.architecture, "max") as maxima:
            clean = block.map(parameters, clean, stream.batch_size)
        learned = start(block, parameters, maxima)
        with wrap(context.model, quantizers) as handle:
            for method in recipe.methods.values():
                hooks(method).attach(method, context.model, recipe, handle)
            about = scheme, settings, context.seed + index, f"block {index}"
            train_block = partial(train, block, parameters, learned, noisy, clean, *about)
            tuned(context.checkpoint, index, learned, train_block)
            weights = fuse(block, learned, scheme)
            noisy = block.map(exact_parameters(layer, context.architecture), noisy, stream.batch_size)
        yield weights
