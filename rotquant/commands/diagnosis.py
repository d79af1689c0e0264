"""The tables and sentences of `rotquant diagnose`, from what `rotquant.metrics.diagnostics` found.

Nothing here measures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rotquant.metrics.diagnostics import INPUTS_ROTATED, LARGE, Costs, Sinks, variants
from rotquant.recipes.schemes import Calibration

#: A rise of the loss, nats a token, beyond which a quantized model is out of the ordinary: perplexity times 2.7.
_MUCH = 1.0
#: Nats a token below which a difference of two rotations is not worth a sentence.
_MATTERS = 0.05
#: Nats beyond which exp of them overflows.
_LARGEST = 700.0


@dataclass(frozen=True)
class FigureTable:
    """Cells as they are shown; `help` is one line on how to read them."""

    title: str
    help: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> list[FigureTable]:
    """What each variant costs, and which tokens stand out.

    Args:
        sinks: of `find_sinks`: without a prefix, then with some.
        decode: gives the text of a token id.
    """
    return [_perplexities(costs), _outliers(sinks, decode)]


def sentences(costs: Costs, sinks: list[Sinks]) -> list[str]:
    """What the tables say: outlier channels before and after rotation, the cache, outlier tokens, what was left out."""
    base, plain = costs.perplexity["unquantized"].perplexity, costs.result("w4a4").perplexity
    before, after, static = costs.rise("w4a4"), costs.rise("r124"), costs.rise("static", "r124")
    times = number(costs.factor("w4a4")[0])
    found = [
        f"W4A4 costs {with_error(*before)} nats a token: perplexity {number(base)} becomes {number(plain)}, {times} "
        "times."
    ]
    if costs.same.get("r124") == "w4a4":
        found.append("No rotation changes this network.")
    else:
        back = before[0] - after[0]
        taken = f"takes back {back:.2f} of these nats" if back > 0 else "takes nothing back"
        left = " More than 1 nat is left: rounding to nearest alone does not do here, even rotated."
        rotations = costs.words[costs.same.get("r124", "r124")].partition(", ")[2]
        found.append(f"Rotation {taken}: with {rotations} W4A4 costs {_nats(after)}.{left if after[0] > _MUCH else ''}")
        gained, error = costs.rise("r124", "inputs")
        if "inputs" not in costs.same and gained > max(2 * error, _MATTERS):
            options = " ".join(f"--set rotation.{field}={value}" for field, value in INPUTS_ROTATED.items())
            found.append(
                f"Inputs rotated online, after the norms' gains, cost {with_error(gained, error)} nats less than by "
                f"R1: `{options}`. R1 rotates what a gain would make small together with the rest."
            )
    found.append(f"A KV cache in 3 bits, rotated, costs {_nats(costs.rise('kv3'))}.")
    found.append(f"Static scales of inputs, after rotation, cost {_nats(static)}, over dynamic ones.")
    found.append(
        f"The first token of a window has {ratio(sinks[0].first)} times the median at down_proj and "
        f"{ratio(sinks[0].residual_first)} times in the residual stream (in the layer, counted from 0)."
    )
    if costs.same:
        usual = variants(Calibration())
        named = ", ".join(f"{usual[name].words} (it is {costs.words[one]})" for name, one in costs.same.items())
        found.append(f"Left out, since on this model the network is that of another row: {named}.")
    return found


def _nats(rise: tuple[float, float]) -> str:
    """A rise of the loss with its standard error, and as a factor of perplexity."""
    nats, _ = rise
    factor = math.exp(nats) if nats < _LARGEST else math.inf
    return f"{with_error(*rise)} nats, {number(factor)} times the perplexity"


def _perplexities(costs: Costs) -> FigureTable:
    base = costs.perplexity["unquantized"]
    rows = []
    for name, words in costs.words.items():
        if (found := costs.perplexity.get(name)) is not None:
            rise, times = (
                ("", "") if found is base else (with_error(*costs.rise(name)), with_error(*costs.factor(name)))
            )
            rows.append((words, number(found.perplexity), rise, times))
    static = costs.factor("static", "r124")
    reading = (
        "weights rounded to nearest, inputs per token; rotation mends outlier channels, a static scale shows what "
        f"outlier tokens do ({with_error(*static)} times the dynamic)"
    )
    return FigureTable("perplexity", reading, ("model", "perplexity", "rise, nats", "times the unquantized"), rows)


def _outliers(sinks: list[Sinks], decode: Callable[[int], str]) -> FigureTable:
    rows = [
        (
            prefix_text(found, decode) if found.prefix else "the first token",
            ratio(found.first),
            ratio(found.elsewhere),
            f"{max(found.above)} of {found.tokens:,}",
            ratio(found.residual_first),
            ratio(found.residual_elsewhere),
        )
        for found in sinks
    ]
    which = ", ".join(f"{token_text(decode(token))} ({count})" for token, count in sinks[0].common) or "none"
    reading = (
        "largest input of down_proj, or value of the residual stream, over the median, in the worst layer (its number, "
        f"from 0); outlier tokens elsewhere (count): {which}; a prefix that works takes the outliers to itself"
    )
    head = ("in front", "there", "elsewhere", f"above {LARGE:.0f}", "residual there", "residual elsewhere")
    return FigureTable("outlier tokens", reading, head, rows)


def prefix_text(found: Sinks, decode: Callable[[int], str]) -> str:
    """The tokens of a prefix, as a reader tells them apart."""
    return " ".join(token_text(decode(token)) for token in found.prefix)


def token_text(text: str) -> str:
    """A token as code, with its spaces to be seen; cut where it is long."""
    cut = text if len(text) <= 20 else text[:19] + "…"
    return "`" + repr(cut)[1:-1].replace(" ", "␣").replace("`", "'") + "`"


def ratio(by_layer: tuple[float, ...]) -> str:
    """The largest ratio and its layer."""
    return f"{max(by_layer):.1f} ({by_layer.index(max(by_layer))})"


def number(value: float, digits: int = 2) -> str:
    """A number with some decimals, a large one with three digits."""
    return f"{value:.{digits}f}" if abs(value) < 10_000 else f"{value:.3g}"


def with_error(value: float, error: float, digits: int = 2) -> str:
    """A value and its standard error, where it has one."""
    return number(value, digits) + ("" if error != error else f" ± {number(error, digits)}")
