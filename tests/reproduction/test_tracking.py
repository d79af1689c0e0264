"""MLflow shows exactly what the result files say: one per run, replaced and never doubled, also when many start."""

import json
import math
import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from reproduction.frame.values import collect
from reproduction.identity.names import HISTORY_FILE
from reproduction.render import tracking
from reproduction.render.pages.runs import runs_report
from reproduction.render.tracking import papers
from reproduction.run.results import RunResult, read_result, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.tables import Claim
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_json
from tests.helpers.learned import LEARNED, learned_record
from tests.helpers.speed import SPEED, record
from tests.helpers.tracked import ROWS, SHARED, TABLES, compute, log, make_project, search
from tests.helpers.watching import long_work


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Path) -> Project:
    return make_project(tmp_path, monkeypatch, fresh_database)


def test_one_mlflow_run_per_run_with_parameters_metrics_and_tags(project: Project) -> None:
    (logged,) = log(project, "quarot_table1")
    runs = {run.info.run_id: run for run in search(project)}
    assert sorted(logged.runs.values()) == sorted(runs)
    cell = next(cell for cell in project.cells("quarot_table1") if cell.row == "QuaRot")
    run = runs[logged.runs[cell.runs[1].key]]
    assert run.data.metrics["perplexity"] == pytest.approx(11.1)
    assert run.data.params["recipe.weights.scheme.bits"] == "4"
    short = {"method": "quarot", "model": "Llama-2-7B", "bits": "4-4-4", "seed": "1"}
    assert short.items() <= run.data.params.items()
    assert run.data.params["recipe.rotation.residual"] == "hadamard"
    expected = {
        "paper": "quarot",
        "method": "quarot",
        "model": "Llama-2-7B",
        "metric": "perplexity",
        "seed": "1",
        "rotquant.key": cell.runs[1].key,
        "mlflow.parentRunId": logged.parent,
    }
    assert {name: run.data.tags.get(name) for name in expected} == expected
    assert run.info.run_name == "QuaRot / Llama-2-7B / perplexity / seed 1"


