"""PrefixQuant's figures about tokens are drawn from run files, a panel for each thing, and say what is left out."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from reproduction.frame import values as tables
from reproduction.metrics.token_maxima import STATISTICS, TENSORS
from reproduction.render.figures import draw as figures
from reproduction.render.figures import tokens as drawn
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import TENSOR_WORDS, quantities
from rotquant.foundation.errors import ResultError
from tests.helpers.circumstances import circumstances
from tests.helpers.project import Copy, checkpoints_by_name

LAYERS = 3
ROTATED = {"rotation": {"values": "random_hadamard", "heads": False}}
ROWS = [{"name": "Original", "method": "baseline"}, {"name": "Rotated", "method": "baseline", "recipe": ROTATED}]


def table(number: int, metric: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": f"prefixquant_figure{number}",
        "title": "tokens",
        "section": "4",
        "caption": "Tokens.",
        "metrics": [metric],
        "columns": ["Llama-2-7B"],
        "baseline": "Original",
        "rows": ROWS,
        "claims": [],
        "figure": {"kind": metric["kind"], "caption": "Tokens."},
        **more,
    }


TABLES = {
    "paper": "prefixquant",
    "title": "PrefixQuant: Static Quantization Beats Dynamic through Prefixed Outliers in LLMs",
    "tables": [
        table(2, {"kind": "token_maxima"}),
        table(3, {"kind": "token_maxima", "tensors": "attention"}, columns=["Llama-2-7B", "Llama-2-13B"]),
        table(4, {"kind": "outlier_tokens"}),
        table(7, {"kind": "outlier_tokens"}, columns=["Llama-2-7B", "Llama-2-13B"]),
        table(
            1,
            {"kind": "magnitudes", "tokens": 4, "sites": ["mlp_output"]},
            figure={"kind": "magnitudes", "own_scales": True, "caption": "Magnitudes."},
        ),
    ],
}


def maxima(**special: list[float]) -> dict[str, list[float]]:
    """Statistics of three layers; `special` ones in place of a hundred times, the same and a half of the median."""
    usual = {"top_1": 100.0, "top_2": 50.0, "top_3": 20.0, "median": 1.0, "min_1": 0.5}
    assert usual.keys() == set(STATISTICS)
    return {name: special.get(name, [value] * LAYERS) for name, value in usual.items()}


def outliers(**special: Any) -> dict[str, Any]:
    contents = [("\n", 4, True), (" self $x$", 2, False), *((f"w{i}", 1, False) for i in range(5))]
    found = {"contents": contents, "first": 5, "others": 11, "positions": [(0, 5), (7, 2)], "windows": 5, "tokens": 16}
    return found | special


def panel(largest: float) -> dict[str, Any]:
    return {
        "layer": 1,
        "linear": "mlp.down_proj",
        "peak_ratio": 8.0,
        "matrix": [[0.5, largest], [0.1, 0.2]],
        "mean": [0.3, 0.4],
        "largest": [0.5, largest],
    }


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    checkpoints_by_name(monkeypatch)
    Copy(tmp_path).set_tables(TABLES)
    loaded = load_project(root=tmp_path)
    compute(loaded)
    return loaded


def compute(project: Project, **arrays: Any) -> None:
    """Write every run file; `arrays` of a kind of metric in place of the usual ones."""
    for run in project.runs.values():
        numbers = {quantity.name: 6.0 + 0.1 * run.seed for quantity in quantities(run.metric)}
        usual: dict[str, Any] = {"outlier_tokens": outliers(), "magnitudes": {}}
        if run.metric.kind == "token_maxima":
            usual["token_maxima"] = {"maxima": {name: maxima() for name in TENSORS[run.metric.tensors]}}
        if run.metric.kind == "magnitudes":
            usual["magnitudes"] = {"panels": [panel(1000.0 if run.recipe.rotation is None else 1.0)]}
        made = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.0, "corpora": {}}
        found = arrays.get(run.metric.kind, usual[run.metric.kind])
        write_result(project.results.run(run.key), RunResult(run, numbers, made, None, found))


def draw(project: Project, number: int) -> str:
    chosen, path = project.table(f"prefixquant_figure{number}"), project.root / "figure.svg"
    values, _ = tables.collect(project, chosen)
    figures.draw(project, chosen, values, path)
    return path.read_text(encoding="utf-8")


def panels(svg: str) -> int:
    return sum(str(group.get("id")).startswith("axes_") for group in ElementTree.fromstring(svg).iter())


def ratios(svg: str) -> set[tuple[str, str]]:
    """The two ratios above the panels."""
    return set(
        zip(*(re.findall(f"<!-- {name} (.*) -->", svg) for name in ("top-1/median", "median/min-1")), strict=True)
    )


@pytest.mark.parametrize(("number", "count"), [(2, 2 * 4), (3, 2 * 2 * 3), (4, 2), (7, 2 * 2)])
def test_a_figure_has_its_panels(project: Project, number: int, count: int) -> None:
    drawn = draw(project, number)
    assert panels(drawn) == count
    if number == 2:
        assert ratios(drawn) == {("▲100", "2")}
    if number == 4:  # equal data give equal files
        assert draw(project, number) == drawn


def test_a_ratio_that_is_too_large_is_marked(project: Project) -> None:
    quiet = maxima(top_1=[9.0, 4.0, 2.0], min_1=[1.0, 0.05, 0.5])
    compute(project, token_maxima={"maxima": dict.fromkeys([*TENSORS["inputs"], *TENSORS["attention"]], quiet)})
    assert ratios(draw(project, 2)) == {("9", "▲20")}
    assert ratios(draw(project, 3)) == {("▲9", "▲20")}  # Q, K, V: above 5


def test_what_has_no_place_on_the_scale_is_counted(project: Project) -> None:
    broken = maxima(top_1=[math.inf, 2.0, 3.0], min_1=[0.0, 0.5, 0.5])
    compute(project, token_maxima={"maxima": dict.fromkeys([*TENSORS["inputs"], *TENSORS["attention"]], broken)})
    svg = draw(project, 2)
    assert ratios(svg) == {("▲inf", "▲inf")}
    assert "<!-- 2 numbers are zero -->" in svg


def test_a_network_that_overflowed_has_no_ratios(project: Project) -> None:
    broken = {name: [math.nan] * LAYERS for name in STATISTICS}
    compute(project, token_maxima={"maxima": dict.fromkeys([*TENSORS["inputs"], *TENSORS["attention"]], broken)})
    assert "top-1/median nan" in draw(project, 2)


def test_contents_are_named_with_their_share_and_the_rest_counted_together(project: Project) -> None:
    svg = draw(project, 4)
    assert r"<!-- '\n' -->" in svg
    assert "<!-- 36.4 (4) -->" in svg
    assert "<!-- '␣self␣$x$' -->" in svg  # no mathematics
    assert "<!-- others -->" in svg
    assert "<!-- 18.2 (2) -->" in svg  # two of the seven contents have no name


def test_no_outlier_token_is_said(project: Project) -> None:
    compute(project, outlier_tokens=outliers(contents=[], others=0, positions=[]))
    svg = draw(project, 4)
    assert "none elsewhere" in svg
    assert svg.count("<!-- no outlier token -->") == 2


def test_panels_of_magnitudes_have_scales_of_their_own_where_asked(project: Project) -> None:
    own = draw(project, 1)
    assert draw(project, 1) == own
    images = own.count("<image ")
    chosen = project.table("prefixquant_figure1")
    shared = chosen.figure.model_copy(update={"own_scales": False})
    project.tables["prefixquant_figure1"] = chosen.model_copy(update={"figure": shared})
    common = draw(project, 1)
    assert images == 2 + 2  # a colour bar each
    assert common.count("<image ") == 2 + 1


@pytest.mark.parametrize(("number", "kind", "name"), [(2, "token_maxima", "maxima"), (4, "outlier_tokens", "contents")])
def test_a_run_file_without_arrays_is_named(project: Project, number: int, kind: str, name: str) -> None:
    compute(project, **{kind: {}})
    with pytest.raises(ResultError, match=f"holds no {name}"):
        draw(project, number)


def test_every_tensor_has_words() -> None:
    assert {tensors: set(names) for tensors, names in TENSOR_WORDS.items()} == {k: set(v) for k, v in TENSORS.items()}
    assert drawn.LARGE.keys() == TENSORS.keys()
    assert drawn.STATISTICS.keys() == set(STATISTICS)
