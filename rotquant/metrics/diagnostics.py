"""What outliers do to a model: perplexity with 4-bit activations before and after rotation, and where the outliers are.

Two kinds matter. Outlier *channels* ruin per-token quantization, and rotation removes them (QuaRot Sec. 1, Figure 1).
Outlier *tokens* ruin static per-tensor quantization even after rotation (PrefixQuant Sec. 4); a token is one when its
largest |down_proj input| exceeds 64 times the median over tokens, taken before the online Hadamard transform.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rotquant.metrics.perplexity import perplexity
from rotquant.models.limits import model_windows
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, Perplexity, QuantizationScheme, RotationScheme
from rotquant.text import Tokens
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import QuantizedState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: PrefixQuant Sec. 5.1: a token whose maximum is this many times the median is an outlier token.
OUTLIER_TOKEN_RATIO = 64.0


@dataclass(frozen=True)
class ActivationDiagnosis:
    """Perplexities with 16-bit weights: unquantized; 4-bit per-token inputs; the same rotated; static and rotated."""

    unquantized: float
    per_token: float
    rotated: float
    rotated_static: float

    @property
    def damage(self) -> float:
        """Perplexity of plain 4-bit activations over the unquantized one."""
        return self.per_token / self.unquantized

    @property
    def recovered(self) -> float:
        """Share of the rise in perplexity which rotation takes back."""
        return (self.per_token - self.rotated) / (self.per_token - self.unquantized)

    @property
    def static_penalty(self) -> float:
        """Perplexity of static per-tensor over dynamic per-token scales, both rotated."""
        return self.rotated_static / self.rotated


@dataclass(frozen=True)
class OutlierTokens:
    """Outlier tokens of one layer's down_proj input.

    first_ratio: the first token's maximum over the median of all tokens' maxima, mean over windows.
    later_ratio: the same for the largest token after the first.
    per_window: tokens above `OUTLIER_TOKEN_RATIO` in a window, mean over windows.
    most_common: text and count of the most frequent outlier tokens that are not first in their window.
    """

    first_ratio: float
    later_ratio: float
    per_window: float
    most_common: tuple[tuple[str, int], ...]


def diagnose_activations(
    model: "PreTrainedModel",
    tokens: Tokens,
    metric: Perplexity,
    calibration: Tensor,
    *,
    bits: int = 4,
    clip_ratio: float = 0.9,
    seed: int = 0,
) -> ActivationDiagnosis:
    """Measure the four perplexities; `model` is rotated in place on the way and is of no use afterwards.

    Args:
        tokens, metric: evaluation text and its windows, as `rotquant.metrics.perplexity.perplexity` takes them.
        calibration: int64 [samples, length], text for the static scales.
        clip_ratio: of all quantizers, static ones too.
    """
    dynamic = QuantizationScheme(bits=bits, clip_ratio=clip_ratio)
    static = QuantizationScheme(bits=bits, clip_ratio=clip_ratio, granularity="tensor", dynamic=False)
    some = Calibration(samples=len(calibration), sequence_length=calibration.shape[1])

    def measure(activations: str, recipe: Recipe, state: QuantizedState | None = None) -> float:
        with quantized_forward(model, recipe, state):
            return perplexity(model, tokens, metric, description=f"perplexity, {activations}").perplexity

    unquantized = measure("unquantized", Recipe())
    per_token = measure("per token", Recipe(activations=dynamic))
    recipe = Recipe(rotation=RotationScheme(), activations=static, calibration=some)
    state = build_weights(model, None, recipe, seed, calibration).state
    rotated_static = measure("rotated, static", recipe, state)
    recipe = Recipe(rotation=RotationScheme(), activations=dynamic)
    rotated = measure("rotated", recipe, QuantizedState(state.manifest.model_copy(update={"recipe": recipe}), {}, {}))
    return ActivationDiagnosis(unquantized, per_token, rotated, rotated_static)


def first_token_windows(model: nn.Module, tokens: Tokens, sequence_length: int, count: int) -> Tensor:
    """The first windows of a text, int64 [at most count, tokens], with BOS in the place of each one's first token.

    Where the tokenizer has no BOS the text's own token stays there. Raises as `rotquant.models.limits.model_windows`.
    """
    windows = model_windows(model, tokens, sequence_length)[:count].clone()
    if tokens.bos is not None:
        windows[:, 0] = tokens.bos
    return windows


@torch.no_grad()
def outlier_tokens(model: nn.Module, windows: Tensor, decode: Callable[[int], str]) -> list[OutlierTokens]:
    """Where the outlier tokens are, layer by layer.

    Args:
        windows: int64 [n, tokens].
        decode: maps one token id to text.
    """
    stream = capture_layer_inputs(model, windows)
    site = stream.architecture.site("mlp_output")
    summaries = []
    for index, _ in stream.layers("outlier tokens"):
        maxima: list[Tensor] = []
        stream.feed(index, site, lambda x, into=maxima: into.append(x.abs().amax(dim=-1).float()))
        stream.advance(index)
        summaries.append(_summary(torch.cat(maxima), windows, decode))
    return summaries


def _summary(maxima: Tensor, windows: Tensor, decode: Callable[[int], str]) -> OutlierTokens:
    """Summarise one layer's token maxima [n, tokens]."""
    ratios = maxima / maxima.median(dim=1, keepdim=True).values
    outliers = ratios > OUTLIER_TOKEN_RATIO
    later = outliers.clone()
    later[:, 0] = False
    counts = Counter(windows[later].tolist())
    return OutlierTokens(
        first_ratio=ratios[:, 0].mean().item(),
        later_ratio=ratios[:, 1:].amax(dim=1).mean().item(),
        per_window=outliers.sum(dim=1).float().mean().item(),
        most_common=tuple((decode(token), count) for token, count in counts.most_common(5)),
    )
