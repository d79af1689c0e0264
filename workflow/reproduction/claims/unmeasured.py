"""Claims about settings, compared cell by cell with the recipes here and with the paper's own table."""

from reproduction.claims.claims import Answer, Outcome, Verdict, decided
from reproduction.claims.findings import Finding
from reproduction.tables.settings import Setting, SettingsClaim, SettingsTable, asked_cells


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
    reason = said if same else f"{said}, {asked} asked"
    return Finding(f"{cell.row}, {cell.column}", "holds" if same else "contradicted", reason=reason)
