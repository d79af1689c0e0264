"""Settings are chosen on validation text: what a grid is, which runs it asks for, what is recorded and what is kept."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.identity.run import Run
from reproduction.run import tuning
from reproduction.run.tuning import TuningJob, at_an_end, points, read_grid, tune, tuning_run
from reproduction.tables.project import Project
from rotquant.cli import app
from rotquant.foundation.errors import ConfigError, RecipeError
from rotquant.foundation.files import read_json
from rotquant.recipes.presets import preset
from rotquant.recipes.schemes import Perplexity
from tests.helpers.project import REPOSITORY


def parabola(job: TuningJob) -> dict[str, float]:
    """In place of quantizing: least at a rate of 2e-4, larger by the seed, and no number above 1."""
    run = job.run
    rate = run.recipe.methods["llm_qat"].learning_rate
    found = math.inf if rate > 1 else 10 + abs(math.log10(rate / 2e-4)) + run.seed / 100
    return {"perplexity": found, "nll": math.log(found), "seconds": 1.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that are measured, by arithmetic."""
    runs: list[Run] = []
    monkeypatch.setattr(tuning, "measure_run", lambda job: runs.append(job.run) or parabola(job))
    return runs


def chosen(
    project: Project, record: Path, *values: float, seeds: tuple[int, ...] = (0, 1), **options: Any
) -> dict[str, Any]:
    slot, grid = project.config.slot("Llama-2-13B"), {("llm_qat", "learning_rate"): values}
    return tune(project, slot, "llm-qat", grid, {}, seeds, record, "cpu", **options)


def test_a_field_is_found_by_its_name_or_with_its_method() -> None:
    recipe = preset("spinquant-hard")
    grid = read_grid(["learning_rate=1.5,100", "methods.gptq.damping=0.01", "spinquant.gradient=errors,scales"], recipe)
    assert grid == {
        ("spinquant", "learning_rate"): (1.5, 100),
        ("gptq", "damping"): (0.01,),
        ("spinquant", "gradient"): ("errors", "scales"),
    }
    first, *others = points(grid)
    assert first == {"spinquant": {"learning_rate": 1.5, "gradient": "errors"}, "gptq": {"damping": 0.01}}
    assert len(others) == 3


def test_test_text_is_never_read(project: Project, measured: list[Run], tmp_path: Path) -> None:
    chosen(project, tmp_path / "record.json", 1e-4, 2e-4)
    assert {run.metric.split for run in measured} == {"validation"}
    slot = project.config.slot("Llama-2-13B")
    for metric in (Perplexity(), Perplexity(split="train")):
        with pytest.raises(ConfigError, match="settings are chosen on validation text"):
            tuning_run(project, slot, preset("llm-qat"), {}, metric, 0)


def test_every_point_has_the_slots_amounts_and_all_seeds(project: Project, measured: list[Run], tmp_path: Path) -> None:
    chosen(project, tmp_path / "record.json", 1e-4, 2e-4)
    slot = project.config.slot("Llama-2-13B")
    methods = [run.recipe.methods["llm_qat"] for run in measured]
    assert {method.steps for method in methods} == {slot.methods["llm_qat"]["steps"]}
    assert [(method.learning_rate, run.seed) for method, run in zip(methods, measured, strict=True)] == [
        (1e-4, 0), (1e-4, 1), (2e-4, 0), (2e-4, 1)
    ]  # fmt: skip


def test_the_least_mean_is_chosen_and_a_diverging_point_is_not(
    project: Project, measured: list[Run], tmp_path: Path
) -> None:
    found = chosen(project, tmp_path / "record.json", 1e-4, 2e-4, 5e-4, 100.0)
    assert found["chosen"] == {"llm_qat": {"learning_rate": 2e-4}}
    assert found["points"][-1]["perplexity"] == math.inf
    assert not at_an_end(found)
    assert read_json(tmp_path / "record.json")["points"][-1]["perplexity"] == "inf"
    assert at_an_end(chosen(project, tmp_path / "other.json", 1e-4, 2e-4)) == ["llm_qat.learning_rate"]


def test_an_interrupted_tuning_continues_and_a_wider_grid_costs_what_it_adds(
    project: Project, measured: list[Run], tmp_path: Path
) -> None:
    chosen(project, tmp_path / "record.json", 1e-4, 100.0)
    assert len(measured) == 4
    found = chosen(project, tmp_path / "record.json", 1e-4, 2e-4, 100.0)
    assert len(measured) == 6
    assert len(found["runs"]) == 6
    assert chosen(project, tmp_path / "again.json", 1e-4, 2e-4, 100.0)["points"] == found["points"]


def test_several_processes_measure_what_one_does(project: Project, tmp_path: Path) -> None:
    alone = chosen(project, tmp_path / "alone.json", 1e-4, 2e-4, 100.0, measure=parabola)
    together = chosen(project, tmp_path / "together.json", 1e-4, 2e-4, 100.0, measure=parabola, workers=2)
    assert {**together, "environment": None} == {**alone, "environment": None}


def refused(job: TuningJob) -> dict[str, float]:
    raise ConfigError("refused in a process")


def test_a_refusal_in_another_process_is_said_here(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refused in a process"):
        chosen(project, tmp_path / "record.json", 1e-4, 2e-4, measure=refused, workers=2)


def test_the_command_prints_what_the_configuration_should_say(
    measured: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "tune",
        "llm-qat",
        "Llama-2-7B",
        "Llama-2-13B",
        "--grid",
        "learning_rate=1e-4,2e-4,5e-4",
        "--seeds",
        "0",
        "--jobs",
        "1",
    ]
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit) as stop:
        app([*words, "-o", str(tmp_path)])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    said = yaml.safe_load(printed[printed.index("slots:") :])
    expected = {"methods": {"llm_qat": {"learning_rate": 2e-4}}}
    assert said == {"slots": {"Llama-2-7B": expected, "Llama-2-13B": expected}}
    assert {path.name for path in tmp_path.iterdir()} == {"llm-qat-Llama-2-7B.json", "llm-qat-Llama-2-13B.json"}


@pytest.mark.parametrize("stage", ["rotations", "weights", "runs"])
def test_a_kept_number_is_of_the_code_of_all_stages(
    project: Project, measured: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Of the learner's too, which is no part of making the weights."""
    chosen(project, tmp_path / "record.json", 1e-4)
    chosen(project, tmp_path / "record.json", 1e-4)
    assert len(measured) == 2
    digest = tuning.stage_digest
    monkeypatch.setattr(tuning, "stage_digest", lambda name, recipe: digest(name, recipe) + "x" * (name == stage))
    chosen(project, tmp_path / "record.json", 1e-4)
    assert len(measured) == 4


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("learning_rate", "write it as field=value,value"),
        ("learning_rate=1,", "write it as field=value,value"),
        ("rate=1", "no method of the recipe has the field 'rate'"),
        ("seed=1,2", "both"),
    ],
)
def test_an_option_that_names_no_grid_is_one_sentence(option: str, sentence: str) -> None:
    methods = {**preset("llm-qat").methods, **preset("quip-sharp").methods}
    with pytest.raises(RecipeError, match=sentence):
        read_grid([option], preset("llm-qat").model_copy(update={"methods": methods}))
