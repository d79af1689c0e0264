"""The claims of a report: whether each holds here and by the paper's own numbers, and what may explain why not."""

from collections.abc import Sequence

from rotquant.reporting.claims import Outcome, Verdict, score
from rotquant.reporting.pages.model import ClaimLine, Claims, ClaimsName, Decision

_DECISIONS: dict[bool | None, Decision] = {True: "holds", False: "fails", None: "not checkable"}


def claims_of(decided: Sequence[Outcome], name: ClaimsName, *, explain: bool = True) -> Claims:
    """The claims with their verdicts. explain: whether a failure here has the reason that the claim gives for one."""
    lines = []
    for outcome in decided:
        claim, fails = outcome.claim, outcome.ours.holds is False
        lines.append(
            ClaimLine(
                claim.text,
                claim.section,
                claim.note,
                claim.if_it_fails if fails and explain else None,
                _DECISIONS[outcome.ours.holds],
                _DECISIONS[outcome.papers.holds],
                findings(outcome.ours),
                findings(outcome.papers),
            )
        )
    return Claims(tuple(lines), score(decided), name)


def findings(verdict: Verdict) -> str:
    """The comparisons behind a verdict in one line; those that fail are marked, what lacks a number is named."""
    marks = {True: "", False: " ❌", None: " (not checkable)"}
    parts = [f"{finding.place}: {finding.numbers}{marks[finding.holds]}" for finding in verdict.findings]
    parts += [f"no number for {where}" for where in verdict.missing]
    return "; ".join(parts) or "nothing to compare"
