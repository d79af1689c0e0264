"""Numbers and quantities in words, as pages and figures print them. Published numbers are in italics."""

import math
from collections.abc import Iterable

from reproduction.frame.values import Values
from reproduction.tables.quantities import KL, LOG_ODDS, OF_CHOICES, OF_WINDOWS, PERPLEXITY, TENSOR_WORDS, Quantity

#: Keeps a number, its deviation and its unit on one line.
SPACE = "\u00a0"

NOT_FINITE = "NaN, Inf: not finite: the network's outputs overflow. Claims about such a number are not checkable."

#: Times the baseline's perplexity from which ties of rounding decide a number's digits (docs/concepts/statistics.md).
BROKEN = 10
_BROKEN = (
    "More than {times} times the baseline's perplexity: {rows}. There the rounding of exact ties alone, or weights "
    "changed by a millionth, moves the number: one seed says its magnitude and no digit (docs/concepts/statistics.md)."
)

_WORDS = {
    "perplexity": "perplexity",
    "kl": "KL divergence to the full-precision model",
    "kl_median": "the same in the median window",
    "flips": "share of positions whose likeliest next token is another one",
    "log_odds": "log-odds of the right answer",
    "log_odds_median": "the same of the median item",
    "answer_flips": "share of items whose choice is another one than the unquantized model's",
    "average": "average accuracy",
    "rouge_l": "ROUGE-L",
    "peak_ratio": "largest magnitude over the median",
    "largest": "largest magnitude",
    "median": "median magnitude",
    "snr": "signal-to-noise ratio of the logits",
    "kurtosis": "largest kurtosis of an input",
    "mean_kurtosis": "mean kurtosis of the inputs",
    "activation_error": "relative squared error of the inputs",
    "weight_error": "relative squared error of the weights",
    "range_use": "share of the largest range that a feature uses",
    "largest_range": "largest range",
    "number": "outlier tokens of a window, in the layer that has most",
    "elsewhere": "share of outlier tokens that are not at the first position",
    "meaningful": "share of outlier tokens that are neither at the first position nor of low meaning",
    "correlation": "Spearman's correlation of the rises of kurtosis and output error by rotation, over output elements",
    "kurtosis_rise": "rise of the mean excess kurtosis of the groups of an output element's weights",
    "raised": "share of output elements whose kurtosis rises",
    "error_rise": "rise of the mean absolute error of the outputs",
    "platykurtic": "share of groups with negative excess kurtosis before rotation",
    "normal": "the same share of groups of as many normal numbers",
    "few_kurtosis_rise": "rise of the kurtosis, of weights whose p_platy before is at most 25 %",
    "half_kurtosis_rise": "rise of the kurtosis, of weights whose p_platy before is 35 to 65 %",
    "half_error_rise": "rise of the error of the same weights",
    "largest_z": "largest distance of Kurt(Y_i) from Kurt(X)/n in standard errors",
    "adjusted_p": "probability of one as large among so many if Kurt(Y_i) is Kurt(X)/n",
    "least_rise": "least rise from Kurt(X) to Kurt(Y_i) in standard errors",
    "resolved": "length up to which every Kurt(Y_i), i > 1, is 4 standard errors from 0",
    "repeated": "share of those elsewhere that stand at the position of one before",
    "tokens": "tokens in front of every text",
    "content": "what they are",
    "megabits": "size in bits",
    "parameters": "number of parameters",
    "spikes": "steps among the first with a loss spike",
    "highest_spike": "largest loss of these steps over the least before it",
    "final_loss": "loss over the last tenth of the steps",
    "remaining": "loss at the end over that of the first step",
    **{
        f"{name}_{end}": f"{ratio}, {f'input of {what}' if tensors == 'inputs' else what}, in its worst layer"
        for tensors, names in TENSOR_WORDS.items()
        for name, what in names.items()
        for end, ratio in (("top", "largest over median token"), ("bottom", "median over smallest token"))
    },
}


def words(quantity: Quantity) -> str:
    """A quantity as a noun, such as "average accuracy"."""
    if quantity.decides is not None and quantity.key not in (KL.name, LOG_ODDS.name):
        return f"{_WORDS[LOG_ODDS.name]} on {quantity.title}"
    if quantity.key in (one.name for one in (*OF_WINDOWS, *OF_CHOICES)):
        return _WORDS[quantity.key]
    kind = "perplexity" if quantity.key == PERPLEXITY.name else "accuracy"
    return _WORDS.get(quantity.name, f"{kind} on {quantity.title}")


def loss_words(quantity: Quantity) -> str:
    """A worse result in words, such as "increase of perplexity"."""
    return f"{'increase' if quantity.better == 'lower' else 'loss'} of {words(quantity)}"


def show(value: float | None, deviation: float | None = None, decimals: int = 2) -> str:
    """A number as printed, with its deviation over the seeds; "-" for none, Inf and NaN as such."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    text = f"{value:.{decimals}f}" if abs(value) < 1e4 else f"{value:.2e}"
    return text if deviation is None else f"{text}{SPACE}±{SPACE}{show(deviation, None, decimals)}"


def show_change(percent: float | None, deviation: float | None = None) -> str:
    """A relative change with its sign and the deviation over the seeds, such as "+11.5 ± 0.4 %"."""
    if percent is None or not math.isfinite(percent):
        return show(percent)
    form = ".1f" if abs(percent) < 1e3 else ".0f" if abs(percent) < 1e4 else ".1e"
    spread = "" if deviation is None else f"{SPACE}±{SPACE}{deviation:{form}}"
    return f"{percent:+{form}}{spread}{SPACE}%"


def show_ratio(ratio: float) -> str:
    """A ratio as printed: two decimals, three up to slightly above one."""
    return f"{ratio:.3f}" if ratio <= 1.1 else f"{ratio:.2f}"


def not_finite(known: Iterable[Quantity], values: Values) -> list[str]:
    """Sentences about NaN and Inf among our numbers; none where all are finite."""
    notes = []
    for quantity in known:
        found = [value.mean for (_, _, name), value in values.items() if name == quantity.name]
        if quantity.absent is not None and any(map(math.isnan, found)):
            notes.append(f"{quantity.title} of NaN: {quantity.absent}.")
        elif not quantity.checkable(*found):
            notes.append(NOT_FINITE)
        elif math.inf in found:
            notes.append(f"{quantity.title} of Inf: {quantity.infinite}.")
    return list(dict.fromkeys(notes))


def broken(baseline: str, values: Values) -> list[str]:
    """A sentence about rows of ours whose perplexity is so many times the baseline's that seeds do not show its noise;
    none without such rows."""
    rows = [
        row
        for (row, column, name), value in values.items()
        if name == PERPLEXITY.name and value.mean > BROKEN * values.get((baseline, column, name), value).mean
    ]
    return [_BROKEN.format(times=BROKEN, rows=listed(rows))] if rows else []


def italic(text: str) -> str:
    """A published number in italics, to tell it from ours."""
    return text if text == "-" else f"*{text}*"


def listed(items: Iterable[object], between: str = ", ") -> str:
    """Join the items, each once, in order; "-" for none."""
    return between.join(dict.fromkeys(map(str, items))) or "-"
