"""Claims: statements of a paper about a table, decided by the table's numbers, ours and the paper's own.

The rule. A check states the region of an effect: a gain above 0, a loss of at most 2 %. For our numbers the effect is
the mean of paired differences over the same seeds and the same windows or items, with a 95 % interval (`estimates`). A
comparison *holds* where the whole interval is inside the region, and is *contradicted* where all of it is outside. Each
is wrong with a probability of at most 2.5 %, if the truth is on the border. Otherwise it is *undecided*, with the
number of seeds or items that would decide it at this effect and this noise.

The smallest difference of KL divergences that matters is 5 % of the other row's, either way
(`findings.NO_DIFFERENCE`). An interval within it is *no effect* where a claim says "better", wherever 0 lies; "no
worse" allows as much.

A claim of several comparisons holds where all do. Since all must, their number needs no correction (Berger 1982,
intersection-union tests). It is contradicted, or without effect, where one is, and there the number matters: Holm's
rule (1979) limits the probability that any is called so wrongly to 2.5 %, or to 5 % where there are two near borders.
Where one endpoint supports a claim and the other is against it, *endpoints disagree*, and the claim is open.

Numbers without noise, a fact of one network or the paper's printed number, are compared directly. A random number of
one seed decides nothing. *Not checkable* is a comparison that lacks a number or its noise, overflowed, or was measured
on different windows or items. So is a direction of rows at chance, none of which exceeds the score of knowing nothing
(`guessing`): neither accuracy nor the log-odds of the same answers say which is better. An Inf or NaN printed by a
paper means that the network broke down, and ranks worst. No network is compared with itself, under any names, and
columns computed by the same runs count once. A column outside a claim's regime by our numbers is left out, and
a claim without any other column is *not testable on this model* (`regimes`).

A claim's mechanism is judged anywhere, its statement about the paper's setting only on the paper's own models or GPU,
and a fact nowhere (`tables.checks`). A claim that is not reproduced is followed by its experiment's finding.

On stand-ins a mechanism is decided on the finest quantity that the compared rows have: KL divergence from the
full-precision model instead of perplexity, and instead of the average accuracy too, whose noise is many times the
effect; MMLU counts as an average. It decides the share of right programs too, on text that is code; not sums, of whose
text a fine-tuned model predicts the results alone. Log-odds of the right answer take the place of accuracy where the
rows have no perplexity, and where the claim is about another task. Of rows without accuracies, whose tasks a
configuration leaves out, KL says what they would. Accuracies at chance are not checkable by KL either.
All compared numbers must have the quantity, and none may be the full-precision model's own KL, which is always 0. The
reference of a row with a prefix is the full-precision model with the same prefix; runs from before that rule have
another reference, and KL does not compare the two (`endpoints`). The paper's quantity is shown next to it and decides
nothing, unless it says the opposite. On the paper's own models the
paper's quantity decides, as anywhere for the size of a loss. What a paper says of the same rows by perplexity and by
accuracy is one mechanism where one quantity decides both: it counts once (`repeated`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from reproduction.claims.effects import CHECKS, Numbers, View
from reproduction.claims.endpoints import Endpoints
from reproduction.claims.findings import AGAINST, Decision, Finding, allowing_for_their_number
from reproduction.claims.regimes import Absent, outside
from reproduction.frame.values import Values, known_quantities, numbers_of
from reproduction.run.results import RunResult, read_result
from reproduction.tables.checks import (
    About,
    Claim,
    Statement,
    is_direction,
    named_by_experiment,
    names_in,
    quantities_in,
)
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import RunTable, Table
from rotquant.foundation.errors import ResultError, lookup
from rotquant.foundation.files import canonical_json

S = TypeVar("S", bound=Statement)

Shown = Literal[
    "reproduced",
    "not reproduced",
    "no effect",
    "undecided",
    "endpoints disagree",
    "not checkable",
    "not testable on this model",
    "not tested here",
]
Results = Mapping[str, RunResult]
Check = Mapping[str, Mapping[str, Any]]

_WORDS: dict[Decision, Shown] = {
    "holds": "reproduced",
    "contradicted": "not reproduced",
    "no effect": "no effect",
    "undecided": "undecided",
    "not checkable": "not checkable",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of one set of numbers on a check.

    missing: comparisons that lack a number. testable: whether a model is in the claim's regime. quantity: what is
    compared; None for times, memory and settings.
    """

    findings: tuple[Finding, ...]
    missing: tuple[str, ...] = ()
    testable: bool = True
    quantity: Quantity | None = None

    @property
    def decision(self) -> Decision:
        """The rule for several comparisons: one that is not checkable allows no verdict but one against the claim."""
        found = [finding.decision for finding in self.findings if finding.compares]
        for decision in AGAINST:
            if decision in found:
                return decision
        if not found or "not checkable" in found:
            return "not checkable"
        return "undecided" if "undecided" in found else "holds"


