"""The loss of self-distillation: the confidence-aware KL divergence of BitDistiller, which RCP trains with (RCP Eq. 3).

CAKLD = a KL(S || T) + (1 - a) KL(T || S), mean over tokens, with S and T the student's and the teacher's distributions
of the next token and a the teacher's confidence. Distributions are made from hidden states a few tokens at a time, so
that the logits of 128,000 words never exist for more tokens than `_LOGITS_AT_ONCE` says, whatever a batch has.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotquant.tensors.devices import of_device
from rotquant.tensors.onednn import linear

#: Logits of one chunk, in elements; some six tensors of this size exist while it is computed.
_LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}


class Divergence(NamedTuple):
    """CAKLD and its two parts, scalars in nats per token; the loss alone has a gradient.

    reverse_kl: KL(S || T), which seeks the teacher's modes. forward_kl: KL(T || S), which covers them.
    """

    loss: Tensor
    reverse_kl: Tensor
    forward_kl: Tensor


def cakld_reference(student: Tensor, teacher: Tensor, confidence: float) -> Divergence:
    """Equation 3 as it is printed, of whole logits.

    Args:
        student, teacher: logits [..., vocabulary].
        confidence: a.
    """
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    of_student = (log_s.exp() * (log_s - log_t)).sum(-1).mean()
    of_teacher = (log_t.exp() * (log_t - log_s)).sum(-1).mean()
    loss = confidence * of_student + (1 - confidence) * of_teacher
    return Divergence(loss, of_student.detach(), of_teacher.detach())


def cakld(
    student: Tensor,
    student_head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    confidence: float,
    chunk: int | None = None,
    cap: float | None = None,
) -> Divergence:
    """CAKLD of hidden states, a chunk of tokens after the other.

    A chunk's gradient is computed with it, since its logits are there then: so nothing is computed twice, and all that
    waits for the backward pass is as large as the hidden states and the head.

    Args:
        student, teacher: last hidden states [..., hidden], of any floating-point types.
        student_head, teacher_head: weights of the language-model heads [vocabulary, hidden]; each is used in the type
            of its hidden states.
        confidence: a, see `teacher_confidence`.
        chunk: tokens at once; default, by the vocabulary and the device.
        cap: c of c tanh(x / c), by which both models' logits follow from what their heads give; None for none.

    Returns:
        In float32, or float64 where the student's hidden states are.
    """
    chunk = chunk or tokens_at_once(student_head)
    flat = student.flatten(0, -2), teacher.detach().flatten(0, -2)
    return Divergence(*_CAKLD.apply(flat[0], student_head, flat[1], teacher_head.detach(), confidence, chunk, cap))


def tokens_at_once(head: Tensor) -> int:
    """How many tokens' logits over the head's vocabulary stay in bounds on its device."""
    return max(1, logits_at_once(head.device) // len(head))


def logits_at_once(device: torch.device) -> int:
    """How many logits a chunk has at most, as long as it has one token."""
    return of_device(_LOGITS_AT_ONCE, device)


def _logits(hidden: Tensor, head: Tensor, cap: float | None) -> Tensor:
    """float32 (or float64) logits [tokens, vocabulary], capped; the product is of the hidden states' type."""
    logits = linear(hidden, head.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _CAKLD(torch.autograd.Function):
    """Confidence-aware KL divergence with its own gradient. With p and q the student's and the teacher's probabilities
    of a token and d = log p - log q:

    the gradient of KL(S || T) by the student's logits z is p (d - KL(S || T)), that of KL(T || S) is p - q; where z is
    capped at c, what the head gives has (1 - (z / c)^2) times that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        a: float,
        chunk: int,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(student.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=student.device)
        to_hidden = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        to_head = torch.zeros_like(student_head, dtype=wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(student.device.type, enabled=False):
            for rows in _chunks(len(student), chunk):
                hidden = student[rows]
                logits = _logits(hidden, student_head, cap)
                log_p = logits.log_softmax(-1)
                log_q = _logits(teacher[rows], teacher_head, cap).log_softmax(-1).to(wide)
                p, q, d = log_p.exp(), log_q.exp(), log_p.sub_(log_q)
                of_student = (p * d).sum(-1, keepdim=True)
                sums += torch.stack([of_student.sum(), -(q * d).sum()])
                if to_hidden is None and to_head is None:
                    continue
                gradient = d.sub_(of_student).mul_(a).add_(1 - a).mul_(p).sub_(q.mul_(1 - a)).div_(len(student))
                if cap is not None:
                    gradient.mul_(1 - (logits / cap).square())
                gradient = gradient.to(hidden.dtype)
                if to_hidden is not None:
                    to_hidden[rows] = gradient @ student_head.to(hidden.dtype)
                if to_head is not None:
                    to_head += gradient.T @ hidden
        ctx.save_for_backward(to_hidden, None if to_head is None else to_head.to(student_head.dtype))
        of_student, of_teacher = (sums / len(student)).unbind()
        ctx.mark_non_differentiable(of_student, of_teacher)
        return a * of_student + (1 - a) * of_teacher, of_student, of_teacher

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has *gradients
        ctx: Any, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        to_hidden, to_head = (None if part is None else part * gradient.to(part) for part in ctx.saved_tensors)
        return to_hidden, to_head, None, None, None, None, None


@torch.no_grad()
def label_probabilities(
    hidden: Tensor, head: Tensor, ids: Tensor, chunk: int | None = None, cap: float | None = None
) -> Tensor:
    """The probabilities that a model gives to the tokens that follow, [texts, tokens - 1].

    Their mean over all tokens of a training text is the teacher's confidence, the a of Equation 3 (Du et al. 2024,
    Eq. 8: the mean of P_T(y_i | x, y_<i) over the data).

    Args:
        hidden: last hidden states [texts, tokens, hidden]. head: weight [vocabulary, hidden].
        ids: the tokens, int64 [texts, tokens].
        chunk, cap: as for `cakld`.
    """
    states, labels = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    found = [
        _logits(states[rows], head, cap).softmax(-1).gather(1, labels[rows, None])[:, 0]
        for rows in _chunks(len(states), chunk or tokens_at_once(head))
    ]
    return torch.cat(found).unflatten(0, (len(ids), -1))


@torch.no_grad()
def largest_probabilities(hidden: Tensor, head: Tensor, chunk: int | None = None, cap: float | None = None) -> Tensor:
    """The largest probability that a model gives to a next token, after all tokens but the last, [texts, tokens - 1].

    Their mean is the a of Equation 3 in BitDistiller's code (`train.py`, `cakld_steps`), which takes some ten batches.

    Args:
        hidden, head, chunk, cap: as for `label_probabilities`.
    """
    states = hidden[:, :-1].flatten(0, 1)
    found = [
        _logits(states[rows], head, cap).softmax(-1).amax(1)
        for rows in _chunks(len(states), chunk or tokens_at_once(head))
    ]
    return torch.cat(found).unflatten(0, (len(hidden), -1))


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, tokens, size))
