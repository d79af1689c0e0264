"""The tables of `rotquant diagnose`, for a terminal and a model card, from what `rotquant.metrics.diagnostics` found.

The first one compares each figure with what is asked of a model that stands for the papers'; nothing here measures.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rotquant.metrics.diagnostics import ASKED, LARGE, Costs, Sinks, variants
from rotquant.metrics.zeroshot import TASKS
from rotquant.recipes.schemes import Calibration

#: Most of a text's tokens that may be large in spite of a prefix.
MAY_BE_LARGE = 1 / 10_000


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
    """All tables, the one of what is asked first.

    Args:
        sinks: of `find_sinks`: without a prefix, then with some.
        decode: gives the text of a token id.
    """
    rows = [(ask.figure, ask.here, ask.asked, "yes" if ask.met else "no") for ask in asked(costs, sinks, decode)]
    reading = (
        "factors and rises of perplexity, points of accuracy, times the median; the right half concerns models that "
        "stand for the papers', what is asked of down_proj and behind a prefix three of them at least"
    )
    first = FigureTable("phenomena", reading, ("figure", "here", "asked of a stand-in", "met"), rows)
    tasks = [_tasks(costs)] if costs.scores else []
    return [first, _perplexities(costs), *tasks, _outliers(sinks, decode)]


def asked(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> list[Asked]:
    """The figures of which something is asked; what is met is decided on figures as shown."""
    plain, over, cache = costs.factor("w4a4"), costs.factor("r12", "r124"), costs.factor("kv3")
    share, rise = 100 * costs.recovered, (100 * (cache[0] - 1), 100 * cache[1])
    risen = f"+{_with_error(*rise, 1)}%" if cache[0] < 2 else f"{_with_error(*cache)} times"
    found = [Asked("plain W4A4 over unquantized", _with_error(*plain), "at least 2", round(plain[0], 2) >= 2)]
    if costs.scores:
        lost = costs.points_lost("w4a4")
        found.append(Asked("plain W4A4, points lost", _with_error(*lost, 1), "at least 8", round(lost[0], 1) >= 8))
    found += [
        Asked("taken back by R1 R2 R4", f"{share:.0f}%", "at least 75%", round(share, 0) >= 75),
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
    known = variants(Calibration())
    base = costs.perplexity["unquantized"]
    rows = [
        (known[name].words, _number(found.perplexity), "" if found is base else _with_error(*costs.factor(name)))
        for name, found in ((name, costs.perplexity[name]) for name in known if name in costs.perplexity)
    ]
    static = costs.factor("static", "r124")
    reading = (
        "weights rounded to nearest, inputs per token; rotation mends outlier channels, a static scale shows what "
        f"outlier tokens do ({_with_error(*static)} times the dynamic)"
    )
    return FigureTable("perplexity", reading, ("model", "perplexity", "times the unquantized"), rows)


def _tasks(costs: Costs) -> FigureTable:
    known = variants(Calibration())
    metrics = {name: costs.scores[name].metrics for name in ASKED}
    tasks = [task for task in TASKS["shipped"] if task in metrics["unquantized"]]
    rows = [
        (
            TASKS["shipped"][task].title,
            f"{TASKS['shipped'][task].chance:.0f}",
            *(f"{metrics[name][task]:.1f}" for name in ASKED),
        )
        for task in tasks
    ]
    rows.append(("average", "", *(f"{metrics[name]['average']:.1f}" for name in ASKED)))
    rows.append(("points lost", "", "", *(_with_error(*costs.points_lost(name), 1) for name in ASKED[1:])))
    items = sum(int(metrics["unquantized"][f"{task}.items"]) for task in tasks)
    reading = f"accuracy in percent on {items:,} items; the error is of the points lost on the same items"
    return FigureTable("tasks", reading, ("task", "chance", *(known[name].words for name in ASKED)), rows)


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
