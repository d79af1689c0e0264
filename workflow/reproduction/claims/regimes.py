"""Regimes: what the phenomenon of a claim needs of a model, such as outlier tokens, and the columns that lack it.

There the claim's rows do not differ in its subject, whatever their numbers, so the column is left out. Where all are,
the claim is not testable on this model. The numbers decide, so that the same claim is judged on a model of its regime.
"""

from collections.abc import Iterator, Mapping, Sequence

from reproduction.claims.effects import View
from reproduction.claims.findings import Finding, Region
from reproduction.tables.checks import Regime
from reproduction.words.numbers import show

Absent = Mapping[str, Sequence[Finding | str]]
"""Columns outside a regime, or where it is unknown, with the reasons: findings that compare nothing, places."""


def outside(view: View, regime: Regime) -> Absent:
    """The columns outside a regime.

    Args:
        view: our numbers of the rows that `regime` names.
    """
    found: dict[str, list[Finding | str]] = {}
    known: set[object] = set()
    for column in view.columns:
        lacking = view.lacking(column, *regime.rows)
        if any(isinstance(one, str) or one.compares for one in lacking):  # except two names of one run
            found[column] = lacking
        elif shown := "; ".join(_shown(view, regime, column)):
            reason = f"{regime.otherwise} ({shown})"
            said = Finding(column, "not checkable", reason=reason, compares=False)
            runs = tuple(view.numbers[row, column].runs for row in regime.rows)
            found[column] = [] if any(runs) and runs in known else [said]  # columns on one model, once
            known.add(runs)
    return found


def _shown(view: View, regime: Regime, column: str) -> Iterator[str]:
    """The numbers that show that a column is outside; none where it is not."""
    if regime.differ is not None:
        first, second = regime.differ
        one, other = view.numbers[first, column], view.numbers[second, column]
        if one.runs == other.runs != ():
            yield f"{first} and {second} are the same runs"
        elif one.values == other.values != ():  # to the last digit, which exports keep of a run's numbers alone
            yield f"{first} and {second} are equal in all that was measured"
    if regime.value is not None:
        asked, number, unit = regime.value, view.estimate(regime.value.row, column), ""
        if regime.over is not None:
            number, unit = number.percent_of(view.estimate(regime.over, column)).times(0.01), " times"
        found = number.interval()
        low, high = (end if bound is None else float(bound) for end, bound in asked.ends)
        if Region(low, high).decide(found.low, found.high) == "contradicted":
            over = "" if regime.over is None else f" over that of {regime.over}"
            title = view.quantity.title
            yield f"{title} of {asked.row}{over}: {show(found.effect)}{unit}, {asked.words} asked"
