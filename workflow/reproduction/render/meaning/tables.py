"""The meaning of an accuracy table's page: its claims, else the causes that it tests, else its effects or rows."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from reproduction.claims.claims import Answer, Outcome, Verdict, by_experiment, once
from reproduction.claims.widths import Course, courses
from reproduction.frame.values import Values, known_quantities, main_quantities
from reproduction.render.meaning.pages import VERDICTS, Words, clauses, grouped, of_claims, sentence
from reproduction.render.meaning.sayings import Saying, Teller, sayings
from reproduction.render.meaning.words import EffectUnit, short, told, upper, whole
from reproduction.run.results import RunResult
from reproduction.tables.checks import Claim, Statement
from reproduction.tables.project import Project
from reproduction.tables.quantities import DESCRIPTIVE, Quantity
from reproduction.tables.tables import RunTable
from reproduction.words.describe import has_hypotheses, is_about_models, is_of_the_paper, is_stand_in
from reproduction.words.numbers import show, show_change

Results = Mapping[str, RunResult]


def meaning_of(
    project: Project, table: RunTable, values: Values, results: Results, decided: Sequence[Outcome]
) -> list[str]:
    """Up to three sentences on a table; none where there is nothing to report.

    Args:
        decided: its claims. Repeated mechanisms are told once.
    """
    return (
        of_claims(once(decided), lambda outcome: _said(project, table, values, outcome), words_of(project, table))
        or _of_causes(project, table, values, results)
        or of_effects(courses(project, table, values, results))
        or _of_rows(project, table, values)
    )


def words_of(project: Project, table: RunTable) -> Words:
    """The words of a table's page about its claims."""
    nothing = "nothing that can be tested here speaks against that"
    said = (
        Words()
        if is_of_the_paper(table)
        else Words("the hypothesis is that", nothing, claims="hypotheses")
        if has_hypotheses(table)
        else Words("it is reported that", nothing)
    )
    if not is_about_models(table):
        return said
    stand_ins = [is_stand_in(project.slot(table, column)) for column in project.columns(table)]
    where = "on the stand-ins" if all(stand_ins) else "on the paper's models" if not any(stand_ins) else "here"
    return said._replace(where=where)


def _said(project: Project, table: RunTable, values: Values, outcome: Outcome) -> Iterator[Saying]:
    claim = outcome.claim
    name = claim.quantity if isinstance(claim, Claim) else None
    quantity = project.quantities(table)[0] if name is None else known_quantities(project, table, values)[name]
    unit = EffectUnit.of(quantity)
    return sayings(outcome, Teller(lambda finding: told(finding, unit), quantity))


def _of_causes(project: Project, table: RunTable, values: Values, results: Results) -> list[str]:
    """Sentences of a page without claims whose numbers test causes of failed claims on other pages."""
    said = list(_causes(project, table, values, results))
    if not said:
        return []
    found = {name: grouped(said, *verdicts) for name, verdicts in VERDICTS.items()}
    first, *others = clauses("experiments", total=len(said), **found)
    return [*filter(None, (sentence([first]), sentence(others)))]


def _causes(project: Project, table: RunTable, values: Values, results: Results) -> Iterator[Saying]:
    measured = {quantity.name: quantity for quantity in project.quantities(table)}
    claims = (claim for other in project.of(RunTable).values() for claim in other.claims)
    experiments = (claim.experiment for claim in claims if claim.experiment)
    for experiment in {one.cause: one for one in experiments if one.target == table.id}.values():
        quantity = measured[experiment.quantity or next(iter(measured))]
        verdict, quantity = by_experiment(
            project, table, experiment.check, quantity, values.ours, results, experiment.columns
        )
        unit = EffectUnit.of(quantity)
        outcome = Outcome(
            Statement(text=upper(whole(experiment.cause)), section="-"), {"mechanism": Answer(verdict, Verdict(()))}
        )
        yield from sayings(outcome, Teller(lambda finding, unit=unit: told(finding, unit)))


def of_effects(found: Sequence[Course]) -> list[str]:
    """Sentences of a page whose figure draws effects over widths."""
    ways = Counter(course.way for course in found)
    drawn = [course for course in found if course.line and course.rises]
    if not drawn:
        return []
    course = max(drawn, key=_clearness)
    rises = {
        width: fmean(r.effect for c, r in course.rises.items() if course.widths[c] == width)
        for width in course.widths.values()
    }
    least, most = min(rises), max(rises)
    ends = {"least": least, "most": most, "from_": show_change(rises[least]), "to": show_change(rises[most])}
    said = clauses(
        "effects", total=len(found), ways=ways, name=course.effect.name, **ends, papers=show_change(course.papers)
    )
    return [sentence([clause]) for clause in said]


def _clearness(course: Course) -> float:
    """The slope divided by the width of its interval."""
    line = course.line
    if line is None:
        return 0.0
    return abs(line.slope) / (line.high - line.low) if line.high > line.low else math.inf


def _of_rows(project: Project, table: RunTable, values: Values) -> list[str]:
    """Sentences of a page without any claim: its best and worst rows by the main quantity, in how many columns."""
    quantity = main_quantities(project, table)[0]
    columns, losses = project.columns(table), _losses(project, table, values, quantity)
    if quantity.text or quantity in DESCRIPTIVE or not losses:
        return []
    rows = list(dict.fromkeys(row for row, _ in losses))
    said: list[str] = []
    for extreme, choose in (("best", min), ("worst", max)):
        there = {
            column: choose((row for row in rows if (row, column) in losses), key=lambda row: losses[row, column])
            for column in columns
            if any((row, column) in losses for row in rows)
        }
        row, count = Counter(there.values()).most_common(1)[0]
        column = next(name for name, one in there.items() if one == row)
        numbers = [values.ours[name, column, quantity.name].mean for name in (row, table.baseline)]
        papers = [values.published.get((name, column, quantity.name)) for name in (row, table.baseline)]
        said += clauses(
            "rows",
            extreme=extreme,
            total=len(rows),
            row=row,
            baseline=table.baseline,
            count=count,
            columns=len(there),
            column=column,
            numbers=[show(number) for number in numbers],
            papers=[show(number.mean) for number in papers if number is not None],
            unit=EffectUnit.of(quantity).one,
            noun=short(quantity),
        )
        if len(rows) == 1:
            break
    return [sentence([clause]) for clause in said]


def _losses(project: Project, table: RunTable, values: Values, quantity: Quantity) -> dict[tuple[str, str], float]:
    """Loss of each row against the baseline by (row, column), where both are numbers."""
    found = {}
    for (row, column, name), number in values.ours.items():
        base = values.ours.get((table.baseline, column, name))
        ours = name == quantity.name and row != table.baseline
        if ours and base is not None and quantity.checkable(number.mean, base.mean):
            found[row, column] = quantity.loss(number.mean, base.mean)
    return found
