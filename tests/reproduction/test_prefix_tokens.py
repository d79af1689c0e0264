"""The tokens of a stored prefix as a table has them: counted, written as the paper does, and shown beside its own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from reproduction.frame.values import Text, Values, collect
from reproduction.metrics.counts import content_of, prefix_tokens
from reproduction.metrics.settings import PrefixTokens
from reproduction.run.results import RunResult, read_result, write_result
from reproduction.run.stages import measures
from reproduction.run.stages.measures import Subject
from reproduction.tables.project import Project
from reproduction.tables.quantities import PREFIX_TOKENS, quantities
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.models.simulation.prefix import stored_ids
from rotquant.recipes.recipe import parse_recipe
from rotquant.weights.build import build_weights
from tests.helpers.models import tiny_model
from tests.helpers.reports import load, page, provenance, table
from tests.helpers.sinks import SINK, planted, text

METHODS = {"prefixed_outliers": {"threshold": 8.0}}
TOKENS = {1: "<s>", 2: "\n", 3: " the", 4: ".", 5: "\t", 6: "\\"}


@pytest.mark.parametrize(
    ("ids", "bos", "content"),
    [
        ((4, 2, 1), 1, r".\n[BOS]"),
        ((3, 1), 1, "_the[BOS]"),
        ((1,), None, "<s>"),
        ((5, 6), 1, "\\t\\"),
        ((), 1, ""),
    ],
)
def test_tokens_are_written_as_in_the_papers_table(ids: tuple[int, ...], bos: int | None, content: str) -> None:
    assert content_of(ids, bos, TOKENS.__getitem__) == content
    assert prefix_tokens(ids, bos, TOKENS.__getitem__) == ({"tokens": len(ids)}, {"content": content})


def subject(recipe: dict[str, Any], samples: torch.Tensor | None = None) -> Subject:
    """A planted model as a recipe stores it."""
    model = planted() if samples is not None else tiny_model()
    parsed = parse_recipe(recipe, "test")
    stored = build_weights(model, None, parsed, 0, samples, progress=False) if samples is not None else None
    run = cast(Any, SimpleNamespace(recipe=parsed))
    tokenizer = cast(Any, SimpleNamespace(decode=lambda token: f"w{token}"))
    return Subject(run, model, tokenizer, cast(Any, None), cast(Any, None), 1, stored and stored.state)


def test_the_metric_is_of_what_the_weights_hold() -> None:
    """SINK is an outlier away from the first position in three windows, so a prefix of it and of BOS is stored."""
    windows = text()
    chosen = subject({"methods": METHODS, "calibration": {"samples": 4, "sequence_length": 16}}, windows)
    assert chosen.state is not None
    assert stored_ids(chosen.state.tensors["prefixed_outliers"]) == (SINK, 1)
    found = measures.prefix_tokens(PrefixTokens(), chosen)
    assert found.metrics == {"tokens": 2.0}
    assert found.texts == {"content": f"w{SINK}[BOS]"}
    assert found.arrays == {"ids": [SINK, 1]}
    named = {quantity.name: quantity.text for quantity in quantities(PrefixTokens())}
    assert named == dict.fromkeys(found.metrics, False) | dict.fromkeys(found.texts, True)


def test_tokens_are_found_on_a_text_of_their_own_where_asked() -> None:
    """The calibration text has no SINK, the method's own text has."""
    own = {"threshold": 8.0, "text": {"samples": 4, "sequence_length": 16}}
    calibration = {"samples": 4, "sequence_length": 16}
    found = []
    for settings in ({"threshold": 8.0}, own):
        asked = parse_recipe({"methods": {"prefixed_outliers": settings}, "calibration": calibration}, "test")
        without = text().masked_fill(text() == SINK, 20)
        texts = {"prefixed_outliers": text()} if asked.own_texts else {}
        stored = build_weights(planted(), None, asked, 0, without, texts=texts, progress=False)
        found.append(stored_ids(stored.state.tensors["prefixed_outliers"]))
    assert found == [(1,), (SINK, 1)]


def test_a_recipe_without_a_prefix_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs a method that chooses one"):
        measures.prefix_tokens(PrefixTokens(), subject({}))


ROW = {
    "name": "Prefix",
    "method": "baseline",
    "recipe": {"methods": {"prefixed_outliers": {}}, "calibration": {}},
}
FOUND = {0: (2, r"\n[BOS]"), 1: (1, "[BOS]")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    fields = {"metrics": [{"kind": "prefix_tokens"}], "rows": [ROW], "baseline": "Prefix", "claims": [], "figure": None}
    one = table("table1", **fields, transposed=True, published="published/prefixes.csv")
    loaded = load(tmp_path, monkeypatch, one)
    for cell in loaded.cells("quarot_table1"):
        for run in cell.runs:
            number, content = FOUND[run.seed]
            record = provenance(corpora={})
            result = RunResult(run, {"tokens": float(number)}, record, record, texts={"content": content})
            write_result(loaded.results.run(run.key), result)
    return loaded


def test_texts_are_collected(project: Project) -> None:
    values, results = collect(project, project.table("quarot_table1"))
    place = ("Prefix", "Llama-2-7B", "content")
    assert values.texts[place].values == tuple(content for _, content in FOUND.values())
    assert values.published_texts == {place: r".\n[BOS]"}
    assert place not in values
    assert {result.texts["content"] for result in results.values()} == {content for _, content in FOUND.values()}


def test_the_page_has_the_papers_text_beside_ours_and_models_below_each_other(project: Project) -> None:
    shown = page(project)
    assert "| Model | Here | Number | *published* | Content | *published* |" in shown
    first = r"| Llama-2-7B | small | 1.50 ± 0.71 | *3* | \n[BOS] (seed 0); [BOS] (seed 1) | *.\n[BOS]* |"
    assert first in shown
    assert r"| Llama-2-13B | larger | 1.50 ± 0.71 | *1* | \n[BOS] (seed 0); [BOS] (seed 1) | - |" in shown


def test_a_run_file_without_its_text_is_damaged(project: Project) -> None:
    (run, *_) = project.cells("quarot_table1")[0].runs
    path = project.results.run(run.key)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in data.items() if name != "texts"}))
    with pytest.raises(ResultError, match="it lacks the metric content"):
        read_result(path)


def test_what_is_no_number_is_named_once_among_the_quantities() -> None:
    assert [quantity.name for quantity in PREFIX_TOKENS if quantity.text] == ["content"]
    one = Values({}, {}, {("a", "b", "c"): Text(("", "x"), (0, 1), ("k", "l"))}, {("a", "b", "d"): "y"})
    assert [*one.frame["text"].dropna()] == ["no text", "x"]  # of a model without outlier tokens, which has no prefix
    assert [*one.frame["published_text"].dropna()] == ["y"]
