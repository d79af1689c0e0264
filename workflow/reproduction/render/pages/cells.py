"""Printing of every cell on every page: numbers of runs, changes, times and bytes of benchmarks, and settings.

Builders of grids choose the number at each place; its form is decided here, from the numbers in words of
`words.numbers`. "-" means no number.
"""

from collections.abc import Iterable

from reproduction.benchmarks.records import Measurement
from reproduction.frame.values import Number, Text
from reproduction.tables.settings import Setting
from reproduction.words.numbers import SPACE, show, show_ratio

#: Mark after a setting that differs from the printed one.
DIFFERS = " ≠"


def measured(number: Number | None, decimals: int = 2) -> str:
    """A number with its deviation over seeds: perplexity, zero-shot accuracy, endpoints and others of runs."""
    return show(number and number.mean, number and number.deviation, decimals)


def printed(number: Number | None, decimals: int = 2) -> str:
    """A paper's number, without its deviation."""
    return show(number and number.mean, None, decimals)


def decimals(numbers: Iterable[Number]) -> int:
    """Number of printed decimals, at most three; two without numbers."""
    texts = [f"{number.mean!r}".removesuffix(".0") for number in numbers]
    return max((min(len(text.partition(".")[2]), 3) for text in texts if "e" not in text), default=2)


def contents(found: Text | None) -> str:
    """Results of the seeds, each once, with its seeds where they differ; "-" for nothing, "none" for an empty text."""
    seeds: dict[str, list[int]] = {}
    for text, seed in zip(found.values, found.seeds, strict=True) if found else ():
        seeds.setdefault(text or "none", []).append(seed)
    if len(seeds) < 2:
        return next(iter(seeds), "-")
    return "; ".join(f"{text} (seed {', '.join(map(str, which))})" for text, which in seeds.items())


def share(part: float | None) -> str:
    """A share of one in percent."""
    return "-" if part is None else f"{100 * part:.2f}"


def ends(values: Iterable[float]) -> str:
    """The range of the values, one number where both ends are printed alike."""
    found = [*values]
    low, high = (f"{end:.2f}" for end in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def ratio(value: float | None) -> str:
    """A ratio of speeds, sizes or times."""
    return "-" if value is None else show_ratio(value)


def amount(found: Measurement | None, factor: float) -> str:
    """Seconds or bytes in a unit of `factor`, with the spread of their replays."""
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
    """A recipe's setting, marked where a paper prints another one."""
    return cell.here + DIFFERS * (cell.same is False)