def test_showing_a_table_says_how_far_it_is(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with long_work(monkeypatch):
        log(project, "quarot_table1")
    assert f"MLflow, quarot_table1: run 2 of {SHARED}, " in capsys.readouterr().err


def test_the_parameters_that_a_comparison_begins_with_are_short(project: Project) -> None:
    log(project)
    shown = [run.data.params for run in search(project)]
    names = sorted({name for params in shown for name in params})
    varied = [name for name in names if len({params.get(name) for params in shown}) > 1]
    first = [name for name in varied if not name.startswith("metric.")][:3]  # as MLflow chooses them
    assert first == ["bits", "method", "model"]


def experiment_tags(project: Project) -> dict[str, str]:
    with tracking.opened(project.root) as store:
        return store.client.get_experiment_by_name("quarot").tags


def view(project: Project, name: str) -> dict[str, Any]:
    """The state of a view, as MLflow's interface unpacks it."""
    packed = json.loads(experiment_tags(project)[f"mlflow.sharedViewState.{name}"])["state"]
    return json.loads(zlib.decompress(b64decode(packed.removeprefix("deflate;"))))


def charts(state: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [chart for chart in state["compareRunCharts"] if chart["metricSectionId"] == section]


def test_an_experiment_has_a_description_and_views_of_all_runs_and_of_each_table(project: Project) -> None:
    log(project)
    first = experiment_tags(project)
    assert TABLES["title"] in first["mlflow.note.content"]
    assert first["mlflow.experimentKind"] == "custom_model_development"
    state = view(project, "runs")
    assert len(search(project, state["searchFilter"])) == len(project.runs)
    assert state["runsHiddenMode"] == "SHOW_ALL"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`average drop in percent`", True)
    axes = ["method", "model", "bits", "online"]
    headlines = ["average drop in percent", "perplexity rise in percent"]
    assert [
        (chart["type"], chart["selectedParams"], chart["selectedMetrics"]) for chart in charts(state, "All settings")
    ] == [("PARALLEL", axes, [name]) for name in headlines]
    shown = [run.info.run_name for run in search(project, view(project, "tables")["searchFilter"])]
    assert sorted(shown) == ["quarot_table1", "quarot_table9"]
    with tracking.opened(project.root) as store:
        experiment = store.client.get_experiment_by_name("quarot").experiment_id
        store.client.set_experiment_tag(experiment, "mlflow.note.content", "Mine.")
        store.client.set_experiment_tag(experiment, "mlflow.sharedViewState.f00d", json.dumps({"name": "Mine"}))
        store.client.set_experiment_tag(
            experiment, "mlflow.sharedViewState.quarot_table8", json.dumps({"name": "Table quarot_table8"})
        )
        listed = [*tracking.links(store, "http://host")]
    assert listed == [
        f"quarot {name}" for name in ("runs", "tables", "quarot_table1", "quarot_table8", "quarot_table9")
    ]
    log(project, "quarot_table1")
    after = experiment_tags(project)
    assert after.pop("mlflow.sharedViewState.f00d")
    assert after == {**first, "mlflow.note.content": "Mine."}


def test_a_table_has_bars_of_its_rows_for_each_model_with_seeds_as_one(project: Project) -> None:
    compute(project, value=13.2, row="QuaRot")
    log(project, "quarot_table1")
    state = view(project, "quarot_table1")
    name = "perplexity rise in percent"
    bars = [("BAR", f"Llama-2-7B/{name}"), ("BAR", f"Llama-2-13B/{name}")]
    assert [(chart["type"], chart["metricKey"]) for chart in charts(state, "Methods by model")] == bars
    tag = "rotquant.table.quarot_table1.row"
    assert state["groupBy"] == {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]}
    rises = {
        (run.data.tags[tag], run.data.params["model"], run.data.params["seed"]): run.data.metrics[name]
        for run in search(project, state["searchFilter"])
    }
    assert rises == {
        ("Baseline", "Llama-2-7B", "0"): 0,
        ("Baseline", "Llama-2-13B", "0"): 0,
        ("QuaRot", "Llama-2-7B", "0"): 20,  # 13.2 of 11
        ("QuaRot", "Llama-2-13B", "0"): 20,
        ("QuaRot", "Llama-2-7B", "1"): 20.91,  # 13.3 of 11, in four digits
        ("QuaRot", "Llama-2-13B", "1"): 20.91,
    }


def test_rows_of_a_model_in_two_columns_are_not_averaged(project: Project) -> None:
    path = project.root / "workflow/papers/quarot/tables.yaml"
    rows = [ROWS[0], {**ROWS[1], "columns": {"8 bits": {"activations": {"bits": 8}}}}]
    columns = ["Llama-2-7B", {"name": "8 bits", "slot": "Llama-2-7B"}]
    table = TABLES["tables"][0] | {"rows": rows, "columns": columns}
    path.write_text(yaml.safe_dump({**TABLES, "tables": [table]}))
    changed = load_project(root=project.root)
    compute(changed)
    log(changed)
    (key,) = view(changed, "quarot_table1")["groupBy"]["groupByKeys"]
    assert key["groupByData"] == "rotquant.table.quarot_table1"


def test_without_the_unquantized_model_numbers_stand_as_they_are(project: Project) -> None:
    path = project.root / "workflow/papers/quarot/tables.yaml"
    table = TABLES["tables"][0] | {"rows": ROWS[1:2], "baseline": "QuaRot"}
    path.write_text(yaml.safe_dump({**TABLES, "tables": [table]}))
    for run in (run for cell in project.cells("quarot_table1") if cell.row == "Baseline" for run in cell.runs):
        project.results.run(run.key).unlink()
    log(load_project(root=project.root))
    (run, *_) = search(project)
    assert set(run.data.metrics) == {"perplexity", f"{run.data.params['model']}/perplexity"}
    assert view(project, "quarot_table1")["orderByKey"] == "metrics.`Llama-2-7B/perplexity`"


def test_views_name_what_runs_have_and_numbers_that_are_no_results_make_no_chart(project: Project) -> None:
    project = with_learned_rotations(project)
    log(project)
    runs = search(project, "tags.`rotquant.table.quarot_table1` != ''")
    metrics = {name for run in runs for name in run.data.metrics}
    params = {name for run in runs for name in run.data.params}
    for name in ("runs", "quarot_table1"):
        state = view(project, name)
        assert {one for chart in state["compareRunCharts"] for one in chart.get("selectedParams", [])} <= params
        named = {
            one for chart in state["compareRunCharts"] for one in chart.get("selectedMetrics", [chart.get("metricKey")])
        }
        chosen = {one for run in search(project, state["searchFilter"]) for one in run.data.metrics}
        assert chosen == named <= metrics  # MLflow adds a chart of each metric that no chart names
        ordered = {one.partition("`")[2].rstrip("`") for one in (*state["selectedColumns"], state["orderByKey"])}
        assert ordered <= metrics | params
    curves = charts(view(project, "quarot_table1"), "Learning curves")
    assert [(chart["type"], chart["metricKey"]) for chart in curves] == [
        ("LINE", "Llama-2-7B/loss"),
        ("LINE", "Llama-2-13B/loss"),
    ]
    assert not metrics & {"nll", "tokens", "windows", "nll_standard_error", "seconds"}
    (run, *_) = search(project)
    assert run.data.tags["metric.tokens"] == "2044.0"
    assert run.data.tags["metric.seconds"] == "1.5" or float(run.data.tags["metric.seconds"]) > 1.5
    assert len(run.data.tags["metric.nll"]) <= 5


def test_an_experiment_that_another_process_makes_at_the_same_time_is_taken(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = log(project, "quarot_table1")
    found = MlflowClient.get_experiment_by_name
    answers = iter([lambda *_: None])  # not yet there when it is looked for first
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *given: next(answers, found)(*given))
    assert log(project, "quarot_table1") == [first]


def test_of_runs_that_two_processes_make_at_once_one_is_kept(project: Project) -> None:
    chosen = [project.table(name) for name in project.tables]
    found = {table.id: collect(project, table)[1] for table in chosen}
    with tracking.opened(project.root) as store:
        processes = [papers.Paper(store, project, "quarot") for _ in range(2)]
        for process, order in zip(processes, (chosen, chosen[::-1]), strict=True):
            for table in order:
                process.show_table(table, found[table.id])
        for process in processes:
            process.drop_doubles()
        first, second = ([process.logged(table.id, found[table.id], {}) for table in chosen] for process in processes)
    assert first == second == log(project)
    assert len(search(project)) == len(project.runs)
    parents = {run.info.run_id for run in search(project, "tags.`rotquant.kind` = 'table'")}
    assert parents == {each.parent for each in first}
    assert {run.data.tags["mlflow.parentRunId"] for run in search(project)} == parents


def test_a_run_that_was_not_finished_gives_way_to_a_whole_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_terminated", killed)
        with pytest.raises(KeyboardInterrupt):
            log(project, "quarot_table1")
    (logged,) = log(project, "quarot_table1")
    assert {run.info.run_id for run in search(project)} == set(logged.runs.values())


def test_a_run_of_several_tables_appears_once_and_is_found_by_each(project: Project) -> None:
    second, first = log(project, "quarot_table9", "quarot_table1")
    assert len(search(project)) == len(project.runs)
    assert len(first.runs.keys() & second.runs.keys()) == len(first.runs) == SHARED
    for logged, name in ((first, "quarot_table1"), (second, "quarot_table9")):
        found = search(project, f"tags.`rotquant.table.{name}` != ''")
        assert {run.info.run_id for run in found} == set(logged.runs.values())
    shared = next(
        run for run in search(project) if run.data.tags.get("rotquant.table.quarot_table1", "")[:6] == "QuaRot"
    )
    assert shared.data.tags["rotquant.table.quarot_table9"][:4] == "INT4"
    assert shared.data.tags["mlflow.parentRunId"] == first.parent


def test_tasks_are_metrics_under_names_that_mlflow_takes(project: Project) -> None:
    log(project, "quarot_table9")
    (run, *_) = search(
        project, "tags.metric = 'zero_shot' and params.method = 'baseline' and params.model = 'Llama-2-7B'"
    )
    assert run.data.metrics["last_word"] == run.data.metrics["average"] == 11.0
    assert run.data.tags["metric.last_word.acc_norm_none"] == "11.0"
    assert run.data.metrics["average drop in percent"] == run.data.metrics["Llama-2-7B/average drop in percent"] == 0


def test_logging_again_changes_nothing_and_a_new_result_replaces_the_old(project: Project) -> None:
    first = log(project)
    assert log(project) == first
    run = next(cell for cell in project.cells("quarot_table1") if cell.row == "QuaRot").runs[0]
    write_result(
        project.results.run(run.key), RunResult(run, {"perplexity": 9.0}, {**environment(), "seconds": 1}, None)
    )
    second = log(project)
    for before, after in zip(first, second, strict=True):
        assert {key for key in before.runs if before.runs[key] != after.runs[key]} == {run.key}
    assert len(search(project)) == len(project.runs)


def test_tags_follow_the_tables(project: Project) -> None:
    (before,) = log(project, "quarot_table1")
    renamed = TABLES["tables"][0] | {"rows": [ROWS[0], {**ROWS[1], "name": "Rotated"}]}
    path = project.root / "workflow/papers/quarot/tables.yaml"
    path.write_text(yaml.safe_dump({**TABLES, "tables": [renamed]}))
    changed = load_project(root=project.root)
    (after,) = log(changed, "quarot_table1")
    assert after == before
    assert not search(changed, "tags.`rotquant.table.quarot_table9` != ''")
    names = {run.data.tags["rotquant.table.quarot_table1"] for run in search(changed)}
    assert "Rotated / Llama-2-7B" in names
    assert "QuaRot / Llama-2-7B" not in names


def test_a_missing_run_file_is_named_before_anything_is_logged(project: Project) -> None:
    key = next(iter(project.runs))
    (project.results.run(key)).unlink()
    with pytest.raises(ResultError, match=key):
        log(project)
    with tracking.opened(project.root) as store:
        assert store.client.get_experiment_by_name("quarot") is None


def test_an_infinite_perplexity_is_kept(project: Project) -> None:
    compute(project, value=math.inf, row="QuaRot")
    log(project, "quarot_table1")
    shown = search(project, "tags.`metric.perplexity` = 'inf'")
    assert len(shown) == 4
    assert all("perplexity" not in run.data.metrics for run in shown)
    compute(project, value=math.inf)
    log(project, "quarot_table1")  # no run has a number
    assert "compareRunCharts" not in view(project, "tables")


_OUTCOMES = ("hold", "contradicted", "undecided", "not_checkable")


def test_a_tables_run_counts_its_claims(project: Project) -> None:
    check = {"better": {"row": "Baseline", "than": ["QuaRot"]}}
    claim = Claim.model_validate({"text": "-", "section": "-", "mechanism": check})
    chosen = project.table("quarot_table1").model_copy(update={"claims": (claim,)})
    decisions = {1.0: ("0", "1", "0", "0"), math.nan: ("0", "0", "0", "1"), 12.0: ("1", "0", "0", "0")}
    for value, counts in decisions.items():
        compute(project, value=value, row="QuaRot")
        (logged,) = tracking.log_tables(project, [chosen])
        tracking.log_report(project.root, logged, runs_report(project, chosen, *collect(project, chosen)), [])
        (parent,) = search(project, "tags.`rotquant.kind` = 'table'")
        tags = parent.data.tags
        assert tuple(tags[f"claims.{name}"] for name in _OUTCOMES) == counts


def test_artifacts_lie_on_the_tables_run(project: Project) -> None:
    (logged,) = log(project, "quarot_table1")
    page = project.root / "report.md"
    page.write_text("# Report\n\n![A figure.](figure.svg)\nFirst" + "\nand more" * 1000)
    chosen = project.table("quarot_table1")
    for _ in range(2):
        report = runs_report(project, chosen, *collect(project, chosen), logged)
        tracking.log_report(project.root, logged, report, [page])
    with tracking.opened(project.root) as found:
        assert [item.path for item in found.client.list_artifacts(logged.parent)] == ["report.md"]
        overview = found.client.get_run(logged.parent).data.tags["mlflow.note.content"]
    link = f"#/experiments/{logged.experiment_id}/runs/{logged.parent}/artifacts/report.md"
    assert overview.startswith(f"[report.md]({link})")
    assert "# Report\n\nFirst" in overview
    assert "figure.svg" not in overview
    assert len(overview) <= 5000


def test_a_speed_table_is_one_run_with_its_cells_as_metrics_and_a_new_record_takes_its_place(project: Project) -> None:
    (project.root / "workflow/papers/quarot/speed.yaml").write_text(yaml.safe_dump(SPEED))
    table = load_project(root=project.root).table("quarot_table14")
    path = project.root / "results/speed/quarot_table14.json"
    first = tracking.log_speed(project, record(path, table), table)
    assert tracking.log_speed(project, record(path, table), table).parent == first.parent
    second = tracking.log_speed(project, record(path, table, gpu="Another GPU"), table)
    assert second.parent != first.parent
    (run,) = search(project, "tags.`rotquant.kind` = 'speed'")
    assert run.data.tags["gpu"] == "Another GPU"
    assert run.data.metrics["Linear layer/4096x4096 batch 1/INT4/seconds"] == pytest.approx(8.192e-5)
    assert len(run.data.metrics) == 6


HISTORY = [
    {
        "step": step,
        "loss": 5.0 - step,
        "learning_rate": 1.5 - step / 2,
        "orthonormality": 1e-7,
        "activation_snr": 20.0 + step,
        "site_snr": {"0.attention_input": 19.0},
        **({"end_to_end_snr": 8.0 + step} if step != 1 else {}),
    }
    for step in range(3)
]


def with_learned_rotations(project: Project) -> Project:
    """The project with a row on learned rotations, all of it computed."""
    path = project.root / "workflow/papers/quarot/tables.yaml"
    table = TABLES["tables"][0] | {"rows": [ROWS[0], LEARNED]}
    path.write_text(yaml.safe_dump({**TABLES, "tables": [table]}))
    changed = load_project(root=project.root)
    compute(changed)
    for key, runs in changed.rotations.items():
        write_json(changed.results.rotation(key) / HISTORY_FILE, HISTORY)
        for run in runs:
            result = read_result(changed.results.run(run.key))
            record = {"seconds": 1.0, "rotation": learned_record(run)}
            write_result(changed.results.run(run.key), replace(result, weights=record))
    return changed


def test_a_learned_rotation_is_a_run_with_the_history_of_its_learning(project: Project) -> None:
    project = with_learned_rotations(project)
    (logged,) = log(project, "quarot_table1")
    runs = {run.info.run_id: run for run in search(project, "tags.`rotquant.kind` = 'rotation'")}
    assert len(runs) == 4  # two seeds on two models
    assert set(runs) == set(logged.rotations.values())
    key, (first, *_) = next(iter(project.rotations.items()))
    shown = runs[logged.rotations[key]]
    expected = {"seed": str(first.seed), "rotquant.table.quarot_table1": "Learned / Llama-2-7B"}
    assert {name: shown.data.tags.get(name) for name in expected} == expected
    assert shown.data.tags["mlflow.parentRunId"] == logged.parent
    assert shown.data.params["learning.steps"] == str(first.recipe.methods["spinquant"].steps)
    calibrated = next(run for run in search(project) if run.data.tags.get("rotation_key") == key)
    assert calibrated.data.params["texts.wikitext2 test"] == first.texts["wikitext2 test"]
    (head,) = (name for name in first.texts if name.startswith("wikitext2 train["))
    assert calibrated.data.params[f"texts.{head.replace('[', '_').replace(']', '_')}"] == first.texts[head]
    with tracking.opened(project.root) as found:
        client = found.client
    for name, steps in {"loss": [0, 1, 2], "orthonormality": [0, 1, 2], "end_to_end_snr": [0, 2]}.items():
        found = client.get_metric_history(shown.info.run_id, name)
        assert [(metric.step, metric.value) for metric in found] == [(step, HISTORY[step][name]) for step in steps]
    measured = search(project, f"tags.rotation_key = '{key}'")
    assert {run.data.tags["rotquant.key"] for run in measured} == {run.key for run in project.rotations[key]}
    assert log(project, "quarot_table1") == [logged]


def test_trained_weights_are_a_run_with_the_history_of_their_training(project: Project) -> None:
    run = next(run for run in project.runs.values() if run.weights_key)
    path = project.results.run(run.key)
    record = {**environment(), "seconds": 2.0, "checkpoint": "models/small", "checkpoint_digest": "feed"}
    write_result(path, replace(read_result(path), weights=record))
    steps = [{"step": step, "loss": 5.0 - step} for step in range(3)]
    write_json(project.results.weights(run.weights_key) / HISTORY_FILE, steps)
    (logged,) = log(project, "quarot_table1")
    (shown,) = search(project, "tags.`rotquant.kind` = 'weights'")
    assert shown.data.tags["rotquant.key"] == run.weights_key
    assert shown.data.tags["mlflow.parentRunId"] == logged.parent
    with tracking.opened(project.root) as store:
        found = store.client.get_metric_history(shown.info.run_id, "loss")
    assert [{"step": metric.step, "loss": metric.value} for metric in found] == steps
    assert log(project, "quarot_table1") == [logged]


def test_a_new_history_replaces_the_old_and_a_missing_one_is_passed_over(project: Project) -> None:
    project = with_learned_rotations(project)
    (before,) = log(project, "quarot_table1")
    changed, missing = list(project.rotations)[:2]
    write_json(project.results.rotation(changed) / HISTORY_FILE, HISTORY[:2])
    (project.results.rotation(missing) / HISTORY_FILE).unlink()
    (after,) = log(project, "quarot_table1")
    assert {key for key in after.rotations if after.rotations[key] != before.rotations[key]} == {changed}
    assert set(before.rotations) - set(after.rotations) == {missing}
