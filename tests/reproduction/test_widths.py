"""Effects by the width of models: the line through them, which way they go, and the page and figure that show it."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from reproduction.claims.estimates import Interval
from reproduction.claims.widths import Course, Line, line_through
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.tables import WidthEffect
from rotquant.foundation.errors import ConfigError
from tests.helpers.project import CONFIG, TABLES, Copy, checkpoints_by_name
from tests.helpers.reports import drawn, metrics, page, provenance

WIDTHS = {"128": 128, "256": 256, "256, seed 1": 256, "512": 512}
EFFECT = {"name": "No protection", "row": "QuaRot", "over": "Baseline", "published": [6.10, 5.47], "source": "Table 1"}
TABLE = {
    **{key: value for key, value in TABLES["tables"][0].items() if key != "published"},
    "columns": [{"name": name, "slot": f"Model {name}"} for name in WIDTHS],
    "claims": [],
    "figure": {"kind": "widths", "caption": "Effects.", "effects": [EFFECT]},
}


def test_the_line_is_that_of_least_squares_with_its_usual_interval() -> None:
    generator = np.random.default_rng(3)
    widths = {str(place): int(width) for place, width in enumerate([128, 192, 256, 256, 384, 512])}
    ratios = {
        name: math.exp(0.3 - 0.1 * math.log2(width) + generator.normal(0, 0.02)) for name, width in widths.items()
    }
    line = line_through(widths, ratios)
    assert line is not None
    x, y = np.log2(list(widths.values())), np.log(list(ratios.values()))
    (slope, start), covariance = np.polyfit(x, y, 1, cov=True)  # scaled by the residuals over n - 2
    half = 2.7764451 * math.sqrt(covariance[0, 0])  # Student's t for 4 degrees of freedom
    found = (line.slope, line.start, line.low, line.high)
    assert found == pytest.approx((slope, start + 7 * slope, slope - half, slope + half))
    assert line.at(1) == pytest.approx(start + 8 * slope)


def test_there_is_no_line_through_two_widths_or_what_broke_down() -> None:
    two = {"a": 128, "b": 256, "c": 256}
    assert line_through(two, dict.fromkeys(two, 1.5)) is None
    three = {"a": 128, "b": 256, "c": 512}
    assert line_through(three, {"a": 1.5, "b": math.inf, "c": 1.2}) is None
    assert line_through(three, {"a": 1.5, "b": 1.3, "c": 1.2}) is not None


@pytest.mark.parametrize(
    ("slope", "half", "papers", "way"),
    [
        (-0.1, 0.05, 0.0, "towards it"),
        (-0.1, 0.05, 900.0, "away from it"),
        (0.1, 0.05, 900.0, "towards it"),
        (0.1, 0.05, 0.0, "away from it"),
        (0.1, 0.2, 900.0, "undecided"),
        (-0.5, 0.1, 100 * math.expm1(-0.4), "away from it"),  # past it: from 0.1 above to 0.4 below
        (None, 0.0, 0.0, None),
    ],
)
def test_which_way_wider_models_go(slope: float | None, half: float, papers: float, way: str | None) -> None:
    line = None if slope is None else Line(-0.3 if half == 0.1 else 0.5, slope, slope - half, slope + half)
    rises = {name: Interval(1.0, 0.9, 1.1) for name in WIDTHS}
    assert Course(WidthEffect(**EFFECT), rises, WIDTHS, papers, line).way == way


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Each width with a rise of 100 % over the width in units of 128, and a seed that adds a hundredth."""
    checkpoints_by_name(monkeypatch)
    copy = Copy(tmp_path)
    copy.set_tables({**TABLES, "tables": [TABLE]})
    slots = {f"Model {name}": {"checkpoint": f"models/{place}"} for place, name in enumerate(WIDTHS)}
    copy.set_config({**CONFIG, "slots": {**CONFIG["slots"], **slots}})
    loaded = load_project(root=tmp_path)
    for cell in loaded.cells("quarot_table1"):
        for run in cell.runs:
            rise = 0.0 if cell.row == "Baseline" else 128 / WIDTHS[cell.column] + run.seed / 100
            weights = provenance(seconds=2.0) if run.weights_key else None
            write_result(
                loaded.results.run(run.key), RunResult(run, metrics(run, 10 + 10 * rise), provenance(), weights)
            )
    return loaded


def test_the_page_lists_effects_with_intervals_and_where_they_go(project: Project) -> None:
    (line,) = [line for line in page(project).splitlines() if line.startswith("| No protection")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["No protection", "QuaRot over Baseline"]
    # Seeds at +100 and +101 %: mean and t of one degree of freedom times the standard error, 12.706 x 0.5.
    assert cells[2] == "+100.5 % [94, 107]"
    assert cells[3] == cells[4] == "+50.5 % [44.1, 56.9]"
    assert cells[7:] == ["*+11.5 % (Table 1)*", "towards it"]
    ratios = {name: 1 + 128 / width + 0.005 for name, width in WIDTHS.items()}
    found = line_through(WIDTHS, ratios)
    assert found is not None
    assert cells[6].startswith(f"{100 * math.expm1(found.slope):+.1f} % [")


def test_the_figure_has_a_panel_for_each_effect(project: Project) -> None:
    svg = drawn(project, "quarot_table1")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "No protection" in svg
    assert "512" in svg


def test_an_effect_of_an_unknown_row_is_refused(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    figure = {**TABLE["figure"], "effects": [{**EFFECT, "row": "QuaRto"}]}
    copy.set_tables({**TABLES, "tables": [{**TABLE, "figure": figure}]})
    with pytest.raises(ConfigError, match="unknown row 'QuaRto'"):
        load_project(root=tmp_path)