@dataclass(frozen=True)
class Answer:
    """The verdict on one check of a claim by our numbers and by the paper's own. judged: whether ours decide.

    on: the deciding quantity, where the table has a finer one than the paper's. second: the verdict here by the
    paper's quantity, where another one decides.
    """

    ours: Verdict
    papers: Verdict
    judged: bool = True
    on: Quantity | None = None
    second: Verdict | None = None

    @property
    def here(self) -> Shown:
        """The decision by our numbers; none where one endpoint supports the claim and the other is against it."""
        if not self.judged:
            return "not tested here"
        if not self.ours.testable:
            return "not testable on this model"
        said = {self.ours.decision, self.ours.decision if self.second is None else self.second.decision}
        return "endpoints disagree" if "holds" in said and said & {*AGAINST} else _WORDS[self.ours.decision]

    @property
    def there(self) -> Shown | None:
        """The decision by the paper's quantity, where another one decides."""
        return None if self.second is None else _WORDS[self.second.decision]


@dataclass(frozen=True)
class Outcome:
    """A claim with an answer to each of its checks, and our numbers' verdict on its experiment.

    experiment: None where there is none, where it is not needed, and where its numbers are not computed.
    """

    claim: Statement
    answers: Mapping[About, Answer]
    experiment: Verdict | None = None

    @property
    def mechanism(self) -> Answer | None:
        """The answer about its direction."""
        return self.answers.get("mechanism")

    @property
    def setting(self) -> Answer | None:
        """The answer about the paper's setting."""
        return self.answers.get("setting")

    @property
    def fact(self) -> Answer | None:
        """The numbers of a fact, which is not judged."""
        return self.answers.get("fact")

    @property
    def is_not_reproduced(self) -> bool:
        """Whether a judged check is not reproduced."""
        return _calls_for_a_cause(self.answers)


@dataclass(frozen=True)
class Score:
    """Numbers of mechanisms that are reproduced, not reproduced, without effect, undecided and not checkable.

    For a reader they are three: `agrees`, `disagrees`, and `untested` here.
    """

    reproduced: int = 0
    not_reproduced: int = 0
    no_effect: int = 0
    undecided: int = 0
    unchecked: int = 0

    @property
    def total(self) -> int:
        """Number of all mechanisms."""
        return self.agrees + self.disagrees + self.untested

    @property
    def agrees(self) -> int:
        """Those that are reproduced."""
        return self.reproduced

    @property
    def disagrees(self) -> int:
        """Those that are not, or have no effect."""
        return self.not_reproduced + self.no_effect

    @property
    def untested(self) -> int:
        """Those that the numbers here do not decide."""
        return self.undecided + self.unchecked


def decided(
    claims: Iterable[S],
    answers: Callable[[S], Iterable[tuple[About, Answer]]],
    tested: Callable[[S], Verdict | None] = lambda _: None,
) -> tuple[Outcome, ...]:
    """Decide the claims of any source.

    Args:
        answers: to each check of a claim, by its source's numbers: with seeds and windows (`outcomes`),
            percentiles of replays (`replays`), or as facts.
        tested: verdict of a claim's experiment, requested where a check is not reproduced.
    """
    found = []
    for claim in claims:
        answered = dict(answers(claim))
        found.append(Outcome(claim, answered, tested(claim) if _calls_for_a_cause(answered) else None))
    return tuple(found)


