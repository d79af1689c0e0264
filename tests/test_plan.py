"""A target's jobs compute the runs, weights and rotations that it shows, and nothing else."""

from pathlib import Path

import pytest

from rotquant.foundation.files import short_hash
from rotquant.recipes.recipe import Run
from rotquant.study import project as projects
from tests.project import REPOSITORY, TABLES, Copy


@pytest.fixture(autouse=True)
def digests_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are told apart by their place, as in a copy of the project, so that tables expand without any."""
    monkeypatch.setattr(projects, "checkpoint_digest", lambda path: short_hash(str(path)))


def runs_of(project: projects.Project, table: str) -> dict[str, Run]:
    """The runs that a table shows."""
    return {run.key: run for cell in project.cells(table) for run in cell.runs}


def test_no_job_of_a_table_makes_what_the_table_does_not_show() -> None:
    """By what the jobs are given: a measuring job its group, a weights job its batch and what is measured with it."""
    project = projects.load_project(root=REPOSITORY)
    for table in project.tables:
        shown = runs_of(project, table)
        batches = {project.batch_of(run) for run in shown.values()} - {None}
        groups = {project.group_of[key] for key in shown} | {project.measured_with(batch) for batch in batches} - {None}
        assert {run.key for group in groups for run in project.groups[group]} == set(shown), table
        served = [run for batch in batches for runs in project.batches[batch].values() for run in runs]
        assert {run.weights_key for run in served} == {run.weights_key for run in shown.values()} - {None}, table
        rotations = ({run.rotation_key for run in runs} - {None} for runs in (served, shown.values()))
        assert next(rotations) == next(rotations), table


def test_a_small_target_leaves_its_own_runs_weights_and_rotations_behind(tmp_path: Path) -> None:
    """Figure 7 shares its weights with tables of zero-shot accuracy, which it does not show."""
    copy = Copy(tmp_path, small=False)
    status, output = copy.snakemake("results/tables/spinquant_figure7.csv")
    assert status == 0, output
    project = projects.load_project(root=tmp_path)
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


def test_what_all_tables_with_the_same_weights_show_is_measured_in_the_job_that_makes_them(tmp_path: Path) -> None:
    (table,) = TABLES["tables"]
    accuracy = {**table, "id": "quarot_table2", "metrics": [{"kind": "zero_shot"}], "claims": []}
    del accuracy["published"]

    def measured(folder: str, *tables: dict) -> set[str | None]:
        copy = Copy(tmp_path / folder)
        copy.set_tables({**TABLES, "tables": list(tables)})
        project = projects.load_project(root=copy.root)
        groups = [project.measured_with(batch) for batch in project.batches]
        assert len(groups) == 2  # one row with weights, two columns
        return {None if group is None else project.groups[group][0].metric.kind for group in groups}

    assert measured("one", table) == {"perplexity"}
    assert measured("both", table, {**table, "id": "quarot_table3"}) == {"perplexity"}
    assert measured("apart", table, accuracy) == {None}
    both = {**accuracy, "metrics": [*table["metrics"], *accuracy["metrics"]]}
    assert measured("more", table, both) == {"perplexity"}  # which the second table shows too
