"""Memory that learning rotations through the network takes on a GPU: sequences that pass it together, and layers that
recompute.

All weights are frozen, so there is no gradient of one. The budget of Llama-3-8B's shape, bfloat16, texts of 2048
tokens, in GiB:

    weights                                            15.0, of them decoder layers 13.0
    R1, its gradient, Cayley SGD's matrices, libraries  1.5
    for each sequence that passes at once:              5.2 (6.6 with the float network's predictions as targets)
        logits, 128,256 of a token, 16 (22) bytes       3.9 (5.4)
        the input of every layer                        0.5
        what one layer keeps while it is differentiated 0.8

So one sequence at a time takes 21.7, which is within 24 GB (22.4 GiB) but for the share that allocators lose: layers
that do not fit stay on the host (`models.placement`), and in the extreme case the rest takes 2.0 + 1.2 + 1.5 + 5.2 =
9.9. Planned for 24 GB on an H200, that shape took 17.1 allocated and 20.7 reserved, and 1.7 times as long a step as
without a limit (29.1 allocated). A GPU of 80 GB holds the four sequences that its bound of logits allows. How a batch
is split moves the last bit of its gradient alone, and where memory suffices it is split as on any GPU.
"""

from dataclasses import dataclass

import torch
from torch import nn

from rotquant.models.architectures import config_of, embedding
from rotquant.models.memory import KEPT_BYTES, LIBRARIES, LOGITS_AT_ONCE, USABLE, kept_bytes, size_in_bytes
from rotquant.models.placement import bytes_without_layers
from rotquant.tensors.devices import of_device
from rotquant.tensors.stiefel import learning_bytes


@dataclass(frozen=True)
class LearningMemory:
    """How a learning uses memory.

    at_once: sequences that pass the network together. working: bytes of a GPU that this takes, weights aside.
    recomputes: whether layers are computed again in the backward pass.
    """

    at_once: int
    working: int
    recomputes: bool


def plan_memory(
    model: nn.Module,
    batch_size: int,
    teacher: bool,
    tokens: int,
    device: torch.device,
    memory: int | None = None,
    rotations: int = 1,
    constants: bool = False,
) -> LearningMemory:
    """Plan a learning on texts of so many tokens.

    Args:
        batch_size: sequences of a step. teacher: whether the loss reads the float network's predictions.
        device: where the network will run.
        memory: bytes of a GPU that may be used; default, all.
        rotations: how many of the size of R1 are learned: one, or two of each layer in its place.
        constants: as `kept_width` takes it.
    """
    at_once = max(1, of_device(LOGITS_AT_ONCE, device) // (tokens * config_of(model).vocab_size))
    at_once, kept = min(batch_size, at_once), of_device(KEPT_BYTES, device)
    if memory is None and device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]  # all: what is free now would split batches in another way
    if memory is None:
        return LearningMemory(at_once, 0, kept_bytes(model, at_once * tokens, constants) > kept)
    usable, sequence = int(USABLE * memory), sequence_bytes(model, teacher, tokens)
    fixed = LIBRARIES + learning_bytes(config_of(model).hidden_size, rotations)
    spare = usable - size_in_bytes(model) - fixed
    if spare < sequence:  # half of what is left by layers on the host is for activations, so that they come less often
        spare = (usable - bytes_without_layers(model) - fixed) // 2
    at_once = min(at_once, max(1, spare // sequence))
    recomputes = kept_bytes(model, at_once * tokens, constants) > min(kept, memory // 2)
    return LearningMemory(at_once, fixed + at_once * sequence, recomputes)


def sequence_bytes(model: nn.Module, teacher: bool, tokens: int) -> int:
    """Bytes that a text of so many tokens takes while it passes a network whose layers are computed again."""
    config, size = config_of(model), embedding(model).weight.element_size()
    layers = config.num_hidden_layers
    # float32: log-probabilities and two gradients of them, and soft targets; logits, their gradient, the float ones
    logits = 12 + 2 * size + (4 + size if teacher else 0)
    every = config.vocab_size * logits + layers * config.hidden_size * size
    return tokens * every + kept_bytes(model, tokens) // layers