def outcomes(project: Project, table: RunTable, values: Values, results: Results) -> tuple[Outcome, ...]:
    """Decide every claim of a table by our numbers and by all that the paper prints, column computed here or not.

    Without a column to compute, claims have no subject, and none is decided. So it is with a claim about a quantity
    that only columns measure which are not computed.

    Args:
        results: the runs of the values by key, which know the windows or items; some may be missing.

    Raises:
        ConfigError: a claim about a quantity that is neither measured nor printed.
    """
    measured = project.quantities(table)
    if not measured:
        return ()
    known, main = known_quantities(project, table, values), measured[0]
    columns = project.columns(table)
    claims = [
        claim
        for claim in table.claims
        if claim.quantity is None or claim.quantity in known or not claim.columns or {*columns} & {*claim.columns}
    ]
    endpoints = Endpoints.of(project, table, results)
    unknown = f"table {table.id}: a claim is about the unknown quantity"

    def answers(claim: Claim) -> Iterator[tuple[About, Answer]]:
        quantity = main if claim.quantity is None else lookup(known, claim.quantity, unknown)
        own = endpoints.are_the_papers(claim.columns)
        for name in (bound for check in claim.checks.values() for bound in quantities_in(check)):
            lookup(known, name, unknown)
        absent = _outside(project, table, claim, quantity, values.ours, results)
        computed = [name for name in columns if name in (claim.columns or (name,))] or claim.columns
        for about, check in claim.checks.items():
            ours = judge(check, table, values.ours, quantity, results, computed, absent)
            papers = judge(check, table, values.published, quantity, columns=claim.columns)
            finer = None
            if about == "mechanism":
                at_chance = ours.decision == "not checkable"
                finer = endpoints.instead(check, quantity, values.ours, computed, at_chance)
            if finer is None:
                said = about == "mechanism" and endpoints.has_finer(quantity)
                judged = about == "mechanism" or own
                yield about, Answer(ours, papers, judged, quantity if said else None)
            else:
                decides = judge(check, table, values.ours, finer, results, computed, absent)
                yield about, Answer(decides, papers, on=finer, second=ours)

    return decided(claims, answers, lambda claim: _tested(project, table, claim))


def _calls_for_a_cause(answers: Mapping[About, Answer]) -> bool:
    return any(
        answers[about].here in ("not reproduced", "no effect") for about in ("mechanism", "setting") if about in answers
    )


def _tested(project: Project, table: RunTable, claim: Claim) -> Verdict | None:
    """Verdict of a claim's experiment by our numbers; None without one, or where some of its runs are missing."""
    if (experiment := claim.experiment) is None:
        return None
    if (experiment.target or table.id) not in project.tables:
        return None
    target = project.one(RunTable, experiment.target or table.id)
    inherited = claim if target.id == table.id else None
    columns = experiment.columns or (inherited and inherited.columns)
    quantity = _quantity(project, target, experiment.quantity or (inherited and inherited.quantity))
    rows = {name for kind, name in named_by_experiment(experiment) if kind == "row"}
    found = _measured(project, target, rows, columns)
    return None if found is None else by_experiment(project, target, experiment.check, quantity, *found, columns)


def _quantity(project: Project, table: RunTable, name: str | None) -> Quantity:
    """A quantity that a table measures, by default its main one."""
    measured = {quantity.name: quantity for quantity in project.quantities(table)}
    unknown = f"table {table.id} does not measure the quantity"
    return lookup(measured, name or next(iter(measured)), unknown)


def _measured(
    project: Project, table: RunTable, rows: Collection[str], columns: Sequence[str] | None
) -> tuple[Numbers, Results] | None:
    """The numbers and runs of rows of any table; None where a run is missing."""
    cells = [
        cell for cell in project.cells(table.id) if cell.row in rows and cell.column in (columns or (cell.column,))
    ]
    try:
        found = {run.key: read_result(project.results.run(run.key)) for cell in cells for run in cell.runs}
    except ResultError:
        return None
    return numbers_of(cells, found), found


def _outside(
    project: Project, table: RunTable, claim: Claim, quantity: Quantity, numbers: Numbers, results: Results
) -> Absent:
    """The columns outside a claim's regime, by this table's numbers or by those of the table that it names."""
    if claim.regime is None:
        return {}
    columns = [name for name in table.column_names if claim.columns is None or name in claim.columns]
    target = table if claim.regime.target is None else project.one(RunTable, claim.regime.target)
    if claim.regime.quantity is not None or target.id != table.id:
        quantity = _quantity(project, target, claim.regime.quantity)
    if target.id != table.id:
        slots = {project.slot(target, name).checkpoint: name for name in reversed(project.columns(target))}
        there = {name: slots.get(project.slot(table, name).checkpoint, name) for name in project.columns(table)}
        found = _measured(project, target, claim.regime.rows, [*there.values()])
        numbers, results = found or ({}, {})
        numbers = {
            (row, name, known): number
            for (row, column, known), number in numbers.items()
            for name, other in there.items()
            if other == column
        }
    return outside(View(quantity, columns, numbers, results, ()), claim.regime)


