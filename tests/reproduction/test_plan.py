"""A target's jobs compute the runs, weights and rotations that it shows, and nothing else."""

from pathlib import Path

import pytest

from reproduction.identity.run import Run
from reproduction.planning.expansion import make_plan
from reproduction.reading.written import read_yaml
from reproduction.run.execution import units, wanted
from reproduction.run.plan import Plan, config_file
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from rotquant.recipes.schemes import Perplexity, ZeroShot
from tests.helpers.project import REPOSITORY, Copy, checkpoints_by_name


@pytest.fixture(scope="module")
def whole(project: Project) -> tuple[Project, Plan]:
    """The project and its plan; tests leave both as they are."""
    return project, make_plan(project, "0" * 16, "0" * 16)


def runs_of(project: Project, table: str) -> dict[str, Run]:
    """The runs that a table shows."""
    return {run.key: run for cell in project.cells(table) for run in cell.runs}


def test_no_job_of_a_table_makes_what_the_table_does_not_show(whole: tuple[Project, Plan]) -> None:
    """By what its jobs are given, the parts of the table, and what these need."""
    project, plan = whole
    for table in project.of(RunTable):
        shown = runs_of(project, table)
        asked = wanted(plan, [table])
        assert asked.parts == plan.table(table).parts
        assert asked.runs.keys() == shown.keys()
        assert asked.weights.keys() == {run.weights_key for run in shown.values()} - {None}, table
        assert asked.rotations.keys() == {run.rotation_key for run in shown.values()} - {None}, table


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


def test_a_table_is_whole_before_one_that_was_asked_for_later_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Project, Plan]
) -> None:
    """They share baselines and more, which do not wait for the last table that shows them."""
    _, plan = whole
    monkeypatch.chdir(tmp_path)  # where there are no results
    asked = wanted(plan, ["quarot_table1", "quarot"])
    order = [run for unit in units(plan, asked)[0] for run in unit.runs]
    first = wanted(plan, ["quarot_table1"]).runs.keys()
    assert sorted(order) == sorted(asked.runs)
    # runs that later tables measure on the same weights come along with them, and nothing else does
    until = order[: max(map(order.index, first)) + 1]
    shared = {plan.runs[run].weights for run in first}
    assert {plan.runs[run].weights for run in until} == shared
    assert len(until) < len(order) / 3


def test_the_file_of_a_configuration_is_read_as_that_configuration(tmp_path: Path, whole: tuple[Project, Plan]) -> None:
    """JSON's 3e-05 is text in YAML, so small numbers have to be written as YAML has them."""
    _, plan = whole
    small = plan.model_copy(update={"config": {**plan.config, "methods": {"block_ap": {"weight_lr": 3e-05}}}})
    assert read_yaml(config_file(tmp_path, small)) == small.config


def test_a_small_target_leaves_its_own_runs_weights_and_rotations_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figure 7 shares its weights with tables of zero-shot accuracy, which it does not show."""
    checkpoints_by_name(monkeypatch, str)  # as the copy does
    copy = Copy(tmp_path, small=False)
    status, output = copy.snakemake("results/tables/spinquant_figure7.csv")
    assert status == 0, output
    project = load_project(root=tmp_path)
    shown = runs_of(project, "spinquant_figure7").values()
    weights = {run.weights_key for run in shown}
    on_them = {run.metric.kind for run in project.runs.values() if run.weights_key in weights}
    assert on_them == {"snr", "perplexity", "zero_shot"}

    def made(pattern: str) -> set[str]:
        return {path.stem for path in tmp_path.glob(pattern)}

    assert made("results/runs/*.json") == {run.key for run in shown}
    assert made("results/weights/*/") == {*weights}
    assert made("results/rotations/*/") == {run.rotation_key for run in shown} - {None}
    assert not made("results/tasks/*")
