"""The sentences of a page from its claims: chosen here, worded by a template."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reproduction.claims.claims import Outcome, Shown
from reproduction.render.meaning.sayings import Saying, clearest
from reproduction.render.meaning.words import upper
from reproduction.tables.checks import headline
from reproduction.words.templates import sentences

TEMPLATE = "meaning/sentences.jinja"


#: Names of verdicts in templates.
VERDICTS: dict[str, tuple[Shown, ...]] = {
    "holds": ("reproduced",),
    "denied": ("not reproduced", "no effect"),
    "open": ("undecided", "endpoints disagree"),
    "unchecked": ("not checkable", "not testable on this model"),
}


class Words(NamedTuple):
    """The words of a page about its claims.

    says: who makes them, up to the clause. nothing: for a page on which none is contradicted. where: what they are
    tested on. subject: what cannot be tested, cannot: what it cannot be tested on, has: that the subject has a number.
    see: whether the page's notes say what limits its numbers.
    """

    says: str = "the paper says that"
    nothing: str = "nothing that can be tested here speaks against the paper"
    where: str = "here"
    subject: str = "the paper's own models"
    cannot: str = "stand-ins"
    has: str = "they have"
    claims: str = "claims"
    see: bool = False


@dataclass(frozen=True)
class Group:
    """Several claims of one verdict, and one of them as an example."""

    count: int
    one: Saying


def of_claims(decided: Sequence[Outcome], say: Callable[[Outcome], Iterable[Saying]], words: Words) -> list[str]:
    """Sentences about the claims of a page; none without claims."""
    decided = [outcome for outcome in decided if outcome.answers]
    by_claim = {id(outcome.claim): [*say(outcome)] for outcome in decided}
    every = [saying for found in by_claim.values() for saying in found]
    judged = [saying for saying in every if saying.about != "fact"]
    first = headline([outcome.claim for outcome in decided])
    if first is None:
        return []
    own = by_claim[id(first)]
    if not judged:
        return _of_facts(own[0], [saying for saying in every if saying is not own[0]], words)
    one = next((saying for saying in own if saying.about != "fact"), judged[0])
    rest = [saying for saying in judged if saying is not one]
    told = (sentence(clauses("headline", one=one, words=words)), _others(rest, words), _against(one, rest, words))
    return [*filter(None, told)]


def _others(rest: Sequence[Saying], words: Words) -> str:
    """Sentence about the other claims that hold, are open or cannot be checked."""
    found = {name: grouped(rest, *verdicts) for name, verdicts in VERDICTS.items() if name != "denied"}
    total = sum(saying.here != "not tested here" for saying in rest)
    return sentence(clauses("others", total=total, **found, words=words))


def _against(one: Saying, rest: Sequence[Saying], words: Words) -> str:
    """Sentence about failed claims, each with its cause or that it is unknown, and untestable ones."""
    said = _denied(one, rest, words)
    denied = bool(said)
    if not denied and any(saying.here in (*VERDICTS["holds"], *VERDICTS["open"]) for saying in (one, *rest)):
        said.append(words.nothing)
    own = one.text if one.part == "direction" and one.papers else None  # its size was reported with its direction
    if untested := [saying for saying in rest if saying.here == "not tested here" and saying.text != own]:
        example = None if denied else next((saying for saying in untested if not saying.part), untested[0])
        further = one.here == "not tested here"
        said += clauses("untested", count=len(untested), one=example, further=further, words=words)
    return sentence(said)


def _denied(one: Saying, rest: Sequence[Saying], words: Words) -> list[str]:
    """The cause of a failed headline, the clearest other claim that fails, and the causes of all."""
    others = [saying for saying in rest if saying.here in VERDICTS["denied"]]
    denied, group = one.here in VERDICTS["denied"], grouped(others, *VERDICTS["denied"])
    count = len(others) + denied
    noted = words.see and count > 0 and not any(saying.cause.known for saying in (one, *others))
    said = clauses("cause", one=one) if denied and not noted else []
    if group is not None:
        alike = denied and one.cause == group.one.cause and not one.cause.known
        said += clauses("against", group=group, either=denied, why_not=noted or alike, words=words)
        left = [saying.cause.known for saying in others if alike or saying is not group.one]
        if left and not noted:
            known, too = sum(left), alike or not group.one.cause.known
            said += clauses("causes", known=known, unknown=len(left) - known, others=not alike, too=too)
    return [*said, *clauses("notes", count=count)] if noted else said


def _of_facts(one: Saying, rest: Sequence[Saying], words: Words) -> list[str]:
    """Sentences about facts, which are not judged: whether the numbers here agree with them."""
    groups = ([saying for saying in rest if saying.agrees is agrees] for agrees in (True, False))
    agree, differ = (Group(len(some), clearest(some)) if some else None for some in groups)
    told = (
        sentence(clauses("fact", one=one, words=words)),
        sentence(clauses("facts", total=len(rest), agree=agree, differ=differ)),
    )
    return [*filter(None, told)]


def grouped(found: Iterable[Saying], *verdicts: Shown) -> Group | None:
    """Claims with any of some verdicts; the example is the clearest of those that have numbers."""
    chosen = [one for one in found if one.here in verdicts]
    return Group(len(chosen), clearest([one for one in chosen if one.numbers] or chosen)) if chosen else None


def clauses(macro: str, **arguments: object) -> list[str]:
    """Clauses of a template's macro, one for each line."""
    return [" ".join(line.split()) for line in sentences(TEMPLATE, macro, **arguments) if line.strip()]


def sentence(said: Sequence[str]) -> str:
    """Join clauses to one sentence; empty without clauses."""
    return f"{upper('; '.join(said))}." if said else ""
