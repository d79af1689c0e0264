"""LLM-QAT (Liu et al. 2023, arXiv:2305.17888): quantization-aware training on text that the model itself generates.

The model writes sequences from random first tokens (Sec. 2.1); then all of its parameters are trained so that with
quantized weights, activations and KV cache it gives the next-token distribution of the full-precision model (Sec. 2.2),
rounding being straight-through. No corpus is read. What is trained is rounded to nearest afterwards, elsewhere.
"""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from rotquant.methods.llm_qat import LLMQAT
from rotquant.models.architectures import (
    Architecture,
    architecture_of,
    config_of,
    decoder_layers,
    embedding,
    linear_of,
)
from rotquant.models.experts import stack_experts
from rotquant.models.limits import ModelLimits
from rotquant.models.masks import kept_masks, recordable
from rotquant.models.memory import LOGITS_AT_ONCE
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import on_device
from rotquant.qat.writing import write, written_once
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.devices import of_device
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.quantization import fake_quantize
from rotquant.training import loop
from rotquant.training.loop import GradientStep, shuffled_batches
from rotquant.training.replay import Replay
from rotquant.training.state import Checkpoint, Record
from rotquant.weights.context import QuantizationContext

#: Up to the third, fourth or fifth token of a sequence the likeliest is taken, then they are drawn (Sec. 2.1).
GREEDY = range(3, 6)


def generate(model: nn.Module, samples: int, length: int, seed: int) -> Tensor:
    """Text of the model's own: a random first token, then the likeliest ones, then tokens drawn from the softmax.

    Sequences do not end at an end-of-text token: what the model takes for the next text follows.

    Args:
        model: a causal language model on its device, unquantized.
        samples, length: how many sequences, and how many tokens in each.
        seed: equal seeds give equal text on one kind of machine.

    Returns:
        Token ids on the host, int64 [samples, length].

    Raises:
        RecipeError: they would exceed the model's context.
    """
    ModelLimits.of(model.config).check_length(length, "texts that LLM-QAT trains on")
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(config_of(model).vocab_size, (samples, 1), generator=generator)
    greedy = torch.randint(GREEDY.start, GREEDY.stop, (samples, 1), generator=generator)
    return write(model, first, length, generator, greedy=greedy, title="LLM-QAT")


def _text(model: nn.Module, recipe: Recipe, seed: int) -> Tensor:
    """Text that `generate` writes for a recipe, computed once for one model and seed: all bit widths share it."""
    settings = LLMQAT.of(recipe)
    size = (settings.samples, settings.sequence_length)
    device = embedding(model).weight.device
    return written_once(model, device, (recipe.rotation, size, seed), lambda: generate(model, *size, seed))


