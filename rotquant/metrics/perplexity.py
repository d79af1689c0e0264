"""Perplexity by the papers' protocol (QuaRot, SpinQuant, PrefixQuant: GPTQ's evaluation of WikiText-2).

The whole text is tokenized once with a single leading BOS, where the tokenizer has one, and cut into non-overlapping
windows, the tail is dropped, and exp of the mean negative log-likelihood over each window's predicted tokens is
reported. lm-eval's `wikitext` task is another metric (word perplexity with BOS per document) and is never mixed with
this one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.foundation.progress import task
from rotquant.models.architectures import config_of
from rotquant.models.limits import metric_windows
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import of_device
from rotquant.tensors.onednn import OneDNNLinear
from rotquant.text import NO_BOS, Tokens

#: Upper bound on the logits held at once, in elements. 2^26 float32 values are 256 MiB; 2^22, 16 MiB, stay in a CPU's
#: cache and in memory that the allocator keeps (from 32 MiB on it maps fresh pages for every tensor).
_LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class PerplexityResult:
    """perplexity = exp(nll); nll in nats per predicted token; `standard_error` of nll over windows (nan for one).

    by_window: each window's nll, whose mean is nll: windows have equally many tokens.
    note: what a reader of the number should know: that the tokenizer has no BOS to put where the metric asks for one.
    """

    perplexity: float
    nll: float
    standard_error: float
    tokens: int
    windows: int
    note: str = ""
    by_window: tuple[float, ...] = ()

    def __str__(self) -> str:
        """The perplexity as a sentence's beginning; one that is not finite is said to be no number."""
        if math.isfinite(self.perplexity):
            return f"perplexity {self.perplexity:.4f}"
        return f"perplexity not finite ({self.perplexity}: the network's outputs overflow or are no numbers)"

    def as_metrics(self) -> dict[str, float]:
        """Flat numbers for a run file."""
        return {
            "perplexity": self.perplexity,
            "nll": self.nll,
            "nll_standard_error": self.standard_error,
            "tokens": self.tokens,
            "windows": self.windows,
        }


def standard_error(values: Tensor) -> float:
    """Of the mean of independent values [n]; nan for one."""
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


@torch.no_grad()
def window_nll(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood of each window's tokens after its first.

    Args:
        model: causal language model whose forward returns `.logits` [batch, tokens, vocabulary].
        windows: token ids, int64 [batch, tokens].

    Returns:
        float64 [batch], nats per predicted token.
    """
    with OneDNNLinear():
        logits = model(input_ids=windows, use_cache=False).logits
    losses = []
    for row, target in zip(logits, windows, strict=True):  # row by row bounds the float32 copy of the logits
        losses.append(cross_entropy(row[:-1].float(), target[1:], reduction="none").double().mean())
    return torch.stack(losses)


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tokens,
    metric: Perplexity,
    *,
    batch_size: int = 8,
    description: str = "perplexity",
) -> PerplexityResult:
    """Perplexity of `model` on one tokenized text.

    Args:
        tokens: the whole text that the metric names (`rotquant.text.tokenize`).
        metric: how it is cut into windows.
        batch_size: windows per forward pass; lowered so that the logits stay within 16 MiB on a CPU, 256 MiB elsewhere.

    Returns:
        Its perplexity is inf or nan where the network's outputs are: a result, not an error.

    Raises:
        CorpusError: the text is shorter than one window, or the tokenizer has no BOS for each.
        RecipeError: windows are longer than the model's context.
        CheckpointError: a token lies beyond the model's vocabulary.
    """
    windows = metric_windows(model, tokens, metric)
    vocabulary: int = config_of(model).vocab_size
    device = next(model.parameters()).device
    limit = of_device(_LOGITS_AT_ONCE, device)
    batch_size = max(1, min(batch_size, limit // (metric.sequence_length * vocabulary)))
    was_training = model.training
    model.eval()
    parts = []
    with task(description, "window", len(windows)) as under_way:
        for batch in windows.split(batch_size):
            parts.append(window_nll(model, batch.to(device)).cpu())
            under_way.advance(len(batch))
    model.train(was_training)
    losses = torch.cat(parts)
    nll = losses.mean().item()
    error = standard_error(losses)
    value = math.exp(nll) if nll < 700 else math.inf if nll == nll else math.nan
    predicted = losses.numel() * (metric.sequence_length - 1)
    note = NO_BOS if tokens.bos is None and metric.bos != "none" else ""
    return PerplexityResult(
        value, nll, error, tokens=predicted, windows=len(losses), note=note, by_window=tuple(losses.tolist())
    )
