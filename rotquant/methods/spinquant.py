"""SpinQuant's learning of rotations (Liu et al. 2024, Sec. 3.2): Cayley SGD on the loss of the quantized network.

R1 and every layer's R2 minimise the next-token cross entropy of the network in which activations and KV cache, and if
the recipe says so weights, are quantized (Eq. 2). All weights are frozen; the model is left as it was. What the
quantized network is stands in `spinquant_network`, how a rotation moves in `rotquant.tensors.stiefel`.
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.foundation.errors import RecipeError, ResultError, RotquantError
from rotquant.foundation.files import atomic_path, canonical_json, short_hash
from rotquant.foundation.progress import silenced, task
from rotquant.methods.spinquant_network import LearningNetwork, quantized_network, running
from rotquant.models.architectures import Architecture, architecture_of, embedding
from rotquant.models.batches import shuffled_batches
from rotquant.models.integrity import check_finite
from rotquant.models.limits import Limits
from rotquant.models.placement import placed
from rotquant.models.rotation.fusing import check_rotation
from rotquant.models.rotation.matrices import Rotations, initial_rotations
from rotquant.models.simulation.wrapping import check_wrapping
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationLearning
from rotquant.tensors.distortion import decibel, square_sum
from rotquant.tensors.onednn import OneDNNLinear
from rotquant.tensors.stiefel import CayleySGD, newton_schulz, orthonormality_error

#: Logits held at once, in elements; training holds about three float32 tensors of this size.
_LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**30}
#: Bytes of activations that may be kept for the backward pass; beyond it layers are computed again.
_KEPT_BYTES = {"cpu": 2**31, "cuda": 2**34}

Record = dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """What learning found.

    rotations: orthogonal to float64's precision.
    history: one record per step: `step`, `loss` (nats per token) and `learning_rate` of the step, `orthonormality`
        max |R^T R - I| over all rotations after it; of the batch before it `site_snr` in dB by place
        ("3.attention_input", "3.keys"), their mean `activation_snr`, and every some steps `end_to_end_snr`.
    """

    rotations: Rotations
    history: list[Record]


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
    snr_every: int = 10,
    checkpoint_every: int = 10,
    callback: Callable[[Record], None] | None = None,
) -> Learned:
    """Learn the rotations of a recipe.

    Args:
        model: a causal language model of a supported family in its original basis; unchanged afterwards.
        recipe: its `rotation.learning` says how; see `quantized_network` for what counts of it.
        seed: of the rotations to start from, and of the order of the samples.
        samples: token ids, int64 [samples, tokens], of the recipe's `rotation.learning.text`.
        device: where to work, see `placed`; None where the model lies, which may be several devices.
        checkpoint: file that keeps the state every `checkpoint_every` steps, and from which an interrupted learning
            continues with the same result. The caller deletes it.
        progress: say how far it is (`rotquant.foundation.progress`).
        batch_size: sequences that pass the network at once; gradients are accumulated over a step's batch. Default:
            as many as keep the logits in bounds.
        snr_every: steps between measurements of the end-to-end signal-to-noise ratio, 10 log10(sum s^2 / sum n^2) over
            tokens and vocabulary, s the logits of the float network and n what quantization adds to them. The first
            and the last step are always measured.
        callback: called with every new record, after the checkpoint is written.

    Raises:
        RecipeError: the recipe does not fit; before anything is computed.
        ResultError: the checkpoint belongs to another learning or is damaged.
        RotquantError: the loss is not finite.
    """
    if recipe.learning is None:
        raise RecipeError("the recipe learns no rotations: set rotation.learning.")
    architecture = architecture_of(model)
    check_rotation(architecture, recipe.rotation)
    check_wrapping(architecture, running(recipe))
    Limits.of(model.config).check(samples, "samples that rotations are learned on")
    with nullcontext() if device is None else placed(model, device), silenced(not progress):
        state = _State.start(model, architecture, recipe, seed)
        identity = _identity(model, recipe, seed, samples)
        if checkpoint is not None:
            state.load(checkpoint, identity)
        settings = recipe.learning
        batch_size = min(settings.batch_size, batch_size or _sequences_at_once(model, samples.shape[1]))
        batches = shuffled_batches(len(samples), settings.batch_size, settings.steps, seed)
        checkpointing = _kept_bytes(model, batch_size * samples.shape[1]) > _of_device(_KEPT_BYTES, model)
        with (
            quantized_network(model, recipe, state.residual, state.values, checkpointing) as network,
            task("learning rotations", "step", settings.steps, state.step) as under_way,
        ):
            for step, batch in enumerate(batches):
                if step < state.step:
                    continue
                measured = step % snr_every == 0 or step + 1 == settings.steps
                record = _step(model, network, state, settings, samples[batch].split(batch_size), measured)
                under_way.advance(note=f"loss {record['loss']:.3f}")
                if checkpoint is not None and (state.step % checkpoint_every == 0 or state.step == settings.steps):
                    state.save(checkpoint, identity)
                if callback is not None:
                    callback(record)
    return Learned(state.rotations(), state.history)


@dataclass
class _State:
    """What changes while learning: rotations, momentum and history."""

    parameters: dict[str, nn.Parameter]
    optimizer: CayleySGD
    history: list[Record] = field(default_factory=list)

    @classmethod
    def start(cls, model: nn.Module, architecture: Architecture, recipe: Recipe, seed: int) -> "_State":
        """Rotations as drawn, in float32 (float64 for a float64 model) beside the embedding."""
        weight = embedding(model).weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        drawn = initial_rotations(architecture, recipe.rotation, seed)
        parameters = {
            name: nn.Parameter(tensor.to(weight.device, dtype, copy=True).contiguous())
            for name, tensor in drawn.tensors().items()
        }
        learning = recipe.learning
        return cls(parameters, CayleySGD(parameters.values(), learning.learning_rate, learning.momentum))

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return len(self.history)

    @property
    def residual(self) -> nn.Parameter | None:
        """R1 [hidden, hidden]."""
        return self.parameters.get("residual")

    @property
    def values(self) -> list[nn.Parameter] | None:
        """R2 of each layer [head_dim, head_dim]."""
        return [parameter for name, parameter in self.parameters.items() if name != "residual"] or None

    def rotations(self) -> Rotations:
        """The rotations on the host, brought from float32's to float64's distance from the manifold."""
        exact = {name: parameter.detach().cpu().double() for name, parameter in self.parameters.items()}
        return Rotations.of_tensors({name: newton_schulz(newton_schulz(matrix)) for name, matrix in exact.items()})

    def save(self, path: Path, identity: str) -> None:
        """Write everything that a continued learning needs, atomically."""
        tensors = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            if "momentum" in self.optimizer.state[parameter]:
                tensors[f"momentum.{name}"] = self.optimizer.state[parameter]["momentum"].cpu()
        metadata = {"identity": identity, "history": json.dumps(self.history)}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    def load(self, path: Path, identity: str) -> None:
        """Continue from a file that `save` wrote, if there is one."""
        if not path.is_file():
            return
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise ResultError(f"checkpoint {path} is damaged ({error}); delete it to learn from the start.") from None
        if metadata["identity"] != identity:
            raise ResultError(f"checkpoint {path} belongs to another learning; delete it to learn from the start.")
        check_finite(path, tensors.items())
        self.history = json.loads(metadata["history"])
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])
            self.optimizer.state[parameter]["step"] = self.step
            if f"momentum.{name}" in tensors:
                # A copy: the file's map need not be aligned, and products of unaligned matrices may round differently.
                momentum = tensors[f"momentum.{name}"].to(parameter.device, copy=True)
                self.optimizer.state[parameter]["momentum"] = momentum


def _step(
    model: nn.Module,
    network: LearningNetwork,
    state: _State,
    settings: RotationLearning,
    batches: tuple[Tensor, ...],
    measure: bool,
) -> Record:
    """One step of Cayley SGD on the mean loss of some batches [sequences, tokens]; its record."""
    rate = learning_rate(settings, state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    network.errors.reset()
    state.optimizer.zero_grad()
    sequences = sum(map(len, batches))
    home = embedding(model).weight.device
    parts = [_accumulate(model, network, batch.to(home), sequences, settings, measure) for batch in batches]
    loss, signal, noise = map(sum, zip(*parts, strict=True))
    if not math.isfinite(loss):
        raise RotquantError(f"the loss of the quantized network is {loss} at step {state.step} of learning rotations.")
    state.optimizer.step()
    sites = network.errors.snr()
    orthonormality = torch.stack([orthonormality_error(parameter.detach()) for parameter in state.parameters.values()])
    record = {
        "step": state.step,
        "loss": loss,
        "learning_rate": rate,
        "orthonormality": orthonormality.max().item(),
        "activation_snr": sum(sites.values()) / len(sites) if sites else None,
        "site_snr": sites,
    }
    if measure:
        record["end_to_end_snr"] = decibel(signal, noise)
    state.history.append(record)
    return record


def _accumulate(
    model: nn.Module, network: LearningNetwork, ids: Tensor, sequences: int, settings: RotationLearning, measure: bool
) -> tuple[float, Tensor | float, Tensor | float]:
    """Add the gradient of a step's mean loss that comes from token ids [batch, tokens], part of its `sequences`.

    Returns:
        Their share of the loss, and where measured the sums of squares over their float logits and over what
        quantization adds to these.
    """
    signal = noise = 0.0
    with torch.enable_grad(), OneDNNLinear():
        if measure or settings.targets == "predictions":
            network.quantizing = False
            with torch.no_grad():
                exact = model(input_ids=ids, use_cache=False).logits
            network.quantizing = True
        logits = model(input_ids=ids, use_cache=False).logits
        if measure:
            signal, noise = square_sum(exact), square_sum(logits.detach() - exact)
        targets = ids[:, 1:].to(logits.device)
        if settings.targets == "predictions":
            targets = exact[:, :-1].float().softmax(dim=-1)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(0, 1), reduction="sum")
        loss = loss / (sequences * (ids.shape[1] - 1))
        loss.backward()
    return loss.item(), signal, noise


def learning_rate(settings: RotationLearning, step: int) -> float:
    """The rate of a step, counted from zero: from the first one's to zero after the last."""
    done = step / settings.steps
    share = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share


