"""Methods ranked by KL divergence on what they have in common: paired effects, Holm's correction, groups, stability.

Sources: Holm 1979 (step-down adjustment of p values), Kendall 1938 (rank correlation); intervals are `estimates`',
groups `ranking_letters`'.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar, cast

import numpy as np
from scipy.stats import kendalltau, rankdata

from reproduction.claims.effects import View
from reproduction.claims.estimates import CONFIDENCE, Array, Estimate, Interval
from reproduction.claims.ranking_letters import compact_letters
from reproduction.frame.values import Values, collect
from reproduction.identity.run import Run
from reproduction.run.results import RunResult
from reproduction.tables.project import Project
from reproduction.tables.quantities import KL, LOG_ODDS
from reproduction.tables.rankings import MethodClass
from reproduction.tables.tables import RunTable
from rotquant.weights.bits import bits_per_cached

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True)
class RankedMethod:
    """A method on one model.

    kl: nats, a mean over seeds and windows, and its standard error over windows; seeds: that of each.
    effect: by how many percent its divergence is above that of the row it is compared with; None for that row.
    adjusted: probability of such a difference from that row between equal methods, by Holm over all pairs of methods of
    the class; None without noise. groups: numbers from 0; two methods share one exactly if they cannot be told apart at
    5 %, by the same probabilities. rank: from 1. odds: by how many nats the log-odds of tasks' right answers are above
    that row's; None where none were computed.
    """

    kl: float
    error: float | None
    seeds: tuple[float, ...]
    effect: Interval | None
    adjusted: float | None
    groups: tuple[int, ...]
    rank: float
    odds: Interval | None = None


@dataclass(frozen=True)
class Ranked:
    """A class of methods.

    standings: by row and column, of rows whose divergence is a number in each column; left: the others. ranks: of each
    row, in each column by each seed. seeds, models: mean of Kendall's tau between the rankings of two seeds of a
    model, and of two models; None where there are no two.
    """

    standings: Mapping[tuple[str, str], RankedMethod]
    left: Sequence[str]
    ranks: Mapping[str, Sequence[float]]
    seeds: float | None
    models: float | None

    @property
    def rows(self) -> list[str]:
        """The rows by their mean rank, the best first."""
        ranks: dict[str, list[float]] = {}
        for (row, _), one in self.standings.items():
            ranks.setdefault(row, []).append(one.rank)
        return sorted(ranks, key=lambda row: fmean(ranks[row]))

    @property
    def columns(self) -> list[str]:
        """The models."""
        return list(dict.fromkeys(column for _, column in self.standings))

    @property
    def best(self) -> list[str]:
        """Rows that are first, or cannot be told from the first, on every model."""
        first = {column: min(self.rows, key=lambda row: self.standings[row, column].kl) for column in self.columns}
        return [
            row
            for row in self.rows
            if all(
                {*self.standings[row, column].groups} & {*self.standings[first[column], column].groups}
                for column in self.columns
            )
        ]


@dataclass(frozen=True)
class LessText:
    """Methods with less calibration text.

    share: of the text. tau: mean over models of Kendall's tau between the rankings with all and with less; None where
    there are no two rows. rises: by how many percent a row's divergence rises, a mean over models.
    """

    share: float
    tau: float | None
    rises: Mapping[str, float]


@dataclass(frozen=True)
class Class:
    """A class of bits with its methods ranked.

    stored: bits a weight with all that is stored, by row, or of a cached number where the cache alone is quantized; nan
    where that is not known. seconds: of learning and rounding, a mean over models and seeds. memory: largest memory of
    that in GiB, of rows whose runs say it. results: its runs by key. less: the same methods with less calibration text,
    where they were computed. unfinished: rows that are not ranked, since some of their seeds are not computed: of fewer
    the noise is another.
    """

    said: MethodClass
    ranked: Ranked
    stored: Mapping[str, float]
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    results: Mapping[str, RunResult]
    less: LessText | None = None
    unfinished: Sequence[str] = ()


def class_of(project: Project, said: MethodClass, table: RunTable, less: RunTable | None = None) -> Class:
    """Rank the rows of a table, but for full precision.

    less: a table of some of the rows with less calibration text.

    Raises:
        ResultError: as `collect`.
    """
    found, quantized, results, unfinished = _ranked_of(project, said, table)
    seconds = {row: fmean(_seconds(one) for _, one in runs) for row, runs in quantized.items()}
    stored = {row: fmean(_bits(project, run, one) for run, one in runs) for row, runs in quantized.items()}
    peaks = {row: [peak for _, one in runs for peak in _peaks(one)] for row, runs in quantized.items()}
    memory = {row: max(known) / 2**30 for row, known in peaks.items() if known}
    again = None
    if less is not None:
        other, _, more, _ = _ranked_of(project, said, less)
        again, results = with_less_text(found, other, less.text_share), {**results, **more}
    return Class(said, found, stored, seconds, memory, results, again, unfinished)


def _ranked_of(
    project: Project, said: MethodClass, table: RunTable
) -> tuple[Ranked, dict[str, list[tuple[Run, RunResult]]], dict[str, RunResult], list[str]]:
    """The ranking of a table, its runs with their results by row, its results by key, and rows that lack seeds."""
    values, results = collect(project, table)
    quantized: dict[str, list[tuple[Run, RunResult]]] = {}
    unfinished: dict[str, None] = {}
    for cell in project.cells(table.id):
        if cell.metric.kind == "perplexity" and not cell.runs[0].recipe.is_baseline:
            quantized.setdefault(cell.row, []).extend((run, results[run.key]) for run in cell.runs)
            if cell.runs[0].recipe.is_random and len(cell.runs) < len(project.seeds(table)):
                unfinished[cell.row] = None
    rows = [row for row in quantized if row not in unfinished]
    return ranked(values, results, rows, project.columns(table), said.against), quantized, results, [*unfinished]


def with_less_text(whole: Ranked, less: Ranked, share: float) -> LessText:
    """What less calibration text changes of the rows that both have."""
    rows = [row for row in whole.rows if row in less.rows]
    columns = [column for column in whole.columns if column in less.columns]
    pairs = {
        column: [(whole.standings[row, column].kl, less.standings[row, column].kl) for row in rows]
        for column in columns
    }
    rises = {
        row: fmean(100 * (pairs[column][place][1] / pairs[column][place][0] - 1) for column in columns)
        for place, row in enumerate(rows)
    }
    return LessText(share, _mean([tau for found in pairs.values() for tau in _agreements(np.array(found).T)]), rises)


def _seconds(result: RunResult) -> float:
    """Seconds of making a run's weights and rotations."""
    return result.seconds - float(result.provenance.get("seconds", 0.0))


