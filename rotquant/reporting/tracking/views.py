"""The views of an experiment in MLflow's interface: which runs, in which groups and columns, and their charts.

MLflow keeps a view as a tag of the experiment, in JSON. A view is made from what the runs in the store have, so it names
no metric, parameter or tag that they lack. MLflow draws a chart of every metric that a view does not name: so a view
names all, and those that it does not show lie in a section that is closed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Run

KIND, TABLE = "rotquant.kind", "rotquant.table"

#: Kinds of MLflow runs whose metrics are numbers step by step.
LEARNED = ("rotation", "weights")

#: Widths of columns in pixels: a run's name, what tells runs apart, numbers.
_NAME = {"attributes.`Run Name`": 360}
_PARAMETERS = {"method": 130, "model": 120, "bits": 90, "online": 110, "seed": 70}
_TITLES = {"tags.`title`": 520, "tags.`claims.hold`": 110, "tags.`claims.contradicted`": 110}
_NUMBER = 170

#: MLflow's page loads so many runs, and more when asked to.
_PAGE = 100

#: Settings of a learning, which are no curve to look at first.
_SETTINGS = ("learning_rate",)

#: The sections of charts, in their order, and whether they are open.
_SECTIONS = {"Comparison": True, "Learning curves": True, "Other numbers": False}


def views(runs: Sequence["Run"]) -> dict[str, dict[str, Any]]:
    """The states of all views of an experiment with these runs, by name: `runs`, `tables`, and each table's own."""
    measured = [run for run in runs if run.data.tags[KIND] == "run"]
    names = [run.info.run_name for run in runs if run.data.tags[KIND] == "table"]
    behind = {name: [run for run in runs if f"{TABLE}.{name}" in run.data.tags] for name in sorted(names, key=_natural)}
    shown = {"runs": _of_runs(measured)} if measured else {}
    return shown | {"tables": _of_tables()} | {name: _of_table(name, found) for name, found in behind.items() if found}


def by_model(name: str, model: str) -> str:
    """The name of a metric of runs of one model alone, whose chart compares methods on this model."""
    return f"{name}/{model}"


def _of_runs(runs: Sequence["Run"]) -> dict[str, Any]:
    """All runs of cells, each a line through method, model, bits, online transforms and its headline."""
    heads = _headlines(runs)
    settings = [name for name in _PARAMETERS if any(name in run.data.params for run in runs)]
    axes = [name for name in settings if name != "seed"]
    charts = [
        {"type": "PARALLEL", "displayName": _title(name), "selectedParams": axes, "selectedMetrics": [name]}
        for name in heads
    ]
    numbers = dict.fromkeys((f"metrics.`{name}`" for name in _overall(runs)), _NUMBER)
    columns = numbers | {f"params.`{name}`": _PARAMETERS[name] for name in settings}
    order = _overall(runs)[0]
    state = _state(f"tags.`{KIND}` = 'run'", f"metrics.`{order}`", columns) | {"orderByAsc": _rises(order, runs)}
    return state | _charts({"Comparison": charts, "Other numbers": [_bars(name) for name in _metrics(runs)]})


def _of_table(name: str, runs: Sequence["Run"]) -> dict[str, Any]:
    """A table: its cells, each with its seeds as one, as bars model by model, and as curves where it was learned."""
    tag = f"{TABLE}.{name}"
    learned = [run for run in runs if run.data.tags[KIND] in LEARNED]
    measured = [run for run in runs if run.data.tags[KIND] == "run"]
    heads, curves = _headlines(measured), [one for one in _metrics(learned) if one not in _SETTINGS]
    bars = [one for each in heads.values() for one in each]
    rest = [one for one in _metrics(runs) if one not in (*bars, *curves)]
    #: Of more runs than a page loads each cell's first seed comes first, so that no cell is left out.
    order = bars[0] if bars and len(runs) <= _PAGE else None
    numbers = [*bars, *(one for one in _overall(measured) if one not in heads)]
    charts = {
        "Comparison": [_bars(one) for one in bars],
        "Learning curves": [{"type": "LINE", "metricKey": one, "selectedMetricKeys": [one]} for one in curves],
        "Other numbers": [_bars(one) for one in rest],
    }
    grouped = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]}
    columns = dict.fromkeys((f"metrics.`{one}`" for one in numbers), _NUMBER)
    state = _state(f"tags.`{tag}` != ''", f"metrics.`{order}`" if order else "params.`seed`", columns)
    state |= {"orderByAsc": order is None or _rises(order, measured)}
    return state | _charts(charts) | {"groupBy": grouped}


def _of_tables() -> dict[str, Any]:
    """The tables' own runs, which hold their reports."""
    return _state("tags.`title` != ''", "tags.`mlflow.runName`", _TITLES)


def _headlines(runs: Iterable["Run"]) -> dict[str, list[str]]:
    """The metrics that runs are compared by, each with its names of the single models, in the models' order."""
    found = {
        (name.removesuffix(f"/{run.data.params['model']}"), name)
        for run in runs
        for name in run.data.metrics
        if name.endswith(f"/{run.data.params['model']}")
    }
    heads: dict[str, list[str]] = {}
    for name, single in sorted(found, key=lambda pair: (" in percent" not in pair[0], _natural(pair[1]))):
        heads.setdefault(name, []).append(single)
    return heads


def _overall(runs: Sequence["Run"]) -> list[str]:
    """The metrics that are not of one model alone, those that runs are compared by first."""
    heads = _headlines(runs)
    singles = {one for each in heads.values() for one in each}
    return [*heads, *(name for name in _metrics(runs) if name not in heads and name not in singles)]


def _rises(name: str, runs: Iterable["Run"]) -> bool:
    """Whether the best numbers of a metric are the lowest."""
    return " in percent" in name or all(
        run.data.tags.get("better") != "higher" for run in runs if name in run.data.metrics
    )


def _metrics(runs: Iterable["Run"]) -> list[str]:
    return sorted({name for run in runs for name in run.data.metrics}, key=_natural)


def _natural(name: str) -> list[Any]:
    """What sorts 7B before 13B."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _title(name: str) -> str:
    """A chart's title: the model first, where the metric is of one."""
    what, slash, model = name.rpartition("/")
    return f"{model}: {what}" if slash else name


def _bars(name: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": name, "displayName": _title(name)}


def _charts(sections: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Charts as MLflow keeps them, section by section; those without a chart are left out."""
    used = [name for name in _SECTIONS if sections.get(name)]
    return {
        "compareRunCharts": [
            {"uuid": f"{section}-{place}", "metricSectionId": section, "isGenerated": False, "deleted": False, **chart}
            for section in used
            for place, chart in enumerate(sections[section])
        ],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": _SECTIONS[name], "isReordered": True} for name in used
        ],
        "isAccordionReordered": True,
    }


def _state(chosen: str, order: str, columns: Mapping[str, int]) -> dict[str, Any]:
    """A view without charts. All runs are drawn, where MLflow would draw ten."""
    widths = {**_NAME, **columns}
    return {
        "searchFilter": chosen,
        "orderByKey": order,
        "orderByAsc": True,
        "selectedColumns": list(columns),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
    }
