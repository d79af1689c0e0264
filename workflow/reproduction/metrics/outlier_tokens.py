"""Content and position of outlier tokens (PrefixQuant Sec. 4, observation 3; Figures 4 and 7).

Which tokens are outlier tokens is decided by `rotquant.models.outlier_tokens`, by Eq. 3, for methods and figures alike.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from reproduction.metrics.settings import OutlierTokens
from rotquant.models.limits import metric_windows
from rotquant.models.outlier_tokens import token_maxima
from rotquant.text import Tokens

#: How many contents are kept by name.
CONTENTS = 12

#: English words that connect others, next to which a token without letters or digits counts as low in meaning.
_FUNCTION_WORDS = (
    "a an and are as at be but by for from had has have he her his if in into is it its no nor not of off on or our "
    "she so than that the their them then there these they this those to up was we were which who will with you"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def outlier_tokens(
    model: nn.Module, tokens: Tokens, metric: OutlierTokens, decode: Callable[[int], str]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Count the outlier tokens of the metric's windows.

    A token is counted once if it is one in some layer, but for `number`. What stands at the first position of a window
    has no content, as in the paper.

    Args:
        model: a supported causal language model, rotated or not, with a prefix or not.
        tokens: of a text (`rotquant.text.tokenize`).
        decode: the text of a token id.

    Returns:
        Metrics: `number` of a window, the mean over windows in the layer that has most (the paper's max(O)); of all of
        them in percent `elsewhere`, those that are not at the first position, and `meaningful`, those of them that
        are not of low meaning (`is_low_in_meaning`); `repeated`, of those elsewhere in percent how many stand at the
        position of one before, in another window. What is nothing has a share of 0. Arrays: those of `look`.

    Raises:
        CorpusError: the text is shorter than a window.
        RecipeError, CheckpointError: the model cannot read the windows; see `rotquant.models.limits`.
    """
    windows = metric_windows(model, tokens, metric)
    maxima = token_maxima(model, windows, device=next(model.parameters()).device)
    arrays = look(maxima.ratios, windows, decode, metric.threshold)
    first, others = arrays["first"], arrays["others"]
    places = sum(place > 0 for place, _ in arrays["positions"])
    return {
        "number": max(arrays["by_layer"]),
        "elsewhere": _percent(others, first + others),
        "meaningful": _percent(arrays["others_of_meaning"], first + others),
        "repeated": _percent(others - places, others),
    }, arrays


def look(ratios: Tensor, windows: Tensor, decode: Callable[[int], str], threshold: float) -> dict[str, Any]:
    """Find the outlier tokens of windows of text.

    Args:
        ratios: Eq. 3, [layers, windows, tokens], of the text's tokens alone.
        windows: their ids, int64 [windows, tokens] or more, which are not looked at.

    Returns:
        `ratios`, the largest of each layer, and `by_layer`, the mean number of outlier tokens in a window; of those of
        any layer what `describe` says.
    """
    outliers = ratios > threshold
    return {
        "ratios": ratios.amax(dim=(1, 2)).tolist(),
        "by_layer": outliers.sum(dim=-1).double().mean(dim=-1).tolist(),
        **describe(outliers.any(dim=0), windows[:, : ratios.shape[-1]], decode),
    }


def describe(outliers: Tensor, windows: Tensor, decode: Callable[[int], str]) -> dict[str, Any]:
    """Count outlier tokens by their position and content.

    Args:
        outliers: which tokens are, bool [windows, tokens].
        windows: token ids, int64 [windows, tokens].

    Returns:
        `first` and `others`, how many are at the first position and elsewhere; `others_of_meaning`, how many of the
        latter are not of low meaning; `contents` of these, the most frequent, as (text, number, whether it is of low
        meaning); `positions`, pairs of position and number, in order; `windows` and `tokens` of each.
    """
    others = windows[:, 1:][outliers[:, 1:]].tolist()
    contents = Counter(decode(token) for token in others)
    at = outliers.sum(dim=0)
    return {
        "first": int(at[0]),
        "others": len(others),
        "others_of_meaning": sum(count for text, count in contents.items() if not is_low_in_meaning(text)),
        "contents": [(text, count, is_low_in_meaning(text)) for text, count in contents.most_common(CONTENTS)],
        "positions": [(place, int(at[place])) for place in at.nonzero()[:, 0].tolist()],
        "windows": len(windows),
        "tokens": windows.shape[1],
    }


def is_low_in_meaning(text: str) -> bool:
    r"""Whether a token tells little of a text's content, as "\n", "." and "the" do: the paper names these three.

    Here: it has no letter and no digit, or is a word that connects others (`FUNCTION_WORDS`).
    """
    word = text.strip("\u2581 \t\r\n").lower()
    return word in FUNCTION_WORDS or not any(character.isalnum() for character in word)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
