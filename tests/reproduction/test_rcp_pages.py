"""RCP's tables and figures of runs: what they measure of a model and of its training, how they are shown."""

import itertools
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from reproduction.frame import values as collected
from reproduction.frame.values import Number, Values, printed
from reproduction.identity.names import HISTORY_FILE, Results
from reproduction.metrics.counts import model_size, training_loss
from reproduction.metrics.settings import TrainingLoss
from reproduction.render.figures import draw as figures
from reproduction.render.figures.scaling import ours, papers
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.runs import runs_report
from reproduction.render.pages.trained import last_step
from reproduction.run.results import RunResult, write_result
from reproduction.run.stages import measures
from reproduction.run.stages.measures import Subject
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.data import merge
from rotquant.foundation.errors import ConfigError, RecipeError, ResultError
from rotquant.foundation.files import write_json
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from tests.helpers.models import tiny_model
from tests.helpers.project import CONFIG, REPOSITORY, TABLES, Copy
from tests.helpers.reports import TASKS, TEXT, provenance

RCP = [
    "table1",
    "table2",
    "table3",
    "table4",
    "table9",
    "table10",
    "table12",
    "table13",
    "table14",
    "table15",
    "table16",
]


def two_bits() -> WeightQuantization:
    scheme = QuantizationScheme(bits=2, symmetric=False, granularity="group", group_size=4)
    return WeightQuantization(scheme=scheme, clip_search=False)


def test_the_size_of_a_model_counts_its_checkpoints_parameters_at_their_bits() -> None:
    model = tiny_model()
    linears = [name for site in architecture_of(model).sites for name in site.linears]
    named = dict(model.named_parameters())
    every = sum(int(np.prod(one.shape)) for one in named.values())
    quantized = sum(one.numel() for name, one in named.items() if name.removesuffix(".weight").endswith(tuple(linears)))
    assert 0 < quantized < every
    assert model_size(model, None) == {"megabits": 16 * every / 1e6, "parameters": every / 1e6}
    bits = 2 * quantized + 16 * (every - quantized)
    assert model_size(model, two_bits()) == {"megabits": pytest.approx(bits / 1e6), "parameters": every / 1e6}


def test_tied_embeddings_count_once() -> None:
    folder = REPOSITORY / "workflow" / "resources" / "models" / "rq-llama3"
    model, _ = load_checkpoint(str(folder), torch.float32, torch.device("cpu"))
    assert model.config.tie_word_embeddings
    stored = sum(one.numel() for one in {id(one): one for one in model.parameters()}.values())
    assert model_size(model, None)["parameters"] == stored / 1e6


