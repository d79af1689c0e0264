"""KL divergence of a network's predictions from the full-precision model's, and how often its first choice differs.

KL(full precision || network) of the next-token distributions, in nats, at every position whose next token a window
predicts: what quantization changed, without the noise of which token the text happens to have next. It has no sign that
luck could turn, as a loss has, and is zero for the full-precision model alone.

The full-precision model's last hidden states are stored, not its logits: of Llama-2-7B on 166 windows of 2048 tokens
2.8 GB in 16 bits, where logits would be 22 GB. Its head makes logits of one window at a time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import task
from rotquant.models.architectures import base_model, lm_head, logit_cap
from rotquant.models.simulation.prefix import prefix_holds
from rotquant.tensors.faster import FasterKernels


@dataclass(frozen=True)
class FloatStates:
    """Last hidden states of the full-precision model, which its head reads.

    windows: token ids that it read, int64 [windows, tokens]. states: [windows, tokens, hidden], both on the host, the
    latter in the model's type; nan at a BOS that it did not read, since its prefix holds one. head: its language-model
    head, where it ran.
    """

    windows: Tensor
    states: Tensor
    head: nn.Module

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.windows.nbytes + self.states.nbytes + sum(tensor.nbytes for tensor in self.head.parameters())

    def of(self, batch: slice) -> "FloatStates":
        """States of some of the windows."""
        return FloatStates(self.windows[batch], self.states[batch], self.head)


@torch.no_grad()
def float_states(model: nn.Module, windows: Tensor, batch_size: int, bos: int | None = None) -> FloatStates:
    """Compute the states by one pass of the full-precision model, in evaluation mode.

    Args:
        windows: token ids, int64 [windows, tokens].
        batch_size: windows in a forward pass.
        bos: the token that a window does not begin with after a prefix that holds it; see `batches_of`.
    """
    device, parts = next(model.parameters()).device, []
    with task("full precision", "window", len(windows)) as under_way, FasterKernels():
        for batch, skipped in batches_of(model, windows, batch_size, bos):
            ids = windows[batch, skipped:].to(device)
            states = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state.cpu()
            parts.append(nn.functional.pad(states, (0, 0, skipped, 0), value=math.nan))
            under_way.advance(len(ids))
    return FloatStates(windows, torch.cat(parts), capped(lm_head(model), logit_cap(model)))


def own_head(model: nn.Module) -> nn.Module:
    """A copy on the host of a model's head, with what caps its logits, which stays as it is when the model changes."""
    copied = {name: one.detach().cpu().clone() for name, one in lm_head(model).named_parameters()}
    return head_of(copied, logit_cap(model))


def head_of(parameters: Mapping[str, Tensor], cap: float | None) -> nn.Module:
    """A head with its cap, where there is one, from `weight` [vocabulary, hidden] and maybe `bias`, which it shares."""
    outputs, inputs = parameters["weight"].shape
    head = nn.Linear(inputs, outputs, "bias" in parameters, device="meta")
    head.load_state_dict(parameters, assign=True)
    return capped(head.requires_grad_(False), cap)


def capped(head: nn.Module, cap: float | None) -> nn.Module:
    """A language-model head whose logits stay below a cap, where there is one."""
    return head if cap is None else nn.Sequential(head, _Cap(cap))


def batches_of(model: nn.Module, windows: Tensor, batch_size: int, bos: int | None) -> Iterator[tuple[slice, int]]:
    """Batches of windows, int64 [windows, tokens], and how many tokens at their head the model does not read: 1 where
    they begin with BOS and its prefix holds one, which is the window's then, else 0."""
    skipped = (windows[:, 0] == (bos if prefix_holds(model, bos) else -1)).int()
    first = 0
    for alike in skipped.unique_consecutive(return_counts=True)[1].tolist():
        for start in range(first, first + alike, batch_size):
            yield slice(start, min(start + batch_size, first + alike)), int(skipped[start])
        first += alike


class _Cap(nn.Module):
    """c tanh(x / c), which keeps logits below c (Gemma 2)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)


def divergence(exact: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """KL(full precision || network) at each position, and whether the likeliest token differs.

    Args:
        exact: logits of the full-precision model, float32 [positions, vocabulary]; overwritten.
        log_probabilities: the network's, float32 [positions, vocabulary].

    Returns:
        KL in nats, float32 [positions], and flips, bool [positions]. KL is inf where the network excludes a token that
        full precision does not, and nan where a logit is.
    """
    flips = exact.argmax(-1) != log_probabilities.argmax(-1)
    log_exact = exact.log_softmax(-1)
    probabilities = torch.exp(log_exact, out=exact)
    terms = log_exact.sub_(log_probabilities).mul_(probabilities)
    return terms.sum(-1), flips
