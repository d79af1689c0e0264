"""SpinQuant's learning of rotations (Liu et al. 2024, Sec. 3.2): Cayley SGD on the loss of the quantized network.

R1, every layer's R2, and the online rotations of its inputs that stand in for R1, minimise the next-token cross entropy
of the network in which activations and KV cache, and if the recipe says so weights, are quantized (Eq. 2). All weights
are frozen; the model is left as it was. What the quantized network is stands in `quantized_network`, how a rotation
moves in `rotquant.tensors.stiefel`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.progress import silenced
from rotquant.methods.spinquant import SpinQuant
from rotquant.methods.spinquant.memory import plan_memory
from rotquant.methods.spinquant.quantized_network import LearningNetwork, RoundingErrors, quantized_network
from rotquant.models.architectures import Architecture, architecture_of, base_model, capped, embedding, lm_head
from rotquant.models.fitting import check_transforms
from rotquant.models.integrity import weights_digest
from rotquant.models.limits import ModelLimits
from rotquant.models.memory import keep
from rotquant.models.placement import placed
from rotquant.models.rotation.matrices import LearnedRotations, Rotations, initial_rotations
from rotquant.models.simulation.runtime import RuntimeQuantization, check_quantization
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.onednn import OneDNNLinear
from rotquant.tensors.stiefel import CayleySGD, orthonormality_error
from rotquant.training.loop import GradientStep, shuffled_batches, train
from rotquant.training.state import Checkpoint, Record

#: What float networks gave to their heads, by what decides it: all bit widths of a model and seed share it.
_FLOAT_STATES: dict[tuple[str, bytes], Tensor] = {}
#: Bytes that are kept of it, and tokens of a text of which it is: for models of real size it costs little.
_FLOAT_BYTES, _FLOAT_TOKENS = 2**28, 2**11


def learn_rotations(
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    samples: Tensor,
    *,
    device: torch.device | str | None = None,
    checkpoint: Path | None = None,
    progress: bool = True,
    batch_size: int | None = None,
    memory: int | None = None,
    snr_every: int = 10,
    checkpoint_every: int = 10,
    callback: Callable[[Record], None] | None = None,
) -> LearnedRotations:
    """Learn the rotations of a recipe.

    Args:
        model: a causal language model of a supported family in its original basis; unchanged afterwards.
        recipe: its `methods.spinquant` says how; see `quantized_network` for what counts of it.
        seed: of the rotations to start from, and of the order of the samples.
        samples: token ids, int64 [samples, tokens], of the recipe's `methods.spinquant.text`.
        device: where to work, see `placed`; None where the model lies, which may be several devices.
        checkpoint: file that keeps the state every `checkpoint_every` steps, and from which an interrupted learning
            continues with the same result. The caller deletes it.
        progress: say how far it is (`rotquant.foundation.progress`).
        batch_size: sequences that pass the network at once; gradients are accumulated over a step's batch. Default:
            as many as keep the logits in bounds, and on a GPU as fit (`memory.plan_memory`).
        memory: bytes of a GPU that may be used; default, those that are free. Layers beyond it stay on the host.
        snr_every: steps between measurements of the end-to-end signal-to-noise ratio, 10 log10(sum s^2 / sum n^2) over
            tokens and vocabulary, s the logits of the float network and n what quantization adds to them. The first
            and the last step are always measured.
        callback: called with every new record, after the checkpoint is written.

    Raises:
        RecipeError: the recipe does not fit; before anything is computed.
        ResultError: the checkpoint belongs to another learning or is damaged.
        RotquantError: the loss is not finite.
    """
    settings = SpinQuant.of(recipe)
    architecture = architecture_of(model)
    check_transforms(architecture, recipe.transforms)
    shapes = tensor_shapes(architecture, recipe.transforms)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_quantization(architecture, RuntimeQuantization(tensors=empty, **recipe.runtime))
    ModelLimits.of(model.config).check(samples, "samples that rotations are learned on")
    place = embedding(model).weight.device if device is None else torch.device(device)
    matrices = max(1, len(shapes) * architecture.num_layers)
    plan = plan_memory(model, settings, samples.shape[1], place, memory, matrices)
    lying = nullcontext(False) if device is None else placed(model, place, plan.working, memory)
    with lying as from_host, silenced(not progress):
        rotations = _initial(model, architecture, recipe, seed)
        # The schedule gives the rate itself, as a multiple of one.
        optimizer = CayleySGD(rotations.values(), 1.0, settings.momentum)
        schedule = LambdaLR(optimizer, partial(learning_rate, settings=settings))
        batch_size = min(settings.batch_size, batch_size or plan.at_once)
        again = from_host or plan.recomputes
        # Of many tokens, or of layers that would have to come, a digest of all weights costs more than it saves.
        few = samples.shape[1] * batch_size <= _FLOAT_TOKENS and not from_host
        about = _about_float(model, recipe) if few else ""
        with quantized_network(model, recipe, Rotations.of_tensors(rotations, exact=False), again) as network:
            batches = shuffled_batches(len(samples), settings.batch_size, settings.steps, seed)
            loss = _Loss(model, network, settings, len(batches[0]), about)
            gradient = GradientStep(
                lambda step: samples[batches[step]].split(batch_size), loss, [optimizer], [schedule]
            )
            history = train(
                partial(_step, loss, gradient, rotations.values(), snr_every),
                settings.steps,
                "learning rotations",
                parts={**rotations, "optimizer": optimizer, "schedule": schedule},
                checkpoint=checkpoint
                and Checkpoint(checkpoint, _identity(model, recipe, seed, samples), checkpoint_every),
                on_step=callback,
                not_finite="the loss of the quantized network is {loss} at step {step} of {description}.",
            )
    return LearnedRotations.of_float32(rotations, history)


def _initial(model: nn.Module, architecture: Architecture, recipe: Recipe, seed: int) -> dict[str, nn.Parameter]:
    """R1 and each layer's matrices as drawn, in float32 (float64 for a float64 model) next to the embedding."""
    weight = embedding(model).weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    drawn = initial_rotations(architecture, cast(RotationScheme, recipe.rotation), seed).tensors()
    return {
        name: nn.Parameter(tensor.to(weight.device, dtype, copy=True).contiguous()) for name, tensor in drawn.items()
    }


