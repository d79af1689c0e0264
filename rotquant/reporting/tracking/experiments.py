"""A paper's experiment in MLflow: its description, and the views of its runs that links open.

MLflow 3 opens an experiment on a choice between model training and GenAI, and lists runs without a number. The
experiment's kind settles the first. For the second its interface keeps views as tags of an experiment (`views`). A link
that names a view shows it, and the menu "Views" lists all.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rotquant.reporting.tracking.store import Store
from rotquant.reporting.tracking.views import views
from rotquant.study.project import Project

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run

_VIEW = "mlflow.sharedViewState."
_DESCRIPTION = "mlflow.note.content"


def open_experiment(store: Store, paper: str) -> str:
    """The id of a paper's experiment, made or restored where needed."""
    experiment = store.client.get_experiment_by_name(paper) or _create(store, paper)
    if experiment.lifecycle_stage == "deleted":
        store.client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def describe(store: Store, project: Project, paper: str, runs: "Sequence[Run]") -> None:
    """Give a paper's experiment its description, and the views that its runs make; views of former tables go."""
    experiment = cast("Experiment", store.client.get_experiment_by_name(paper))
    wanted = _tags(project, experiment, views(runs))
    for name, value in wanted.items():
        if experiment.tags.get(name) != value:
            store.client.set_experiment_tag(experiment.experiment_id, name, value)
    for view in _view_names(experiment.tags):
        if f"{_VIEW}{view}" not in wanted:
            store.client.delete_experiment_tag(experiment.experiment_id, f"{_VIEW}{view}")


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
        f"{experiment.name} {view}": f"{server}/{view_link(experiment.experiment_id, view)}"
        for experiment in found
        for view in _view_names(experiment.tags)
    }


def view_link(experiment: str, view: str) -> str:
    """The address of a view on its server: tables as a list, runs as charts."""
    mode = "" if view == "tables" else "compareRunsMode=CHART&"
    return f"#/experiments/{experiment}/runs?workflowType=machine_learning&{mode}viewStateShareKey={view}"


def _tags(project: Project, experiment: "Experiment", states: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The tags that an experiment should have; a description that is there stays, a user may have written it."""
    tables = [table for table in (*project.tables.values(), *project.speed.values()) if table.paper == experiment.name]
    wanted = {"mlflow.experimentKind": "custom_model_development"}
    for view, state in states.items():
        made = {"name": _title(view), "createdAt": experiment.creation_time, "state": _packed(state)}
        wanted[f"{_VIEW}{view}"] = json.dumps(made)
    if tables and _DESCRIPTION not in experiment.tags:
        shown = [
            f"[{view}]({view_link(experiment.experiment_id, view)})" for view in ("runs", "tables") if view in states
        ]
        wanted[_DESCRIPTION] = (
            f"{tables[0].paper_title}\n\nViews: {', '.join(shown)}, and one of each table with its charts. A run is "
            "one cell of a table with one seed. A table's own run shows its report, has its figure as an artifact, and "
            "the runs of its cells below it."
        )
    return wanted


def _packed(state: Mapping[str, Any]) -> str:
    """A state as MLflow's interface packs it: a tag holds 5,000 to 20,000 characters, by MLflow's version."""
    return f"deflate;{b64encode(zlib.compress(json.dumps(state).encode())).decode()}"


def _title(view: str) -> str:
    return view.capitalize() if view in ("runs", "tables") else f"Table {view}"


def _name_in(tag: str) -> str | None:
    """The name of a view in a tag; None where somebody wrote something else there."""
    try:
        return json.loads(tag)["name"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _view_names(tags: Mapping[str, str]) -> list[str]:
    """The views that were made here, those of all runs and tables first: users' own have other names."""
    shared = {tag.removeprefix(_VIEW): value for tag, value in tags.items() if tag.startswith(_VIEW)}
    ours = [view for view, made in shared.items() if _name_in(made) == _title(view)]
    return sorted(ours, key=lambda view: (view not in ("runs", "tables"), view))
