"""The claims of a report: what each says here and by the paper's own numbers, and what tests a contradiction."""

from collections.abc import Sequence

from rotquant.reporting.claims import Outcome, Verdict, score
from rotquant.reporting.pages.model import ClaimLine, Claims, ClaimsName
from rotquant.study.checks import Experiment


def claims_of(decided: Sequence[Outcome], name: ClaimsName) -> Claims:
    """The claims with their verdicts; a magnitude has a line of its own below the direction."""
    return Claims(tuple(map(_line, decided)), score(decided), name)


def _line(outcome: Outcome) -> ClaimLine:
    claim, contradicted = outcome.claim, outcome.here == "contradicted"
    again = outcome.magnitude and claim.check is not None  # quote and note are printed with the direction
    return ClaimLine(
        f"How much: {claim.text}" if outcome.magnitude else claim.text,
        claim.section,
        None if again else claim.quote,
        None if again else claim.note,
        _experiment(claim.experiment) if claim.experiment and contradicted else None,
        outcome.here,
        outcome.papers.decision,
        findings(outcome.ours),
        findings(outcome.papers),
    )


def _experiment(experiment: Experiment) -> str:
    rows = " and ".join(experiment.rows)
    where = f"row {rows}" if rows else f"`{experiment.target}`"
    return f"{experiment.text.rstrip('.')}: {where}."


def findings(verdict: Verdict) -> str:
    """The comparisons behind a verdict in one line; those that do not hold are marked, what lacks a number is named."""
    marks = {"holds": "", "contradicted": " ❌", "undecided": " (undecided)", "not checkable": " (not checkable)"}
    parts = []
    for finding in verdict.findings:
        mark = f" (undecided: {finding.needed})" if finding.needed else marks[finding.decision]
        parts.append(f"{finding.place}: {finding.numbers}{mark}")
    parts += [f"no number for {where}" for where in verdict.missing]
    return "; ".join(parts) or "nothing to compare"
