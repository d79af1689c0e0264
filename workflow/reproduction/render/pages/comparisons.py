"""Comparisons of claims in words: their numbers, effects, bounds and reasons, as pages print them."""

import math

from reproduction.claims.findings import Effect, Finding
from reproduction.tables.quantities import KL, LOG_ODDS, Quantity
from reproduction.words.numbers import show, show_ratio, words

_SHORT = {KL.name: "KL divergence", LOG_ODDS.name: "log-odds"}


def short(quantity: Quantity) -> str:
    """A quantity as a noun, endpoints by their name alone."""
    return _SHORT.get(quantity.key) or words(quantity)


def numbers(finding: Finding, quantity: Quantity | None) -> str:
    """The compared numbers with their unit, such as "6.10 against 8.87"; without an effect the reason."""
    effect = finding.effect
    if effect is None:
        return finding.reason
    if not effect.compared:
        return _with_unit(_number(effect.size, effect), effect.unit)
    shown = [_number(one, effect) for one in effect.compared]
    least = min(map(abs, effect.compared))
    alike = shown[0] == shown[1] and effect.compared[0] != effect.compared[1]
    if quantity is not None and (alike or 0 < least < 0.05):
        shown = [show(one, None, 4) for one in effect.compared]
    unit = quantity.unit if quantity is not None and effect.of in ("", "deviation") else effect.unit
    text = _with_unit((" to " if effect.kind == "loss" else " against ").join(shown), unit)
    return f"{effect.of} {text}".strip()


def change(finding: Finding) -> str:
    """The effect with its interval, such as "gain 1.24 [1.11, 1.37]"; "" for a number without noise."""
    effect = finding.effect
    if effect is None:
        return ""
    interval = _interval(effect)
    if effect.kind == "number":
        return interval.strip()
    name = {"apart": "difference"}.get(effect.kind, effect.kind)
    return _with_unit(f"{name} {_number(effect.size, effect)}{interval}", effect.unit)


def asked(finding: Finding) -> str:
    """The bound on an effect, such as "at most 0.63"; "" where a sign is asked, or more or less than the same time."""
    effect = finding.effect
    if (
        effect is None
        or effect.kind in ("apart", "ratio")
        or (effect.unit == "x" and 1.0 in (effect.region.low, effect.region.high))
    ):
        return ""
    low, high, single = effect.region.low, effect.region.high, effect.kind == "number"
    if math.isfinite(high) and low == -high and high:
        return _with_unit(f"within ±{high:g}", effect.unit)
    if math.isfinite(high) and (high or single):
        return _with_unit(f"at most {high:g}", effect.unit)
    least = "more than" if effect.region.open else "at least"
    return _with_unit(f"{least} {low:g}", effect.unit) if math.isfinite(low) and (low or single) else ""


def _interval(effect: Effect) -> str:
    ends = _number(effect.low, effect), _number(effect.high, effect)
    return f" [{', '.join(ends)}]" if ends[0] != ends[1] else ""


def _number(value: float, effect: Effect) -> str:
    """Two decimals; small ones with two significant digits, ratios of speeds with up to three decimals."""
    if effect.unit == "x":
        return show_ratio(value)
    if not math.isfinite(value) or abs(value) >= 0.1 or abs(value) < 1e-9:
        return show(value)
    return f"{value:.2g}"


def _with_unit(text: str, unit: str) -> str:
    return f"{text}x" if unit == "x" else f"{text} {unit}".rstrip()
