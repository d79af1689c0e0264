"""Regimes: what the phenomenon of a claim needs of a model, such as outlier tokens, and the columns that lack it.

There the claim's rows do not differ in its subject, whatever their numbers, so the column is left out. Where all are,
the claim is not testable on this model. The numbers decide, so that the same claim is judged on a model of its regime.
"""

from collections.abc import Iterator

from reproduction.claims.effects import View
from reproduction.claims.findings import Finding, Region
from reproduction.tables.checks import Regime


def outside(view: View, regime: Regime) -> dict[str, list[Finding | str]]:
    """Columns outside the regime, or where it is unknown, with the reasons: findings that compare nothing, places.

    Args:
        view: our numbers, including the rows that `regime` names.
    """
    found: dict[str, list[Finding | str]] = {}
    for column, said in _against(view, regime):
        found.setdefault(column, []).append(said)
    return found


def _against(view: View, regime: Regime) -> Iterator[tuple[str, Finding | str]]:
    for column in view.columns:
        lacking = view.lacking(column, *regime.rows)
        if any(isinstance(one, str) or one.compares for one in lacking):  # except two names of one run
            yield from ((column, one) for one in lacking)
        elif shown := "; ".join(_shown(view, regime, column)):
            yield column, Finding(column, f"{regime.otherwise} ({shown})", "not checkable", compares=False)


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
        found, asked = view.estimate(regime.value.row, column).interval(), regime.value
        low, high = (end if bound is None else float(bound) for end, bound in asked.ends)
        region = Region(low, high)
        if region.decide(found.low, found.high) == "contradicted":
            yield f"{view.quantity.title} of {asked.row}: {found.effect:.2f}, {asked.words} asked"