def _identity(model: nn.Module, recipe: Recipe, seed: int, samples: Tensor) -> str:
    """A digest of what decides the result, the model's weights excepted."""
    about = {
        "recipe": recipe.learned(),
        "seed": seed,
        "samples": hashlib.sha256(samples.cpu().numpy().tobytes()).hexdigest(),
        "dtype": str(model.dtype),
    }
    return short_hash(canonical_json(about))


def _sequences_at_once(model: nn.Module, tokens: int) -> int:
    return max(1, _of_device(_LOGITS_AT_ONCE, model) // (tokens * model.config.vocab_size))


def _kept_bytes(model: nn.Module, tokens: int) -> int:
    """Roughly what a forward pass keeps for the backward pass, in bytes, without computing layers again.

    Counted in tensors of the widths of the residual stream, of the heads and of the MLP, for each layer.
    """
    shape = architecture_of(model)
    width = 12 * shape.hidden_size + 12 * shape.num_heads * shape.head_dim + 8 * shape.intermediate_size
    return tokens * width * shape.num_layers * embedding(model).weight.element_size()


def _of_device(values: dict[str, int], model: nn.Module) -> int:
    """The entry for the kind of device that a model lies on; any accelerator counts as cuda."""
    return values["cpu" if embedding(model).weight.device.type == "cpu" else "cuda"]