@dataclass
class _Loss:
    """The mean loss of a step's sequences, part by part.

    sequences: in a step. about: identifies the float network; empty where its states are not kept.
    measuring: whether what quantization adds to the float network's logits is kept in `errors`.
    """

    model: nn.Module
    network: LearningNetwork
    settings: SpinQuant
    sequences: int
    about: str
    measuring: bool = False
    errors: RoundingErrors = field(default_factory=RoundingErrors)

    def __call__(self, ids: Tensor) -> Tensor:
        """The share of token ids [batch, tokens], anywhere, in the loss."""
        ids = ids.to(embedding(self.model).weight.device)
        soft = self.settings.targets == "predictions"
        with OneDNNLinear():
            exact = self._float_logits(ids) if soft or self.measuring else None
            logits = self.model(input_ids=ids, use_cache=False).logits
        targets = ids[:, 1:].to(logits.device)
        if exact is not None and self.measuring:
            self.errors.add("logits", exact, logits.detach() - exact)
        if exact is not None and soft:
            targets = exact[:, :-1].float().softmax(dim=-1)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(0, 1), reduction="sum")
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


def _step(loss: _Loss, gradient: GradientStep, rotations: Iterable[Tensor], snr_every: int, step: int) -> Record:
    """Do one step of Cayley SGD and return its record."""
    loss.measuring = step % snr_every == 0 or step + 1 == loss.settings.steps
    loss.errors.reset()
    loss.network.errors.reset()
    values = gradient(step)
    sites = loss.network.errors.snr()
    record = {
        **values,
        "learning_rate": learning_rate(step, loss.settings),
        "orthonormality": torch.stack([orthonormality_error(rotation.detach()) for rotation in rotations]).max().item(),
        "activation_snr": sum(sites.values()) / len(sites) if sites else None,
        "site_snr": sites,
    }
    return record | ({"end_to_end_snr": loss.errors.snr()["logits"]} if loss.measuring else {})


def learning_rate(step: int, settings: SpinQuant) -> float:
    """The rate of a step, counted from zero: from the first one's to zero after the last."""
    done = step / settings.steps
    share = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share


def _about_float(model: nn.Module, recipe: Recipe) -> str:
    """Identifies the float network that `quantized_network` lets run: the model, and how its norms are computed."""
    scheme = cast(RotationScheme, recipe.rotation)
    return str((weights_digest(model), recipe.fuses_norms, scheme.center_embeddings, SpinQuant.of(recipe).network))


def _identity(model: nn.Module, recipe: Recipe, seed: int, samples: Tensor) -> str:
    """A digest of what decides the result, the model's weights excepted."""
    about = {
        "recipe": recipe.learned(),
        "seed": seed,
        "samples": hashlib.sha256(samples.cpu().numpy().tobytes()).hexdigest(),
        "dtype": str(model.dtype),
    }
    return short_hash(canonical_json(about))
