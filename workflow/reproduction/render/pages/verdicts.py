"""Claims on a page: one of three words with the numbers here and the paper's, and below how each was decided."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reproduction.claims.claims import Answer, Outcome, Score, Shown, Verdict, repeated, score
from reproduction.claims.findings import Finding
from reproduction.render.pages.comparisons import asked, change, numbers, short
from reproduction.render.pages.model import CheckLine, ClaimLine, Claims, ClaimsName, Comparison, Finer, Report, Word
from reproduction.run.results import table_path
from reproduction.tables.checks import About, Claim, Experiment, Explained
from reproduction.tables.quantities import KL, LOG_ODDS
from reproduction.tables.tables import Table
from reproduction.words.describe import is_of_the_paper, title
from reproduction.words.numbers import listed

#: What a reader is told of a verdict; those that are not here are not tested.
WORDS: dict[Shown, Word] = {"reproduced": "agrees", "not reproduced": "disagrees", "no effect": "disagrees"}
UNKNOWN = "Cause unknown"


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
    papers = is_of_the_paper(table) and claims != "Causes"
    found = claims_of(decided, "Claims of the paper" if papers else claims)
    return Report(
        id=table.id,
        title=title(table),
        caption=table.caption,
        source=f"{table.paper_title}, Section {table.section}" if is_of_the_paper(table) else table.paper_title,
        figure=table.drawn,
        notes=(*notes, *table.notes),
        claims=found,
        details={"csv": table_path(table.id), **details},
        **content,
    )


def claims_of(decided: Sequence[Outcome], name: ClaimsName) -> Claims:
    """The claims of a page with their verdicts; causes that it tests for other pages count nowhere."""
    again = repeated(decided)
    lines = (_line(number, one, again.get(number - 1)) for number, one in enumerate(decided, 1))
    return Claims(tuple(lines), Score() if name == "Causes" else score(decided), name)


def _line(number: int, outcome: Outcome, first: int | None) -> ClaimLine:
    """first: place of a claim with the same mechanism, which counts once."""
    claim, answers = outcome.claim, outcome.answers
    about = next(iter(answers), None)
    judged = outcome.mechanism is not None or outcome.setting is not None
    if about is None:
        seen = f"see {listed(claim.shown or ())}" if isinstance(claim, Claim) else "-"
        word, finer, here, paper = "not tested here", None, seen, seen
    else:
        word, finer = _word(answers)
        here, paper = _shown(answers[about])
    found = outcome.experiment
    holds = found is not None and found.decision == "holds"
    why = f"{_cause(claim.experiment)} ({_where(claim.experiment)})" if holds and isinstance(claim, Claim) else ""
    return ClaimLine(
        number=number,
        text=claim.text,
        section=claim.section,
        quote=claim.quote,
        note=claim.note,
        headline=claim.headline,
        judged=judged,
        word=word,
        finer=finer,
        here=here,
        paper=paper,
        why=why,
        cause=_explained(outcome) if outcome.is_not_reproduced else "",
        same_as=None if first is None else first + 1,
        checks=tuple(check for name, answer in answers.items() for check in _checks(name, answer)),
    )


def _word(answers: Mapping[About, Answer]) -> tuple[Word, Finer | None]:
    """One word for all checks of a claim, and the verdict where the word does not say it, or that a size is not tested.

    A fact's numbers agree or not. A claim disagrees where one of its checks does.
    """
    shown: list[Shown] = [
        answer.here for about, answer in answers.items() if about != "fact" or answer.ours.decision != "holds"
    ]
    if not shown:
        return "agrees", None
    if set(answers) == {"fact"}:
        return (
            "disagrees" if answers["fact"].ours.decision in ("contradicted", "no effect") else "not tested here"
        ), None
    against: list[Shown] = [one for one in shown if WORDS.get(one) == "disagrees"]
    verdict: Shown = against[0] if against else shown[0]
    word = WORDS.get(verdict, "not tested here")
    if word == "agrees" and "not tested here" in shown:
        return word, "in direction"
    return word, None if verdict in ("reproduced", "not reproduced", "not tested here") else verdict


def _shown(answer: Answer) -> tuple[str, str]:
    """The numbers of the comparison nearest to the border, or farthest beyond it, and the paper's there.

    In the paper's quantity where both say the same; where they do not, in both.
    """
    second = answer.second
    agree = second is not None and second.decision == answer.ours.decision
    place, here = _example(second if second is not None and agree else answer.ours)
    if second is not None and not agree:
        other, found = _example(second)
        here = "; ".join(filter(None, (here, f"{other}: {found}" if other not in ("", place) else found)))
    there = [one for one in answer.papers.findings if one.place == place] or answer.papers.findings[:1]
    told = [(one.device, numbers(one, answer.papers.quantity)) for one in there]
    paper = "; ".join(f"{device}: {text}" if device else text for device, text in told)
    several = sum(finding.compares for finding in answer.ours.findings) > 1
    return f"{place}: {here}" if several and place else here, paper or "-"


def _example(verdict: Verdict) -> tuple[str, str]:
    """The place of the deciding comparison, and its numbers; without one, why nothing is compared."""
    alike = [one for one in verdict.findings if one.decision == verdict.decision and one.effect is not None]
    if verdict.decision == "not checkable" or not alike:
        rest = [one for one in verdict.findings if one.decision == verdict.decision] or verdict.findings
        missing = f"no number for {verdict.missing[0]}" if verdict.missing else "nothing to compare"
        return "", f"{rest[0].place}: {rest[0].reason}" if rest else missing
    one = min(alike, key=lambda found: found.effect.margin if found.effect else 0.0)
    quantity = verdict.quantity
    noun = f"{short(quantity)} " if quantity and quantity.key in (KL.name, LOG_ODDS.name) else ""
    bound = asked(one)
    return one.place, f"{noun}{numbers(one, quantity)}{f' ({bound} asked)' if bound else ''}"


def _checks(about: About, answer: Answer) -> Iterator[CheckLine]:
    """A check with all comparisons: here with the paper's at the same places, then by the paper's quantity."""
    papers = {(one.place, one.device): one for one in answer.papers.findings}
    devices = list(dict.fromkeys(one.device for one in answer.papers.findings)) or [""]
    lines = []
    for place in dict.fromkeys(one.place for one in (*answer.ours.findings, *answer.papers.findings)):
        ours = next((one for one in answer.ours.findings if one.place == place), None)
        there = [(device, papers[place, device]) for device in devices if (place, device) in papers]
        told = [f"{device} {numbers(one, answer.papers.quantity)}{_mark(one)}".strip() for device, one in there]
        lines.append(_compared(place, ours, answer.ours, "; ".join(told) or "-"))
    lines += [Comparison(place, "-", "-", "no number", "-") for place in answer.ours.missing]
    on = "" if answer.on is None or not answer.judged else short(answer.on)
    yield CheckLine(about, answer.here, answer.papers.decision, on, tuple(lines))
    if answer.second is not None and answer.second.quantity is not None and answer.there is not None:
        lines = [_compared(one.place, one, answer.second, "-") for one in answer.second.findings]
        yield CheckLine(about, answer.there, None, short(answer.second.quantity), tuple(lines), decides=False)


def _compared(place: str, ours: Finding | None, verdict: Verdict, paper: str) -> Comparison:
    if ours is None:
        return Comparison(place, "-", "-", "no number", paper)
    bound, reason = asked(ours), ours.reason if ours.effect else ""
    effect = ", ".join(filter(None, (change(ours), f"{bound} asked" if bound else ""))) or "-"
    decision = f"{ours.decision}: {reason}" if reason else ours.decision
    return Comparison(place, numbers(ours, verdict.quantity), effect, decision, paper)


def _mark(finding: Finding) -> str:
    return "" if finding.decision == "holds" else f" ({finding.decision})"


def _explained(outcome: Outcome) -> str:
    """What explains a claim that is not reproduced: what its experiment found, its author's reason, or nothing."""
    claim, found = outcome.claim, outcome.experiment
    because = f"{claim.because}." if isinstance(claim, Explained) and claim.because else ""
    if not isinstance(claim, Claim) or claim.experiment is None:
        return because or f"{UNKNOWN}: no experiment tests one."
    cause, where = _cause(claim.experiment), _where(claim.experiment)
    if found is None or found.decision == "not checkable":
        return because or f"{UNKNOWN}: {where} would test one and is not computed. {cause}."
    said = {
        "holds": "supports it",
        "contradicted": "speaks against it",
        "no effect": "finds no effect",
        "undecided": "leaves it open",
    }
    place, text = _example(found)
    tested = f"Tested cause: {cause}. {where[0].upper()}{where[1:]} {said[found.decision]} ({place}: {text})."
    return tested if found.decision == "holds" else f"{tested} {because or f'{UNKNOWN}.'}"


def _cause(experiment: Experiment | None) -> str:
    return "" if experiment is None else experiment.cause.rstrip(".")


def _where(experiment: Experiment | None) -> str:
    return f"`{experiment.target}`" if experiment and experiment.target else "this table"