def _peaks(result: RunResult) -> list[float]:
    """Largest memory of making a run's weights and rotations, in bytes; none of older records."""
    found = (stage.get("peak_bytes") for stage in (result.weights or {}, result.rotation or {}))
    return [float(one) for one in found if one]


def _bits(project: Project, run: Run, result: RunResult) -> float:
    """Bits a weight; or of a number in the cache, where that alone is quantized and the model's sizes are known."""
    if run.recipe.weights is not None:
        return float(((result.weights or {}).get("bits_per_weight") or {}).get("total", math.nan))
    model = project.model(project.checkpoint_path(run.checkpoint), run.checkpoint_digest)
    if model is None or (run.recipe.keys is None and run.recipe.values is None):
        return math.nan
    return bits_per_cached(run.recipe, model[0].head_dim, model[0].num_kv_heads)


def ranked(
    values: Values, results: Mapping[str, RunResult], rows: Sequence[str], columns: Sequence[str], against: str
) -> Ranked:
    """Rank the rows of a table on each of its models.

    Args:
        rows: of the table, without full precision. against: the one that the others are compared with.
    """
    view = View(KL, columns, values, results, rows)
    columns = view.columns  # those on one checkpoint once
    known = [row for row in rows if all(_is_number(view, row, column) for column in columns)]
    standings: dict[tuple[str, str], RankedMethod] = {}
    tasks = View(LOG_ODDS, columns, values, results, rows)
    for column in columns if known else ():
        found = {row: view.estimate(row, column) for row in known}
        for row, standing in _standings(found, against).items():
            kl, odds = view.numbers[row, column], None
            if row != against and all(_is_number(tasks, one, column) for one in (row, against)):
                odds = tasks.gain(row, against, column).interval()
            standings[row, column] = RankedMethod(kl.mean, kl.standard_error, kl.values, *standing, odds)
    by_seed = {column: _ranks_by_seed([standings[row, column].seeds for row in known]) for column in columns}
    ranks = {
        row: [*np.concatenate([by_seed[column][:, place] for column in columns])] for place, row in enumerate(known)
    }
    within = [tau for column in columns for tau in _agreements(by_seed[column])]
    across = _agreements(np.array([[standings[row, column].rank for row in known] for column in columns]))
    left = [row for row in rows if row not in known]
    return Ranked(standings, left, ranks, _mean(within), _mean(across))


