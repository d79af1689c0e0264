"""Statements and numbers as parts of a sentence. Numbers are rounded as in claims on pages."""

import math
import re
from dataclasses import replace
from typing import NamedTuple

from reproduction.claims.effects import signed
from reproduction.claims.findings import NONE, Effect, Finding
from reproduction.tables.quantities import DESCRIPTIVE, KL, LOG_ODDS, Quantity
from reproduction.words.numbers import words

#: Names that look like words.
_NAMES = ("Atom", "Hadamard", "Llama", "Mistral", "Qwen")
_OPPOSITE = {"a gain of": "a loss of", "a loss of": "a gain of", "by": "less by"}
_WORDS = {"by": "more by", "it is": "", "the share": ""}
_SHORT = {KL.name: "KL divergence", LOG_ODDS.name: "log-odds"}


class ToldEffect(NamedTuple):
    """A comparison in words: with both numbers and by its effect alone; a paper's is shown so, without noise."""

    full: str
    brief: str
    papers: str
    papers_brief: str


class EffectUnit(NamedTuple):
    """A unit after a number and after a difference of two, and the quantity that has it, "perplexity".

    title: of a statistic of a distribution, for which less is not better; its meaning is in brackets.
    falls: whether such a statistic is smaller where a claim calls it better.
    """

    one: str = ""
    apart: str = ""
    noun: str = ""
    title: str = ""
    falls: bool = False

    @classmethod
    def of(cls, quantity: Quantity) -> "EffectUnit":
        """The unit of a quantity."""
        space = f" {quantity.unit}" if quantity.unit else ""
        apart = " points" if quantity.unit == "%" else space
        if quantity in DESCRIPTIVE:
            return cls(space, apart, "", lower(quantity.title), quantity.better == "lower")
        noun = short(quantity) if quantity.sampled else lower(quantity.title) if space else ""
        return cls(space, apart, noun)


def short(quantity: Quantity) -> str:
    """A quantity as a noun, endpoints only by their name."""
    return _SHORT.get(quantity.key) or words(quantity)


def clause(text: str) -> str:
    """A statement in the form after "that", without the part after a semicolon."""
    return lower(text.partition(";")[0].rstrip(". "))


def whole(text: str) -> str:
    """A statement of several parts as one clause."""
    return lower(text.rstrip(". ").replace("; ", ", and "))


def lower(text: str) -> str:
    """A sentence with a lower-case beginning, unless it begins with a name."""
    first = text.partition(" ")[0]
    name = first in _NAMES or re.fullmatch("A|[A-Z][a-z]+(-[a-z]+)*,?", first) is None
    return text if name else text[0].lower() + text[1:]


def upper(text: str) -> str:
    """A clause as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def told(finding: Finding, unit: EffectUnit = EffectUnit()) -> ToldEffect:
    """A comparison of models: "a gain of 1.24 [1.11, 1.37] in perplexity (10.86 against 12.10)"."""
    effect = finding.effect
    if effect is None:
        return ToldEffect(*[finding.numbers] * 4)
    noun = f" in {unit.noun}" if unit.noun else ""
    if effect.name == "it is":
        value = f"{signed(effect.size)}{unit.one}"
        asked = "" if effect.asked.endswith(" 0") else f"{effect.asked} is asked"
        brackets = f" ({', '.join(filter(None, (unit.title, asked)))})" if unit.title or asked else ""
        shown = f"{value}{_interval(effect)}{noun}"
        return ToldEffect(f"{shown}{brackets}", shown, value, value)
    loss = effect.sign == "to"
    compared = replace(effect, sign="to" if loss else "against").compared
    compared = f"{'from ' if loss else ''}{compared}{'' if effect.name == 'by' else unit.one}"
    if not math.isfinite(effect.size):
        return ToldEffect(f"{compared}{noun}", f"{compared}{noun}", compared, compared)
    if unit.title and effect.name in _OPPOSITE and effect.name != "by":
        better = (effect.name == "a gain of") == (effect.size > 0)
        smaller = better == unit.falls
        size = f"{'smaller' if smaller else 'larger'} by {signed(abs(effect.size))}{unit.apart}"
        full = f"{compared}, {size}{_interval(effect)}"
        return ToldEffect(full, full, compared, compared)
    size = _size(effect, effect.unit or unit.apart)
    if effect.name == "by":
        full = f"{compared}{noun}, {size}{_interval(effect)}"
        return ToldEffect(full, full, compared, compared)
    brief = f"{size}{_interval(effect)}{noun}{f', {NONE}' if effect.is_none else ''}"
    return ToldEffect(f"{brief} ({compared})", brief, f"{size} ({compared})", size)


def _size(effect: Effect, unit: str) -> str:
    """An effect in words, a negative one as its opposite."""
    turned = effect.size < 0 and effect.name in _OPPOSITE
    name = _OPPOSITE[effect.name] if turned else _WORDS.get(effect.name, effect.name)
    behind = " times as much" if effect.name == "the share" else unit
    return f"{name} {signed(-effect.size if turned else effect.size)}{behind}".strip()


def _interval(effect: Effect) -> str:
    """The interval after a number; empty where its ends are printed alike."""
    turned = effect.size < 0 and effect.name in _OPPOSITE
    ends = (-effect.high, -effect.low) if turned else (effect.low, effect.high)
    return between(*map(signed, ends))


def between(low: str, high: str) -> str:
    return f" [{low}, {high}]" if low != high else ""


def would_decide(needed: str) -> str:
    """Requirements for a decision of an undecided comparison, as the end of a clause."""
    if not needed:
        return ""
    return f", which {needed}" if needed.endswith("decide") else f", {needed}"
