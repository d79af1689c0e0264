"""A paper's experiment in MLflow: its description, and the views of its runs that links open.

MLflow 3 opens an experiment on a choice between model training and GenAI, and lists runs without a number. The
experiment's kind settles the first. For the second its interface keeps views as tags of an experiment: a name, which
runs, their order, and the columns. A link that names a view shows it, and the menu "Views" lists all.
"""

import json
from typing import TYPE_CHECKING, Any, cast

from rotquant.reporting.tracking.store import Store
from rotquant.study.project import Project
from rotquant.study.quantities import quantities

if TYPE_CHECKING:
    from mlflow.entities import Experiment

KIND = "rotquant.kind"

#: Columns in the order shown, with their widths in pixels: a run's name and the parameters that tell runs apart.
_NAME = {"attributes.`Run Name`": 360}
_PARAMETERS = {"params.`method`": 130, "params.`model`": 120, "params.`bits`": 90, "params.`seed`": 70}
_METRIC_WIDTH = 160

_VIEW = "mlflow.sharedViewState."
_DESCRIPTION = "mlflow.note.content"


def open_experiment(store: Store, project: Project, paper: str) -> str:
    """The id of a paper's experiment, made or restored where needed, with its description and views."""
    experiment = store.client.get_experiment_by_name(paper) or _create(store, paper)
    if experiment.lifecycle_stage == "deleted":
        store.client.restore_experiment(experiment.experiment_id)
    for name, value in _tags(project, experiment).items():
        if experiment.tags.get(name) != value:
            store.client.set_experiment_tag(experiment.experiment_id, name, value)
    return experiment.experiment_id


def _create(store: Store, paper: str) -> "Experiment":
    """A new experiment, or the one that another process has made in the meantime."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_experiment(paper, artifact_location=store.location.artifacts(paper))
    except MlflowException:
        if store.client.get_experiment_by_name(paper) is None:
            raise
    return cast("Experiment", store.client.get_experiment_by_name(paper))


def links(store: Store, server: str) -> dict[str, str]:
    """The addresses of all views on a server, by experiment and what they show: {"quarot runs": ...}."""
    found = sorted(store.client.search_experiments(), key=lambda experiment: int(experiment.experiment_id))
    return {
        f"{experiment.name} {view}": f"{server}/{_link(experiment.experiment_id, view)}"
        for experiment in found
        for view in _view_names(experiment.tags)
    }


def _link(experiment: str, view: str) -> str:
    return f"#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={view}"


def _tags(project: Project, experiment: "Experiment") -> dict[str, str]:
    """The tags that an experiment should have; a description that is there stays, a user may have written it."""
    tables = [table for table in (*project.tables.values(), *project.speed.values()) if table.paper == experiment.name]
    wanted = {"mlflow.experimentKind": "custom_model_development"}
    for view, state in _views(project, experiment.name).items():
        made = {"name": view.capitalize(), "createdAt": experiment.creation_time, "state": json.dumps(state)}
        wanted[f"{_VIEW}{view}"] = json.dumps(made)
    if tables and _DESCRIPTION not in experiment.tags:
        shown = [f"[{view}]({_link(experiment.experiment_id, view)})" for view in _view_names(wanted)]
        wanted[_DESCRIPTION] = (
            f"{tables[0].paper_title}\n\nViews: {', '.join(shown)}. A run is one cell of a table with one seed. A "
            "table's own run holds its report and its figure as artifacts, and the runs of its cells below it."
        )
    return wanted


def _views(project: Project, paper: str) -> dict[str, dict[str, Any]]:
    """The views of an experiment, as MLflow's interface keeps them: runs with their numbers, best first; tables."""
    titles = {"tags.`title`": 520, "tags.`claims.hold`": 110, "tags.`claims.contradicted`": 110}
    tables = _view("tags.`title` != ''", "tags.`mlflow.runName`", True, titles)
    names = [name for name, table in project.tables.items() if table.paper == paper]
    cells = [cell for name in names for cell in project.cells(name)]
    mains = {f"metrics.`{main.name}`": main for main, *_ in (quantities(cell.metric) for cell in cells)}
    if not mains:
        return {"tables": tables}
    first, quantity = next(iter(mains.items()))
    columns = dict.fromkeys(mains, _METRIC_WIDTH) | _PARAMETERS
    return {"runs": _view(f"tags.`{KIND}` = 'run'", first, quantity.better == "lower", columns), "tables": tables}


def _view(chosen: str, order: str, ascending: bool, columns: dict[str, int]) -> dict[str, Any]:
    widths = _NAME | columns
    return {
        "searchFilter": chosen,
        "orderByKey": order,
        "orderByAsc": ascending,
        "selectedColumns": list(columns),
        "columnOrder": list(widths),
        "columnWidths": widths,
    }


def _view_names(tags: dict[str, str]) -> list[str]:
    return [name for name in ("runs", "tables") if f"{_VIEW}{name}" in tags]
