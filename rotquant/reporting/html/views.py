"""What the page's template prints: standings turned into cards of plain text. All escaping is left to the template."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from rotquant.foundation.errors import ResultError
from rotquant.reporting.claims import Outcome
from rotquant.reporting.figures.draw import figure_path
from rotquant.reporting.html.grid import Cell, Grid
from rotquant.reporting.html.inline_svg import inline_svg
from rotquant.reporting.html.speed import speed_facts, speed_grids
from rotquant.reporting.pages.values import printed_decimals
from rotquant.reporting.pages.verdicts import findings
from rotquant.reporting.scoreboard import Standing, subjects, summary
from rotquant.reporting.speed.claims import Outcome as SpeedOutcome
from rotquant.reporting.words.describe import is_stand_in, model_name
from rotquant.reporting.words.numbers import not_finite, show, words
from rotquant.study.project import Project
from rotquant.study.quantities import Quantity, quantities
from rotquant.study.results import REPORTS, RunResult, read_result, rotations_of, run_path, table_path
from rotquant.study.speed.definitions import Drawing, SpeedTable
from rotquant.study.tables import Figure, Table
from rotquant.study.values import Number, Values, known_quantities, main_quantities

#: Quantities share one grid while a line holds no more numbers than this.
_WIDTH = 8


@dataclass(frozen=True)
class ClaimView:
    """A claim with its outcome in words; `why` explains a failure."""

    text: str
    section: str
    note: str | None
    outcome: Literal["holds", "fails", "not checkable"]
    papers: Literal["holds", "fails", "not checkable"]
    why: str | None
    ours: str
    published: str


@dataclass(frozen=True)
class RunView:
    """One run: where it stands, its number, and the path of its file from the page."""

    row: str
    column: str
    seed: int
    number: str
    key: str
    path: str


@dataclass(frozen=True)
class Card:
    """One target as the page shows it."""

    standing: Standing
    caption: str
    figure: Markup | None
    figure_caption: str
    notes: tuple[str, ...]
    grids: tuple[Grid, ...]
    tasks: tuple[tuple[str, tuple[Grid, ...]], ...]
    claims: tuple[ClaimView, ...]
    facts: tuple[tuple[str, str], ...]
    runs: tuple[RunView, ...]
    links: tuple[tuple[str, str], ...]

    @property
    def outcomes(self) -> str:
        """The outcomes that occur among its claims, as the filter reads them."""
        return " ".join(dict.fromkeys(claim.outcome.replace(" ", "-") for claim in self.claims))


@dataclass(frozen=True)
class Paper:
    """One paper's section of the page: cards of what is done, and standings of what is not; counts in a sentence."""

    id: str
    title: str
    summary: str
    cards: tuple[Card, ...]
    pending: tuple[Standing, ...]


def papers(project: Project, found: Mapping[str, Sequence[Standing]]) -> list[Paper]:
    """The sections of the page.

    Raises:
        ResultError: a figure is damaged.
    """
    titles = subjects(project)
    return [
        Paper(
            paper,
            titles[paper],
            summary(group) if any(standing.listed for standing in group) else "",
            tuple(_card(project, standing) for standing in group if standing.status != "not yet"),
            tuple(standing for standing in group if standing.status == "not yet"),
        )
        for paper, group in found.items()
    ]


def _card(project: Project, standing: Standing) -> Card:
    table, values = standing.table, standing.values
    if standing.speed is not None:
        return _speed_card(project, standing, standing.speed)
    if table is None or values is None:
        return Card(standing, "", None, "", (), (), (), (), (), (), _links(project, standing))
    results = _results(project, values)
    return Card(
        standing,
        table.caption,
        _figure(project, table.id, table.figure),
        table.figure.caption if table.figure else "",
        (*not_finite(project.quantities(table), values), *table.notes),
        _main_grids(project, table, values),
        _task_grids(project, table, values),
        tuple(_claim(outcome) for outcome in standing.claims),
        _facts(project, table, results),
        _runs(project, table, values),
        _links(project, standing),
    )


