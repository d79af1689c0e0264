"""Numbers and arrays for every figure of the project's tables, and the faults that a drawn figure can have."""

import functools
import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from reproduction.frame.values import Number, Place, Values, printed
from reproduction.identity.names import key_in
from reproduction.identity.run import Run
from reproduction.metrics.token_maxima import STATISTICS, TENSORS
from reproduction.render.figures import arrays, style
from reproduction.tables.project import Project
from reproduction.tables.quantities import Quantity
from reproduction.tables.tables import RunTable

LAYERS = 6

#: Colours that figures have besides those of series: marks in black, white and grey, the line on heat maps.
PALETTE = {
    to_hex(color)
    for color in (
        style.OURS,
        style.PUBLISHED,
        style.NEUTRAL,
        style.LIGHT,
        style.LINK,
        *style.SERIES,
        "black",
        "white",
        "#e3e3e3",
    )
}


def numbers(project: Project, table: RunTable, broken: bool = True) -> Values:
    """Numbers in every cell of a table, beside those that the paper prints.

    broken: some networks broke down, some numbers of the paper are missing and some are not finite.
    """
    chance = random.Random(table.id)
    ours: dict[Place, Number] = {}
    for cell in project.cells(table.id):
        for quantity in (quantity for quantity in cell.quantities if not quantity.text):
            exact = cell.row == table.baseline and quantity.name != "megabits"
            loss = 0.0 if exact else chance.lognormvariate(-2, 1.5)
            found = [_value(quantity, loss * chance.uniform(0.95, 1.05)) for _ in cell.runs]
            if broken and cell.row != table.baseline and chance.random() < 0.06:
                found = [
                    chance.choice([math.inf, math.nan, 57_321.0] if quantity.better == "lower" else [math.nan])
                ] * len(found)
            keys = tuple(run.key for run in cell.runs)
            seeds = tuple(run.seed for run in cell.runs)
            ours[cell.row, cell.column, quantity.name] = Number.of_seeds(tuple(found), seeds, keys)
    papers = printed(project, table)
    if broken:
        papers = {place: number for place, number in papers.items() if chance.random() > 0.05}
        papers |= {
            place: Number(math.inf)
            for place in papers
            if place[2] == "perplexity" and place[0] != table.baseline and chance.random() < 0.03
        }
    return Values(ours, papers)


def _value(quantity: Quantity, loss: float) -> float:
    return 10.0 * (1 + loss) if quantity.better == "lower" else 70.0 / (1 + loss)


