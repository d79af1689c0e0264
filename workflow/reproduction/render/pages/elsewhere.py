"""The report of a table of numbers that somebody else measured: each next to the paper's, with its origin."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from reproduction.claims.claims import Outcome
from reproduction.claims.unmeasured import claimed, outcomes_elsewhere
from reproduction.frame.elsewhere import Elsewhere
from reproduction.render.meaning.pages import Words, of_claims
from reproduction.render.meaning.sayings import Saying, Teller, sayings
from reproduction.render.meaning.words import EffectUnit, told
from reproduction.render.pages.grids import elsewhere_grids
from reproduction.render.pages.model import Fact, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.checks import Claim
from reproduction.tables.elsewhere import ElsewhereTable


def elsewhere_report(table: ElsewhereTable, found: Elsewhere) -> Report:
    """Build the report of a table."""

    def say(outcome: Outcome) -> Iterator[Saying]:
        quantity = claimed(table, found, cast("Claim", outcome.claim))
        return sayings(outcome, Teller(lambda finding: told(finding, EffectUnit.of(quantity)), quantity))

    decided = outcomes_elsewhere(table, found)
    measured = f"Upright numbers were measured elsewhere, not by this project: {table.origin.rstrip('.')}."
    return judged_report(
        table,
        decided,
        meaning=of_claims(decided, say, Words(where="by numbers measured elsewhere", cannot="other models")),
        reading=[f"{measured} *Italic* ones are the paper's."],
        grids=[*elsewhere_grids(table, found)],
        facts=[Fact("Measured elsewhere", origin) for origin in dict.fromkeys(found.origins.values())],
        template="pages/elsewhere.md.jinja",
        details={"numbers": Path(table.numbers)},
    )
