"""Reports say only what run files hold: ours, the paper's, claims, and where every number comes from."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rotquant import tables
from rotquant.commands.report import report_app
from rotquant.errors import ResultError
from rotquant.files import short_hash
from rotquant.presets import PRESETS, preset
from rotquant.provenance import environment
from rotquant.reporting import describe, figures, markdown, scoreboard
from rotquant.reporting import tables as collected
from rotquant.results import RunResult, read_result, run_path, write_result
from rotquant.tracking import Logged
from tests.project import Copy

VALUES = {"Baseline": 10.0, "QuaRot": 11.0}
TEXT = {
    "name": "docstrings",
    "source": "docstrings",
    "splits": {"test": {"characters": 1234, "sha256": "ab" * 32, "expected_sha256": "cd" * 32}},
}


def provenance(**more: Any) -> dict[str, Any]:
    return {**environment(), "code_digest": "0123456789abcdef", "seconds": 1.5, **more}


def compute(project: tables.Project, **special: float) -> None:
    """Write run files: the row's value, the slot's index and the seed on top; `special` sets a row's value."""
    for cell in project.cells("quarot_table1"):
        for run in cell.runs:
            value = special.get(cell.row, VALUES[cell.row]) + run.seed / 10
            weights = provenance(seconds=2.0) if run.weights_key else None
            result = RunResult(run, {"perplexity": value}, provenance(corpora={"evaluation": TEXT}), weights)
            write_result(project.root / run_path(run.key), result)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tables.Project:
    monkeypatch.setattr(tables, "checkpoint_digest", lambda path: short_hash(Path(path).name))
    Copy(tmp_path)
    loaded = tables.load_project(root=tmp_path)
    compute(loaded)
    return loaded


def page(project: tables.Project, logged: Logged | None = None) -> str:
    table = project.table("quarot_table1")
    return markdown.page(project, table, *collected.collect(project, table), logged)


def test_a_cell_is_the_mean_and_sample_deviation_over_its_seeds(project: tables.Project) -> None:
    values, results = collected.collect(project, project.table("quarot_table1"))
    cell = values["QuaRot", "Llama-2-7B"]
    assert cell.values == (11.0, 11.1)
    assert cell.mean == pytest.approx(11.05)
    assert cell.deviation == pytest.approx(0.1 / math.sqrt(2))
    assert values["Baseline", "Llama-2-7B"].deviation is None
    assert cell.published == 8.37
    assert len(results) == 6


