"""For a target the runs, weights and rotations are computed that it shows, and nothing else."""

from pathlib import Path

import pytest

from reproduction.identity.run import Run
from reproduction.planning.expansion import make_plan
from reproduction.reading.written import read_yaml
from reproduction.run.execution import to_compute, wanted
from reproduction.run.plan import Plan, config_file
from reproduction.sources import load_project
from reproduction.tables.project import Project, task_set
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import ConfigError
from rotquant.recipes.schemes import Perplexity
from tests.helpers.project import REPOSITORY


@pytest.fixture(scope="module")
def whole(project: Project) -> tuple[Project, Plan]:
    """The project and its plan; tests leave both as they are."""
    return project, make_plan(project, "0" * 16, "0" * 16)


def runs_of(project: Project, table: str) -> dict[str, Run]:
    """The runs that a table shows."""
    return {run.key: run for cell in project.cells(table) for run in cell.runs}


def test_nothing_is_computed_for_a_table_but_its_runs_and_what_these_need(
    whole: tuple[Project, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, plan = whole
    monkeypatch.chdir(tmp_path)  # where there are no results
    for table in project.of(RunTable):
        shown = runs_of(project, table)
        keys = wanted(plan, [table])
        assert keys == [*shown]
        graph = to_compute(plan, keys)
        needs = {key: {run.weights_key, task_set(run)} - {None} for key, run in shown.items()}
        needs |= {str(run.weights_key): {run.rotation_key} - {None} for run in shown.values() if run.weights_key}
        needs |= {str(need): set() for run in shown.values() for need in (run.rotation_key, task_set(run)) if need}
        assert graph == needs, table


def test_a_table_that_shares_its_weights_with_others_has_nothing_of_these_computed(
    whole: tuple[Project, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figure 7 shares its weights with tables of zero-shot accuracy, which it does not show."""
    project, plan = whole
    monkeypatch.chdir(tmp_path)
    graph = to_compute(plan, wanted(plan, ["spinquant_figure7"]))
    on_them = {run.metric.kind for run in project.runs.values() if run.weights_key in graph}
    assert on_them == {"snr", "perplexity", "zero_shot"}
    assert {project.runs[key].metric.kind for key in graph if key in project.runs} == {"snr"}
    assert not graph.keys() & plan.tasks.keys()


def test_the_thorough_profile_takes_all_items_more_windows_and_its_seeds_everywhere() -> None:
    """No table keeps an amount of its own that the profile cannot reach."""
    project = load_project([REPOSITORY / "config/thorough.yaml"], root=REPOSITORY)
    runs = [run for table in project.tables for run in runs_of(project, table).values()]
    assert {run.metric.limit for run in runs if isinstance(run.metric, ZeroShot)} == {None}
    assert {run.metric.max_windows for run in runs if isinstance(run.metric, Perplexity)} == {200}
    for table in project.tables:
        drawn = [{run.seed for run in cell.runs} for cell in project.cells(table) if len(cell.runs) > 1]
        own = project.config.table_seeds.get(table)
        amounts = (3, 30) if own is None else (own,)
        assert all(seeds in [{*range(amount)} for amount in amounts] for seeds in drawn), table


def test_targets_are_tables_papers_and_keys_each_once_in_the_order_of_asking(whole: tuple[Project, Plan]) -> None:
    """So a table is whole before one that was asked for later, with which it shares baselines and more."""
    project, plan = whole
    first, paper = wanted(plan, ["quarot_table1"]), wanted(plan, ["quarot"])
    assert first == [*runs_of(project, "quarot_table1")]
    assert paper == [*{run: None for table in plan.of_runs.values() if table.paper == "quarot" for run in table.runs}]
    assert wanted(plan, ["quarot_table1", "quarot"]) == [*dict.fromkeys([*first, *paper])]
    assert {*wanted(plan, [])} == plan.runs.keys()
    weights, rotation, tasks = (next(iter(known)) for known in (plan.weights, plan.rotations, plan.tasks))
    assert wanted(plan, [weights, first[3], rotation, tasks, weights]) == [weights, first[3], rotation, tasks]


@pytest.mark.parametrize(("target", "nearest"), [("quarot_tabel1", "quarot_table1"), ("spinqant", "spinquant")])
def test_what_names_nothing_is_refused_with_what_is_nearest(
    target: str, nearest: str, whole: tuple[Project, Plan]
) -> None:
    with pytest.raises(ConfigError, match=f"nothing to compute is called '{target}'; nearest: {nearest}"):
        wanted(whole[1], ["quarot", target])


def test_the_file_of_a_configuration_is_read_as_that_configuration(tmp_path: Path, whole: tuple[Project, Plan]) -> None:
    """JSON's 3e-05 is text in YAML, so small numbers have to be written as YAML has them."""
    _, plan = whole
    small = plan.model_copy(update={"config": {**plan.config, "methods": {"block_ap": {"weight_lr": 3e-05}}}})
    assert read_yaml(config_file(tmp_path, small)) == small.config
