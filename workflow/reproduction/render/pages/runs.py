"""The report of a table of accuracy: ours next to the paper's, claims, and each number's origin.

Numbers computed here are upright, *published* ones in italics. Nothing is printed that no result file has.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.claims.claims import outcomes, tested_here
from reproduction.frame.values import Values
from reproduction.identity.names import HISTORY_FILE, RESULTS
from reproduction.identity.run import Run
from reproduction.render.pages import origins
from reproduction.render.pages.effort import given
from reproduction.render.pages.grids import change_grids, endpoint_grids, task_grids, value_grids
from reproduction.render.pages.model import Report
from reproduction.render.pages.trained import trained
from reproduction.render.pages.verdicts import judged_report
from reproduction.run.provenance import RotationProvenance, told
from reproduction.run.results import rotations_of
from reproduction.tables.project import Project
from reproduction.tables.quantities import ANSWER_FLIPS, ROUGE_L, quantities
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import Task, quoted, task_names
from reproduction.words.describe import corpus_words, has_hypotheses, is_about_models, is_stand_in
from reproduction.words.numbers import broken, not_finite
from reproduction.words.templates import sentences

WORDS = "pages/runs.jinja"

#: Where the models lie that ship with the project.
SHIPPED = Path("workflow/resources/models")

_BITS = (
    "Bits per weight count all that a quantized linear layer stores: codes, float32 scales, zero points of one byte, "
    "outlier features and tables. They count permutations and rotations that a method keeps, and codes without padding."
)
_UNLIKE = (
    "Rows with a prefix are compared with others by perplexity, not by KL divergence. These runs are from before the "
    "reference of a row with a prefix was the full-precision model with the same prefix."
)
_ALIKE = "The reference of a row with a prefix is the full-precision model with the same prefix."


class Measure(NamedTuple):
    """One way to measure accuracy: its tasks, each with its number of items, where known."""

    metric: ZeroShot
    corpus: str | None
    rouge: bool
    tasks: list[tuple[Task, float | None]]


def runs_report(project: Project, table: RunTable, values: Values, results: origins.Results) -> Report:
    """Build the report of a table's values.

    Args:
        results: the runs of the values. Some runs of an older table may be missing; their facts are left out.
    """
    on_models = is_about_models(table)
    bits = origins.row_bits(project, table, results) if on_models else {}
    grids = value_grids(project, table, values, bits)
    picture = project.picture(table)
    decided = outcomes(project, table, values, results)
    causes = () if decided else tested_here(project, table, values, results)
    unlike = any(not result.reference_is_alike for result in results.values())
    return judged_report(
        table,
        decided or causes,
        "Causes" if causes else "Hypotheses" if has_hypotheses(table) else "Claims",
        reading=_reading(project, table, any(grid.best for grid in grids)) if on_models else "",
        picture=None if picture == table.id else picture,
        grids=grids,
        notes=(
            *_footnotes(project, table, values),
            *project.remarks(table),
            *([_BITS] if bits else []),
            *([_UNLIKE] if unlike and table.claims and project.endpoints(table) else []),
            *broken(table.baseline, values),
        ),
        facts=(*origins.model_facts(results, on_models), *origins.origin_facts(results)),
        template="pages/runs.md.jinja",
        details={**_details(project, table, values, results), "references": "" if unlike else _ALIKE},
    )


def _details(project: Project, table: RunTable, values: Values, results: origins.Results) -> dict[str, Any]:
    """Content of the page alone: changes, tasks, checkpoints, recipes and learned rotations."""
    runs = [run for cell in project.cells(table.id) for run in cell.runs]
    rotations = rotations_of(results.values()).items()
    rows: dict[str, dict[str, None]] = {}
    for cell in project.cells(table.id):
        for rotation in rotations_of(results[run.key] for run in cell.runs if run.key in results):
            rows.setdefault(rotation, {})[cell.row] = None
    divergences, odds = endpoint_grids(project, table, values)
    measures = list(_measures(project, table, results))
    return {
        "noise": "seeds",
        "baseline": table.baseline,
        "changes": change_grids(project, table, values),
        "divergences": divergences,
        "odds": odds,
        "has_flips": any(name.endswith(ANSWER_FLIPS.name) for _, _, name in values),
        "measures": measures,
        "tasks": task_grids(project, table, values) if measures else (),
        "columns": origins.computed_on(project, table) if is_about_models(table) else (),
        "groups": any(origins.has_groups(run.recipe) for run in runs),
        "outliers": any(getattr(method, "features", None) for run in runs for method in run.recipe.methods.values()),
        "settings": origins.row_settings(project, table),
        "budgets": given(project, table, results),
        "trained": trained(project, table, results),
        "measurements": origins.measurements(project, table),
        "dtype": runs[0].dtype,
        "rotations": [
            (
                told(record, RotationProvenance),
                RESULTS / "rotations" / project.results.rotation(key).name / HISTORY_FILE,
                rows.get(key, ()),
            )
            for key, record in rotations
        ],
    }


def _reading(project: Project, table: RunTable, best: bool) -> str:
    """Whose the numbers are, and on which models."""
    slots = list(dict.fromkeys(project.slot(table, column).name for column in project.columns(table)))
    stand_ins = [name for name in slots if is_stand_in(project.config.slot(name))]
    places = [project.config.slot(name).checkpoint for name in stand_ins]
    return sentences(
        WORDS,
        "reading",
        slots=slots,
        stand_ins=() if has_hypotheses(table) else stand_ins,
        small=all(Path(place).is_relative_to(SHIPPED) for place in places),
        printed=bool(project.published(table)),
        best=best,
    )[0]


def _footnotes(project: Project, table: RunTable, values: Values) -> tuple[str, ...]:
    """Notes on the ±, on non-finite or missing numbers, and on single columns."""
    printed, computed = project.published(table).items(), project.columns(table)
    return sentences(
        WORDS,
        "footnotes",
        table=table,
        seeds=project.seeds(table) if is_about_models(table) else (),
        columns=computed,
        not_finite=not_finite(project.quantities(table), values),
        own={column for (_, column, _), number in printed if number.file == table.published},
        added=[row.name for row in project.config.rows.get(table.id, ())],
        skipped=[column.name for column in table.columns if column.name not in computed],
    )


def _measures(project: Project, table: RunTable, results: origins.Results) -> Iterator[Measure]:
    """Each way in which a table measures accuracy, by the first run that uses it; none without tasks."""
    found: dict[ZeroShot, Run] = {}
    for run in (cell.runs[0] for cell in project.cells(table.id)):
        if isinstance(run.metric, ZeroShot):
            found.setdefault(run.metric, run)
    for metric, run in found.items():
        known = results[run.key].metrics if run.key in results else {}
        tasks = [(quoted(metric, name), known.get(f"{name}.items")) for name in task_names(metric)]
        yield Measure(metric, corpus_words(run), ROUGE_L in quantities(metric), tasks)
