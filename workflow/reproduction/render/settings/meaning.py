"""What the page of a table of settings means: how many cells are as printed, and what is not."""

from reproduction.render.meaning.pages import clauses, sentence
from reproduction.render.meaning.words import clause, lower
from reproduction.tables.settings import Settings, asked_cells


def meaning_of_settings(found: Settings) -> list[str]:
    """Up to three sentences on a table: its cells, what the paper's text says of them, and what differs."""
    printed = [cell for cell in found.cells if cell.published is not None]
    differs = [cell for cell in printed if not cell.same]
    told = [claim for claim in found.table.claims if claim.fact.told]
    agree = [
        claim
        for claim in told
        if all(cell.here.casefold() == asked.casefold() for cell, asked in asked_cells(found, claim))
    ]
    reason = differs[0].reason if differs else None
    said = clauses(
        "settings",
        printed=len(printed),
        same=len(printed) - len(differs),
        told=len(told),
        agree=len(agree),
        example=clause(agree[0].text) if agree else "",
        differs=differs,
        reason=lower(reason.rstrip(".")) if reason else "",
    )
    return [sentence([line]) for line in said]
