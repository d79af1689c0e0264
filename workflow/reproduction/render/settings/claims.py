"""What a paper says of settings, cell by cell, beside the recipes here and beside what its own table prints."""

from reproduction.claims.claims import Answer, Outcome, Verdict
from reproduction.claims.findings import Finding
from reproduction.tables.settings import Setting, Settings, SettingsClaim, asked_cells


def outcomes(settings: Settings) -> tuple[Outcome, ...]:
    """Every claim of a table."""
    claims = settings.table.claims
    return tuple(Outcome(claim, {"fact": Answer(_ours(settings, claim), _papers(settings, claim))}) for claim in claims)


def _ours(settings: Settings, claim: SettingsClaim) -> Verdict:
    return Verdict(tuple(_finding(cell, cell.here, asked) for cell, asked in asked_cells(settings, claim)))


def _papers(settings: Settings, claim: SettingsClaim) -> Verdict:
    """By the cells that the paper's table prints; where it prints none, a sentence of the paper stands alone."""
    cells = asked_cells(settings, claim)
    return Verdict(tuple(_finding(cell, cell.published, asked) for cell, asked in cells if cell.published is not None))


def _finding(cell: Setting, said: str, asked: str) -> Finding:
    same = said.casefold() == asked.casefold()
    text = said if same else f"{said}, {asked} asked"
    return Finding(f"{cell.row}, {cell.column}", text, "holds" if same else "contradicted")
