"""`rotquant diagnose`: each figure on a model or on numbers of which the answer is known."""

import gc
import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch

from rotquant.commands.diagnosis import sentences, tables, token_text
from rotquant.commands.options import changed
from rotquant.foundation.errors import RecipeError
from rotquant.metrics.diagnostics import ASKED, Costs, find_sinks, measure_costs, variants
from rotquant.metrics.perplexity import perplexity
from rotquant.models.outlier_tokens import detect_prefix, token_maxima
from rotquant.recipes.presets import preset
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.text import Tokens
from rotquant.weights.build import build_weights, quantized_forward
from tests.helpers.checkpoints import save_tiny, save_words
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model
from tests.helpers.sinks import BOS, COSTS, HEIGHT, SINK, expected_ratio, planted, result, windows_with_sinks


@pytest.fixture
def windows() -> torch.Tensor:
    return windows_with_sinks()


def test_a_planted_sink_is_found_with_its_ratio_its_count_and_its_residual(windows):
    plain, *_ = find_sinks(planted(), windows, None, threshold=8.0)
    assert plain.first == pytest.approx([expected_ratio()] * 2, rel=1e-4)
    assert plain.elsewhere == pytest.approx([expected_ratio()] * 2, rel=1e-4)
    assert plain.above == (3, 3)
    assert plain.tokens == 4 * 31
    assert plain.residual_first == pytest.approx([HEIGHT] * 2)
    assert plain.residual_elsewhere == pytest.approx([HEIGHT / 2 + 0.5] * 2)  # in two of four windows; 1 in the others
    assert plain.common == ((SINK, 3),)


def test_a_prefix_is_looked_at_by_itself_and_all_tokens_behind_it_are_text(windows):
    model = planted()
    _, bos, detected = find_sinks(model, windows, BOS, threshold=8.0)
    assert (bos.prefix, detected.prefix) == ((BOS,), (SINK, BOS))  # two in a window, BOS is for the first of them
    assert bos.first == pytest.approx([1.0] * 2)
    assert detected.first == pytest.approx([expected_ratio()] * 2, rel=1e-4)  # its largest token, wherever it stands
    assert bos.above == detected.above == (7, 7)  # nothing is mended here: attention writes nothing
    assert bos.tokens == detected.tokens == 4 * 32


def test_what_follows_a_prefix_depends_on_it_as_on_text(windows):
    model, front = tiny_model(), [BOS, SINK]
    behind = token_maxima(model, windows, front)
    joined = torch.cat([torch.tensor([front]).expand(4, -1), windows], dim=1)
    whole = token_maxima(model, joined)
    assert torch.equal(behind.down_proj, whole.down_proj)
    assert torch.equal(behind.residual, whole.residual)
    text_alone = whole.down_proj / whole.down_proj[..., 2:].median(dim=-1, keepdim=True).values
    assert torch.equal(behind.ratios, text_alone)


def test_a_full_context_loses_its_last_tokens_to_a_prefix_and_longer_windows_are_refused():
    full = torch.full((1, 512), 20)
    assert token_maxima(tiny_model(), full, [BOS]).down_proj.shape == (2, 1, 512)
    with pytest.raises(RecipeError, match="windows of 513 tokens exceed the model's context of 512"):
        token_maxima(tiny_model(), torch.full((1, 513), 20))


def planted_ratios() -> tuple[torch.Tensor, torch.Tensor]:
    """Of four windows [2, 4, 10], and these: the first token stands out everywhere, 5 thrice, 6 twice, 7 once.

    5 does in the second layer and 6 in the first alone, 7 in both; the second has 2 a window.
    """
    ids = torch.arange(4 * 10).view(4, 10) + 10
    ratios = torch.ones(2, 4, 10)
    ratios[:, :, 0] = 100
    ids[0, 3] = ids[1, 4] = ids[2, 5] = 5
    ids[0, 6] = ids[1, 7] = 6
    ids[3, 8] = 7
    ratios[1, 0, 3] = ratios[1, 1, 4] = ratios[1, 2, 5] = ratios[0, 0, 6] = ratios[0, 1, 7] = 70
    ratios[:, 3, 8] = 70
    return ratios, ids


def test_a_prefix_has_the_most_frequent_of_as_many_outlier_tokens_as_a_window_has_and_then_bos():
    ratios, ids = planted_ratios()
    assert detect_prefix(ratios, ids, BOS) == (5, 6, BOS)  # the first position counts in 2, and is none of them
    assert detect_prefix(ratios, ids, None) == (5, 6)
    assert detect_prefix(ratios, ids, BOS, threshold=80.0) == (BOS,)
    ratios[1, 0, 6] = 70
    assert detect_prefix(ratios, ids, BOS) == (5, 6, 7, BOS)  # 2.25