def _speed_card(project: Project, standing: Standing, table: SpeedTable) -> Card:
    return Card(
        standing,
        table.caption,
        _figure(project, table.id, table.drawing),
        table.drawing.caption if table.drawing else "",
        table.notes,
        speed_grids(project, table),
        (),
        tuple(_claim(outcome) for outcome in standing.claims),
        speed_facts(project, table),
        (),
        _links(project, standing),
    )


def _figure(project: Project, name: str, figure: Figure | Drawing | None) -> Markup | None:
    path = project.root / figure_path(name)
    if figure is None or not path.exists():
        return None
    return Markup(inline_svg(path, name, figure.caption))


def _links(project: Project, standing: Standing) -> tuple[tuple[str, str], ...]:
    """Files beside the page that exist: (words, path). The page of a report is written with the index."""
    files = [("full report", REPORTS / f"{standing.id}.md", ".html"), ("table as CSV", table_path(standing.id), ".csv")]
    return tuple(
        (text, os.path.relpath(path.with_suffix(shown), REPORTS))
        for text, path, shown in files
        if (project.root / path).exists()
    )


def _main_grids(project: Project, table: Table, values: Values) -> tuple[Grid, ...]:
    """Ours beside the paper's: one grid of all main quantities where a line can hold them, else one each."""
    mains = main_quantities(project, table)
    together = len(project.columns(table)) * len(mains) * 2 <= _WIDTH
    return tuple(
        _main_grid(project, table, values, group) for group in ([mains] if together else [(q,) for q in mains])
    )


def _main_grid(project: Project, table: Table, values: Values, group: Sequence[Quantity]) -> Grid:
    digits = {quantity.name: printed_decimals(values, quantity) for quantity in group}
    remarks = {column: _remark(project, table, column) for column in project.columns(table)}
    distinct = set(remarks.values())
    common = distinct.pop() if len(remarks) > 1 and len(distinct) == 1 else ""
    heads, groups = [], []
    pairs: list[tuple[str, str, bool]] = []
    for column in project.columns(table):
        before = len(heads)
        for quantity in group:
            printed = any((row.name, column, quantity.name) in values.published for row in table.rows)
            pairs.append((column, quantity.name, printed))
            heads += [quantity.title, "published"] if printed else [quantity.title]
        groups.append((column, "" if common else remarks[column], len(heads) - before))

    def cells(row: str) -> Iterator[Cell]:
        for column, name, printed in pairs:
            yield Cell(_ours(values.get((row, column, name)), max(2, digits[name])), "ours")
            if printed:
                yield Cell(_paper(values, (row, column, name), digits[name]), "published")

    lines = tuple(((row.name, *map(str, row.labels)), tuple(cells(row.name))) for row in table.rows)
    caption = "; ".join([*map(_caption, group), *([f"all columns {common}"] if common else [])])
    return Grid(caption, ("Method", *table.label_columns), tuple(groups), tuple(heads), lines)


def _remark(project: Project, table: Table, column: str) -> str:
    """What a column is computed on, where its name does not say it."""
    slot = project.slot(table, column)
    here = f"here: {model_name(slot)}" if is_stand_in(slot) else ""
    return here if column == slot.name else f"on {slot.name}{f' ({here})' if here else ''}"


def _ours(value: Number | None, digits: int = 2) -> str:
    return "-" if value is None else show(value.mean, value.deviation, digits)


def _paper(values: Values, place: tuple[str, str, str], digits: int) -> str:
    number = values.published.get(place)
    return show(number and number.mean, decimals=digits)


def _caption(quantity: Quantity) -> str:
    unit = f" ({quantity.unit})" if quantity.unit else ""
    text = f"{words(quantity)}{unit}, {quantity.better} is better"
    return text[0].upper() + text[1:]


