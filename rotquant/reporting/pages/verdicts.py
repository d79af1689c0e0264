"""Section "Claims": each statement of the paper, whether it holds here and by the paper's own numbers, and why not."""

from collections.abc import Sequence

from rotquant.reporting.claims import Outcome, Verdict, score
from rotquant.reporting.words.describe import is_of_the_paper, is_stand_in
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import SPACE
from rotquant.study.project import Project
from rotquant.study.tables import Table


def claims_section(project: Project, table: Table, decided: Sequence[Outcome]) -> str:
    """The verdicts as a table, the numbers behind them folded below; nothing for a table without claims."""
    if not decided:
        return ""
    on_stand_ins = any(is_stand_in(project.slot(table, column)) for column in project.columns(table))
    rows, details = [], []
    for number, outcome in enumerate(decided, 1):
        claim, here = outcome.claim, outcome.ours.holds
        text = claim.text + (f"<br><sub>Check: {claim.note}</sub>" if claim.note else "")
        if claim.if_it_fails and here is False and on_stand_ins:
            text += f"<br>❌ Why it may fail here: {claim.if_it_fails}"
        rows.append([number, text, claim.section, verdict_words(here), verdict_words(outcome.papers.holds)])
        details.append(f"{number}. {claim.text}\n")
        details.append(f"   - here: {findings(outcome.ours)}\n   - *published*: {findings(outcome.papers)}\n")
    counted = score(decided)
    title = "Claims of the paper" if is_of_the_paper(table) else "Claims"
    unchecked = f", {counted.unchecked} not checkable" if counted.unchecked else ""
    return "\n".join(
        [
            f"## {title}: {counted.holds} of {counted.checked} hold here{unchecked}\n",
            markdown_table(["", "Claim", "Section", "here", "*paper's numbers*"], rows, "rllll"),
            f"<details><summary>The numbers behind each verdict</summary>\n\n{''.join(details)}\n</details>\n",
        ]
    )


def verdict_words(holds: bool | None) -> str:
    """A verdict as pages print it."""
    return "not checkable" if holds is None else f"✅{SPACE}holds" if holds else f"❌{SPACE}fails"


def findings(verdict: Verdict) -> str:
    """The comparisons behind a verdict in one line; those that fail are marked, what lacks a number is named."""
    marks = {True: "", False: " ❌", None: " (not checkable)"}
    parts = [f"{finding.place}: {finding.numbers}{marks[finding.holds]}" for finding in verdict.findings]
    parts += [f"no number for {where}" for where in verdict.missing]
    return "; ".join(parts) or "nothing to compare"
