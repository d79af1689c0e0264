"""Reports with their claims: the verdict here and by the paper's own numbers, and the cause of a failure."""

from collections.abc import Mapping, Sequence
from typing import Any

from reproduction.claims.claims import Answer, Outcome, Verdict, repeated, score
from reproduction.render.pages.model import ClaimLine, Claims, ClaimsName, FactLine, Judged, Report
from reproduction.run.results import table_path
from reproduction.tables.checks import Claim, Experiment, Explained
from reproduction.tables.tables import Table
from reproduction.words.describe import is_of_the_paper, lead, title
from reproduction.words.numbers import listed, words

UNKNOWN = "cause unknown"


def judged_report(
    table: Table,
    decided: Sequence[Outcome],
    claims: ClaimsName = "Claims",
    *,
    notes: Sequence[str] = (),
    details: Mapping[str, Any],
    **content: Any,
) -> Report:
    """The report of a table of any source: what all have in common, and its own `content`, fields of a report.

    Args:
        claims: their name where they are no paper's. notes: before the table's own.
    """
    found = claims_of(decided, "Claims of the paper" if is_of_the_paper(table) else claims)
    return Report(
        id=table.id,
        title=title(table),
        caption=table.caption,
        lead=lead(table),
        figure=table.drawn,
        notes=(*notes, *table.notes),
        claims=found,
        details={"csv": table_path(table.id), **details},
        **content,
    )


def claims_of(decided: Sequence[Outcome], name: ClaimsName) -> Claims:
    """The claims with their verdicts, and the facts separately."""
    judged = [one for one in decided if one.mechanism or one.setting]
    first = repeated(judged)
    lines = tuple(_line(one, first.get(place)) for place, one in enumerate(judged))
    facts = tuple(_fact(one) for one in decided if one.fact or not one.answers)
    return Claims(lines, score(decided), name, facts)


def _line(outcome: Outcome, first: int | None) -> ClaimLine:
    """first: place of a claim with the same mechanism."""
    said = outcome.claim
    both = (None if one is None else _judged(one) for one in (outcome.mechanism, outcome.setting))
    cause = _cause(outcome, first) if outcome.is_not_reproduced else None
    again = "" if first is None else f"It asks what claim {first + 1} asks; both count once."
    note = " ".join(filter(None, (said.note, again))) or None
    return ClaimLine(said.text, said.section, said.quote, note, cause, *both)


def _judged(answer: Answer) -> Judged:
    found = Judged(answer.here, answer.papers.decision, findings(answer.ours), findings(answer.papers))
    if answer.on is None or not answer.judged:
        return found
    found = found._replace(on=words(answer.on))
    if answer.second is None or answer.by is None:
        return found
    return found._replace(by=words(answer.by), second=answer.there, second_says=findings(answer.second))


def _fact(outcome: Outcome) -> FactLine:
    said, answer = outcome.claim, outcome.fact
    if answer is None:
        seen = f"see {listed(said.shown or ())} in the table" if isinstance(said, Claim) else "-"
        return FactLine(said.text, said.section, said.quote, said.note, seen, seen)
    numbers = (findings(verdict, otherwise=" (not so)") for verdict in (answer.ours, answer.papers))
    return FactLine(said.text, said.section, said.quote, said.note, *numbers)


def _cause(outcome: Outcome, first: int | None) -> str:
    """The cause by the claim's experiment, its author, or the `first` of equal claims; or that it is unknown."""
    claim = outcome.claim
    because = f"{claim.because}." if isinstance(claim, Explained) and claim.because else ""
    if not isinstance(claim, Claim) or claim.experiment is None:
        unknown = f"{UNKNOWN.capitalize()}: no experiment tests one." if first is None else f"See claim {first + 1}."
        return because or unknown
    experiment, found = claim.experiment, outcome.experiment
    tested = experiment.cause.rstrip(".")
    if found is None or found.decision == "not checkable":
        return because or f"{UNKNOWN.capitalize()}. {_where(experiment)} would test one and is not computed: {tested}."
    said = {
        "holds": "supports it",
        "contradicted": "speaks against it",
        "no effect": "finds no effect",
        "undecided": "leaves it open",
    }
    left = "" if found.decision == "holds" or because else f"; {UNKNOWN}"
    tested = f"Tested cause: {tested}. {_where(experiment)} {said[found.decision]} ({findings(found)}){left}."
    return tested if found.decision == "holds" else f"{tested} {because}".rstrip()


def _where(experiment: Experiment) -> str:
    return "This table" if experiment.target is None else f"`{experiment.target}`"


def findings(verdict: Verdict, otherwise: str = " ❌") -> str:
    """The comparisons of a verdict in one line; failed ones are marked, places without a number are named."""
    marks = {
        "holds": "",
        "contradicted": otherwise,
        "no effect": otherwise,
        "undecided": " (undecided)",
        "not checkable": " (not checkable)",
    }
    parts = []
    for finding in verdict.findings:
        mark = f" (undecided: {finding.needed})" if finding.needed else marks[finding.decision]
        parts.append(f"{finding.place}: {finding.numbers}{mark}")
    parts += [f"no number for {where}" for where in verdict.missing]
    return "; ".join(parts) or "nothing to compare"