def test_bos_is_one_of_the_tokens_of_a_prefix_where_asked():
    assert detect_prefix(*planted_ratios(), BOS, number="with_bos") == (5, BOS)


def test_a_token_counts_in_each_layer_where_asked():
    ratios, ids = planted_ratios()
    ratios[0, 3, 8] = ratios[0, 0, 6] = ratios[0, 1, 7] = 1
    ratios[:, :2, 1] = 70
    ids[:2, 1] = 9  # twice, in both layers, where 5 is thrice in one
    assert detect_prefix(ratios, ids, BOS, number="with_bos") == (5, 9, BOS)
    assert detect_prefix(ratios, ids, BOS, number="with_bos", each_layer=True) == (9, 5, BOS)


def test_which_rare_tokens_a_prefix_leaves_out_is_a_choice():
    ratios = torch.ones(1, 11, 10)
    ratios[0, :, 0] = ratios[0, 4, 3] = 100
    ids = torch.arange(110).view(11, 10) + 10
    lone = ids[4, 3].item()
    assert detect_prefix(ratios, ids, BOS) == (lone, BOS)
    assert detect_prefix(ratios, ids, BOS, rare="once") == (BOS,)
    assert detect_prefix(ratios, ids, BOS, rare="one_type") == (BOS,)  # 1 of 11 windows
    assert detect_prefix(ratios[:, 2:], ids[2:], BOS, rare="one_type") == (lone, BOS)  # 1 of 9
    ratios[0, 7, 5] = 100
    assert detect_prefix(ratios, ids, BOS, rare="one_type") == (lone, ids[7, 5].item(), BOS)  # no lone type


@pytest.fixture(scope="module")
def text() -> Tokens:
    return Tokens(torch.randint(3, VOCABULARY, (256,), generator=torch.Generator().manual_seed(1)), BOS)


METRIC = Perplexity(sequence_length=32, bos="none")
SAMPLES = torch.randint(3, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(2))


def test_variants_that_share_stored_weights_are_what_they_are_alone(text):
    costs = measure_costs(tiny_model, text, METRIC, SAMPLES)
    for name, variant in variants(Calibration(samples=4, sequence_length=32)).items():
        model, state = tiny_model(), None
        if name != "unquantized":
            state = build_weights(model, None, variant.recipe, 0, SAMPLES).state
        with quantized_forward(model, variant.recipe, state):
            alone = perplexity(model, text, METRIC).perplexity
        assert costs.perplexity[name].perplexity == alone, name


def test_one_copy_of_the_model_is_in_memory_at_a_time_and_three_answer_tasks(text):
    loaded: list[weakref.ref] = []

    def load():
        gc.collect()
        assert all(copy() is None for copy in loaded)
        model = tiny_model()
        loaded.append(weakref.ref(model))
        return model

    seen: list[str] = []
    asked_of = lambda model: len(seen)  # noqa: E731
    costs = measure_costs(load, text, METRIC, SAMPLES, ask=asked_of, look=lambda model: seen.append("unquantized"))
    assert len(loaded) == 6
    assert seen == ["unquantized"]
    assert costs.answers == dict.fromkeys(ASKED, 1)


def test_rotation_takes_back_what_a_planted_outlier_channel_costs():
    """A channel of the residual stream that is large in every token leaves 4-bit inputs few levels for the rest."""

    def load():
        model = tiny_model(hidden_size=128)
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 5] = 3.0
            model.lm_head.weight.mul_(8)
        return model

    from rotquant.methods.llm_qat.data_free_distillation import generate

    own = Tokens(generate(load(), 8, 64, seed=0).flatten(), BOS)
    costs = measure_costs(load, own, METRIC.model_copy(update={"sequence_length": 64}), SAMPLES)
    plain, rotated = costs.factor("w4a4"), costs.factor("r124")
    assert plain[0] - 1 > 4 * plain[1]
    assert rotated[0] < plain[0]
    assert costs.rise("r124")[0] < 0.7 * costs.rise("w4a4")[0]


def test_a_rotation_behind_the_gains_costs_less_where_a_gain_makes_a_large_feature_small(windows):
    """R1 gives the gain to the weights, so what it rotates is the large feature and little else."""

    def load():
        model = tiny_model(hidden_size=128)
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 5] = 3.0
            model.lm_head.weight[:, 5] = 0
            model.lm_head.weight.mul_(8)
            for layer in model.model.layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight[5] = 0.01
        return model

    from rotquant.methods.llm_qat.data_free_distillation import generate

    own = Tokens(generate(load(), 8, 64, seed=0).flatten(), BOS)
    costs = measure_costs(load, own, METRIC.model_copy(update={"sequence_length": 64}), SAMPLES)
    sinks = find_sinks(planted(), windows, None, threshold=8.0)
    (advice,) = (sentence for sentence in sentences(costs, sinks) if "online" in sentence)
    assert "`--set rotation.residual=none --set rotation.inputs=hadamard`" in advice
    recipe = changed(preset("quarot-rtn"), re.findall(r"--set ([\w.]+=\w+)", advice))
    assert {one.location for one in recipe.transforms} >= {"attention_input", "mlp_input"}
    assert not any("online" in sentence for sentence in sentences(COSTS, sinks))


