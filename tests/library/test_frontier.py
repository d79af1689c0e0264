"""`rotquant frontier`: methods are tried with equal text, judged by windows, and what is alike is said to be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rotquant import api
from rotquant import frontier as work
from rotquant.foundation.errors import RecipeError
from rotquant.frontier import Tried, class_of, frontier, recipes_of
from rotquant.metrics.cost import FullPrecision
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_config
from rotquant.models.fitting import fitted
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.weights.bits import bits_per_weight
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import outlier_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frontier") / "model"
    outlier_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CorpusSpec:
    folder = tmp_path_factory.mktemp("text")
    save_words(folder / "train.txt", 2000)
    save_words(folder / "validation.txt", 600)
    return CorpusSpec(name="words", source="local", path=str(folder))


SMALL = {"samples": 4, "length": 16, "windows": 4}


def test_methods_are_ranked_and_the_simplest_of_those_alike_is_taken(model: Path, text: CorpusSpec) -> None:
    found = frontier(model, "W4A4KV4", text, methods=["rtn", "quarot-rtn", "quarot"], **SMALL)
    means = [one.mean for one in found.tried]
    assert means == sorted(means)
    assert {one.name for one in found.tried} == {"rtn", "quarot-rtn", "quarot"}
    assert found.tried[-1].name == "rtn"  # the model has outliers
    assert all(len(one.kl) == 4 and one.seconds > 0 and 4 < one.bits < 5 for one in found.tried)
    assert {one.name: one.online for one in found.tried} == {"rtn": 0, "quarot-rtn": 3, "quarot": 3}
    assert found.taken in found.alike
    assert found.taken in found.reason
    assert found.metric.split == "validation"


def test_stored_matrices_and_orders_count_in_the_bits_of_a_weight(model: Path, text: CorpusSpec) -> None:
    (found,) = frontier(model, "W4A4KV4", text, methods=["duquant"], **SMALL).tried
    recipe = fitted(preset("duquant"), architecture_of(load_config(model)))[0]
    recipe = override(recipe, {"calibration": {"corpus": "words", "samples": 4, "sequence_length": 16}}, "test")
    stored = api.quantize(model, recipe, corpus=text).stored
    assert stored is not None
    (tensors,) = stored.state.tensors.values()
    assert any(tensor.dtype == torch.int64 for tensor in tensors.values())  # orders of features
    assert any(tensor.is_floating_point() for tensor in tensors.values())  # rotations
    shapes = stored.manifest.quantized
    numbers = sum(rows * columns for rows, columns in shapes.values())
    without = bits_per_weight(recipe, architecture_of(load_config(model)), shapes)["total"]
    assert found.bits == pytest.approx(without + 8 * sum(one.nbytes for one in tensors.values()) / numbers)


def test_no_method_begins_that_a_budget_has_no_time_for(model: Path, text: CorpusSpec) -> None:
    found = frontier(model, "W4A4KV4", text, methods=["rtn", "quarot-rtn"], budget=1e-6, **SMALL)
    assert not found.tried
    assert found.late == ["quarot-rtn", "rtn"]
    assert all("not begun: it takes about" in one.said for one in found.left)
    assert found.reason == (
        "The budget allowed none of 2 methods, too few to take one of: --budget 1min allows about 2."
    )


def test_a_short_time_goes_to_what_is_often_the_best_and_of_too_few_none_is_taken(
    model: Path, text: CorpusSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(recipes_of("W4A4KV4", short=True))
    assert names[:4] == ["quarot-rtn", "rtn", "quarot", "quarot-128g"]
    assert names.index("atom-128g") < names.index("resq") < names.index("gptq") < names.index("spinquant-hard")
    monkeypatch.setattr(work, "_work", lambda recipe, windows, length: 1000 * recipe.reads_text)
    monkeypatch.setattr(work, "_full_precision", _at_one_second_a_window)
    methods = ["rtn", "quarot-rtn", "quarot", "gptq"]
    found = frontier(model, "W4A4KV4", text, methods=methods, budget=600.0, **SMALL)
    assert sorted(one.name for one in found.tried) == ["quarot-rtn", "rtn"]
    assert (found.late, found.taken) == (["quarot", "gptq"], "")
    assert found.reason == ("The budget allowed 2 of 4 methods, too few to take one of: --budget 34min allows about 4.")
    found = frontier(model, "W4A4KV4", text, methods=methods[:3], budget=2000.0, **SMALL)
    assert not found.late
    assert found.taken


def _at_one_second_a_window(*given: Any) -> tuple[FullPrecision, float, int]:
    known, _, samples = _measured(*given)
    return known, 1.0, samples


_measured = work._full_precision


def test_amounts_of_text_are_the_largest_with_which_five_methods_fit() -> None:
    rows = list(recipes_of("W4A4KV4", short=True).values())
    assert work._amounts(rows, 32, 16, 512, math.inf) == (32, 16)
    assert work._amounts(rows, 32, 16, 512, 300) == (16, 8)
    assert work._amounts(rows, 32, 16, 512, 0) == (8, 4)
    assert work._amounts(rows, 4, 2, 512, 0) == (4, 2)
    assert work._amounts(rows[:2], 32, 16, 512, 100) == (32, 16)


def test_a_method_of_many_more_bits_is_taken_with_a_word_on_them() -> None:
    """QUIK keeps as many features of a small model in full precision as of a large one."""
    few, many = Tried("few", kl=(0.3, 0.3), bits=4.1), Tried("many", kl=(0.1, 0.1), bits=14.6)
    found = work.Frontier([many, few], [], 20.0, Perplexity(corpus="words"), ["many"], "many")
    assert found.reason.endswith("standard errors. It has 14.60 bits a weight, where few has 4.10.")


def test_what_does_not_fit_a_model_is_left_with_its_sentence(model: Path, text: CorpusSpec) -> None:
    """Groups of 128 of 64 features."""
    found = frontier(model, "W4A16", text, methods=["awq-128g", "awq"], **SMALL)
    assert any("group size 128" in one.said for one in found.left)


@pytest.mark.parametrize(
    ("kl", "alike"),
    [((0.1, 0.1, 0.1, 0.1), False), ((0.1, 0.3, 0.2, 0.2), True), ((0.21, 0.31, 0.19, 0.21), True)],
)
def test_a_difference_counts_above_two_standard_errors(kl: tuple[float, ...], alike: bool) -> None:
    best = Tried("best", kl=kl)
    other = Tried("other", kl=(0.2, 0.3, 0.22, 0.2))
    assert work._worse(other, best) is not alike
    assert math.isclose(best.mean, sum(kl) / 4)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("W4A16", (4, None, None)),
        ("W4A8KV4", (4, 8, 4)),
        ("W4A4KV4", (4, 4, 4)),
        ("W2A4KV4", (2, 4, 4)),
        ("KV2", (None, None, 2)),
    ],
)
def test_every_row_of_a_class_has_its_bits(kind: str, bits: tuple[int | None, ...]) -> None:
    rows = recipes_of(kind)
    assert len(rows) > (8 if kind != "KV2" else 3)
    for name, recipe in rows.items():
        parts = (recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys, recipe.values)
        assert tuple(part and part.bits for part in parts) == (*bits, bits[-1]), name
        assert class_of(recipe) == kind


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_classes_of_floats_have_what_takes_floats(kind: str) -> None:
    rows = recipes_of(kind)
    assert {kind.lower(), "gptq", "mr-gptq", "quarot", "quarot-rtn"} <= rows.keys()
    assert not {"rtn", "spinquant-hard"} & rows.keys()
    for recipe in rows.values():
        assert class_of(recipe) == kind
        assert (recipe.keys, recipe.values) == (None, None)
        assert recipe.activations.dynamic == (kind == "MXFP4")
    assert rows["mr-gptq"].rotation.heads == rows["mr-gptq"].rounded.scheme.group_size


def test_rows_are_all_presets_of_the_class_and_the_short_ones_come_first() -> None:
    rows = recipes_of("W4A4KV4")
    assert {"rtn", "quarot", "spinquant-hard", "flatquant", "dartquant"} <= rows.keys()
    assert not {"llm-qat", "baseline", "gptq-w4a16"} & rows.keys()
    assert rows == {name: preset(name) for name in rows}
    assert [*rows].index("quarot") < [*rows].index("spinquant-hard") < [*rows].index("omniquant")
    short = recipes_of("W4A4KV4", short=True)
    assert short["spinquant-hard"].methods["spinquant"].steps == 32
    assert short["quarot"] == rows["quarot"]
    assert {"qift", "quarot"} <= recipes_of("W2A4KV4").keys()
    assert not {"rcp", "bitdistiller"} & recipes_of("W2A4KV4").keys()


def test_the_cache_alone_is_a_class_of_which_equal_rows_are_one() -> None:
    rows = recipes_of("KV4")
    assert {"rtn", "quarot", "int4-per-token-head"} <= rows.keys()
    assert not {"omniquant", "smoothquant", "baseline"} & rows.keys()  # rtn's cache, and none
    assert rows["rtn"].transforms == ()
    assert [one.name for one in rows["quarot"].transforms] == ["R2", "R3"]
    assert not any(recipe.methods or recipe.weights or recipe.activations for recipe in rows.values())


def test_what_is_not_rotated_stays_so_in_another_class() -> None:
    assert recipes_of("W4A16")["rtn"].rotation is None


def test_every_method_that_learns_for_long_has_a_short_form() -> None:
    """Below 100 steps, so that a time means something."""
    for name in all_presets():
        recipe = preset(name)
        less = {one.name: dict(one.short) for one in recipe.methods.values() if one.short}
        short = override(recipe, {"methods": less}, name) if less else recipe
        if name not in ("rcp", "bitdistiller", "bitdistiller-rotated", "efficientqat", "prefixquant-tuned"):
            assert all(one.budget(short).steps <= 128 for one in short.methods.values()), name


def test_bad_input_is_refused_before_any_work(model: Path, text: CorpusSpec) -> None:
    with pytest.raises(RecipeError, match="'W5' is no class of bits: write W4A16"):
        frontier(model, "W5", text)
    with pytest.raises(RecipeError, match="'' is no class of bits"):
        frontier(model, "", text)
    with pytest.raises(RecipeError, match="the class W4A16 has no method 'qift'"):
        frontier(model, "W4A16", text, methods=["qift"])


def test_the_command_prints_a_table_and_one_sentence(
    model: Path, text: CorpusSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--samples", "4", "--sequence-length", "16", "--max-windows", "4"]
    words = ["frontier", str(model), "--corpus", str(text.path), "--method", "rtn", "--budget", "1h", *small]
    rotquant(monkeypatch, *words, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["class"], found["taken"], found["alike"]) == ("W4A4KV4", "rtn", ["rtn"])
    assert Perplexity.model_validate(found["metric"]).max_windows == 4
    rotquant(monkeypatch, *words)
    assert "Take rtn: it alone was tried." in capsys.readouterr().out
    rotquant(monkeypatch, *words[:4], "--method", "rtn", "--method", "quarot-rtn", "--budget", "0.0001s", *small)
    shown = capsys.readouterr().out
    assert "not begun within 0.0001s: quarot-rtn, rtn" in shown
    assert "The budget allowed none of 2 methods" in shown