def test_csv_keeps_every_number(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    values, _ = collected.collect(project, table)
    path = project.root / "results/tables/quarot_table1.csv"
    collected.write_csv(path, table, values)
    assert collected.read_csv(path) == values
    assert "QuaRot,Llama-2-7B,perplexity,11.05," in path.read_text()


def test_the_page_shows_ours_the_papers_and_the_losses_of_both(project: tables.Project) -> None:
    text = page(project)
    assert "| QuaRot | 11.05 ± 0.07 | *8.37* | 11.05 ± 0.07 | - |" in text
    assert "| QuaRot | +10.5 % | *+53.0 %* | -42.5 | +10.5 % | - | - |" in text
    assert "1 of 1 hold here" in text


def test_the_page_says_where_each_number_comes_from(project: tables.Project) -> None:
    keys = [run.key for cell in project.cells("quarot_table1") for run in cell.runs]
    logged = Logged("sqlite:///mlflow.db", "quarot", "1", "parent-id", {key: f"mlflow-{key}" for key in keys})
    text = page(project, logged)
    for key in keys:
        assert f"(../results/runs/{key}.json)" in text
        assert f"mlflow-{key}" in text
    assert "parent-id" in text
    assert environment()["cpu"] in text
    assert "`0123456789abcdef`" in text
    assert "1,234 characters" in text
    assert "not the recorded text" in text
    assert "computed on small models that stand for the paper's" in text
    assert "Wall time, summed over all jobs: 17 s" in text  # 6 runs of 1.5 s and 4 weights of 2 s


def test_a_failed_claim_is_shown_with_its_numbers(project: tables.Project) -> None:
    compute(project, Baseline=12.0)
    text = page(project)
    assert "0 of 1 hold here" in text
    assert "❌ fail | ✅ pass" in text
    assert "Llama-2-7B: 12.00 < 11.05 ❌" in text


@pytest.mark.parametrize(("value", "printed"), [(math.inf, "Inf"), (math.nan, "NaN"), (123456.0, "1.23e+05")])
def test_a_broken_network_is_a_result(project: tables.Project, value: float, printed: str) -> None:
    compute(project, QuaRot=value)
    table = project.table("quarot_table1")
    assert f"| QuaRot | {printed} " in page(project)
    values, _ = collected.collect(project, table)
    path = project.root / "results/tables/quarot_table1.csv"
    collected.write_csv(path, table, values)
    figures.draw(project, table, collected.read_csv(path), project.root / "figure.svg")
    assert ElementTree.parse(project.root / "figure.svg").getroot().tag.endswith("svg")


def test_equal_numbers_give_the_same_figure(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    values, _ = collected.collect(project, table)
    for name in ("a.svg", "b.svg"):
        figures.draw(project, table, values, project.root / name)
    assert (project.root / "a.svg").read_bytes() == (project.root / "b.svg").read_bytes()


def test_missing_and_damaged_run_files_are_named(project: tables.Project) -> None:
    table = project.table("quarot_table1")
    key = project.cells(table.id)[0].runs[0].key
    path = project.root / run_path(key)
    good = path.read_text()
    for damaged in (good[:100], "{}", "[1]", good.replace('"perplexity": 10', '"perplexity": "ten"')):
        path.write_text(damaged)
        with pytest.raises(ResultError, match=rf"{key}.json is damaged .*delete it and run again"):
            collected.collect(project, table)
    data = json.loads(good)
    data["run"]["dtype"] = "bfloat16"
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match="its run has the key"):
        read_result(path)
    path.unlink()
    with pytest.raises(ResultError, match=f"{key}.json does not exist"):
        collected.collect(project, table)


def test_the_scoreboard_counts_what_exists(project: tables.Project) -> None:
    text = scoreboard.index(project)
    assert "0 of 107" in text
    assert "quarot_table17" in text
    table = project.table("quarot_table1")
    collected.write_csv(project.root / collected.table_path(table.id), table, collected.collect(project, table)[0])
    (project.root / "reports").mkdir()
    (project.root / "reports/quarot_table1.md").write_text(page(project))
    (project.root / "results/bench/nvidia-h200").mkdir(parents=True)
    (project.root / "results/bench/nvidia-h200/quarot_table14.json").write_text("{}")
    text = scoreboard.index(project)
    assert "2 of 107" in text
    assert "[quarot_table1](quarot_table1.md)" in text
    assert "computed | 1 of 1 |" in text
    assert "recorded on nvidia-h200" in text


def test_the_gallery_is_a_copy_without_links_to_files_that_are_not_committed(
    project: tables.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    (project.root / "reports/figures").mkdir(parents=True)
    (project.root / "reports/figures/quarot_table1.svg").write_text("<svg/>")
    card = "[card](../workflow/resources/models/rq/README.md)"
    text = f"[`k`](../results/runs/k.json) {card} ![f](figures/quarot_table1.svg)"
    (project.root / "reports/quarot_table1.md").write_text(text)
    outcome = CliRunner().invoke(report_app, ["gallery"])
    assert outcome.exit_code == 0, outcome.output
    copied = (project.root / "docs/gallery/quarot_table1.md").read_text()
    assert copied == "`k` [card](../../workflow/resources/models/rq/README.md) ![f](figures/quarot_table1.svg)"
    assert (project.root / "docs/gallery/figures/quarot_table1.svg").exists()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_recipe_is_described_in_one_line_that_differs_from_the_others(name: str) -> None:
    lines = {other: describe.settings(preset(other)) for other in PRESETS}
    assert "\n" not in lines[name]
    assert [other for other in lines if lines[other] == lines[name]] == [name]