def reference(losses: list[float], metric: TrainingLoss) -> dict[str, float]:
    """As the metric says it, step by step."""
    ratios = [losses[step] / min(losses[:step]) for step in range(1, min(metric.first, len(losses)))]
    count = max(1, len(losses) // 10)
    final = sum(losses[len(losses) - count :]) / count
    return {
        "spikes": sum(ratio > metric.factor for ratio in ratios),
        "highest_spike": max(ratios),
        "final_loss": final,
        "remaining": 100 * final / losses[0],
    }


@pytest.mark.parametrize(("steps", "first"), [(2, 100), (7, 100), (150, 100), (150, 10)])
def test_spikes_are_steps_above_the_least_loss_before_them(steps: int, first: int) -> None:
    metric = TrainingLoss(first=first)
    losses = np.random.default_rng(steps + first).lognormal(sigma=0.5, size=steps).tolist()
    metrics, arrays = training_loss(losses, metric)
    assert metrics == pytest.approx(reference(losses, metric))
    assert arrays["losses"] == losses
    assert len(arrays["spikes"]) == metrics["spikes"]
    assert all(losses[step] > metric.factor * min(losses[:step]) for step in arrays["spikes"])


def test_a_falling_loss_has_no_spike_and_a_planted_one_is_found() -> None:
    falling = [4.0 - step / 50 for step in range(150)]
    assert training_loss(falling, TrainingLoss())[0]["spikes"] == 0
    for step, found in ((30, [30]), (130, [])):  # behind the first hundred it is none
        planted = [*falling[:step], 9.0, *falling[step + 1 :]]
        metrics, arrays = training_loss(planted, TrainingLoss())
        assert (arrays["spikes"], metrics["spikes"]) == (found, len(found))


def subject(weights: Path | None) -> Subject:
    parts: Any = dict.fromkeys(("run", "model", "tokenizer", "text", "reference"))
    return Subject(**parts, batch_size=1, weights=weights)


def test_the_loss_is_read_where_the_weights_are(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, 0.5]
    write_json(tmp_path / HISTORY_FILE, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    found = measures.training_loss(TrainingLoss(), subject(tmp_path / "model"))
    assert found.metrics == pytest.approx(reference(losses, TrainingLoss()))
    write_json(tmp_path / "other" / HISTORY_FILE, [])  # of weights that nothing trains
    for folder in (None, tmp_path / "other" / "model", tmp_path / "none" / "model"):
        with pytest.raises(RecipeError, match="needs a method that trains weights"):
            measures.training_loss(TrainingLoss(), subject(folder))


def made_up(project: Project, name: str) -> tuple[Values, dict[str, RunResult]]:
    """A table's numbers, each another one unless it is of the same runs, seed by seed, with their runs."""
    numbers = itertools.count(10)
    means: dict[Any, float] = defaultdict(lambda: float(next(numbers)))
    found, results = {}, {}
    for cell in project.cells(name):
        for quantity in cell.quantities:
            keys = tuple(run.key for run in cell.runs)
            mean = means[keys, quantity.name]
            seeds = tuple(run.seed for run in cell.runs)
            values = tuple(mean + seed / 10 for seed in seeds)
            found[cell.row, cell.column, quantity.name] = Number.of_seeds(values, seeds, keys)
            for run, value in zip(cell.runs, values, strict=True):
                metrics = {**(results[run.key].metrics if run.key in results else {}), quantity.key: value}
                results[run.key] = RunResult(run, metrics, provenance(corpora={"evaluation": TEXT}, tasks=TASKS), None)
    return Values(found, printed(project, project.table(name))), results


@pytest.mark.parametrize("name", [*RCP, "figure1", "figure6"])
def test_every_page_has_words_and_every_number_stands_on_it(name: str, project: Project) -> None:
    table = project.table(f"rcp_{name}")
    values, results = made_up(project, table.id)
    page = markdown(runs_report(project, table, values, results))
    mains = [quantity for quantity in project.quantities(table) if quantity.chance is None]
    for (_, _, quantity), number in values.items():
        if quantity in [main.name for main in mains]:
            assert f"{number.mean:.2f}" in page
    for claim in table.claims:
        assert claim.text in page


def test_a_page_shows_in_each_column_what_is_measured_there(project: Project) -> None:
    table = project.table("rcp_table3")
    page = markdown(runs_report(project, table, *made_up(project, table.id)))
    shown = "| WizardCoder-7B, HumanEval<br>here: rq-7b-code | *published* | WizardCoder-7B, code<br>here: rq-7b-code"
    assert f"{shown} | MetaMath-7B, GSM8K<br>here: rq-7b-math | *published* |" in page


def test_mmlu_stands_beside_the_mean_of_other_tasks_and_is_compared_with_the_papers(project: Project) -> None:
    values, _ = made_up(project, "rcp_table2")
    places = {name for _, _, name in values}
    assert {"mmlu", "average", "perplexity"} <= places
    assert {name for _, _, name in values.published} == {"mmlu", "average", "perplexity"}
    mmlu = next(one for one in project.quantities(project.table("rcp_table2")) if one.name == "mmlu")
    assert (mmlu.title, mmlu.key) == ("MMLU", "average")


def test_a_metric_that_is_called_otherwise_is_read_from_its_runs(tmp_path: Path) -> None:
    """Two of a kind in a column, and one column with one of them; what is written is read back."""
    zero_shot = {"kind": "zero_shot", "suite": "shipped", "corpus": "wikitext2"}
    chosen = {
        **TABLES["tables"][0],
        "metrics": [{**zero_shot, "tasks": ["last_word"]}, {**zero_shot, "tasks": ["grammar"], "called": "mmlu"}],
        "columns": ["Llama-2-7B", {"name": "Second", "slot": "Llama-2-7B", "metrics": ["mmlu"]}],
        "published": None,
        "claims": [],
        "figure": None,
    }
    copy = Copy(tmp_path)
    copy.set_tables({**TABLES, "tables": [chosen]})
    copy.set_config(merge(CONFIG, {"slots": {"Llama-2-7B": {"digest": "0" * 16}}}))  # its model is not here
    project = load_project(root=tmp_path)
    table = project.table(chosen["id"])
    assert [quantity.name for quantity in project.quantities(table)] == ["average", "last_word", "mmlu"]
    for run in project.runs.values():
        (task,) = cast(ZeroShot, run.metric).tasks
        value = 40.0 if task == "grammar" else 20.0
        metrics = {"average": value, task: value}
        write_result(project.results.run(run.key), RunResult(run, metrics, provenance(), None))
    values, _ = collected.collect(project, table)
    found = {place[1:]: number.mean for place, number in values.items()}
    assert found == {
        ("Llama-2-7B", "average"): 20.0,
        ("Llama-2-7B", "last_word"): 20.0,
        ("Llama-2-7B", "mmlu"): 40.0,
        ("Second", "mmlu"): 40.0,
    }


def histories(project: Project, name: str) -> None:
    """Of each training of RCP a history with two steps, whose last one rises with the seed."""
    for cell in project.cells(name):
        for run in cell.runs:
            if "rcp" in run.recipe.methods:
                shares = {"partition_1": 0.3 + run.seed / 100, "from_uniform": 0.04, "clip_low": 0.9}
                last = {"centre": 0.51} if "3-4-4" in cell.row else shares
                records = [{"step": 0, "loss": 2.0, "from_uniform": 0.0}, {"step": 1, "loss": 1.0, **last}]
                write_json(project.results.weights(str(run.weights_key)) / HISTORY_FILE, records)


def test_where_partitions_ended_stands_on_the_page_and_once_for_each_model(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(project), "results", Results(tmp_path, project.names))
    for name in ("rcp_start", "rcp_table2"):
        table = project.table(name)
        assert "<summary>What is trained" not in markdown(
            runs_report(project, table, *made_up(project, name))
        )  # histories are not here
        histories(project, name)
        text = markdown(runs_report(project, table, *made_up(project, name)))
        lines = text.partition("<summary>What is trained in addition to the weights")[2].partition("</details>")[0]
        head = "| Row | Model | lower end | first partition | farthest from a third | centre |"
        assert head in lines
        assert "| RCP 2-4-4 | Llama-" in lines
        assert "| 90.00 | 31.00 | 4.00 | - |" in lines  # of the seeds 0, 1, 2
        assert "| - | - | - | 51.00 |" in lines
        assert "BitDistiller" not in lines
        models = 1 if name == "rcp_start" else 3  # six columns on three stand-ins
        assert lines.count("| RCP 2-4-4 |") == models
        for path in tmp_path.glob("weights/*/history.json"):
            path.unlink()


def test_a_history_without_a_list_of_steps_is_damaged_and_one_without_shares_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_FILE
    for records, expected in (([], {}), ([{"loss": 1.0}], {}), ([{"from_uniform": 0.1}], {"from_uniform": 0.1})):
        write_json(path, records)
        assert last_step(path) == expected
    for text in ('{"step": 1}', "[1, 2]", "[{"):
        path.write_text(text)
        with pytest.raises(ResultError, match="history of a training"):
            last_step(path)


def test_a_type_is_said_of_a_papers_tables_alone_or_of_one_table(tmp_path: Path) -> None:
    for name, text in (("good", "dtypes: {rcp: bfloat16, rcp_table2: float16}"), ("bad", "dtypes: {rpc: bfloat16}")):
        (tmp_path / f"{name}.yaml").write_text(text)
    project = load_project([tmp_path / "good.yaml"], root=REPOSITORY)
    types = {name: project.cells(name)[0].runs[0].dtype for name in ("rcp_table1", "rcp_table2", "quarot_table1")}
    assert types == {"rcp_table1": "bfloat16", "rcp_table2": "float16", "quarot_table1": "float32"}
    with pytest.raises(ConfigError, match=r"dtypes\.rpc: unknown paper or table of runs; nearest: rcp"):
        load_project([tmp_path / "bad.yaml"], root=REPOSITORY)


def test_figure_1_draws_each_model_once_in_order_of_size(project: Project, tmp_path: Path) -> None:
    table = project.table("rcp_figure1")
    values, _ = made_up(project, table.id)
    points = ours(project, table, values, "RCP 2-4-4")
    assert sorted(points) == ["rq-13b", "rq-7b", "rq-llama3"]
    assert [*points.values()] == sorted(points.values())
    unsized = {place: number for place, number in values.ours.items() if place[1:] != ("Llama-2-13B", "megabits")}
    assert "rq-13b" not in ours(project, table, replace(values, ours=unsized), "RCP 2-4-4")
    published = papers(project, table, values, "RCP 2-4-4")
    assert published["Llama-3-8B"] == (16.0, 12.69)
    assert papers(project, table, values, "BF16")["Llama-3.2-1B"] == (16.0, 13.40)
    assert papers(project, table, values, "BitDistiller 3-4-4") == {"Llama-3-8B": (24.0, 10.46)}
    assert papers(project, table, values, "BitDistiller 2-4-4") == {}
    figures.draw(project, table, values, tmp_path / "figure.svg")
    assert ElementTree.parse(tmp_path / "figure.svg").getroot().tag.endswith("svg")
    assert "rq-13b" in (tmp_path / "figure.svg").read_text()
    sizeless = {place: number for place, number in values.ours.items() if place[2] != "megabits"}
    figures.draw(project, table, replace(values, ours=sizeless), tmp_path / "published.svg")
    assert "computed here" in (tmp_path / "figure.svg").read_text()
    assert "computed here" not in (tmp_path / "published.svg").read_text()
    figures.draw(project, table, replace(values, ours=sizeless, published={}), tmp_path / "none.svg")
    assert "No figure" in (tmp_path / "none.svg").read_text()


def test_figure_6_draws_the_losses_of_its_runs(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = project.table("rcp_figure6")
    values, _ = made_up(project, table.id)
    losses = {
        run.key: [4.0 / (step + 1) for step in range(120)] for cell in project.cells(table.id) for run in cell.runs
    }
    asked = []

    def array_of(_: Project, key: str, name: str) -> Any:
        asked.append((key, name))
        return losses[key] if name == "losses" else [3]

    monkeypatch.setattr("reproduction.render.figures.learning.array_of", array_of)
    figures.draw(project, table, values, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert all(f"<!-- {row.name} -->" in text for row in table.rows)
    assert {key for key, _ in asked} == {cell.runs[0].key for cell in project.cells(table.id)}