def quantized_weights(model: nn.Module, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """The weights of every decoder layer's linear layers, rounded to nearest, by full name; differentiable."""
    prefix, names = f"{model.base_model_prefix}.layers", architecture_of(model).linears
    weights = {
        f"{prefix}.{index}.{name}.weight": fake_quantize(linear_of(layer, name).weight, scheme)
        for index, layer in enumerate(decoder_layers(model))
        for name in names
    }
    stack_experts(weights)
    return weights


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy of the student's distribution under the teacher's, - sum p_T log p_S, mean over tokens.

    Args:
        student, teacher: logits [..., vocabulary], of any floating-point types.
    """
    target = teacher.flatten(0, -2).float().softmax(-1)
    return cross_entropy(student.flatten(0, -2).float(), target)


def train(
    model: nn.Module,
    teacher: nn.Module,
    ids: Tensor,
    recipe: Recipe,
    seed: int = 0,
    *,
    checkpoint: Checkpoint | None = None,
) -> list[Record]:
    """Train the model's parameters in place: AdamW without weight decay, the learning rate along a cosine to zero.

    Args:
        model: in float32 (or float64), on its device, wrapped by its quantizers.
        teacher: the full-precision model, on the same device.
        ids: token ids, int64 [samples, tokens].
        recipe: its method and `weights`.
        seed: the run's: with the method's own it decides the order of the samples.
        checkpoint: where an interrupted training continues, with the same result.

    Returns:
        The number and the loss of each step, in nats per token.

    Raises:
        RotquantError: the loss is not finite.
    """
    settings, scheme = LLMQAT.of(recipe), recipe.rounded.scheme
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    batches = shuffled_batches(len(ids), settings.batch_size, settings.steps, settings.seed + seed)

    device, size = embedding(model).weight.device, len(batches[0])
    at_once = max(1, of_device(LOGITS_AT_ONCE, device) // (ids.shape[1] * config_of(model).vocab_size))

    def parts(step: int) -> Iterator[tuple[Tensor]]:
        return ((part.to(device),) for part in ids[batches[step]].split(at_once))

    def loss(part: tuple[Tensor]) -> Tensor:
        return _loss(model, teacher, part[0], scheme) * (len(part[0]) / size)

    # Parts of another shape would need the graph's memory once more.
    pure = recordable(model) and size % min(size, at_once) == 0
    replayed = Replay(model.parameters(), settings.steps, pure=pure)
    with kept_masks(model, teacher), replayed as replay:
        return loop.train(
            GradientStep(parts, loss, [optimizer], [schedule], replay=replay),
            settings.steps,
            "LLM-QAT training",
            parts={"model": model, "optimizer": optimizer, "schedule": schedule},
            checkpoint=checkpoint,
            not_finite="the loss of LLM-QAT is {loss} after {step} steps: lower methods.llm_qat.learning_rate.",
        )


def _loss(model: nn.Module, teacher: nn.Module, ids: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Loss of the quantized model on sequences [n, tokens], mean over tokens."""
    with FasterKernels():
        with torch.no_grad():
            target = teacher(input_ids=ids, use_cache=False).logits
        inputs = {"input_ids": ids, "use_cache": False}
        output = functional_call(model, quantized_weights(model, scheme), kwargs=inputs)
        return distillation_loss(output.logits, target)


def train_model(
    model: nn.Module,
    recipe: Recipe,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    checkpoint: Checkpoint | None = None,
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Record]:
    """Generate text with a model and train it on that, in place.

    A copy of the model in its own type is the teacher; the model is trained in float32 at least, which with gradients
    and AdamW's two moments takes 16 bytes a parameter.

    Args:
        model: a causal language model of a supported family, rotated before if the recipe rotates, and not wrapped.
        recipe: with this method and `weights`; its run-time quantizers act while training.
        seed: the run's: with the method's own it draws the text and its order.
        device: where to work.
        checkpoint: where an interrupted training continues; the text, which the seed decides, is generated again.
        tensors: of the recipe's online transforms.

    Returns:
        The number and the loss of each step, in nats per token.

    Raises:
        RotquantError: the loss is not finite.
    """
    settings, dtype = LLMQAT.of(recipe), cast(torch.dtype, model.dtype)
    teacher = copy.deepcopy(model).requires_grad_(False)
    with on_device(teacher, device), wrap(teacher, RuntimeQuantization(recipe.transforms, tensors=tensors)):
        with FasterKernels():
            ids = _text(teacher, recipe, settings.seed + seed)
        model.to(torch.promote_types(dtype, torch.float32))
        with on_device(model, device), wrap(model, RuntimeQuantization(tensors=tensors, **recipe.runtime)):
            history = train(model, teacher, ids, recipe, seed, checkpoint=checkpoint)
    model.to(dtype)
    return history


def check_model(settings: LLMQAT, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """The generated text fits the context."""
    limits.check_length(settings.sequence_length, "texts that LLM-QAT trains on")


def apply(settings: LLMQAT, context: QuantizationContext) -> None:
    """Train the whole model, then round to nearest."""
    context.history = train_model(
        context.model,
        context.recipe,
        context.seed,
        context.device,
        checkpoint=context.checkpoint,
        tensors=context.online.tensors,
    )
    context.round_to_nearest()
