"""Claims with their verdicts in the form of sentences: one comparison each, in our numbers and the paper's.

The comparison shown is the deciding one: of those that hold the nearest to the border, of those that are contradicted
the farthest beyond it. Where a finer quantity decides and disagrees with the paper's, both are shown.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reproduction.claims.claims import Answer, Outcome, Shown, Verdict
from reproduction.claims.findings import Finding
from reproduction.render.meaning.words import EffectUnit, ToldEffect, clause, short, told, whole, would_decide
from reproduction.tables.checks import About, Claim, Explained
from reproduction.tables.quantities import Quantity

Tell = Callable[[Finding], ToldEffect]
"""A comparison in words."""


@dataclass(frozen=True)
class Cause:
    """The cause of a failed reproduction: given by a table's author, or found by an experiment.

    text: the cause, as a clause. where: the page that tests it. numbers: the numbers found there.
    """

    found: Literal["said", "holds", "contradicted", "no effect", "undecided", "not computed", "none"]
    text: str = ""
    where: str = ""
    numbers: str = ""

    @property
    def known(self) -> bool:
        """Whether a cause is known."""
        return self.found in ("said", "holds")


@dataclass(frozen=True)
class Saying:
    """One check of a claim, in the form that sentences need.

    text: the claim as a clause. part: the part that the check is about, where the claim has checks of both.
    place: of the comparison shown; "" where there is no other. numbers, brief: its numbers. papers, papers_brief: the
    paper's there.
    comparisons, alike, holding: how many there are, how many have the verdict, and how many hold.
    by: the deciding quantities, if not the paper's alone. other: the paper's quantity, if its verdict would be
    `otherwise`; others_numbers: its numbers. needed: what would decide it.
    reason: why it is not checkable. clear: in half widths of the interval. agrees: whether our numbers do.
    """

    text: str
    about: About
    here: Shown
    part: Literal["", "direction", "size"]
    cause: Cause
    agrees: bool
    papers_deny: bool
    comparisons: int = 0
    alike: int = 0
    holding: int = 0
    place: str = ""
    numbers: str = ""
    brief: str = ""
    papers: str = ""
    papers_brief: str = ""
    by: str = ""
    other: str = ""
    otherwise: Shown | None = None
    others_numbers: str = ""
    needed: str = ""
    reason: str = ""
    clear: float = 0.0


@dataclass(frozen=True)
class Teller:
    """Words for the comparisons of a claim.

    quantity: the quantity that the claim is about, if it is one. gpus: the paper's. open: why a comparison is undecided
    where nothing says what would decide it.
    """

    tell: Tell
    quantity: Quantity | None = None
    gpus: Sequence[str] = ()
    open: str = ""

    def place(self, papers: Finding) -> str:
        """A place among the paper's numbers without the GPU, which our places do not name."""
        return functools.reduce(lambda left, gpu: left.replace(f"{gpu}, ", ""), self.gpus, papers.place)


def sayings(outcome: Outcome, teller: Teller) -> Iterator[Saying]:
    """Each check of a claim."""
    both = {"mechanism", "setting"} <= {*outcome.answers}
    for about, answer in outcome.answers.items():
        saying = Saying(
            text=clause(outcome.claim.text),
            about=about,
            here=answer.here,
            part="" if not both else "direction" if about == "mechanism" else "size",
            cause=cause(outcome),
            agrees=answer.ours.decision == "holds",
            papers_deny=answer.papers.decision == "contradicted",
        )
        shown = _with_numbers(saying, answer, teller)
        yield shown or replace(saying, reason=_reason(answer.ours))


def _with_numbers(saying: Saying, answer: Answer, teller: Teller) -> Saying | None:
    """The saying of a check with a comparison to show, else None."""
    second = answer.second if teller.quantity and answer.on else None
    agreed = second is not None and second.decision == answer.ours.decision
    verdict = second if second and agreed else answer.ours
    found = [finding for finding in verdict.findings if finding.compares]
    alike = [finding for finding in found if finding.decision == verdict.decision]
    if not alike or verdict.decision == "not checkable":
        return None
    shown = min(alike, key=_margin)
    said, papers = teller.tell(shown), _papers(answer.papers, shown, len(found), teller)
    saying = replace(
        saying,
        comparisons=len(found),
        alike=len(alike),
        holding=sum(finding.decision == "holds" for finding in found),
        place=shown.place if len(found) > 1 else "",
        numbers=said.full,
        brief=said.brief,
        papers=_joined(one.papers for one in papers),
        papers_brief=_joined(one.papers_brief for one in papers),
        needed=(would_decide(shown.needed) or teller.open) if saying.here == "undecided" else "",
        clear=shown.effect.clearness if shown.effect else 0.0,
    )
    if second is None or answer.on is None or teller.quantity is None:
        return saying
    own = short(teller.quantity)
    if agreed:  # in the paper's unit, which is named as the deciding one
        bare = told(shown, EffectUnit.of(teller.quantity)._replace(noun=""))
        return replace(saying, by=f"{short(answer.on)} and by {own}", numbers=bare.full)
    finer = told(shown, EffectUnit.of(answer.on))
    coarse = next((one for one in second.findings if one.place == shown.place), None)
    return replace(
        saying,
        by=short(answer.on),
        numbers=told(shown, EffectUnit.of(answer.on)._replace(noun="")).full,
        brief=finer.brief,
        other=own,
        otherwise=answer.there,
        others_numbers=told(coarse, EffectUnit.of(teller.quantity)._replace(noun="")).brief if coarse else "",
    )


def _margin(finding: Finding) -> float:
    effect = finding.effect
    return math.inf if effect is None or math.isnan(effect.margin) else effect.margin


def _papers(verdict: Verdict, shown: Finding, comparisons: int, teller: Teller) -> list[ToldEffect]:
    """The paper's numbers at the shown place, one for each of its GPUs, or the only ones it has."""
    found = [one for one in verdict.findings if teller.place(one) == shown.place]
    if not found and comparisons == 1:
        found = [*verdict.findings]
    return [teller.tell(one) for one in found]


def _joined(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def _reason(verdict: Verdict) -> str:
    """Reason why a claim is not checkable."""
    unclear = [one for one in verdict.findings if one.decision == "not checkable"]
    if unclear:
        return f"{unclear[0].place}: {unclear[0].numbers}"
    return f"there is no number for {verdict.missing[0]}" if verdict.missing else "there is nothing to compare"


def cause(outcome: Outcome) -> Cause:
    """The cause of a claim that is not reproduced; only requested for these."""
    claim = outcome.claim
    because = claim.because if isinstance(claim, Explained) else None
    said = Cause("said", whole(because)) if because else None
    if not isinstance(claim, Claim) or claim.experiment is None:
        return said or Cause("none")
    experiment, found = claim.experiment, outcome.experiment
    text = whole(experiment.cause)
    where = f"`{experiment.target}`" if experiment.target else "this table"
    if found is None or found.decision == "not checkable":
        return said or Cause("not computed", text, where)
    shown = min((one for one in found.findings if one.decision == found.decision), key=_margin)
    tested = Cause(found.decision, text, where, f"{shown.place}: {told(shown).brief}")
    return tested if tested.known or said is None else said


def clearest(found: Sequence[Saying]) -> Saying:
    """The saying with the least doubt from noise, preferably one whose text is not about a size too."""
    return max(found, key=lambda one: (not one.part, one.clear))
