"""The tables and sentences of `rotquant diagnose`, from what `rotquant.metrics.diagnostics` found.

A model card has one table more, which compares figures with what is asked of a model that stands for the papers'.
Nothing here measures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rotquant.metrics.diagnostics import ASKED, INPUTS_ROTATED, LARGE, Costs, Sinks, variants
from rotquant.metrics.zeroshot import TASKS
from rotquant.recipes.schemes import Calibration

#: Most of a text's tokens that may be large in spite of a prefix.
MAY_BE_LARGE = 1 / 10_000
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


@dataclass(frozen=True)
class Asked:
    """A figure as shown, and what is asked of a stand-in: in words, and whether it is met."""

    figure: str
    here: str
    asked: str
    met: bool


def tables(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> list[FigureTable]:
    """What each variant costs, what tasks say of some, and which tokens stand out.

    Args:
        sinks: of `find_sinks`: without a prefix, then with some.
        decode: gives the text of a token id.
    """
    tasks = [_tasks(costs)] if costs.scores else []
    return [_perplexities(costs), *tasks, _outliers(sinks, decode)]


def phenomena(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> FigureTable:
    """The table of a card of a model that stands for the papers': figures, and what is asked of them."""
    rows = [(ask.figure, ask.here, ask.asked, "yes" if ask.met else "no") for ask in asked(costs, sinks, decode)]
    reading = (
        "factors and rises of perplexity, points of accuracy, times the median; the right half concerns models that "
        "stand for the papers', what is asked of down_proj and behind a prefix three of them at least"
    )
    return FigureTable("phenomena", reading, ("figure", "here", "asked of a stand-in", "met"), rows)


def sentences(costs: Costs, sinks: list[Sinks]) -> list[str]:
    """What the tables say: outlier channels before and after rotation, the cache, outlier tokens, what was left out."""
    base, plain = costs.perplexity["unquantized"].perplexity, costs.result("w4a4").perplexity
    before, after, static = costs.rise("w4a4"), costs.rise("r124"), costs.rise("static", "r124")
    times = _number(costs.factor("w4a4")[0])
    found = [
        f"W4A4 costs {_with_error(*before)} nats a token: perplexity {_number(base)} becomes {_number(plain)}, {times} "
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
                f"Inputs rotated online, after the norms' gains, cost {_with_error(gained, error)} nats less than by "
                f"R1: `{options}`. R1 rotates what a gain would make small together with the rest."
            )
    found.append(f"A KV cache in 3 bits, rotated, costs {_nats(costs.rise('kv3'))}.")
    found.append(f"Static scales of inputs, after rotation, cost {_nats(static)}, over dynamic ones.")
    found.append(
        f"The first token of a window has {_ratio(sinks[0].first)} times the median at down_proj and "
        f"{_ratio(sinks[0].residual_first)} times in the residual stream (in the layer, counted from 0)."
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
    return f"{_with_error(*rise)} nats, {_number(factor)} times the perplexity"


def asked(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> list[Asked]:
    """The figures of which something is asked; what is met is decided on figures as shown."""
    plain, over, cache = costs.factor("w4a4"), costs.factor("r12", "r124"), costs.factor("kv3")
    share, rise = 100 * costs.recovered, (100 * (cache[0] - 1), 100 * cache[1])
    left = costs.rise("r124")[0]
    risen = f"+{_with_error(*rise, 1)}%" if cache[0] < 2 else f"{_with_error(*cache)} times"
    found = [Asked("plain W4A4 over unquantized", _with_error(*plain), "at least 2", round(plain[0], 2) >= 2)]
    if costs.scores:
        lost = costs.points_lost("w4a4")
        found.append(Asked("plain W4A4, points lost", _with_error(*lost, 1), "at least 8", round(lost[0], 1) >= 8))
    found += [
        Asked(
            "taken back by R1 R2 R4", f"{share:.0f}%, {_number(left)} nats left", "at least 75%", round(share, 0) >= 75
        ),
        Asked("R1 R2 over R1 R2 R4", _with_error(*over), "at least 1.3", round(over[0], 2) >= 1.3),
        Asked("3-bit KV cache, rotated", risen, "at most 4%", round(rise[0], 1) <= 4),
        _at_least("first token, down_proj input", sinks[0].first, 30),
        _at_least("first token, residual stream", sinks[0].residual_first, 100),
    ]
    last = sinks[-1]
    if last.prefix:
        many, met = max(last.above), max(last.above) <= MAY_BE_LARGE * last.tokens
        label = f"above {LARGE:.0f} behind {prefix_text(last, decode)}"
        found.append(Asked(label, f"{many} of {last.tokens:,}", "at most 1 in 10,000", met))
    return found


def _at_least(figure: str, by_layer: tuple[float, ...], least: float) -> Asked:
    return Asked(figure, _ratio(by_layer), f"at least {least:.0f}", round(max(by_layer), 1) >= least)


def _perplexities(costs: Costs) -> FigureTable:
    base = costs.perplexity["unquantized"]
    rows = []
    for name, words in costs.words.items():
        if (found := costs.perplexity.get(name)) is not None:
            rise, times = (
                ("", "") if found is base else (_with_error(*costs.rise(name)), _with_error(*costs.factor(name)))
            )
            rows.append((words, _number(found.perplexity), rise, times))
    static = costs.factor("static", "r124")
    reading = (
        "weights rounded to nearest, inputs per token; rotation mends outlier channels, a static scale shows what "
        f"outlier tokens do ({_with_error(*static)} times the dynamic)"
    )
    return FigureTable("perplexity", reading, ("model", "perplexity", "rise, nats", "times the unquantized"), rows)


def _tasks(costs: Costs) -> FigureTable:
    shown = [name for name in ASKED if name not in costs.same]
    metrics = {name: costs.scores[name].metrics for name in shown}
    tasks = [task for task in TASKS["shipped"] if task in metrics["unquantized"]]
    rows = [
        (
            TASKS["shipped"][task].title,
            f"{TASKS['shipped'][task].chance:.0f}",
            *(f"{metrics[name][task]:.1f}" for name in shown),
        )
        for task in tasks
    ]
    rows.append(("average", "", *(f"{metrics[name]['average']:.1f}" for name in shown)))
    rows.append(("points lost", "", "", *(_with_error(*costs.points_lost(name), 1) for name in shown[1:])))
    items = sum(int(metrics["unquantized"][f"{task}.items"]) for task in tasks)
    reading = f"accuracy in percent on {items:,} items; the error is of the points lost on the same items"
    return FigureTable("tasks", reading, ("task", "chance", *(costs.words[name] for name in shown)), rows)


def _outliers(sinks: list[Sinks], decode: Callable[[int], str]) -> FigureTable:
    rows = [
        (
            prefix_text(found, decode) if found.prefix else "the first token",
            _ratio(found.first),
            _ratio(found.elsewhere),
            f"{max(found.above)} of {found.tokens:,}",
            _ratio(found.residual_first),
            _ratio(found.residual_elsewhere),
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


def _ratio(by_layer: tuple[float, ...]) -> str:
    """The largest ratio and its layer."""
    return f"{max(by_layer):.1f} ({by_layer.index(max(by_layer))})"


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if abs(value) < 10_000 else f"{value:.3g}"


def _with_error(value: float, error: float, digits: int = 2) -> str:
    """A value and its standard error, where it has one."""
    return _number(value, digits) + ("" if error != error else f" ± {_number(error, digits)}")
