"""SpinQuant's figures are drawn from run files and histories, with a panel for each thing and nothing else."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from reproduction.claims import claims
from reproduction.frame import values as tables
from reproduction.identity.names import HISTORY_FILE
from reproduction.render.figures import draw as figures
from reproduction.render.figures.changes import change_between
from reproduction.render.figures.learning import gains, layers_of, smoothed
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import SNR_DB, quantities
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_json
from tests.helpers.circumstances import circumstances
from tests.helpers.project import CONFIG, Copy, checkpoints_by_name
from tests.helpers.reports import changed, drawn, page

ROTATED = {"methods": {"spinquant": None, "gptq": None}, "keys": None, "values": None}
LEARNED = {**ROTATED, "methods": {"spinquant": {"network": "all"}, "gptq": None}}
LAYERS = 4


def table(name: str, metric: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": f"spinquant_{name}",
        "title": name,
        "section": "2",
        "caption": "A figure.",
        "claims": [],
        "metrics": [metric],
        "columns": ["Llama-2-7B"],
        "baseline": rows[0]["name"],
        "rows": rows,
        **more,
    }


BEFORE_AFTER = [
    {"name": "Original", "method": "baseline"},
    {"name": "Rotated", "method": "spinquant-hard", "recipe": ROTATED},
]
TRIALS = [*BEFORE_AFTER, {"name": "Learned", "method": "spinquant-hard", "recipe": LEARNED}]
TABLES = {
    "paper": "spinquant",
    "title": "SpinQuant: LLM Quantization with Learned Rotations",
    "tables": [
        table("figure3", {"kind": "outliers"}, BEFORE_AFTER, figure={"kind": "outliers", "caption": "-"}),
        table(
            *("figure4", {"kind": "perplexity"}, TRIALS),
            repeats="trials",
            published="published/spread.csv",
            claims=[
                {
                    "text": "Less spread.",
                    "section": "2",
                    "mechanism": {"spread_smaller": {"row": "Learned", "than": ["Rotated"]}},
                }
            ],
            figure={"kind": "distribution", "caption": "-", "rows": ["Rotated", "Learned"]},
        ),
        table(
            *("figure6", {"kind": "range_use"}),
            [
                {"name": "2-D", "method": "baseline"},
                {"name": "3-D", "method": "baseline", "metrics": {"range_use": {"magnitudes": [2, 1, 1]}}},
            ],
            figure={"kind": "range_use", "caption": "-"},
        ),
        table(
            *("figure7", {"kind": "snr"}, TRIALS),
            repeats="once",
            figure={"kind": "learning", "caption": "-", "rows": ["Learned"]},
        ),
    ],
}
PUBLISHED = """row,column,metric,value,unit,deviation
Rotated,Llama-2-7B,perplexity,8.2,ppl,0.73
Learned,Llama-2-7B,perplexity,6.1,ppl,0.03
"""
ARRAYS: dict[str, dict[str, Any]] = {
    "outliers": {
        "kurtosis": {"attention_input": [9.0] * LAYERS, "mlp_input": [4.0, math.nan, 3.0, 3.0]},
        "activation_error": {"attention_input": [2.0] * LAYERS, "mlp_input": [1.0] * LAYERS},
        "weight_error": {name: [1.5] * LAYERS for name in ("query", "key", "value", "gate", "up")},
    },
    "range_use": {"points": [[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]], "ranges": [2.0, 1.0, 1.0]},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    checkpoints_by_name(monkeypatch)
    copy = Copy(tmp_path)
    copy.set_tables(TABLES)
    copy.set_config({**CONFIG, "trials": 4})
    copy.write("workflow/papers/quarot/published/spread.csv", PUBLISHED)
    loaded = load_project(root=tmp_path)
    for run in loaded.runs.values():
        compute(loaded, run)
    return loaded


def compute(project: Project, run: Any) -> None:
    """Write a run file; learned rotations vary less with the seed."""
    spread = 0.01 if run.rotation_key else 0.1
    numbers = {quantity.name: 6.0 + spread * run.seed for quantity in quantities(run.metric)}
    made = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.0, "corpora": {}}
    weights = {**made, "rotation": rotation(run.rotation_key)} if run.rotation_key else None
    arrays = ARRAYS.get(run.metric.kind, {})
    if run.metric.kind == "range_use":
        size = len(run.metric.magnitudes)
        arrays = {"points": [point[:size] for point in arrays["points"]], "ranges": arrays["ranges"][:size]}
    write_result(project.results.run(run.key), RunResult(run, numbers, made, weights, arrays))
    if run.rotation_key:
        write_json(project.results.rotation(run.rotation_key) / HISTORY_FILE, history(20))


def rotation(key: str) -> dict[str, Any]:
    """What a record of learned rotations says."""
    learning = {"network": "all", "steps": 20, "batch_size": 2, "text": {"sequence_length": 16}}
    made = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.0, "corpora": {}, "checkpoint": "small"}
    return {**made, "key": key, "seed": 0, "learning": learning, "first": {"loss": 4.0}, "last": {"loss": 3.0}}


def history(steps: int) -> list[dict[str, Any]]:
    """A learning in which o_proj of layer l gains l dB in the first half, and nothing else does."""
    sites = ("attention_input", "attention_output", "mlp_input", "mlp_output")
    return [
        {
            "step": step,
            "loss": 4.0 - step / steps,
            "site_snr": {
                f"{layer}.{site}": 20.0 + (layer if site == "attention_output" and step >= steps / 2 else 0)
                for layer in range(LAYERS)
                for site in sites
            }
            | {f"{layer}.keys": 18.0 for layer in range(LAYERS)},
            **({"end_to_end_snr": 5.0 + step / 10} if step % 10 == 0 else {}),
        }
        for step in range(steps)
    ]


def draw(project: Project, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn(project, name))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("spinquant_figure3", 3),  # kurtosis, activations, weights
        ("spinquant_figure4", 2),  # ours, the paper's
        ("spinquant_figure6", 2),
        ("spinquant_figure7", 3),  # end to end, one layer, gains
    ],
)
def test_a_figure_has_its_panels(project: Project, name: str, count: int) -> None:
    svg = draw(project, name)
    assert sum(str(group.get("id")).startswith("axes_") for group in svg.iter()) == count


def test_every_seed_of_a_distribution_is_drawn(project: Project) -> None:
    chosen = project.table("spinquant_figure4")
    values, _ = tables.collect(project, chosen)
    assert values["Learned", "Llama-2-7B", "perplexity"].seeds == (0, 1, 2, 3)
    (outcome,) = claims.outcomes(project, chosen, values, {})
    assert outcome.mechanism is not None
    assert outcome.mechanism.here in ("reproduced", "undecided")
    assert outcome.mechanism.papers.decision == "holds"  # by the deviations that the paper prints, 0.03 and 0.73


def test_seeds_that_are_not_finite_have_no_place_and_are_counted(project: Project) -> None:
    chosen = project.table("spinquant_figure4")
    values, _ = tables.collect(project, chosen)
    place = ("Rotated", "Llama-2-7B", "perplexity")
    for count in (4, 3):
        numbers = (math.inf,) * count + (50.0,) * (4 - count)
        figures.draw(project, chosen, changed(values, place, *numbers), project.root / "figure.svg")
        assert f"{count} of 4 seeds not finite -->" in (project.root / "figure.svg").read_text()


def test_layers_that_are_not_finite_have_no_place_and_are_counted(project: Project) -> None:
    draw(project, "spinquant_figure3")  # both rows have one in a layer of the MLP's input
    assert f"<!-- 2 of {2 * 2 * LAYERS} not finite -->" in (project.root / "figure.svg").read_text()


def test_a_running_mean_keeps_a_line_and_averages_what_scatters() -> None:
    assert smoothed([3.0] * 7) == [3.0] * 7
    assert smoothed([0.0, 5.0, 0.0, 5.0, 0.0, 5.0])[2:4] == [2.0, 3.0]  # of five neighbours


def test_a_gain_is_the_difference_of_both_ends(project: Project) -> None:
    found = gains(history(20))
    assert layers_of(history(20)) == LAYERS
    assert found["attention_output"] == [0.0, 1.0, 2.0, 3.0]
    assert found["mlp_input"] == [0.0] * LAYERS


def test_a_row_that_learns_nothing_has_no_history(project: Project) -> None:
    chosen = project.table("spinquant_figure7")
    figure = chosen.figure.model_copy(update={"rows": ("Rotated",)})
    project.tables["spinquant_figure7"] = chosen.model_copy(update={"figure": figure})
    with pytest.raises(ResultError, match="knows of no learned rotations"):
        draw(project, "spinquant_figure7")


def test_an_illustration_speaks_of_no_model(project: Project) -> None:
    chosen = project.table("spinquant_figure6")
    text = page(project, chosen.id)
    assert "stand for the paper's" not in text
    assert "What each column is" not in text
    assert "Change from" not in text


def test_ratios_in_decibels_are_not_compared_in_percent(project: Project) -> None:
    chosen = project.table("spinquant_figure7")
    text = page(project, chosen.id)
    assert "Signal-to-noise ratio of the logits (dB), higher is better" in text
    assert "Change from" not in text
    values, _ = tables.collect(project, chosen)
    change = change_between(values, ("Learned", "Llama-2-7B"), ("Original", "Llama-2-7B"), SNR_DB)
    assert (change.ours, change.papers) == (None, None)