def _task_grids(project: Project, table: Table, values: Values) -> tuple[tuple[str, tuple[Grid, ...]], ...]:
    """Accuracy task by task, for each column: ours by our tasks, and the paper's by its own."""
    ours = [quantity for quantity in project.quantities(table) if quantity.chance is not None]
    papers = [quantity for quantity in known_quantities(project, table, values).values() if quantity.chance is not None]
    found = []
    numbers = {place: _ours(value) for place, value in values.items()}
    printed = {place: show(number.mean) for place, number in values.published.items()}
    for column in project.columns(table) if ours else ():
        shown = [
            task for task in papers if any((row.name, column, task.name) in values.published for row in table.rows)
        ]
        grids = [_task_grid(table, column, ours, numbers, "ours")]
        if shown:
            grids.append(_task_grid(table, column, shown, printed, "published"))
        found.append((column, tuple(grids)))
    return tuple(found)


def _task_grid(
    table: Table,
    column: str,
    tasks: Sequence[Quantity],
    numbers: Mapping[tuple[str, str, str], str],
    origin: Literal["ours", "published"],
) -> Grid:
    lines = [
        ((row.name,), tuple(Cell(numbers.get((row.name, column, task.name), "-"), origin) for task in tasks))
        for row in table.rows
    ]
    chance = tuple(Cell(show(task.chance, decimals=1), "chance") for task in tasks)
    whose = "computed here" if origin == "ours" else "published"
    heads = tuple(task.title for task in tasks)
    return Grid(f"Accuracy (%) by task, {whose}", ("Method",), (), heads, (*lines, (("chance",), chance)))


def _claim(outcome: Outcome | SpeedOutcome) -> ClaimView:
    names = {True: "holds", False: "fails", None: "not checkable"}
    claim, here = outcome.claim, names[outcome.ours.holds]
    return ClaimView(
        claim.text,
        claim.section,
        claim.note,
        here,
        names[outcome.papers.holds],
        claim.if_it_fails if here == "fails" else None,
        findings(outcome.ours),
        findings(outcome.papers),
    )


def _results(project: Project, values: Values) -> dict[str, RunResult]:
    """The run files behind a table that are there, by key: a table may be older than the configuration."""
    found = {}
    for key in dict.fromkeys(key for number in values.values() for key in number.runs):
        try:
            found[key] = read_result(project.root / run_path(key))
        except ResultError:
            continue
    return found


def _facts(project: Project, table: Table, results: Mapping[str, RunResult]) -> tuple[tuple[str, str], ...]:
    """On which models, with which seeds, when, where and by which code."""
    if not results:
        return ()
    runs = [result.run for result in results.values()]
    records = [result.provenance for result in results.values()]
    checkpoints = {run.checkpoint: run.checkpoint_digest for run in runs}
    stages = {result.run.weights_key: result.weights for result in results.values() if result.weights}
    learned = rotations_of(results.values())
    dates = sorted(str(record.get("date", "-")) for record in records)
    computed = [*records, *stages.values(), *learned.values()]
    seconds = sum(float(record.get("seconds", 0.0)) for record in computed)
    rotations = f", {len(learned)} learned rotations" if learned else ""
    commits = {str(record.get("git_commit") or "not a git checkout")[:12] for record in records}
    return (
        ("Models", "; ".join(f"{Path(name).name} (digest {digest[:12]})" for name, digest in checkpoints.items())),
        ("Seeds", ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))),
        (
            "Computed",
            f"{dates[0]} to {dates[-1]} (UTC), {seconds:.0f} s in {len(results)} runs{rotations} and "
            f"{len(stages)} weights",
        ),
        ("Hardware", _list(record.get("gpu") or record.get("cpu") for record in records)),
        ("Code", f"commit {_list(sorted(commits))}; digest {_list(record.get('code_digest') for record in records)}"),
    )


def _list(items: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(item) for item in items)) or "-"


def _runs(project: Project, table: Table, values: Values) -> tuple[RunView, ...]:
    """Every run once, with the main quantity of what it measures."""
    first = {quantities(cell.metric)[0].name: quantities(cell.metric)[0] for cell in project.cells(table.id)}
    return tuple(
        RunView(row, column, seed, f"{first[name].title} {show(number)}", key, os.path.relpath(run_path(key), REPORTS))
        for (row, column, name), value in values.items()
        if name in first
        for key, seed, number in zip(value.runs, value.seeds, value.values, strict=True)
    )
