"""Assumptions of a claim about a model, such as outlier tokens to prefix, and the columns that do not meet them.

Without the assumption, the claim's rows do not differ in its subject, whatever their numbers. The column is left out,
and a claim without any column left is not checkable. The numbers decide, so that the same claim is judged on a model
that meets its assumption.
"""

from collections.abc import Iterator

from reproduction.claims.effects import View
from reproduction.claims.findings import Finding, Region
from reproduction.tables.checks import Given


def not_given(view: View, given: Given) -> dict[str, list[Finding | str]]:
    """Columns where the assumption is false or unknown, with the reasons: findings that compare nothing, places.

    Args:
        view: our numbers, including the rows that `given` names.
    """
    found: dict[str, list[Finding | str]] = {}
    for column, said in _against(view, given):
        found.setdefault(column, []).append(said)
    return found


def _against(view: View, given: Given) -> Iterator[tuple[str, Finding | str]]:
    for column in view.columns:
        lacking = view.lacking(column, *given.rows)
        if any(isinstance(one, str) or one.compares for one in lacking):  # except two names of one run
            yield from ((column, one) for one in lacking)
        elif shown := "; ".join(_shown(view, given, column)):
            yield column, Finding(column, f"{given.otherwise} ({shown})", "not checkable", compares=False)


def _shown(view: View, given: Given, column: str) -> Iterator[str]:
    """The numbers that refute the assumption; none where it is met."""
    if given.differ is not None:
        first, second = given.differ
        one, other = view.numbers[first, column], view.numbers[second, column]
        if one.runs == other.runs != ():
            yield f"{first} and {second} are the same runs"
        elif one.values == other.values != ():  # to the last digit, which exports keep of a run's numbers alone
            yield f"{first} and {second} are equal in all that was measured"
    if given.value is not None:
        found, asked = view.estimate(given.value.row, column).interval(), given.value
        low, high = (end if bound is None else float(bound) for end, bound in asked.ends)
        region = Region(low, high)
        if region.decide(found.low, found.high) == "contradicted":
            yield f"{view.quantity.title} of {asked.row}: {found.effect:.2f}, {asked.words} asked"
