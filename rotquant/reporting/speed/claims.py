"""Claims about speed, decided by our measurements, and by the paper's on each of its GPUs.

A claim compares two columns by their ratio, or bounds the numbers of one. What lacks a number is named and left out; a
claim without anything to compare has no verdict. Bounds are met up to rounding of floating-point numbers, never up to
a spread: a claim that holds within its noise fails, and shows by how little.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator

from rotquant.reporting.claims import EPSILON, Finding, Outcome, Verdict
from rotquant.reporting.speed.numbers import Number, Numbers, row_names
from rotquant.study.speed.definitions import FACTORS, Check, Grid, SpeedClaim, SpeedTable, matches

#: More rows than these are summed up.
_ROWS = 6

Ratio = Callable[[str, str, str, str | None], float | None]
"""The number of a grid's row in column `over` by that in another column: (grid, row, column, over).

Without `over` the number itself, in SI units.
"""


def outcomes(table: SpeedTable, numbers: Numbers) -> tuple[Outcome, ...]:
    """Every claim of a table."""
    found = []
    for claim in table.claims:
        papers = [judge(claim, table, _ratios(table, numbers, gpu), gpu) for gpu in table.gpus]
        together = Verdict(
            tuple(finding for verdict in papers for finding in verdict.findings),
            tuple(place for verdict in papers for place in verdict.missing),
        )
        found.append(Outcome(claim, judge(claim, table, _ratios(table, numbers)), together))
    return tuple(found)


def judge(claim: SpeedClaim, table: SpeedTable, ratio: Ratio, gpu: str = "") -> Verdict:
    """Decide a claim by one set of ratios; `gpu` is named where it is not ours."""
    results = [
        result
        for grid in table.grids
        if matches(grid.name, claim.grid)
        for column in claim.check.columns
        for result in _findings(claim, grid, column, ratio, _prefix(table, grid, gpu))
    ]
    findings = tuple(result for result in results if isinstance(result, Finding))
    return Verdict(findings, tuple(result for result in results if isinstance(result, str)))


def _findings(claim: SpeedClaim, grid: Grid, column: str, ratio: Ratio, prefix: str) -> Iterator[Finding | str]:
    check = claim.check
    chosen = [row for row in row_names(grid) if matches(row, *claim.rows)]
    compared = column if check.over is None else f"{column} over {check.over}"
    values = {row: ratio(grid.name, row, column, check.over) for row in chosen}
    known = {row: value for row, value in values.items() if value is not None}
    if not known:
        yield from [f"{prefix}{compared}"] if chosen else []
        return
    yield from (f"{prefix}{row}, {compared}" for row in chosen if row not in known)
    if broken := [row for row, value in known.items() if not math.isfinite(value)]:
        yield from (Finding(f"{prefix}{row}, {compared}", f"{known[row]}, not finite", None) for row in broken)
        return
    prefix += f"{column}, " if len(check.columns) > 1 else ""
    ratios = {row: _compared(check, grid, value) for row, value in known.items()}
    if check.increasing:
        for (before, less), (after, more) in itertools.pairwise(ratios.items()):
            numbers = f"{show(more)} > {show(less)}"
            yield Finding(f"{prefix}{after} after {before}", numbers, more - less > EPSILON)
    elif check.of == "every":
        yield from _every(check, prefix, ratios)
    elif check.of == "best":
        row = max(ratios, key=lambda name: ratios[name])
        yield _bounded(check, f"{prefix}best, {row}", ratios[row])
    else:
        yield _bounded(check, f"{prefix}mean of {len(ratios)}", statistics.fmean(ratios.values()))


def _compared(check: Check, grid: Grid, value: float) -> float:
    """What is held against the bound, of a speedup or a number in SI units."""
    if check.compare == "amount":
        return value / FACTORS[grid.unit]
    return 1 / value if check.compare == "cost" else value


def _every(check: Check, prefix: str, ratios: dict[str, float]) -> Iterator[Finding]:
    """A finding per row; of many rows the worst alone, which decides, with the range of all."""
    found = {row: _bounded(check, f"{prefix}{row}", value) for row, value in ratios.items()}
    if len(found) <= _ROWS:
        yield from found.values()
        return
    worst = (min if check.at_least is not None else max)(ratios, key=lambda row: ratios[row])
    fail = sum(not finding.holds for finding in found.values())
    span = f"{show(min(ratios.values()))} to {show(max(ratios.values()))}"
    numbers = f"{found[worst].numbers}; all {span}{f', {fail} fail' if fail else ''}"
    yield Finding(f"{prefix}worst of {len(found)}, {worst}", numbers, found[worst].holds)


def _bounded(check: Check, place: str, value: float) -> Finding:
    if check.at_least is not None:
        return Finding(place, f"{show(value)} ≥ {check.at_least:g}", value >= check.at_least - EPSILON)
    assert check.at_most is not None
    return Finding(place, f"{show(value)} ≤ {check.at_most:g}", value <= check.at_most + EPSILON)


def _ratios(table: SpeedTable, numbers: Numbers, gpu: str = "") -> Ratio:
    """Ratios of our numbers, or of the paper's on a GPU, where one that is printed goes before that of two numbers."""

    def ratio(grid: str, row: str, column: str, over: str | None) -> float | None:
        value, known = _value_and_ratio(numbers[grid, row, column], gpu)
        if over is None:
            return value
        if known is not None and table.grid(grid).over(table.grid(grid).column(column)) == over:
            return known
        base, _ = _value_and_ratio(numbers[grid, row, over], gpu)
        return base / value if value and base is not None else None

    return ratio


def _value_and_ratio(number: Number, gpu: str) -> tuple[float | None, float | None]:
    """Of our measurement or, on a GPU, of the paper's: the number in SI units and its ratio to the baseline."""
    if not gpu:
        return number.ours and number.ours.value, number.ratio
    paper = number.paper(gpu)
    return (None, None) if paper is None else (paper.value, paper.ratio)


def _prefix(table: SpeedTable, grid: Grid, gpu: str) -> str:
    parts = [grid.name] if len(table.grids) > 1 else []
    parts += [gpu] if gpu and len(table.gpus) > 1 else []
    return "".join(f"{part}, " for part in parts)


def show(ratio: float) -> str:
    """A ratio as printed: two decimals, three up to a little above one."""
    return f"{ratio:.3f}" if ratio <= 1.1 else f"{ratio:.2f}"
