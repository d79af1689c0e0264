"""The way in which a self-distillation runs on a device, which `qat.estimate` chooses when a training begins.

`estimate` asks the GPU how much memory it has. A plan's GPU need not be here, so the choice is made again with a given
size; the ways, their order and every formula are those of `qat.estimate`.
"""

from dataclasses import dataclass
from math import inf

import torch

from rotquant.costs.work import Work
from rotquant.models.placement import USABLE
from rotquant.qat.estimate import _LEARNED, _LIBRARIES, _MOMENTS, Memory, _parameters, _ways
from rotquant.qat.method import SelfDistillation
from rotquant.tensors.devices import torch_dtype


@dataclass(frozen=True)
class TrainingWay:
    """What a training holds in one process, in bytes unless stated otherwise.

    sequences: that pass the model together. offloaded: whether moments and the teacher's layers lie on the host.
    networks: student, gradients, moments and teacher on the device. quantizers: their parameters, likewise.
    activations: with the loss. libraries: what libraries and a context take.
    moments, best: of AdamW, and the step's best parameters so far, on the host.
    """

    sequences: int
    offloaded: bool
    networks: int
    quantizers: int
    activations: int
    libraries: int
    moments: int
    best: int

    @property
    def needed(self) -> int:
        """Bytes of the device."""
        return self.networks + self.quantizers + self.activations + self.libraries

    def __str__(self) -> str:
        together = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return f"{together} at once{', moments and teacher on the host' if self.offloaded else ''}"


def training_way(work: Work, method: SelfDistillation) -> TrainingWay:
    """The first way that fits the work's device, else the last; on a CPU, where memory is not asked for, as set."""
    device = torch.device(work.device)
    numbers = _parameters(work.shapes.model)
    ways = [_way(work, method, numbers, *way) for way in _ways(None, method.batch_size, 1, device)]
    room = USABLE * work.memory if device.type == "cuda" else inf
    return next((way for way in ways if way.needed <= room), ways[-1])


def _way(
    work: Work, method: SelfDistillation, numbers: tuple[int, int, int], offloaded: bool, at_once: int | None
) -> TrainingWay:
    sequences = at_once or method.batch_size
    tokens = sequences * method.text.sequence_length
    memory = Memory(work.shapes.model, torch.device(work.device), torch_dtype(work.dtype), 1, tokens, offloaded)
    layers, rest, widest = numbers
    rest += work.parameters - work.shapes.parameters  # a training begins with embedding and head apart
    size = work.recipe.rounded.scheme.group_size or work.shapes.architecture.hidden_size
    learned = _LEARNED * (layers // size) if "quantizer_lr" in type(method).model_fields else 0
    trained = layers + learned + rest
    networks = memory.parameters(layers, rest, widest)
    return TrainingWay(
        sequences=sequences,
        offloaded=offloaded,
        networks=networks,
        quantizers=memory.parameters(layers + learned, rest, widest) - networks,
        activations=memory.activations(widest) - _LIBRARIES,
        libraries=_LIBRARIES,
        moments=_MOMENTS * trained if offloaded else 0,
        best=4 * trained if method.validated else 0,
    )
