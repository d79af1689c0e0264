"""Perplexity by the papers' protocol (QuaRot, SpinQuant, PrefixQuant: GPTQ's evaluation of WikiText-2).

The whole text is tokenized once with a single leading BOS, where the tokenizer has one, and cut into non-overlapping
windows, the tail is dropped, and exp of the mean negative log-likelihood over each window's predicted tokens is
reported. lm-eval's `wikitext` task is another metric (word perplexity with BOS per document) and is never mixed with
this one. Where the model's prefix holds BOS, that is the BOS of the text or window, which gets no other.

Where the full-precision model's last states are given, the same pass yields each window's KL divergence from it
(`metrics.divergence`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.progress import task
from rotquant.metrics.divergence import FloatStates, batches_of, divergence
from rotquant.models.architectures import base_model, capped, config_of, lm_head
from rotquant.models.limits import metric_windows
from rotquant.models.simulation.prefix import BOS_OF_PREFIX, prefix_holds
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.faster import FasterKernels
from rotquant.text import NO_BOS, Tokens

#: Upper bound on the logits of all windows that a CPU reads at once, in elements: its caches hold their states then.
_LOGITS_ON_A_CPU = 2**22


@dataclass(frozen=True)
class PerplexityResult:
    """perplexity = exp(nll); nll in nats per predicted token; `standard_error` of nll over windows (nan for one).

    by_window: each window's nll, whose mean is nll: windows have equally many tokens.
    note: what a reader of the number should know, as that the tokenizer has no BOS to put where the metric asks for
        one.
    kl: each window's mean KL divergence from the full-precision model, nats; flips: each window's share of positions
    at which the likeliest next token is another one. Both are empty where that model was not asked.
    """

    perplexity: float
    nll: float
    standard_error: float
    tokens: int
    windows: int
    note: str = ""
    by_window: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    flips: tuple[float, ...] = ()

    def __str__(self) -> str:
        """The perplexity as a sentence's beginning; one that is not finite is reported as such."""
        if math.isfinite(self.perplexity):
            return f"perplexity {self.perplexity:.4f}"
        return f"perplexity not finite ({self.perplexity}: the network's outputs overflow or are no numbers)"

    def as_metrics(self) -> dict[str, float]:
        """Flat numbers for a run file; flips in percent."""
        found = {
            "perplexity": self.perplexity,
            "nll": self.nll,
            "nll_standard_error": self.standard_error,
            "tokens": self.tokens,
            "windows": self.windows,
        }
        if self.kl:
            found |= {"kl": fmean(self.kl), "kl_median": float(np.median(self.kl)), "flips": 100 * fmean(self.flips)}
        return found


def standard_error(values: Tensor) -> float:
    """Standard error of the mean of independent values [n]; nan for one."""
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean of independent values and its standard error; nan for one value."""
    return fmean(values), standard_error(torch.tensor(values, dtype=torch.float64))


def paired_ratio(result: PerplexityResult, base: PerplexityResult) -> tuple[float, float]:
    """One perplexity over another's, and its standard error from the differences of the same windows' losses."""
    ratio = result.perplexity / base.perplexity
    _, error = mean_with_error([a - b for a, b in zip(result.by_window, base.by_window, strict=True)])
    return ratio, ratio * error


@torch.no_grad()
def window_scores(model: nn.Module, windows: Tensor, exact: FloatStates | None = None, skipped: int = 0) -> Tensor:
    """Scores of a network on each window's tokens after its first, means over them.

    Args:
        model: causal language model, whose head makes logits of one window at a time.
        windows: token ids, int64 [batch, tokens].
        exact: the full-precision model's last states of these windows.
        skipped: how many tokens at their head the network does not read, so that it predicts one less.

    Returns:
        float64 [batch, 3]: negative log-likelihood and KL divergence, nats, and share of flips. The last two are zero
        without `exact`; flips are nan where KL is not finite.
    """
    scores = windows.new_zeros(len(windows), 3, dtype=torch.float64)
    with FasterKernels():
        states = base_model(model)(input_ids=windows[:, skipped:], use_cache=False).last_hidden_state
        for place, (row, target) in enumerate(zip(states, windows, strict=True)):
            found = capped(model, lm_head(model)(row[:-1])).float().log_softmax(-1)
            scores[place, 0] = -found.gather(1, target[skipped + 1 :, None]).double().mean()
            if exact is not None:
                known = exact.states[place, skipped:-1].to(row.device)
                unread = int(not skipped and bool(known[0].isnan().any()))
                kl, flips = divergence(exact.head(known[unread:]).float(), found[unread:])
                scores[place, 1] = kl.double().mean()
                scores[place, 2] = flips.double().mean() + 0 * scores[place, 1]
    return scores


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tokens,
    metric: Perplexity,
    *,
    batch_size: int = 8,
    description: str = "perplexity",
    exact: FloatStates | None = None,
) -> PerplexityResult:
    """Perplexity of `model` on one tokenized text.

    Args:
        tokens: the whole text that the metric names (`rotquant.text.tokenize`).
        metric: how it is cut into windows.
        batch_size: windows per forward pass; on a CPU fewer, so that what a layer reads stays in its caches.
        exact: the full-precision model's last states of the windows that the metric asks for.

    Returns:
        Its perplexity is inf or nan where the network's outputs are: a result, not an error.

    Raises:
        CorpusError: the text is shorter than one window, or the tokenizer has no BOS for each.
        RecipeError: windows are longer than the model's context.
        CheckpointError: a token lies beyond the model's vocabulary, or `exact` is of other windows.
    """
    windows = metric_windows(model, tokens, metric)
    if exact is not None and not torch.equal(exact.windows, windows):
        raise CheckpointError("the full-precision model read other tokens: the tokenizers of the two models differ.")
    device = next(model.parameters()).device
    if device.type == "cpu":
        vocabulary: int = config_of(model).vocab_size
        batch_size = max(1, min(batch_size, _LOGITS_ON_A_CPU // (metric.sequence_length * vocabulary)))
    was_training = model.training
    model.eval()
    parts, unread = [], 0
    with task(description, "window", len(windows)) as under_way:
        for batch, skipped in batches_of(model, windows, batch_size, tokens.bos):
            known = exact and exact.of(batch)
            parts.append(window_scores(model, windows[batch].to(device), known, skipped).cpu())
            unread += skipped * len(parts[-1])
            under_way.advance(len(parts[-1]))
    model.train(was_training)
    losses, kl, flips = torch.cat(parts).T
    nll = losses.mean().item()
    error = standard_error(losses)
    value = math.exp(nll) if nll < 700 else math.inf if nll == nll else math.nan
    predicted = losses.numel() * (metric.sequence_length - 1) - unread
    note = ""
    if metric.bos != "none":
        note = NO_BOS if tokens.bos is None else BOS_OF_PREFIX if prefix_holds(model, tokens.bos) else ""
    by_window = [tuple(column.tolist()) for column in (losses, kl, flips)[: 1 if exact is None else 3]]
    return PerplexityResult(value, nll, error, predicted, len(losses), note, *by_window)
