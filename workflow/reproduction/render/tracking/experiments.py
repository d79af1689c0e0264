"""A paper's experiment in MLflow: its description, and the views of its runs that links open.

MLflow 3 opens an experiment on a choice between model training and GenAI, and lists runs without a number. The
experiment's kind sets the first. For the second, MLflow's interface stores views as tags of an experiment (`views`). A
link that names a view shows it, and the menu "Views" lists all.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from reproduction.render.tracking.location import TrackingError
from reproduction.render.tracking.store import Store, gone
from reproduction.render.tracking.views import views
from reproduction.tables.project import Project

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run

_VIEW = "mlflow.sharedViewState."
_DESCRIPTION = "mlflow.note.content"


def experiment_name(store: Store, project: Project, paper: str) -> str:
    """Name of a paper's experiment: its short name, after the project's name where it has one.

    Raises:
        TrackingError: the store is a server and the project has none: two projects would relabel each other's runs.
    """
    name = project.config.tracking
    if isinstance(name, str):
        return f"{name}/{paper}"
    if store.location.path is None:
        raise TrackingError(
            f"the MLflow store {store.uri} is a server, where projects are kept apart by their names: write "
            "`tracking: NAME` in the configuration, the same name for all who work on this project."
        )
    return paper


def writer(project: Project) -> str:
    """Name of the writing project: processes of the same project take turns."""
    return str(project.config.tracking)


def open_experiment(store: Store, name: str) -> str:
    """Id of an experiment, created or restored if needed."""
    experiment = store.client.get_experiment_by_name(name) or _create(store, name)
    if experiment.lifecycle_stage == "deleted":
        store.client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def describe(store: Store, project: Project, paper: str, runs: "Sequence[Run]") -> None:
    """Set the description of a paper's experiment, and the views of its runs; views of former tables are removed."""
    from mlflow.exceptions import MlflowException

    name = experiment_name(store, project, paper)
    experiment = cast("Experiment", store.client.get_experiment_by_name(name))
    wanted = _tags(project, paper, experiment, views(runs))
    for tag, value in wanted.items():
        if experiment.tags.get(tag) != value:
            try:
                store.client.set_experiment_tag(experiment.experiment_id, tag, value)
            except MlflowException:  # another process added it at the same moment: now it is there to change
                store.client.set_experiment_tag(experiment.experiment_id, tag, value)
    for view in _view_names(experiment.tags):
        if f"{_VIEW}{view}" not in wanted:
            with gone():
                store.client.delete_experiment_tag(experiment.experiment_id, f"{_VIEW}{view}")


def _create(store: Store, name: str) -> "Experiment":
    """Create an experiment, or get the one that another process has created in the meantime."""
    from mlflow.exceptions import MlflowException

    artifacts = store.location.artifacts(name)
    if artifacts and store.location.is_database_server and urlsplit(artifacts).scheme in ("", "file"):
        Path(unquote(urlsplit(artifacts).path)).mkdir(parents=True, exist_ok=True)  # `Location.reaches` looks for it
    try:
        store.client.create_experiment(name, artifact_location=artifacts)
    except MlflowException:
        if store.client.get_experiment_by_name(name) is None:
            raise
    return cast("Experiment", store.client.get_experiment_by_name(name))


def links(store: Store, server: str) -> dict[str, str]:
    """Addresses of all views on a server, by experiment and content: {"quarot runs": ...}."""
    found = sorted(store.client.search_experiments(), key=lambda experiment: int(experiment.experiment_id))
    return {
        f"{experiment.name} {view}": f"{server}/{view_link(experiment.experiment_id, view)}"
        for experiment in found
        for view in _view_names(experiment.tags)
    }


def view_link(experiment: str, view: str) -> str:
    """Address of a view on its server: tables as a list, runs as charts."""
    mode = "" if view == "tables" else "compareRunsMode=CHART&"
    return f"#/experiments/{experiment}/runs?workflowType=machine_learning&{mode}viewStateShareKey={view}"


def _tags(
    project: Project, paper: str, experiment: "Experiment", states: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """The tags that an experiment should have; an existing description stays, a user may have written it."""
    tables = [table for table in project.tables.values() if table.paper == paper]
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
    """A state packed as in MLflow's interface: a tag has 5,000 to 20,000 characters, by MLflow's version."""
    return f"deflate;{b64encode(zlib.compress(json.dumps(state).encode())).decode()}"


def _title(view: str) -> str:
    return view.capitalize() if view in ("runs", "tables") else f"Table {view}"


def _name_in(tag: str) -> str | None:
    """The name of a view in a tag; None where somebody wrote another text there."""
    try:
        return json.loads(tag)["name"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _view_names(tags: Mapping[str, str]) -> list[str]:
    """The views created here, those of all runs and tables first: users' own have other names."""
    shared = {tag.removeprefix(_VIEW): value for tag, value in tags.items() if tag.startswith(_VIEW)}
    ours = [view for view, made in shared.items() if _name_in(made) == _title(view)]
    return sorted(ours, key=lambda view: (view not in ("runs", "tables"), view))
