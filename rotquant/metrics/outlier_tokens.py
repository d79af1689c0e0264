"""Content and position of outlier tokens (PrefixQuant Sec. 4, observation 3; Figures 4 and 7).

Which tokens are outlier tokens is decided by `rotquant.models.outlier_tokens`, by Eq. 3, for methods and figures alike.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rotquant.models.limits import metric_windows
from rotquant.models.outlier_tokens import token_maxima
from rotquant.recipes.schemes import OutlierTokens
from rotquant.text import Tokens

#: How many contents are kept by name.
CONTENTS = 12

#: English words that connect others, beside which a token without letters or digits counts as low in meaning.
FUNCTION_WORDS = frozenset(
    "a an and are as at be but by for from had has have he her his if in into is it its no nor not of off on or our "
    "she so than that the their them then there these they this those to up was we were which who will with you".split()
)


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
        them in percent `elsewhere`, those that are not at the first position, and `meaningful`, those that are besides
        not of low meaning (`is_low_in_meaning`); `repeated`, of those elsewhere in percent how many stand at the
        position of one before, in another window. What is nothing has a share of 0. Arrays: `by_layer`, the mean number
        by layer; `first` and `others`, how many are at the first position and elsewhere; `contents` of the latter, the
        most frequent, as [text, number, whether it is of low meaning]; `positions`, pairs of position and number;
        `windows` and `tokens` of each.

    Raises:
        CorpusError: the text is shorter than a window.
        RecipeError, CheckpointError: the model cannot read the windows; see `rotquant.models.limits`.
    """
    windows = metric_windows(model, tokens, metric)
    outliers = token_maxima(model, windows, device=next(model.parameters()).device).ratios > metric.threshold
    by_layer = outliers.sum(dim=-1).double().mean(dim=-1)
    metrics, arrays = describe(outliers.any(dim=0), windows, decode)
    return {"number": by_layer.max().item(), **metrics}, {"by_layer": by_layer.tolist(), **arrays}


def describe(
    outliers: Tensor, windows: Tensor, decode: Callable[[int], str]
) -> tuple[dict[str, float], dict[str, Any]]:
    """What `outlier_tokens` says of which tokens are outliers, bool [windows, tokens], besides their number by layer."""
    first, others = int(outliers[:, 0].sum()), int(outliers[:, 1:].sum())
    contents = Counter(decode(token) for token in windows[:, 1:][outliers[:, 1:]].tolist())
    low = sum(count for text, count in contents.items() if is_low_in_meaning(text))
    at = outliers.sum(dim=0)
    positions = [(place, int(at[place])) for place in at.nonzero()[:, 0].tolist()]
    metrics = {
        "elsewhere": _percent(others, first + others),
        "meaningful": _percent(others - low, first + others),
        "repeated": _percent(others - sum(place > 0 for place, _ in positions), others),
    }
    arrays = {
        "first": first,
        "others": others,
        "contents": [(text, count, is_low_in_meaning(text)) for text, count in contents.most_common(CONTENTS)],
        "positions": positions,
        "windows": len(windows),
        "tokens": windows.shape[1],
    }
    return metrics, arrays


def is_low_in_meaning(text: str) -> bool:
    r"""Whether a token tells little of a text's content, as "\n", "." and "the" do: the paper names these three.

    Here: it has no letter and no digit, or is a word that connects others (`FUNCTION_WORDS`).
    """
    word = text.strip("\u2581 \t\r\n").lower()
    return word in FUNCTION_WORDS or not any(character.isalnum() for character in word)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
