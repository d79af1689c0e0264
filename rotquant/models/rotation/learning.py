"""Learning of rotations through the quantized network (`rotation.network`): SpinQuant's and OSTQuant's.

The loss is one of the network in which activations and KV cache, and if a method says so weights, are quantized. All
weights are frozen; the model is left as it was. A method says where it starts, its loss, optimizer and rates. On a GPU
products of float32 are TF32's, nearer to float32 than the authors' bfloat16; optimizers step in float32.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.progress import silenced
from rotquant.models.architectures import architecture_of, base_model, capped, embedding, lm_head
from rotquant.models.fitting import check_transforms
from rotquant.models.integrity import weights_digest
from rotquant.models.limits import ModelLimits
from rotquant.models.memory import keep
from rotquant.models.placement import placed
from rotquant.models.rotation.learning_memory import plan_memory
from rotquant.models.rotation.matrices import SCALE, LearnedRotations, Rotations
from rotquant.models.rotation.network import Clips, Gradient, LearningNetwork, RoundingErrors, quantized_network
from rotquant.models.simulation.runtime import RuntimeQuantization, check_quantization
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.devices import tensor_core_products
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.stiefel import orthonormality_error
from rotquant.training.loop import GradientStep, shuffled_batches, train
from rotquant.training.state import Checkpoint, Record

#: What float networks gave to their heads, by what decides it: all bit widths of a model and seed share it.
_FLOAT_STATES: dict[tuple[str, bytes], Tensor] = {}
#: Bytes that are kept of it, and tokens of a text of which it is: for models of real size it costs little.
_FLOAT_BYTES, _FLOAT_TOKENS = 2**28, 2**11

#: The sum over predictions of a loss: of the quantized network's logits [predictions, vocabulary], the float network's
#: or None, and the text's next tokens [predictions].
Objective = Callable[[Tensor, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class NetworkLearning:
    """How a method learns.

    steps: iterations. batch_size: sequences of an iteration.
    objective: the loss. teacher: whether it reads the float network's logits.
    optimizers: made of the parameters by their names; their rates are those of the first step.
    share: of the rates at a step, counted from zero.
    gradient, weights, clips: as `quantized_network` takes them.
    clip: norm to which the gradient of all parameters is cut; None leaves it.
    """

    steps: int
    batch_size: int
    objective: Objective
    teacher: bool
    optimizers: Callable[[Mapping[str, nn.Parameter]], Sequence[Optimizer]]
    share: Callable[[int], float]
    gradient: Gradient = "errors"
    weights: QuantizationScheme | None = None
    clips: Clips | None = None
    clip: float | None = None

    @property
    def constants(self) -> bool:
        """Whether neither weights nor rounding errors have a gradient."""
        return self.gradient == "errors" and self.weights is None


@dataclass(frozen=True)
class LearningOptions:
    """How a learning is run, which changes no result; see `learn_through_network`."""

    device: torch.device | str | None = None
    checkpoint: Path | None = None
    progress: bool = True
    batch_size: int | None = None
    memory: int | None = None
    snr_every: int = 10
    checkpoint_every: int = 10
    callback: Callable[[Record], None] | None = None


def learn_through_network(
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    samples: Tensor,
    settings: NetworkLearning,
    start: Callable[[], Mapping[str, Tensor]],
    options: LearningOptions,
) -> LearnedRotations:
    """Learn the rotations of a recipe through the quantized network.

    Args:
        model: a causal language model of a supported family in its original basis; unchanged afterwards.
        recipe: see `quantized_network` for what counts of it.
        seed: of the order of the samples.
        samples: token ids, int64 [samples, tokens].
        settings: how.
        start: rotations and scales from which learning starts, by their names (`Rotations.tensors`); called where the
            model lies for its learning.
        options: device: where to work, see `placed`; None where the model lies, which may be several devices.
            checkpoint: file that keeps the state every `checkpoint_every` steps, and from which an interrupted learning
            continues with the same result; the caller deletes it.
            progress: say how far it is (`rotquant.foundation.progress`).
            batch_size: sequences that pass the network at once; gradients are accumulated over a step's batch. Default:
            as many as keep the logits in bounds, and on a GPU as fit (`learning_memory.plan_memory`).
            memory: bytes of a GPU that may be used; default, those that are free. Layers beyond it stay on the host.
            snr_every: steps between measurements of the end-to-end signal-to-noise ratio, 10 log10(sum s^2 / sum n^2)
            over tokens and vocabulary, s the logits of the float network and n what quantization adds to them. The
            first and the last step are always measured.
            callback: called with every new record, after the checkpoint is written.

    Raises:
        RecipeError: the recipe does not fit; before anything is computed.
        ResultError: the checkpoint belongs to another learning or is damaged.
        RotquantError: the loss is not finite.
    """
    architecture = architecture_of(model)
    check_transforms(architecture, recipe.transforms)
    shapes = tensor_shapes(architecture, recipe.transforms)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_quantization(architecture, RuntimeQuantization(tensors=empty, **recipe.runtime))
    ModelLimits.of(model.config).check(samples, "samples that rotations are learned on")
    place = embedding(model).weight.device if options.device is None else torch.device(options.device)
    matrices = max(1, len(shapes) * architecture.num_layers)
    tokens, memory = samples.shape[1], options.memory
    plan = plan_memory(
        model, settings.batch_size, settings.teacher, tokens, place, memory, matrices, settings.constants
    )
    lying = nullcontext(False) if options.device is None else placed(model, place, plan.working, memory)
    with lying as from_host, silenced(not options.progress):
        parameters = _parameters(model, start())
        optimizers = settings.optimizers(parameters)
        schedules = [LambdaLR(optimizer, settings.share) for optimizer in optimizers]
        state = {f"optimizer {number}": one for number, one in enumerate(optimizers)}
        state |= {f"schedule {number}": one for number, one in enumerate(schedules)}
        batch_size = min(settings.batch_size, options.batch_size or plan.at_once)
        again = from_host or plan.recomputes
        # Of many tokens, or of layers that would have to come, a digest of all weights costs more than it saves.
        few = tokens * batch_size <= _FLOAT_TOKENS and not from_host
        about = _about_float(model, recipe, settings) if few else ""
        rotations = Rotations.of_tensors(parameters, exact=False)
        quantizers = {"gradient": settings.gradient, "weights": settings.weights, "clips": settings.clips}
        with quantized_network(model, recipe, rotations, again, **quantizers) as network:
            batches = shuffled_batches(len(samples), settings.batch_size, settings.steps, seed)
            loss = _Loss(model, network, settings, len(batches[0]), about)
            clip = partial(nn.utils.clip_grad_norm_, [*parameters.values()], settings.clip or math.inf)
            gradient = GradientStep(
                lambda step: samples[batches[step]].split(batch_size),
                loss,
                optimizers,
                schedules,
                clip if settings.clip else None,
                _backward,
            )
            checkpoint = options.checkpoint and Checkpoint(
                options.checkpoint, _identity(model, recipe, seed, samples), options.checkpoint_every
            )
            history = train(
                partial(_step, loss, gradient, parameters, options.snr_every),
                settings.steps,
                "learning rotations",
                parts=parameters | state,
                checkpoint=checkpoint,
                on_step=options.callback,
                not_finite="the loss of the quantized network is {loss} at step {step} of {description}.",
            )
    return LearnedRotations.of_float32(parameters, history)


def _parameters(model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """What is learned, in float32 (float64 for a float64 model) next to the embedding."""
    weight = embedding(model).weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return {
        name: nn.Parameter(tensor.to(weight.device, dtype, copy=True).contiguous()) for name, tensor in start.items()
    }


@dataclass
class _Loss:
    """The mean loss of a step's sequences, part by part.

    sequences: in a step. about: identifies the float network; empty where its states are not kept.
    measuring: whether what quantization adds to the float network's logits is kept in `errors`.
    """

    model: nn.Module
    network: LearningNetwork
    settings: NetworkLearning
    sequences: int
    about: str
    measuring: bool = False
    errors: RoundingErrors = field(default_factory=RoundingErrors)

    def __call__(self, ids: Tensor) -> Tensor:
        """The share of token ids [batch, tokens], anywhere, in the loss."""
        ids = ids.to(embedding(self.model).weight.device)
        with FasterKernels(), tensor_core_products():
            exact = self._float_logits(ids) if self.settings.teacher or self.measuring else None
            logits = self.model(input_ids=ids, use_cache=False).logits
        if exact is not None and self.measuring:
            self.errors.add("logits", exact, logits.detach() - exact)
        teacher = exact[:, :-1].flatten(0, 1).float() if exact is not None and self.settings.teacher else None
        loss = self.settings.objective(
            logits[:, :-1].flatten(0, 1).float(), teacher, ids[:, 1:].to(logits.device).flatten()
        )
        return loss / (self.sequences * (ids.shape[1] - 1))

    @torch.no_grad()
    def _float_logits(self, ids: Tensor) -> Tensor:
        text = self.about, str(tuple(ids.shape)).encode() + ids.cpu().numpy().tobytes()
        if (known := _FLOAT_STATES.get(text)) is not None:
            return capped(self.model, lm_head(self.model)(known))
        self.network.quantizing = False
        try:
            states = base_model(self.model)(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            self.network.quantizing = True
        if self.about:
            keep(_FLOAT_STATES, text, states, _FLOAT_BYTES)
        return capped(self.model, lm_head(self.model)(states))


def _backward(loss: Tensor) -> None:
    with tensor_core_products():
        loss.backward()


def _step(loss: _Loss, gradient: GradientStep, parameters: Mapping[str, Tensor], snr_every: int, step: int) -> Record:
    """Do one step of the optimizer and return its record."""
    loss.measuring = step % snr_every == 0 or step + 1 == loss.settings.steps
    loss.errors.reset()
    loss.network.errors.reset()
    rate = gradient.optimizers[0].param_groups[0]["lr"]
    values = gradient(step)
    sites = loss.network.errors.snr()
    errors = [orthonormality_error(one.detach()) for name, one in parameters.items() if not name.startswith(SCALE)]
    record = {
        **values,
        "learning_rate": rate,
        "orthonormality": torch.stack(errors).max().item(),
        "activation_snr": sum(sites.values()) / len(sites) if sites else None,
        "site_snr": sites,
    }
    return record | ({"end_to_end_snr": loss.errors.snr()["logits"]} if loss.measuring else {})


def _about_float(model: nn.Module, recipe: Recipe, settings: NetworkLearning) -> str:
    """Identifies the float network that `quantized_network` lets run: the model, and how its norms are computed."""
    scheme = cast(RotationScheme, recipe.rotation)
    about = recipe.fuses_norms, scheme.center_embeddings, settings.weights is not None
    return str((weights_digest(model), *about))


def _identity(model: nn.Module, recipe: Recipe, seed: int, samples: Tensor) -> str:
    """A digest of what decides the result, the model's weights excepted."""
    about = {
        "recipe": recipe.learned(),
        "seed": seed,
        "samples": hashlib.sha256(samples.cpu().numpy().tobytes()).hexdigest(),
        "dtype": str(model.dtype),
    }
    return short_hash(canonical_json(about))
