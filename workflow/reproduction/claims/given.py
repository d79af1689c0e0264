"""What a claim takes for granted of a model, such as outlier tokens to prefix, and where that is not so.

On a model where it is not so the claim's rows differ by nothing that it is about, whatever their numbers. Its column is
left out, and a claim of which no column is left is not checkable. The numbers decide, so that the same claim is judged
on a model where it is so.
"""

from collections.abc import Iterator

from reproduction.claims.effects import View
from reproduction.claims.findings import Finding
from reproduction.tables.checks import Given


def not_given(view: View, given: Given) -> dict[str, list[Finding | str]]:
    """The columns where it is not so, or not known, and what says so: findings that compare nothing, places.

    Args:
        view: our numbers, of the rows that `given` names among others.
    """
    found: dict[str, list[Finding | str]] = {}
    for column, said in _against(view, given):
        found.setdefault(column, []).append(said)
    return found


def _against(view: View, given: Given) -> Iterator[tuple[str, Finding | str]]:
    for column in view.columns:
        lacking = view.lacking(column, *given.rows)
        if any(isinstance(one, str) or one.compares for one in lacking):  # but for two names of one run
            yield from ((column, one) for one in lacking)
        elif shown := "; ".join(_shown(view, given, column)):
            yield column, Finding(column, f"{given.otherwise} ({shown})", "not checkable", compares=False)


def _shown(view: View, given: Given, column: str) -> Iterator[str]:
    """The numbers by which it is not so; nothing where it is."""
    if given.differ is not None:
        first, second = given.differ
        if view.numbers[first, column].runs == view.numbers[second, column].runs != ():
            yield f"{first} and {second} are the same runs"
        elif view.gain(first, second, column).is_nothing:
            yield f"{first} and {second} are equal in all that was measured"
    if given.at_least is not None:
        row, value = given.at_least.row, given.at_least.value
        found = view.estimate(row, column).interval()
        if found.high < value:
            yield f"{view.quantity.title} of {row}: {found.effect:.2f}, at least {value:g} asked"
