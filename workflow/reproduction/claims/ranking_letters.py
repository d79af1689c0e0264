"""Compact letter displays: which rows of a ranking are told apart, as groups that may overlap.

Two rows share a group exactly if no test tells them apart. Groups overlap where of three rows only the first and the
last differ.

Source: Piepho 2004, "An algorithm for a letter-based representation of all-pairwise comparisons" (insert and absorb).
"""

from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement

Group = frozenset[int]


def compact_letters(count: int, apart: Collection[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The numbers from 0 of each row's groups; groups are numbered by their first rows.

    Args:
        count: number of rows, which are 0, 1, ..., the best first. apart: pairs of rows that are told apart.
    """
    groups = [frozenset(range(count))]
    for one, other in apart:
        parts = [part for group in groups for part in _without_pair(group, one, other)]
        groups = [part for part in dict.fromkeys(parts) if not any(part < larger for larger in parts)]
    needed = _needed(sorted(groups, key=sorted))
    return [tuple(number for number, group in enumerate(needed) if row in group) for row in range(count)]


def _without_pair(group: Group, one: int, other: int) -> Sequence[Group]:
    """The group, in two parts if it has both rows, of which each lacks one."""
    return (group - {other}, group - {one}) if one in group and other in group else (group,)


def _needed(groups: Sequence[Group]) -> list[Group]:
    """The groups without those whose rows and pairs of rows are all in others; later ones go first."""
    found = list(groups)
    for group in reversed(groups):
        rest = [other for other in found if other != group]
        if all(
            any(pair <= other for other in rest) for pair in map(frozenset, combinations_with_replacement(group, 2))
        ):
            found = rest
    return found
