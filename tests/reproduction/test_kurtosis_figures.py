"""RCP's Figures 3 and 8 and Lemma 1 are drawn from run files, a panel for each weight and row; claims follow them."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.claims import claims
from reproduction.frame import values as tables
from reproduction.identity.run import Run
from reproduction.run.results import RunResult, write_result
from reproduction.run.stages import measures
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import quantities
from rotquant.foundation.errors import RecipeError
from tests.helpers.circumstances import circumstances
from tests.helpers.project import CONFIG, REPOSITORY, Copy, checkpoints_by_name
from tests.helpers.reports import drawn, page

TABLES = yaml.safe_load((REPOSITORY / "workflow/papers/rcp/analysis.yaml").read_text(encoding="utf-8"))
NUMBERS = {
    "correlation": 0.3,
    "kurtosis_rise": 0.2,
    "half_kurtosis_rise": 0.2,
    "half_error_rise": 1.0,
    "few_kurtosis_rise": -1.0,
    "platykurtic": 55.0,
    "normal": 52.0,
    "adjusted_p": 40.0,
    "least_rise": 9.0,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    checkpoints_by_name(monkeypatch)
    copy = Copy(tmp_path)
    copy.set_tables({**TABLES, "paper": "rcp"})
    copy.set_config({**CONFIG, "seeds": [0, 1, 2], "weight_kurtosis": {"groups": 4}})
    return load_project(root=tmp_path)


def compute(project: Project, **numbers: float) -> None:
    """Write run files; with the seed numbers rise by a thousandth."""
    for run in project.runs.values():
        found = {one.name: (NUMBERS | numbers).get(one.name, 1.0) + run.seed / 1000 for one in quantities(run.metric)}
        made = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.0, "corpora": {}}
        weights = made if run.weights_key else None
        write_result(project.results.run(run.key), RunResult(run, found, made, weights, arrays(run)))


def arrays(run: Run) -> dict[str, Any]:
    metric: Any = run.metric
    if metric.kind == "hadamard_kurtosis":
        point = {"size": 2, "kurtosis_x": -1.2, "first": [-0.6, 0.1], "others": [0.1, 0.01]}
        return {"series": {name: [point, {**point, "size": 4}] for name in metric.distributions}}
    return {"panels": [panel(name) for _ in metric.depths for name in metric.weights]}


def panel(weight: str) -> dict[str, Any]:
    broken = weight == "o_proj"
    histogram = {"counts": [[1, 0], [2, 3]], "x": [-1.0, 1.0], "y": [0.5, 1.5], "beyond": 4}
    return {
        "layer": 3,
        "weight": weight,
        "correlation": math.nan if broken else 0.5,
        "interval": [math.nan if broken else 0.3, math.nan if broken else 0.7],
        "platykurtic": 40.0,
        "normal": 61.0,
        "error": [1.0, 2.0],
        "error_rise": 100.0,
        "histogram": {"counts": [], "x": [], "y": [], "beyond": 10} if broken else histogram,
    }


@pytest.mark.parametrize(("name", "count"), [("rcp_figure3", 1), ("rcp_figure8", 9), ("rcp_lemma1", 3)])
def test_a_figure_has_its_panels(project: Project, name: str, count: int) -> None:
    compute(project)
    svg = drawn(project, name)
    groups = [str(group.get("id")) for group in ElementTree.fromstring(svg).iter()]
    assert sum(group.startswith("axes_") for group in groups) == count
    if name == "rcp_figure8":
        assert svg.count("<!-- not finite -->") == 3  # o_proj of three layers
        assert svg.count("up to 3 in a field") == 6
    if name == "rcp_figure3":
        # three of the four fields hold something
        mesh = next(group for group in ElementTree.fromstring(svg).iter() if "QuadMesh" in str(group.get("id")))
        assert sum("fill: #" in str(part.get("style")) for part in mesh.iter()) == 3


def decided(project: Project, name: str) -> tuple[claims.Outcome, ...]:
    chosen = project.table(name)
    return claims.outcomes(project, chosen, *tables.collect(project, chosen))


def mechanisms(project: Project, name: str) -> list[str]:
    return [outcome.mechanism.here for outcome in decided(project, name) if outcome.mechanism]


def facts(project: Project, name: str) -> list[str]:
    return [outcome.fact.ours.decision for outcome in decided(project, name) if outcome.fact]


def test_mechanisms_and_facts_follow_the_numbers(project: Project) -> None:
    compute(project)
    kurtosis = ("rcp_figure3", "rcp_figure8")
    assert [mechanisms(project, name) for name in kurtosis] == [["reproduced"] * 2, ["reproduced"] * 4]
    assert not any(outcome.experiment for name in kurtosis for outcome in decided(project, name))
    assert facts(project, "rcp_lemma1") == ["holds"] * 3
    signs = dict.fromkeys(("kurtosis_rise", "half_kurtosis_rise", "half_error_rise", "correlation"), -2.0)
    compute(project, **signs, few_kurtosis_rise=1.0, platykurtic=40.0, adjusted_p=0.1, least_rise=1.0)
    assert [mechanisms(project, name) for name in kurtosis] == [["not reproduced"] * 2, ["not reproduced"] * 4]
    assert facts(project, "rcp_lemma1") == ["contradicted"] * 3
    assert mechanisms(project, "rcp_lemma1") == []


def test_what_rotation_does_not_raise_is_explained_by_fewer_platykurtic_groups_than_of_normal_numbers(
    project: Project,
) -> None:
    """And where there are as many or more, the page says that the cause is unknown, whatever half of them says."""
    tested = "Tested cause: Fewer groups are platykurtic than of normal numbers are"
    for name, falls in (("rcp_figure3", "kurtosis_rise"), ("rcp_figure8", "half_kurtosis_rise")):
        compute(project, **{falls: -2.0}, platykurtic=52.0, normal=67.0)
        text = page(project, name)
        assert tested in text
        assert "This table supports it (Llama-2-7B: 52.00 against" in text
        assert "Cause unknown" not in text
        compute(project, **{falls: -2.0}, platykurtic=48.0, normal=45.0)
        text = page(project, name)
        assert tested in text
        assert "speaks against it (" in text
        assert "Cause unknown." in text


def test_half_of_the_groups_are_not_most_where_more_are_of_normal_numbers(project: Project) -> None:
    for normal, expected in ((67.6, "contradicted"), (52.0, "holds")):
        compute(project, platykurtic=52.2, normal=normal)
        (setting,) = (outcome.setting for outcome in decided(project, "rcp_figure8") if outcome.setting)
        assert (setting.ours.decision, setting.here) == (expected, "not tested here")


def test_where_no_weight_is_of_a_kind_its_claim_is_not_checkable_and_the_page_says_why(project: Project) -> None:
    compute(project, few_kurtosis_rise=math.nan)
    assert mechanisms(project, "rcp_figure8") == ["reproduced", "not checkable", "reproduced", "reproduced"]
    text = page(project, "rcp_figure8")
    assert "NaN: no weight has such a p_platy." in text
    assert "outputs overflow" not in text


def test_the_lemma_speaks_of_no_model(project: Project) -> None:
    compute(project)
    text = page(project, "rcp_lemma1")
    assert text.startswith("# Rotate, Clip, and Partition, Lemma 1: Excess kurtosis")
    assert "agrees: 9.00 (at least 4 asked)" in text
    assert "Fact: counts in no score." in text
    assert "Fact: not judged" not in text
    for words in ("Mechanism", "stand for the paper's", "Llama", "Models:", "over the seeds", "over seeds and windows"):
        assert words not in text
    assert "- Seeds: 0\n" in text  # which draw the numbers


def test_a_recipe_that_quantizes_is_refused(project: Project) -> None:
    run = next(run for run in project.runs.values() if run.metric.kind == "weight_kurtosis")
    weights = {"scheme": {"bits": 2, "granularity": "channel"}}
    quantizing = Run.model_validate({**run.model_dump(), "recipe": {**run.recipe.model_dump(), "weights": weights}})
    subject: Any = measures.Subject(quantizing, *[None] * 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RecipeError, match="rounds weights by itself: leave weights out of the recipe"):
        measures.weight_kurtosis(subject.run.metric, subject)
