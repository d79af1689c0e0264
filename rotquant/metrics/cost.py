"""What quantization costs a model, on a few windows of a text: the full-precision model reads them before the work, the
quantized one after it.

In between the full-precision model's last states and its head are kept on the host, since logits of a vocabulary of
262,144 would take 0.25 GiB a window of 512 tokens. There are never two models.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import task
from rotquant.metrics.divergence import FloatStates, own_head
from rotquant.metrics.perplexity import perplexity
from rotquant.models.architectures import base_model, capped, lm_head
from rotquant.models.limits import metric_windows
from rotquant.models.memory import size_in_bytes
from rotquant.models.placement import placed
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens

#: Nats a token of KL divergence from full precision above which a result is out of the ordinary: what 4 bits cost with
#: any of the papers' methods is below.
EXTRAORDINARY = 1.0
#: Copies of a window's logits in float32 that scoring it takes.
_COPIES = 5


@dataclass(frozen=True)
class FullPrecision:
    """What the full-precision model says of windows of a text.

    exact: its last states and its head, on the host. nll: nats per predicted token.
    """

    tokens: Tokens
    metric: Perplexity
    exact: FloatStates
    nll: float


@dataclass(frozen=True)
class QuantizationCost:
    """Cost of quantization on windows of a text.

    tokens: predicted. full_precision, quantized: perplexities. kl: KL(full precision || quantized) of the next token,
    nats, and of each window. flips: share of positions at which the likeliest next token is another one, percent.
    """

    metric: Perplexity
    tokens: int
    full_precision: float
    quantized: float
    kl: float
    flips: float
    by_window: tuple[float, ...] = ()

    @property
    def is_extraordinary(self) -> bool:
        """Whether it is so much that something is likely to be wrong; also where it is no number."""
        return not self.kl <= EXTRAORDINARY

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        kept = {name: value for name, value in vars(self).items() if name != "by_window"}
        return {**kept, "metric": self.metric.model_dump(mode="json")}


@torch.no_grad()
def reference(model: nn.Module, tokens: Tokens, metric: Perplexity, device: torch.device | str) -> FullPrecision | None:
    """Let the full-precision model read the windows that a metric asks for; None where a GPU has no room for that.

    Args:
        model: where it is afterwards too.
        device: where it runs, layers that do not fit coming from the host.

    Raises:
        CorpusError, RecipeError, CheckpointError: the text is too short, or the model cannot read it.
    """
    windows = metric_windows(model, tokens, metric)
    states: list[Tensor] = []
    losses: list[float] = []
    with task("full precision", "window", len(windows)) as under_way:
        try:
            with placed(model, device, _working(model, metric)):
                place = base_model(model).embed_tokens.weight.device
                for window in windows:
                    state = base_model(model)(input_ids=window[None].to(place), use_cache=False).last_hidden_state[0]
                    logits = capped(model, lm_head(model)(state[:-1])).float()
                    losses.append(cross_entropy(logits, window[1:].to(logits.device)).item())
                    states.append(state.cpu())
                    under_way.advance()
                head = own_head(model)
        except RecipeError:  # of `placed`: not even layer by layer
            return None
    return FullPrecision(tokens, metric, FloatStates(windows, torch.stack(states), head), fmean(losses))


def cost(model: nn.Module, known: FullPrecision, device: torch.device | str) -> QuantizationCost:
    """Let the quantized model, with what acts at run time, read the same windows."""
    exact = known.exact
    with placed(model, device, _working(model, known.metric) + size_in_bytes(exact.head)):
        exact.head.to(lm_head(model).weight.device)
        try:
            found = perplexity(model, known.tokens, known.metric, batch_size=1, description="quantized", exact=exact)
        finally:
            exact.head.cpu()
    full = math.exp(known.nll) if known.nll < 700 else math.inf
    return QuantizationCost(
        known.metric, found.tokens, full, found.perplexity, fmean(found.kl), 100 * fmean(found.flips), tuple(found.kl)
    )


def _working(model: nn.Module, metric: Perplexity) -> int:
    vocabulary = base_model(model).embed_tokens.weight.shape[0]
    return _COPIES * 4 * metric.sequence_length * vocabulary
