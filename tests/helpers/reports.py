"""Small tables of every kind with their run files, for the tests of pages and figures."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduction.frame import values as collected
from reproduction.frame.values import Number, Place, Values
from reproduction.render.figures import draw as figures
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.runs import runs_report
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import quantities
from tests.helpers.circumstances import circumstances
from tests.helpers.project import CONFIG, PUBLISHED, TABLES, Copy, checkpoints_by_name

VALUES = {"Baseline": 10.0, "QuaRot": 11.0}
TEXT = {
    "name": "docstrings",
    "source": "docstrings",
    "splits": {"test": {"characters": 1234, "sha256": "ab" * 32, "expected_sha256": "cd" * 32}},
}
TASKS = {
    "suite": "shipped",
    "lm_eval": "0.4.13",
    "tasks": {"last_word": {"sha256": "ef" * 32}, "piqa": {"source": "hub"}},
}
PERPLEXITY_ALONE = [{"kind": "perplexity", "corpus": "wikitext2"}]
ZERO_SHOT = {"kind": "zero_shot", "suite": "shipped", "corpus": "wikitext2", "tasks": ["last_word", "grammar"]}
WITH_TASKS = """row,column,metric,value,unit
Baseline,Llama-2-7B,perplexity,5.47,ppl
Baseline,Llama-2-7B,piqa,79.11,%
Baseline,Llama-2-7B,average,69.79,%
QuaRot,Llama-2-7B,perplexity,6.10,ppl
QuaRot,Llama-2-7B,piqa,76.77,%
QuaRot,Llama-2-7B,average,65.64,%
"""
PREFIXES = """row,column,metric,value,unit
Prefix,Llama-2-7B,tokens,3,tokens
Prefix,Llama-2-7B,content,.\\n[BOS],text
Prefix,Llama-2-13B,tokens,1,tokens
Prefix,Llama-2-13B,content,-,text
"""
RATIOS = """row,column,metric,value,unit
QuaRot,1.0,perplexity,5.938,ppl
QuaRot,0.85,perplexity,5.850,ppl
"""


def drawn(project: Project, name: str) -> str:
    """The figure of a table as SVG; equal data give equal files."""
    chosen, path = project.table(name), project.root / "figure.svg"
    values, _ = collected.collect(project, chosen)
    figures.draw(project, chosen, values, path)
    first = path.read_text(encoding="utf-8")
    figures.draw(project, chosen, values, path)
    assert path.read_text(encoding="utf-8") == first
    return first


def table(name: str, **fields: Any) -> dict[str, Any]:
    """The small table of tests/helpers/project.py with another name and other fields; None removes one."""
    merged = {**TABLES["tables"][0], "id": f"quarot_{name}", **fields}
    return {key: value for key, value in merged.items() if value is not None}


def rows(*names: str, **fields: Any) -> list[dict[str, Any]]:
    """A baseline row and QuaRot rows that differ in a setting of GPTQ, `fields` in the last one."""
    recipes = [{"methods": {"gptq": {"block_size": 2 + place}}} for place in range(len(names))]
    others = [{"name": name, "method": "quarot", "recipe": recipe} for name, recipe in zip(names, recipes, strict=True)]
    return [{"name": "Baseline", "method": "baseline"}, *others[:-1], {**others[-1], **fields}]


RATIO_CHANGES = {ratio: {"activations": {"clip_ratio": float(ratio)}} for ratio in ("1.0", "0.85")}
KINDS = [
    table("table1"),
    table(
        "table3",
        metrics=[*PERPLEXITY_ALONE, ZERO_SHOT],
        columns=["Llama-2-7B"],
        published="published/tasks.csv",
        figure={"kind": "tasks", "caption": "Tasks."},
    ),
    table(
        "table5",
        columns=[{"name": ratio, "slot": "Llama-2-7B"} for ratio in RATIO_CHANGES],
        rows=rows("QuaRot", columns=RATIO_CHANGES),
        published="published/ratios.csv",
        claims=[],
        figure={"kind": "lines", "caption": "Ratios.", "x": "clip ratio"},
    ),
    table(
        "table9",
        rows=rows("RTN INT4", "RTN INT8", "QuaRot INT4"),
        columns=["Llama-2-7B", "Llama-3-8B"],
        published=None,
        claims=[],
        figure={"kind": "lines", "caption": "Bits."},
    ),
    table(
        "table11",
        columns=["Llama-3-8B", {"name": "Llama-2-7B", "slot": "Llama-2-7B", "published": "published/small.csv"}],
        published=None,
        claims=[],
    ),
    table(
        "switches",
        rows=[*TABLES["tables"][0]["rows"], *rows("One", "Two", "Three", metrics={"perplexity": {"bos": "none"}})[1:]],
        published="published/small.csv",
        claims=[],
    ),
    table("figure1", metrics=[{"kind": "magnitudes"}], columns=["Llama-2-7B"], published=None, claims=[], figure=None),
]


def provenance(**more: Any) -> dict[str, Any]:
    return {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.5, **more}


def metrics(run: Any, value: float) -> dict[str, float]:
    """The run's quantities, with what a zero-shot run stores beside them."""
    names = [quantity.name for quantity in quantities(run.metric)]
    items = {f"{name}.items": 1200.0 for name in names if run.metric.kind == "zero_shot"}
    return dict.fromkeys(names, value) | items


