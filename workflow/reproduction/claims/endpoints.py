"""Endpoints: which quantity decides a direction on stand-ins, the finest that the compared rows have.

`reproduction.claims.claims` says the rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.claims.effects import Numbers
from reproduction.run.results import RunResult
from reproduction.tables.checks import is_direction, names_in
from reproduction.tables.project import Project
from reproduction.tables.quantities import KL, Quantity
from reproduction.tables.tables import RunTable
from reproduction.words.describe import is_about_models, is_stand_in

#: Accuracies that KL divergence decides too: averages over many tasks; and the share of right programs, on code.
BY_KL = ("average", "mmlu", "humaneval")

#: Divergences up to this are of the full-precision model from itself, with or without a prefix: float32's rounding.
NOTHING = 1e-6


@dataclass(frozen=True)
class Endpoints:
    """What may decide the directions of a table.

    finer: quantities of its runs that replace others; measured: the others. stand_ins: columns of models that stand
    for the paper's; empty where no model takes part. unlike: runs, by key, whose models read a prefix that the
    reference of their KL divergence did not.
    """

    finer: tuple[Quantity, ...]
    measured: tuple[Quantity, ...]
    stand_ins: frozenset[str]
    unlike: frozenset[str] = frozenset()

    @classmethod
    def of(cls, project: Project, table: RunTable, results: Mapping[str, RunResult]) -> "Endpoints":
        """Those of a table under a configuration."""
        computed = project.columns(table) if is_about_models(table) else ()
        stand_ins = frozenset(column for column in computed if is_stand_in(project.slot(table, column)))
        unlike = frozenset(key for key, result in results.items() if not result.reference_is_alike)
        return cls(project.endpoints(table), tuple(project.quantities(table)), stand_ins, unlike)

    def are_the_papers(self, columns: Sequence[str] | None) -> bool:
        """Whether all columns, None for the table's, are the paper's own models, or no model takes part."""
        return self.stand_ins.isdisjoint(columns or self.stand_ins)

    def has_finer(self, quantity: Quantity) -> bool:
        """Whether the table has a finer quantity than this one."""
        return any(_replaces(one, quantity) for one in self.finer)

    def instead(
        self,
        check: Mapping[str, Mapping[str, Any]],
        quantity: Quantity,
        numbers: Numbers,
        columns: Sequence[str] | None,
        at_chance: bool,
    ) -> Quantity | None:
        """The quantity that decides a check instead of another; None where that one decides itself.

        The check must ask for a direction of stand-ins, and all its rows must have the finer quantity wherever they
        have the other. Where none has the other, which a configuration may leave out, the finer one decides alone. KL
        does not measure the full-precision model, whose own is 0. It does not compare runs that have a reference like
        themselves with `unlike` ones; perplexity does.

        Args:
            at_chance: whether the other quantity cannot decide, as accuracies at chance; then KL does not decide.
        """
        if self.are_the_papers(columns) or not is_direction(check):
            return None
        rows = {name for kind, name in names_in(check) if kind == "row"}

        def having(name: str) -> list[tuple[str, str]]:
            asked = [place for place in numbers if place[0] in rows and (columns is None or place[1] in columns)]
            return [(row, column) for row, column, known in asked if known == name]

        places = having(quantity.name)
        known = [one for one in self.finer if _replaces(one, quantity)]
        for finer in sorted(known, key=lambda one: one.key != KL.name):
            found = [numbers.get((row, column, finer.name)) for row, column in places or having(finer.name)]
            if not found or None in found or (places and at_chance and finer.decides != quantity.name):
                continue
            if finer.key != KL.name:
                return finer
            known_runs = (run for one in found if one is not None for run in one.runs)
            if len({run in self.unlike for run in known_runs}) > 1:
                return None if finer.decides == quantity.name else self._of(finer.decides)
            if all(one is not None and abs(one.mean) > NOTHING for one in found):
                return finer
        return None

    def _of(self, name: str | None) -> Quantity:
        return next(one for one in self.measured if one.name == name)


def _replaces(finer: Quantity, quantity: Quantity) -> bool:
    """Whether it may decide instead of the other."""
    return finer.decides == quantity.name or (finer.key == KL.name and quantity.name in BY_KL)
