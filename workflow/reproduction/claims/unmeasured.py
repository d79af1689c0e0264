"""Claims of tables of which nothing is measured here: statements about settings, and about numbers from elsewhere.

Settings are compared cell by cell, with the recipes here and with the paper's own table.
"""

from collections.abc import Iterator

from reproduction.claims.claims import Answer, Outcome, Verdict, decided, judge
from reproduction.claims.findings import Finding
from reproduction.frame.elsewhere import Elsewhere
from reproduction.tables.checks import About, Claim
from reproduction.tables.elsewhere import ElsewhereTable
from reproduction.tables.quantities import Quantity
from reproduction.tables.settings import Setting, SettingsClaim, SettingsTable, asked_cells


def outcomes_elsewhere(table: ElsewhereTable, found: Elsewhere) -> tuple[Outcome, ...]:
    """Decide every claim of a table by the numbers printed elsewhere, and by the paper's."""

    def answers(claim: Claim) -> Iterator[tuple[About, Answer]]:
        quantity = claimed(table, found, claim)
        for about, check in claim.checks.items():
            ours, papers = (
                judge(check, table, numbers, quantity, columns=claim.columns, regime=regime)
                for numbers, regime in ((found.numbers, claim.regime), (found.published, None))
            )
            yield about, Answer(ours, papers, about == "mechanism" or table.on_papers_models)

    return decided(table.claims, answers)


def claimed(table: ElsewhereTable, found: Elsewhere, claim: Claim) -> Quantity:
    """The quantity that a claim is about: the first metric unless it names another."""
    return table.quantity(claim.quantity or next(name for _, _, name in found.numbers))


def outcomes(table: SettingsTable) -> tuple[Outcome, ...]:
    """Decide every claim of a table of settings."""
    return decided(table.claims, lambda claim: [("fact", Answer(_ours(table, claim), _papers(table, claim)))])


def _ours(table: SettingsTable, claim: SettingsClaim) -> Verdict:
    return Verdict(tuple(_finding(cell, cell.here, asked) for cell, asked in asked_cells(table, claim)))


def _papers(table: SettingsTable, claim: SettingsClaim) -> Verdict:
    """The verdict of the cells in the paper's table; where it prints none, a sentence of the paper stands alone."""
    cells = asked_cells(table, claim)
    return Verdict(tuple(_finding(cell, cell.published, asked) for cell, asked in cells if cell.published is not None))


def _finding(cell: Setting, said: str, asked: str) -> Finding:
    same = said.casefold() == asked.casefold()
    text = said if same else f"{said}, {asked} asked"
    return Finding(f"{cell.row}, {cell.column}", text, "holds" if same else "contradicted")
