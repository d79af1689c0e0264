"""Settings are chosen by tables on validation text, and the configuration has what they found best."""

import csv

import pytest
import yaml

from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from tests.helpers.project import REPOSITORY

#: Methods whose settings config.yaml takes model by model; RCP and its baseline have one rate for all.
METHODS = ("omniquant", "smoothquant", "llm-qat", "spinquant-hard", "prefixquant-tuned")


@pytest.fixture(scope="module")
def tuned() -> Project:
    return load_project([REPOSITORY / "config/tuning.yaml"], REPOSITORY)


def test_settings_are_chosen_on_validation_text_and_tables_of_papers_report_test_text(tuned: Project) -> None:
    for table in tuned.of(RunTable).values():
        metrics = [run.metric for cell in tuned.cells(table.id) for run in cell.runs]
        splits = {metric.split for metric in metrics if metric.kind == "perplexity"}
        assert splits <= {"validation" if table.paper == "tuning" else "test"}, table.id
    assert {cell.row for cell in tuned.cells("tuning_smoothquant")} == {"FP16", "0.3", "0.5", "0.7", "0.85", "0.95"}


def test_a_row_has_the_configurations_amounts_and_its_own_rate(tuned: Project) -> None:
    cell = next(cell for cell in tuned.cells("tuning_llmqat") if (cell.row, cell.column) == ("1e-4", "tuned-13b"))
    method = cell.runs[0].recipe.methods["llm_qat"]
    assert (method.learning_rate, method.steps) == (1e-4, tuned.config.slot("tuned-13b").methods["llm_qat"]["steps"])
    assert [run.seed for run in cell.runs] == [*tuned.config.seeds]


def test_the_configuration_has_the_best_of_each_model(project: Project) -> None:
    with (REPOSITORY / "workflow/resources/tuning.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["amounts"] == "config" and line["method"] in METHODS]
    tried: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in lines:
        tried.setdefault((line["method"], line["slot"]), []).append(line)
    for (method, name), several in tried.items():
        best = min(several, key=lambda line: float(line["perplexity"]))
        assert [line["chosen"] for line in several if line is best] == ["yes"], (method, name)
        slot = project.config.slot(name)
        assert best["checkpoint_digest"] == project.digest(name)
        for setting in best["setting"].split():
            path, value = setting.split("=")
            section, field = path.split(".")
            assert float(slot.methods[section][field]) == float(yaml.safe_load(value)), (method, name)