def replace_files(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    """Let figures read arrays and histories of runs that were never computed."""
    runs = {run.key: run for name in project.tables for cell in project.cells(name) for run in cell.runs}

    def read(path: Any) -> SimpleNamespace:
        return SimpleNamespace(arrays=_arrays(runs[key_in(path.stem)]), rotation={"key": "0"})

    monkeypatch.setattr(arrays, "read_result", read)
    monkeypatch.setattr(arrays, "read_json", lambda *_: _history(40))


def _arrays(run: Run) -> dict[str, Any]:
    """What the metric of a run keeps."""
    metric: Any = run.metric
    chance = np.random.default_rng(run.seed)
    match metric.kind:
        case "magnitudes":
            of = {"attention_input": "q_proj", "attention_output": "o_proj", "mlp_input": "gate_proj"}
            matrix = np.abs(chance.normal(size=(16, 24))) ** 3
            panel = {"peak_ratio": 12345.678, "matrix": matrix, "mean": matrix.mean(0), "largest": matrix.max(0)}
            places = itertools.product(metric.depths, metric.sites)
            return {
                "panels": [{**panel, "layer": 12, "linear": f"mlp.{of.get(site, 'down_proj')}"} for _, site in places]
            }
        case "outliers":
            found = {name: list(chance.uniform(1, 300, LAYERS)) for name in ("attention_input", "mlp_input")}
            weights = dict.fromkeys(("query", "key", "value", "gate", "up"), found["mlp_input"])
            return {"kurtosis": found, "activation_error": found, "weight_error": weights}
        case "range_use":
            ends = np.array(metric.magnitudes)
            return {"points": (chance.uniform(-1, 1, (50, len(ends))) * ends).tolist(), "ranges": list(ends)}
        case "token_maxima":
            series = {name: list(chance.uniform(0.5, 9000.0, LAYERS)) for name in STATISTICS}
            series["min_1"][2] = 0.0
            return {"maxima": dict.fromkeys(TENSORS[metric.tensors], series)}
        case "outlier_tokens":
            words = [("\n", 40, True), (" self.$x$ = something", 20, False), *((f"w{i}", 3, False) for i in range(6))]
            places = [(0, 50), (7, 2), (200, 20)]
            contents = {"contents": words, "first": 50, "others": 78}
            return {**contents, "positions": places, "windows": 50, "tokens": 512}
        case "training_loss":
            return {"losses": list(4 / np.sqrt(1 + np.arange(300))), "spikes": [20, 50]}
        case "weight_kurtosis":
            histogram = {"counts": chance.integers(0, 9, (8, 8)).tolist(), "x": [-1.0, 1.5], "y": [-2e-3, 3e-3]}
            names = [(layer, name) for layer in range(len(metric.depths)) for name in metric.weights]
            panel = {"correlation": -0.123, "interval": [-0.234, 0.05], "platykurtic": 55.0, "normal": 61.0}
            panel |= {"error": [1e-3, 2e-3], "error_rise": 123.4, "histogram": histogram}
            return {"panels": [{**panel, "layer": 10 + layer, "weight": name} for layer, name in names]}
        case "hadamard_kurtosis":
            point = {"kurtosis_x": -1.2, "first": [-0.6, 0.1], "others": [0.1, 0.01]}
            return {"series": {name: [{**point, "size": 2**k} for k in range(1, 11)] for name in metric.distributions}}
    return {}


@functools.cache
def _history(steps: int) -> list[dict[str, Any]]:
    """A learning of so many steps."""
    sites = ("attention_input", "attention_output", "mlp_input", "mlp_output")
    places = [f"{layer}.{site}" for layer in range(LAYERS) for site in sites]
    return [
        {"step": step, "end_to_end_snr": 5.0 + step / 10, "site_snr": dict.fromkeys(places, 20.0 + step / 9)}
        for step in range(steps)
    ]


def faults(figure: Figure) -> Iterator[str]:
    """What a reader of a figure would stumble over, as sentences."""
    yield from _faults_of_texts(figure)
    yield from _faults_of_legends(figure)
    yield from _faults_of_axes(figure)
    drawn = {
        color
        for artist in figure.findobj(Line2D) + figure.findobj(Patch)
        if artist.get_visible()
        for color in _colors(artist)
    }
    if others := {color for color in drawn if color not in PALETTE}:
        yield f"colours {others} are not of the style"
    if figure.get_figwidth() > style.WIDTHS["page"]:
        yield f"is {figure.get_figwidth():.1f} in wide"


def _faults_of_texts(figure: Figure) -> Iterator[str]:
    shown = {text: text.get_window_extent() for text in _texts(figure)}
    boxes = {text: box.padded(-0.06 * figure.dpi / 10) for text, box in shown.items()}
    known, (x0, y0, x1, y1) = [*boxes], np.array([box.extents for box in boxes.values()]).T
    meet = (x0[:, None] < x1) & (x0 < x1[:, None]) & (y0[:, None] < y1) & (y0 < y1[:, None])
    for one, other in np.argwhere(np.triu(meet, 1)):
        yield f"{known[one].get_text()!r} and {known[other].get_text()!r} overlap"
    for text, box in boxes.items():
        if not (box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1):
            yield f"{text.get_text()!r} leaves the figure"
        if text.get_fontsize() < style.SMALL:
            yield f"{text.get_text()!r} is too small"


def _texts(figure: Figure) -> list[Text]:
    """The texts that are seen: none of ticks beyond the ends of their axis."""
    hidden = set()
    for axes in figure.axes:
        sides: Any = (axes.xaxis, axes.yaxis, *([axes.zaxis] if hasattr(axes, "zaxis") else []))
        for side in sides:
            shown = set() if len(sides) == 3 else {*side._update_ticks()}  # those of a space are placed as it is drawn
            ticks = {*side.get_major_ticks(), *side.get_minor_ticks()} - shown
            hidden |= {label for tick in ticks for label in (tick.label1, tick.label2)}
    texts: Any = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return [text for text in dict.fromkeys(texts) if text.get_text().strip() and text not in hidden]


def _colors(artist: Any) -> set[str]:
    """The colours that an artist has, without those that are fully transparent."""
    if isinstance(artist, Line2D):
        stroke = [artist.get_color()] if artist.get_linestyle() != "None" else []
        edge = [artist.get_markeredgecolor()] if artist.get_marker() not in ("None", "") else []
        face = [artist.get_markerfacecolor()] if artist.get_marker() in Line2D.filled_markers else []
        return {to_hex(color) for color in (*stroke, *edge, *face)}
    given = (artist.get_facecolor(), artist.get_edgecolor())
    return {to_hex(color) for both in given for color in np.reshape(both, (-1, 4)) if color[3] > 0}


def _marks(artist: Any) -> set[tuple[str, str]]:
    """Colour and mark of an artist that has any data; a stroke has no mark."""
    if isinstance(artist, Line2D):
        if not np.isfinite(np.ma.filled(np.ma.asarray(artist.get_ydata(), dtype=float), math.nan)).any():
            return set()
        return {(color, mark) for color in _colors(artist) for mark in {"None", str(artist.get_marker())}}
    return {(color, mark) for color in _colors(artist) for mark in ("None", "|")}


def _faults_of_legends(figure: Figure) -> Iterator[str]:
    """Entries that stand for nothing in the panels; one in grey or black stands for marks of any colour."""
    drawn: set[tuple[str, str]] = set()
    for axes in figure.axes:
        for artist in [*axes.lines, *axes.patches, *axes.collections]:
            drawn |= _marks(artist)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    for legend in legends:
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            mark = str(handle.get_marker()) if isinstance(handle, Line2D) else "None"
            own = to_hex(handle.get_color() if isinstance(handle, Line2D) else handle.get_facecolor())
            alike = {other for color, other in drawn if color == own or own in (to_hex(style.NEUTRAL), "#000000")}
            if mark not in alike:
                yield f"the legend's {text.get_text()!r} is drawn nowhere"


def _faults_of_axes(figure: Figure) -> Iterator[str]:
    for axes in figure.axes:
        for side in (axes.xaxis, axes.yaxis):
            places = [(tick.get_loc(), tick.label1.get_text()) for tick in side._update_ticks()]
            low, high = side.get_view_interval()
            places = sorted(places, reverse=bool(side.get_inverted()))
            try:
                found = [float(text.replace("\N{MINUS SIGN}", "-")) for _, text in places if text]
            except ValueError:
                continue
            if found != sorted(found, reverse=bool(side.get_inverted())):
                yield f"numbers of an axis do not ascend: {found} in [{low:g}, {high:g}]"