def holm(chances: Mapping[N, float]) -> dict[N, float]:
    """P values adjusted by Holm's step-down procedure, for any dependence between them."""
    adjusted, least = {}, 0.0
    for place, (name, chance) in enumerate(sorted(chances.items(), key=lambda pair: pair[1])):
        least = max(least, min(1.0, (len(chances) - place) * chance))
        adjusted[name] = least
    return adjusted


def _is_number(view: View, row: str, column: str) -> bool:
    number = view.numbers.get((row, column))
    return number is not None and math.isfinite(number.mean)


def _standings(
    found: Mapping[str, Estimate], against: str
) -> dict[str, tuple[Interval | None, float | None, tuple[int, ...], float]]:
    """Effect, adjusted p value, groups and rank of each row on one model."""
    effects = {
        row: (one - found[against]).percent_of(found[against]).interval()
        for row, one in found.items()
        if against in found and row != against
    }
    order = sorted(found, key=lambda row: found[row].mean)
    pairs = {
        (place, other): (found[order[other]] - found[order[place]]).interval()
        for place, other in itertools.combinations(range(len(order)), 2)
    }
    chances = holm(_chances(pairs))
    groups = dict(zip(order, compact_letters(len(order), _apart(pairs, chances)), strict=True))
    adjusted = {frozenset((order[one], order[other])): chance for (one, other), chance in chances.items()}
    ranks = dict(zip(found, rankdata([one.mean for one in found.values()]), strict=True))
    return {
        row: (effects.get(row), adjusted.get(frozenset((row, against))), groups[row], float(ranks[row]))
        for row in found
    }


def _apart(pairs: Mapping[N, Interval], chances: Mapping[N, float]) -> list[N]:
    """The pairs that are told apart; without noise all that differ."""
    return [
        pair
        for pair, difference in pairs.items()
        if (chances[pair] <= 1 - CONFIDENCE if pair in chances else difference.effect != 0)
    ]


def _chances(effects: Mapping[N, Interval]) -> dict[N, float]:
    """Two-sided p values of effects against none, where there is noise."""
    return {name: min(1.0, 2 * one.tail(0.0)) for name, one in effects.items() if one.tail is not None}


def _ranks_by_seed(values: Sequence[tuple[float, ...]]) -> Array:
    """Ranks float64 [seeds, rows] of rows' values by seed; what is not random has one value for all."""
    count = max(map(len, values), default=1)
    full = np.array([one if len(one) == count else one[:1] * count for one in values])
    return rankdata(full, axis=0).T


def _agreements(ranks: Array) -> list[float]:
    """Kendall's tau of each two rankings [n, rows]."""
    if ranks.shape[-1] < 2:
        return []
    return [float(cast(Any, kendalltau(one, other)).statistic) for one, other in itertools.combinations(ranks, 2)]


def _mean(found: Sequence[float]) -> float | None:
    return fmean(found) if found else None
