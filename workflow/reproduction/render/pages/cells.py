"""How every cell of every page is printed: numbers of runs, changes, times and bytes of benchmarks, and settings.

What builds a grid says which number stands where; what stands there is decided here, from the numbers in words of
`words.numbers`. "-" is no number.
"""

import math
from collections.abc import Iterable

from reproduction.benchmarks.records import Measurement
from reproduction.claims.estimates import Interval
from reproduction.claims.replays import show as show_ratio
from reproduction.frame.values import Number, Text
from reproduction.tables.settings import Setting
from reproduction.words.numbers import SPACE, show, show_change

#: Stands behind a setting that is not as printed.
DIFFERS = " ≠"


def measured(number: Number | None, decimals: int = 2) -> str:
    """A number with its deviation over seeds: perplexity, zero-shot accuracy, endpoints and all else of runs."""
    return show(number and number.mean, number and number.deviation, decimals)


def printed(number: Number | None, decimals: int = 2) -> str:
    """A number of a paper's, without its deviation."""
    return show(number and number.mean, None, decimals)


def decimals(numbers: Iterable[Number]) -> int:
    """As many decimals as numbers were printed with, three at most; two where there are none."""
    texts = [f"{number.mean!r}".removesuffix(".0") for number in numbers]
    return max((min(len(text.partition(".")[2]), 3) for text in texts if "e" not in text), default=2)


def contents(found: Text | None) -> str:
    """What the seeds found, each once, with its seeds where they differ; "-" for nothing, "none" for an empty text."""
    seeds: dict[str, list[int]] = {}
    for text, seed in zip(found.values, found.seeds, strict=True) if found else ():
        seeds.setdefault(text or "none", []).append(seed)
    if len(seeds) < 2:
        return next(iter(seeds), "-")
    return "; ".join(f"{text} (seed {', '.join(map(str, which))})" for text, which in seeds.items())


def rise(found: Interval | None) -> str:
    """A change in percent with its 95 % interval."""
    return "-" if found is None else interval(found.effect, found.low, found.high)


def interval(effect: float, low: float, high: float) -> str:
    """A change in percent with the ends of its interval."""
    if not math.isfinite(effect):
        return show(effect)
    digits = 1 if abs(effect) < 100 else 0
    return f"{show_change(effect)} [{low:.{digits}f}, {high:.{digits}f}]"


def share(part: float | None) -> str:
    """A share in percent, of one."""
    return "-" if part is None else f"{100 * part:.2f}"


def ends(values: Iterable[float]) -> str:
    """From the least to the largest, once where both are printed alike."""
    found = [*values]
    low, high = (f"{end:.2f}" for end in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def ratio(value: float | None) -> str:
    """How many times as fast, as small or as slow."""
    return "-" if value is None else show_ratio(value)


def amount(found: Measurement | None, factor: float) -> str:
    """Seconds or bytes in a unit of that many, with the spread of their replays."""
    if found is None:
        return "-"
    spread = "" if found.spread is None else f"{SPACE}±{SPACE}{100 * found.spread:.1f}{SPACE}%"
    return f"{digits(found.value / factor)}{spread}"


def digits(value: float) -> str:
    """Four significant digits without powers of ten."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, 4 - whole)}f}" if abs(value) >= 1e-3 else f"{value:.2g}"


def setting(cell: Setting) -> str:
    """What a recipe says, marked where a paper prints another thing."""
    return cell.here + DIFFERS * (cell.same is False)