def test_a_token_is_told_with_its_spaces_and_ends_of_lines():
    assert token_text("\n    ") == "`\\n␣␣␣␣`"
    assert token_text("#" * 40) == "`" + "#" * 19 + "…`"


def test_factors_have_the_errors_of_paired_windows():
    ratio, error = COSTS.factor("w4a4")
    assert ratio == pytest.approx(math.exp(0.7))
    assert error == pytest.approx(ratio * 0.2 / math.sqrt(3))  # differences .5, .7, .9
    assert COSTS.factor("r124")[1] == pytest.approx(0, abs=1e-12)


def test_tables_show_what_is_not_finite(windows):
    sinks = find_sinks(planted(), windows, BOS, threshold=8.0)
    shown = {table.title: table for table in tables(COSTS, sinks, str)}
    assert list(shown) == ["perplexity", "outlier tokens"]
    rows = {row[0]: row[1:] for row in shown["perplexity"].rows}
    assert rows["unquantized"] == ("7.39", "", "")
    assert rows["W4A4"] == ("14.88", "0.70 ± 0.12", "2.01 ± 0.23")
    assert rows["preset rtn (W4A4KV4)"][:2] == ("inf", "inf")
    assert "`7` (3)" in shown["outlier tokens"].help


def test_sentences_state_rises_in_nats_and_never_a_share_alone(windows):
    sinks = find_sinks(planted(), windows, BOS, threshold=8.0)
    said = sentences(COSTS, sinks)
    assert said[0] == "W4A4 costs 0.70 ± 0.12 nats a token: perplexity 7.39 becomes 14.88, 2.01 times."
    assert said[1].startswith("Rotation takes back 0.60 of these nats: with R1 R2 R4 W4A4 costs 0.10 ± 0.00 nats, 1.11")
    assert not any("%" in sentence or "More than" in sentence for sentence in said)
    ruined = Costs(COSTS.perplexity | {"w4a4": result(8.3, 9.3, 10.3), "r124": result(6.3, 7.3, 8.3)})
    said = sentences(ruined, sinks)
    assert "takes back 2.00 of these nats: with R1 R2 R4 W4A4 costs 5.30 ± 0.00 nats, 200.34 times the" in said[1]
    assert "More than 1 nat is left" in said[1]


def test_a_network_that_equals_another_has_no_row_and_is_named(text, windows):
    """Norms after attention and MLP let no R1 pass; what stands in for it here is nothing, so it is plain W4A4."""

    def without_r1(recipe):
        if recipe.rotation is None:
            return recipe
        changed = {"residual": "none", "mlp": False, "heads": False, "keys": recipe.keys is not None}
        return recipe.model_copy(update={"rotation": recipe.rotation.model_copy(update=changed)})

    costs = measure_costs(tiny_model, text, METRIC, SAMPLES, fit=without_r1)
    assert costs.same == {"r1": "w4a4", "r124": "r12"}  # of R1, R2, R4 there is R2 alone
    assert costs.perplexity.keys() == variants(Calibration()).keys() - costs.same.keys()
    assert costs.rise("r124") == costs.rise("r12")
    sinks = find_sinks(planted(), windows, BOS, threshold=8.0)
    rows = [row[0] for row in tables(costs, sinks, str)[0].rows]
    assert rows[1:4] == ["W4A4", "W4A4, R2", "the same, inputs static per tensor"]
    assert sentences(costs, sinks)[-1] == (
        "Left out, since on this model the network is that of another row: W4A4, R1 (it is W4A4), W4A4, R1 R2 R4 (it "
        "is W4A4, R2)."
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("diagnosed") / "model")


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_record_says_of_which_model_and_text(folder, split, tmp_path, monkeypatch, capsys):
    words, record = save_words(tmp_path / "words.txt", 4000), tmp_path / "diagnosis.json"
    arguments = ["diagnose", str(folder), "--corpus", str(words), "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, *arguments, "--split", split, "--max-windows", "3", "-o", str(record)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"on 3 windows of 32 tokens spread over the {split} split of words, rotation of seed 0" in shown
    result = json.loads(record.read_text())
    assert (result["settings"]["max_windows"], result["settings"]["seed"], result["settings"]["split"]) == (3, 0, split)
    assert result["text"]["splits"][split]["sha256"]
    assert result["perplexity"].keys() == variants(Calibration()).keys()
    assert len(result["perplexity"]["w4a4"]["by_window"]) == 3