def samples(run: Any, value: float) -> dict[str, str]:
    """A thousand answers to each task, as many right as a run's value says."""
    tasks = run.metric.tasks if run.metric.kind == "zero_shot" and math.isfinite(value) else ()
    return {name: "".join("1" if item < 10 * value - 0.5 else "0" for item in range(1000)) for name in tasks}


def compute(project: Project, name: str = "quarot_table1", **special: float) -> None:
    """Write run files: the row's value, a tenth of the seed on top; `special` sets a row's value."""
    for cell in project.cells(name):
        for run in cell.runs:
            value = special.get(cell.row, VALUES.get(cell.row, 12.0)) + run.seed / 10
            weights = provenance(seconds=2.0) if run.weights_key else None
            record = provenance(corpora={"evaluation": TEXT}, tasks=TASKS)
            result = RunResult(run, metrics(run, value), record, weights, samples=samples(run, value))
            write_result(project.results.run(run.key), result)


def load(root: Path, monkeypatch: pytest.MonkeyPatch, *tables: dict[str, Any]) -> Project:
    checkpoints_by_name(monkeypatch)
    copy = Copy(root)
    copy.set_tables({**TABLES, "tables": list(tables)})
    slots = {**CONFIG["slots"], "Llama-3-8B": {"checkpoint": "models/small"}}
    copy.set_config({**CONFIG, "slots": slots})
    for name, text in (("small", PUBLISHED), ("tasks", WITH_TASKS), ("ratios", RATIOS), ("prefixes", PREFIXES)):
        copy.write(f"workflow/papers/quarot/published/{name}.csv", text)
    return load_project(root=root)


def changed(values: Values, place: Place, *numbers: float) -> Values:
    """Other numbers of ours in one place, seed by seed."""
    old, count = values[place], len(numbers)
    return replace(values, ours={**values.ours, place: Number.of_seeds(numbers, old.seeds[:count], old.runs[:count])})


def page(project: Project, name: str = "quarot_table1") -> str:
    """The page with ordinary spaces."""
    chosen = project.table(name)
    found = runs_report(project, chosen, *collected.collect(project, chosen))
    return markdown(found).replace("\u00a0", " ")


@contextmanager
def every_kind(root: Path) -> Iterator[Project]:
    """A project of one table of each kind, computed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(root)  # to which texts are relative
        loaded = load(root, monkeypatch, *KINDS)
        for name in loaded.tables:
            compute(loaded, name)
        yield loaded
