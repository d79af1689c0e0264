"""What is asked of a model that stands for the papers', beside what `rotquant diagnose` found of it; its tasks.

Nothing here measures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from reproduction.tasks import TASKS, Scores
from rotquant.commands.diagnosis import FigureTable, number, prefix_text, ratio, with_error
from rotquant.metrics.diagnostics import ASKED, LARGE, Costs, Sinks
from rotquant.metrics.perplexity import mean_with_error

#: Most of a text's tokens that may be large in spite of a prefix.
MAY_BE_LARGE = 1 / 10_000


@dataclass(frozen=True)
class Asked:
    """A figure as shown, and what is asked of a stand-in: in words, and whether it is met."""

    figure: str
    here: str
    asked: str
    met: bool


def phenomena(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> FigureTable:
    """The table of a card of a model that stands for the papers': figures, and what is asked of them."""
    rows = [(ask.figure, ask.here, ask.asked, "yes" if ask.met else "no") for ask in asked(costs, sinks, decode)]
    reading = (
        "factors and rises of perplexity, points of accuracy, times the median; the right half concerns models that "
        "stand for the papers', what is asked of down_proj and behind a prefix three of them at least"
    )
    return FigureTable("phenomena", reading, ("figure", "here", "asked of a stand-in", "met"), rows)


def recovered(costs: Costs) -> float:
    """Share of plain W4A4's rise of perplexity that R1, R2, R4 take back; nan where nothing rises."""
    plain, rotated, base = (costs.result(name).perplexity for name in ("w4a4", "r124", "unquantized"))
    return (plain - rotated) / (plain - base) if plain > base else math.nan


def points_lost(costs: Costs, name: str) -> tuple[float, float]:
    """Mean over tasks of the accuracy that a variant loses, in points, with its standard error over paired items.

    nan where the network's outputs are not finite.
    """
    base, ours = _by_item(costs.answers["unquantized"]), _by_item(costs.answers[costs.same.get(name, name)])
    if not base or base.keys() != ours.keys():
        return math.nan, math.nan
    lost = [[100 * (a - b) for a, b in zip(base[task], ours[task], strict=True)] for task in base]
    mean = sum(sum(items) / len(items) for items in lost) / len(lost)
    return mean, math.hypot(*(mean_with_error(items)[1] for items in lost)) / len(lost)


def _by_item(scores: Scores) -> dict[str, tuple[float, ...]]:
    """The scores of the items of each task, without log-odds and choices."""
    return {task: items for task, items in scores.items.items() if f"{task}.items" in scores.metrics}


def asked(costs: Costs, sinks: list[Sinks], decode: Callable[[int], str]) -> list[Asked]:
    """The figures of which something is asked; what is met is decided on figures as shown."""
    plain, over, cache = costs.factor("w4a4"), costs.factor("r12", "r124"), costs.factor("kv3")
    share, rise = 100 * recovered(costs), (100 * (cache[0] - 1), 100 * cache[1])
    left = costs.rise("r124")[0]
    risen = f"+{with_error(*rise, 1)}%" if cache[0] < 2 else f"{with_error(*cache)} times"
    found = [Asked("plain W4A4 over unquantized", with_error(*plain), "at least 2", round(plain[0], 2) >= 2)]
    if costs.answers:
        lost = points_lost(costs, "w4a4")
        found.append(Asked("plain W4A4, points lost", with_error(*lost, 1), "at least 8", round(lost[0], 1) >= 8))
    found += [
        Asked(
            "taken back by R1 R2 R4", f"{share:.0f}%, {number(left)} nats left", "at least 75%", round(share, 0) >= 75
        ),
        Asked("R1 R2 over R1 R2 R4", with_error(*over), "at least 1.3", round(over[0], 2) >= 1.3),
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
    return Asked(figure, ratio(by_layer), f"at least {least:.0f}", round(max(by_layer), 1) >= least)


def accuracies(costs: Costs) -> FigureTable:
    """What the variants that were asked score on each task, and the points that quantized ones lose."""
    shown = [name for name in ASKED if name not in costs.same]
    metrics = {name: costs.answers[name].metrics for name in shown}
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
    rows.append(("points lost", "", "", *(with_error(*points_lost(costs, name), 1) for name in shown[1:])))
    items = sum(int(metrics["unquantized"][f"{task}.items"]) for task in tasks)
    reading = f"accuracy in percent on {items:,} items; the error is of the points lost on the same items"
    return FigureTable("tasks", reading, ("task", "chance", *(costs.words[name] for name in shown)), rows)
