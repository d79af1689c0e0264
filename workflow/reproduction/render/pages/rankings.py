"""The report of a ranking: for each class of bits which methods are best, what cannot be told apart, and how stable
that is over seeds and models.
"""

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reproduction.claims.ranking import Class, RankedMethod
from reproduction.frame.lines import COMPUTED, to_frame
from reproduction.render.pages import origins
from reproduction.render.pages.grids import remark
from reproduction.render.pages.model import Grid, GridColumn, Report
from reproduction.render.pages.verdicts import judged_report
from reproduction.tables.project import Project
from reproduction.tables.rankings import Ranking
from reproduction.tables.tables import RunTable
from reproduction.words.numbers import listed, show
from reproduction.words.templates import sentences

if TYPE_CHECKING:
    import pandas as pd

WORDS = "pages/rankings.jinja"

#: Columns of the frame: of each method on each model its divergence, its effect in percent (`ratio`) with the interval,
#: and rank, the letters of its groups (`text`) and Holm's p value as quantities of their own.
NAMES = ("grid", "row", "column", "quantity", "origin", "value", "standard_error", "low", "high", "ratio", "text")

#: Between names in a list: names themselves have commas.
BETWEEN = "; "


def ranking_report(project: Project, table: Ranking, classes: Sequence[Class]) -> Report:
    """Build the report of a ranking."""
    results = {key: result for one in classes for key, result in one.results.items()}
    seeds = {result.run.seed for result in results.values()}
    odds = any(standing.odds for one in classes for standing in one.ranked.standings.values())
    return judged_report(
        table,
        (),
        "Hypotheses",
        reading=" ".join(sentences(WORDS, "reading", seeds=len(seeds))),
        grids=(_first(classes), *(_grid(project, one) for one in classes)),
        notes=sentences(WORDS, "notes", classes=classes, odds=odds, between=BETWEEN),
        facts=(*origins.model_facts(results), *origins.origin_facts(results)),
        details={"noise": "none"},
    )


def _first(classes: Sequence[Class]) -> Grid:
    """Which method each class begins with, and how sure that is."""
    best = [one.ranked.best for one in classes]
    columns = (
        GridColumn([one.ranked.rows[0] if one.ranked.rows else "-" for one in classes], "first on average"),
        GridColumn([listed(found, BETWEEN) for found in best], "first, or not told from it, on every model"),
        GridColumn([show(one.ranked.seeds) for one in classes], "τ of two seeds"),
        GridColumn([show(one.ranked.models) for one in classes], "τ of two models"),
        GridColumn([show(one.less and one.less.tau) for one in classes], "τ of two amounts of text"),
    )
    labels = [(f"[{one.said.name}]({one.said.table}.md)",) for one in classes]
    return Grid("", ["Class"], labels, columns)


def _bits(project: Project, one: Class) -> Mapping[str, str]:
    """Bits a weight with all that is stored, or of a number in the cache, by row, as printed."""
    return origins.row_bits(project, project.one(RunTable, one.said.table), one.results) or {
        row: f"{bits:.2f}" for row, bits in one.stored.items() if math.isfinite(bits)
    }


def _grid(project: Project, one: Class) -> Grid:
    """The methods of a class, the best first."""
    rows, found, bits, table = one.ranked.rows, one.ranked, _bits(project, one), project.one(RunTable, one.said.table)
    columns: list[GridColumn] = []
    for column in found.columns:
        model = "<br>".join(filter(None, (column, remark(project, table, column))))
        told = [found.standings[row, column] for row in rows]
        shown = {
            "KL, nats": [show(standing.kl, standing.error, 3) for standing in told],
            f"against {one.said.against}, %": [_effect(standing) for standing in told],
            "group": [letters(standing.groups) for standing in told],
        }
        if any(standing.odds for standing in told):
            shown[f"log-odds against {one.said.against}, nats"] = [_odds(standing) for standing in told]
        columns += [GridColumn(texts, f"{model}<br>{head}", group=column, title=head) for head, texts in shown.items()]
    columns += [
        GridColumn([_range(found.ranks[row]) for row in rows], "rank by seed"),
        GridColumn([bits.get(row, "-") for row in rows], "bits"),
        GridColumn([f"{one.seconds[row]:.0f}" for row in rows], "s"),
    ]
    if one.memory:
        columns.append(GridColumn([f"{one.memory[row]:.2f}" if row in one.memory else "-" for row in rows], "GiB"))
    if (less := one.less) is not None:
        rises = [f"{less.rises[row]:+.0f}" if row in less.rises else "-" for row in rows]
        columns.append(GridColumn(rises, f"KL with {less.share:g} of the text, %"))
    return Grid("", ["Method"], [(row,) for row in rows], columns, name=one.said.name)


def letters(groups: Sequence[int]) -> str:
    """Groups as letters, from a; beyond Z as numbers in brackets."""
    known = string.ascii_letters
    return "".join(known[number] if number < len(known) else f"({number + 1})" for number in groups)


def _effect(standing: RankedMethod) -> str:
    if standing.effect is None:
        return "-"
    effect, low, high = (f"{one:+.0f}" for one in (standing.effect.effect, standing.effect.low, standing.effect.high))
    if standing.adjusted is None:
        return effect
    chance = "p < .001" if standing.adjusted < 1e-3 else f"p {standing.adjusted:.3f}".replace("0.", ".")
    return f"{effect} [{low}, {high}], {chance}"


def _odds(standing: RankedMethod) -> str:
    if standing.odds is None:
        return "-"
    return f"{standing.odds.effect:+.3f} [{standing.odds.low:+.3f}, {standing.odds.high:+.3f}]"


def _range(ranks: Sequence[float]) -> str:
    low, high = min(ranks), max(ranks)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def frame(classes: Sequence[Class]) -> "pd.DataFrame":
    """Every number of a ranking as a line of `NAMES`."""
    return to_frame([line for one in classes for line in _lines(one)], NAMES)


def _lines(one: Class) -> Iterator[tuple[Any, ...]]:
    for (row, column), standing in one.ranked.standings.items():
        place, nothing = (one.said.table, row, column), (None,) * 5
        effect = standing.effect
        told = nothing[2:] if effect is None else (effect.low, effect.high, effect.effect)
        yield (*place, "kl", COMPUTED, standing.kl, standing.error, *told, None)
        yield (*place, "group", COMPUTED, *nothing, letters(standing.groups))
        numbers = {"rank": standing.rank, "holm": standing.adjusted}
        numbers |= {"bits": one.stored[row], "seconds": one.seconds[row]}
        numbers |= {"memory": one.memory[row]} if row in one.memory else {}
        numbers |= {"less_text": one.less.rises[row]} if one.less and row in one.less.rises else {}
        if standing.odds is not None:
            told = (standing.odds.low, standing.odds.high, None, None)
            yield (*place, "log_odds", COMPUTED, standing.odds.effect, None, *told)
        for name, value in numbers.items():
            yield (*place, name, COMPUTED, value, *nothing)