def by_experiment(
    project: Project,
    target: RunTable,
    check: Check,
    quantity: Quantity,
    numbers: Numbers,
    results: Results,
    columns: Sequence[str] | None,
) -> Verdict:
    """The verdict on an experiment's check, decided as a mechanism is."""
    verdict = judge(check, target, numbers, quantity, results, columns)
    at_chance = verdict.decision == "not checkable"
    finer = Endpoints.of(project, target, results).instead(check, quantity, numbers, columns, at_chance)
    return verdict if finer is None else judge(check, target, numbers, finer, results, columns)


def tested_here(project: Project, table: RunTable, values: Values, results: Results) -> tuple[Outcome, ...]:
    """What a table finds of the causes that other tables' claims have it test, each cause once."""
    claims = (claim for other in project.of(RunTable).values() for claim in other.claims)
    causes = {one.cause: one for claim in claims if (one := claim.experiment) and one.target == table.id}
    found = []
    for cause, one in causes.items():
        quantity = _quantity(project, table, one.quantity)
        verdict = by_experiment(project, table, one.check, quantity, values.ours, results, one.columns)
        answer = Answer(verdict, Verdict(()), on=verdict.quantity)
        found.append(Outcome(Statement(text=f"{cause.rstrip('.')}.", section="-"), {"mechanism": answer}))
    return tuple(found)


def score(decided: Sequence[Outcome]) -> Score:
    """Count the mechanisms by our numbers, repeated ones once; settings and facts do not count."""
    found = [one.mechanism.here for one in once(decided) if one.mechanism is not None]
    named = ("reproduced", "not reproduced", "no effect", "not checkable")
    held, against, none, unchecked = (found.count(name) for name in named)
    unchecked += found.count("not testable on this model")
    return Score(held, against, none, len(found) - held - against - none - unchecked, unchecked)


def once(decided: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, repeated mechanisms left out."""
    again = repeated(decided)
    return [
        replace(one, answers={about: answer for about, answer in one.answers.items() if about != "mechanism"})
        if place in again
        else one
        for place, one in enumerate(decided)
    ]


def repeated(decided: Sequence[Outcome]) -> dict[int, int]:
    """The claims whose mechanism is another one's, by their places: equal checks of equal columns, which one quantity
    decides. The headline goes before others."""
    first: dict[tuple[str, str], int] = {}
    found = {}
    for place, one in sorted(enumerate(decided), key=lambda each: not each[1].claim.headline):
        if one.mechanism is None or one.mechanism.on is None or not isinstance(one.claim, Claim):
            continue
        said = one.claim.model_dump(mode="json", include={"mechanism", "columns", "regime"})
        before = first.setdefault((canonical_json(said), one.mechanism.on.name), place)
        if before != place:
            found[place] = before
    return found


def judge(
    check: Check,
    table: Table,
    numbers: Numbers,
    quantity: Quantity,
    results: Results | None = None,
    columns: Sequence[str] | None = None,
    absent: Absent | None = None,
) -> Verdict:
    """Decide a check by the given numbers of one quantity: ours with their `results`, or the paper's.

    Args:
        columns: the columns to check; default all.
        absent: those outside the claim's regime, with the reasons.
    """
    ((kind, arguments),) = check.items()
    absent = absent or {}
    chosen = [name for name in table.column_names if (columns is None or name in columns) and name not in absent]
    rows = [name for kind, name in names_in(check) if kind == "row"]
    view = View(quantity, chosen, numbers, results, rows, direction=is_direction(check))
    found = [*CHECKS[kind](view, **arguments), *(one for said in absent.values() for one in said)]
    findings = allowing_for_their_number([result for result in found if isinstance(result, Finding)])
    missing = tuple(dict.fromkeys(result for result in found if isinstance(result, str)))
    return Verdict(findings, missing, bool(chosen) or bool(missing) or not absent, quantity)
