"""The views of an experiment in MLflow's interface: runs, their groups and columns, and their charts.

MLflow stores a view as a tag of the experiment, in JSON. A view is made from the runs in the store, so it names no
metric, parameter or tag that they lack. MLflow draws a chart of every metric that a view does not name. Therefore a
view names all, and puts those that it does not show in a closed section.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Run

KIND, TABLE = "rotquant.kind", "rotquant.table"

#: Suffix of metrics that give a run's loss against the unquantized model; lower is better.
PERCENT = " in percent"

#: Kinds of MLflow runs whose metrics have steps.
LEARNED = ("rotation", "weights")

#: Widths of columns in pixels: a run's name, distinguishing labels, numbers.
_NAME = {"attributes.`Run Name`": 360}
_PARAMETERS = {"method": 130, "model": 120, "bits": 90, "online": 110, "seed": 70}
_TITLES = {"tags.`title`": 440, "tags.`claims.hold`": 110, "tags.`claims.contradicted`": 110}
_NUMBER, _COMPARED = 170, 270

#: Runs loaded by MLflow's page, which loads more on request.
_PAGE = 100

#: The sections of charts in their order: whether they are open, charts in a line, and height in pixels.
_SECTIONS = {
    "Methods by model": (True, 3, 480),
    "All settings": (True, 1, 520),
    "Learning curves": (True, 2, 420),
    "Other numbers": (False, 3, 360),
}


def views(runs: Sequence["Run"]) -> dict[str, dict[str, Any]]:
    """States of all views of an experiment with these runs, by name: `runs`, `tables`, and each table's own."""
    measured = [run for run in runs if run.data.tags[KIND] == "run" and run.data.metrics]
    names = sorted((str(run.info.run_name) for run in runs if run.data.tags[KIND] == "table"), key=_natural)
    behind = {name: [run for run in runs if by_row(name) in run.data.tags] for name in names}
    shown = {"runs": _of_runs(measured)} if measured else {}
    return shown | {"tables": _of_tables()} | {name: _of_table(name, found) for name, found in behind.items() if found}


def by_model(name: str, model: str) -> str:
    """The name of a metric for runs of one model alone, whose chart compares methods on this model.

    The model is first: a chart's title is cut after some 20 letters.
    """
    return acceptable(f"{model}/{name}")


def acceptable(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def by_row(table: str) -> str:
    """The tag with a run's row in a table; the tag with its cells, row and column, is the table's own."""
    return f"{TABLE}.{table}.row"


def _of_runs(runs: Sequence["Run"]) -> dict[str, Any]:
    """All runs of cells, each a line through method, model, bits, online transforms and its headline."""
    settings = [name for name in _PARAMETERS if any(name in run.data.params for run in runs)]
    axes = [name for name in settings if name != "seed"]
    overall = _overall(runs)
    compared = [name for name in _singles(runs) if name in overall]
    columns = dict.fromkeys(map(_metric, overall), _NUMBER) | {f"params.`{one}`": _PARAMETERS[one] for one in settings}
    charts = {
        "All settings": [{"type": "PARALLEL", "selectedParams": axes, "selectedMetrics": [one]} for one in compared],
        "Other numbers": map(_bars, _metrics(runs)),
    }
    state = _state(f"tags.`{KIND}` = 'run'", _metric(overall[0]), _rises(overall[0], runs), columns)
    return state | _charts(charts)


def _of_table(name: str, runs: Sequence["Run"]) -> dict[str, Any]:
    """A table: bars by model and curves of learned parts, for each row, its seeds as one.

    A model in several columns has a bar for each cell.
    """
    cells = {(run.data.tags[by_row(name)], run.data.params["model"], run.data.tags[f"{TABLE}.{name}"]) for run in runs}
    tag = by_row(name) if len(cells) == len({cell[:2] for cell in cells}) else f"{TABLE}.{name}"
    learned = [run for run in runs if run.data.tags[KIND] in LEARNED]
    measured = [run for run in runs if run.data.tags[KIND] == "run"]
    bars, curves = ([one for each in _singles(some).values() for one in each] for some in (measured, learned))
    others = [one for one in _metrics(runs) if one not in (*bars, *curves)]
    # With more runs than a page loads, each cell's first seed comes first, so that no cell is left out.
    order = bars[0] if bars and len(runs) <= _PAGE else None
    charts = {
        "Methods by model": map(_bars, bars),
        "Learning curves": ({"type": "LINE", "metricKey": one, "selectedMetricKeys": [one]} for one in curves),
        "Other numbers": map(_bars, others),
    }
    grouped = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]}
    closed = {f"tag.{tag}.{run.data.tags[tag]}": False for run in runs}
    state = _state(
        f"tags.`{TABLE}.{name}` != ''",
        _metric(order) if order else "params.`seed`",
        order is None or _rises(order, measured),
        dict.fromkeys(map(_metric, bars), _COMPARED),
    )
    return state | _charts(charts) | {"groupBy": grouped, "groupsExpanded": closed}


def _of_tables() -> dict[str, Any]:
    """The tables' own runs, which have their reports."""
    return _state("tags.`title` != ''", "tags.`mlflow.runName`", True, _TITLES)


def _singles(runs: Iterable["Run"]) -> dict[str, list[str]]:
    """The metrics that compare runs, percents first: for each its names of single models, in their order."""
    found = {
        (name.removeprefix(by_model("", run.data.params["model"])), name)
        for run in runs
        for name in run.data.metrics
        if name.startswith(by_model("", run.data.params["model"]))
    }
    singles: dict[str, list[str]] = {}
    for overall, name in sorted(found, key=lambda pair: (PERCENT not in pair[0], _natural(pair[1]))):
        singles.setdefault(overall, []).append(name)
    return singles


def _overall(runs: Sequence["Run"]) -> list[str]:
    """The metrics not limited to one model, those that compare runs first."""
    compared = _singles(runs)
    single = {one for each in compared.values() for one in each}
    return sorted((name for name in _metrics(runs) if name not in single), key=lambda name: name not in compared)


def _rises(name: str, runs: Iterable["Run"]) -> bool:
    """Whether the lowest numbers of a metric are the best."""
    return PERCENT in name or all(run.data.tags.get("better") != "higher" for run in runs if name in run.data.metrics)


def _metrics(runs: Iterable["Run"]) -> list[str]:
    return sorted({name for run in runs for name in run.data.metrics}, key=_natural)


def _natural(name: str) -> list[Any]:
    """Sort key that puts 7B before 13B."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _metric(name: str) -> str:
    return f"metrics.`{name}`"


def _bars(name: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": name}


def _charts(given: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """Charts as MLflow stores them, by section; sections without a chart are left out."""
    sections = {name: found for name in _SECTIONS if (found := list(given.get(name, ())))}
    return {
        "compareRunCharts": [
            {"uuid": f"{section}-{place}", "metricSectionId": section, "isGenerated": False, "deleted": False, **chart}
            for section, found in sections.items()
            for place, chart in enumerate(found)
        ],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": display, "columns": columns, "cardHeight": height}
            for name, (display, columns, height) in _SECTIONS.items()
            if name in sections
        ],
        "isAccordionReordered": True,
    }


def _state(chosen: str, order: str, ascending: bool, columns: Mapping[str, int]) -> dict[str, Any]:
    """A view without charts. All runs are drawn; MLflow would draw ten."""
    widths = {**_NAME, **columns}
    return {
        "searchFilter": chosen,
        "orderByKey": order,
        "orderByAsc": ascending,
        "selectedColumns": list(columns),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
    }
