"""Claims about settings, compared cell by cell with the recipes here and with the paper's own table."""

from reproduction.claims.claims import Answer, Outcome, Verdict, decided
from reproduction.claims.findings import Finding
from reproduction.tables.settings import Setting, SettingsClaim, SettingsTable, asked_cells


def outcomes(table: SettingsTable) -> tuple[Outcome, ...]:
    """Decide every claim of a table of settings."""
    return decided(table.claims, lambda claim: [("fact", _answer(table, claim))])


def _answer(table: SettingsTable, claim: SettingsClaim) -> Answer:
    """Ours, and that of the cells in the paper's table; where it prints none, a sentence of the paper stands alone."""
    cells = [*asked_cells(table, claim)]
    ours = [_finding(cell, cell.here, asked) for cell, asked in cells]
    papers = [_finding(cell, cell.published, asked) for cell, asked in cells if cell.published is not None]
    return Answer(Verdict(tuple(ours)), Verdict(tuple(papers)))


def _finding(cell: Setting, said: str, asked: str) -> Finding:
    same = said.casefold() == asked.casefold()
    reason = said if same else f"{said}, {asked} asked"
    return Finding(f"{cell.row}, {cell.column}", "holds" if same else "contradicted", reason=reason)
