"""What a checkpoint has besides weights goes along, its end-of-text tokens end texts, and models are compared by one
rule of writing."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from reproduction.tasks.scoring import Scorer
from rotquant import api
from rotquant.commands.root import cli
from rotquant.decoder import Generation, convert, load_decoder, save_decoder
from rotquant.decoder.network import Network
from rotquant.foundation.errors import CheckpointError
from rotquant.models.companions import companions, left_out
from rotquant.models.generation import end_tokens, generation_config, greedy
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.weights.build import build_weights
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens

#: Vicuna's and an early Llama 2's: a temperature without sampling, which transformers loads and refuses to save.
SETTINGS = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096, "bos_token_id": 1, "eos_token_id": [2, 29]}
GOES_ALONG = {
    "generation_config.json": json.dumps(SETTINGS),
    "chat_template.jinja": "{{ bos_token }}{{ messages[0].content }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "preprocessor_config.json": "{}",
    "LICENSE": "all of it",
}
STAYS = {
    "README.md": "a model card",
    "quantize_config.json": '{"bits": 4}',
    "original/params.json": "{}",
    ".gitattributes": "",
}
WITHOUT_QUANTIZERS = override(preset("rtn"), {"activations": None, "keys": None, "values": None}, "test")


def checkpoint(folder: Path, files: dict[str, str], **model: object) -> Path:
    """A tiny checkpoint with further files."""
    tiny_model(**model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_every_other_file_arrives_everywhere_as_it_is_or_is_named(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", GOES_ALONG | STAYS)
    said = {}
    for name, line in {
        "quantized": ["quantize", model, "--method", "rtn", "--device", "cpu"],
        "plain": ["export", tmp_path / "quantized"],
        "served": ["export", tmp_path / "quantized", "--format", "compressed-tensors"],
        "decoder": ["convert", tmp_path / "quantized", "--dtype", "float32"],
    }.items():
        found = CliRunner().invoke(cli, [*map(str, line), "-o", str(tmp_path / name), "--json"], catch_exceptions=False)
        said[name] = json.loads(found.stdout)["left_out"]
        assert companions(tmp_path / name) == companions(model)
        assert not any((tmp_path / name / one).exists() for one in STAYS)
    assert companions(model).keys() >= GOES_ALONG.keys() | {"tokenizer.json", "tokenizer_config.json"}
    assert said == {"quantized": ["README.md", "original/", "quantize_config.json"], "plain": [], "served": []} | {
        "decoder": []
    }
    assert left_out(model) == tuple(said["quantized"])
    template = AutoTokenizer.from_pretrained(tmp_path / "decoder").chat_template
    assert template["default"] == GOES_ALONG["chat_template.jinja"]


def test_settings_of_config_json_alone_are_not_lost(tmp_path: Path) -> None:
    """As old checkpoints have them; transformers drops them from what it saves as config.json."""
    model = checkpoint(tmp_path / "model", {})
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | SETTINGS))
    made = api.quantize(model, "rtn")
    made.save(tmp_path / "quantized")
    for network in (api.load(model).network, made.network, api.load(tmp_path / "quantized").network):
        found = network.generation_config
        assert (found.temperature, found.top_p, found.eos_token_id) == (0.9, 0.6, [2, 29])


@pytest.mark.parametrize("settings", [{"max_new_tokens": -3}, {"watermarking_config": 3}])
def test_settings_that_transformers_refuses_are_damage_in_a_sentence(tmp_path: Path, settings: dict[str, int]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"generation_config\.json is damaged: "):
        generation_config(tmp_path)


def test_what_could_not_be_saved_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.config.temperature = 0.5  # which transformers refuses to write into config.json
    monkeypatch.setattr("rotquant.weights.build._build", lambda *_: pytest.fail("the work has begun"))
    with pytest.raises(CheckpointError, match=r"configuration or tokenizer cannot be saved: .*generation parameters"):
        build_weights(model, None, preset("rtn"), 0, progress=False)


@pytest.mark.parametrize(
    ("named", "expected"), [(5, (2, 5)), ([29, 5, 2], (2, 5, 29)), (None, (2,))], ids=["one", "list", "none"]
)
def test_a_text_ends_at_the_tokens_of_the_settings_and_of_the_tokenizer(named: object, expected: tuple) -> None:
    assert end_tokens(GenerationConfig(eos_token_id=named), tiny_tokenizer()) == expected
    assert end_tokens(None, tiny_tokenizer()) == (2,)


def test_a_decoder_ends_each_text_of_a_batch_at_its_first_end_token() -> None:
    decoder = convert(build_weights(tiny_model(), None, WITHOUT_QUANTIZERS, 0, progress=False), dtype="float32")
    prompts = tiny_tokens(3, 5)
    endless = Generation(decoder, 3, 40).generate(prompts, 30)
    ends = sorted({endless[0, 2].item(), endless[1, 19].item()})
    found = Generation(decoder, 3, 40).generate(prompts, 30, ends)
    lengths = []
    for row, whole in zip(found.tolist(), endless.tolist(), strict=True):
        length = next((place + 1 for place, one in enumerate(whole) if one in ends), len(whole))
        assert row[:length] == whole[:length]
        assert set(row[length:]) <= {ends[0]}
        lengths.append(length)
    assert lengths[0] <= 3
    assert found.shape[1] == max(lengths)


def test_the_command_ends_where_transformers_does(tmp_path: Path) -> None:
    """The third greedy token is made an end token, by the checkpoint's list alone."""
    tokens, model = torch.tensor([[1, 5, 6]]), checkpoint(tmp_path / "model", {})
    made = api.quantize(model, WITHOUT_QUANTIZERS)  # whose inputs decoder and simulation cannot round differently
    third = made.network.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)[
        0, -1
    ].item()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, third]}))
    made = api.quantize(model, WITHOUT_QUANTIZERS)
    made.save(tmp_path / "quantized")
    run = CliRunner().invoke
    run(cli, ["convert", str(tmp_path / "quantized"), "-o", str(tmp_path / "decoder"), "--dtype", "float32"])
    line = ["generate", str(tmp_path / "decoder"), "--prompt", "w5 w6", "--tokens", "20", "--device", "cpu", "--json"]
    found = json.loads(run(cli, line, catch_exceptions=False).stdout)
    expected = made.network.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False
    )[0, 3:].tolist()
    assert found["tokens"] == expected
    assert found["ended"] == (expected[-1] in (2, third))
    assert f"w{third}" not in found["text"]


def test_models_are_compared_by_one_rule_whatever_their_own_settings(tmp_path: Path) -> None:
    """Penalties, bans and sampling of a checkpoint change no task; its end tokens do, for all models alike."""
    prompts, setting = ["w5 w6 w7", "w8"], [((), 12)] * 2
    plain = api.load(checkpoint(tmp_path / "plain", {"generation_config.json": "{}"}))
    written = Scorer(plain.network, plain.tokenizer, "text", 4).generate(prompts, setting, ["t"] * 2)
    third = written[0][0].split()[2]
    own = {
        "repetition_penalty": 3.0,
        "do_sample": True,
        "temperature": 5.0,
        "min_new_tokens": 9,
        "bad_words_ids": [[7]],
    }
    settings = json.dumps(own | {"eos_token_id": [2, int(third[1:])]})
    folder = checkpoint(tmp_path / "model", {"generation_config.json": settings})
    baseline = api.quantize(folder, "baseline")
    baseline.save(tmp_path / "copy")
    expected = [text.split(third)[0].strip() for text, _ in written]
    for model in (api.load(folder), baseline, api.load(tmp_path / "copy")):
        kept = model.network.generation_config
        found = Scorer(model.network, model.tokenizer, "text", 4).generate(prompts, setting, ["t"] * 2)
        assert [text.strip() for text, _ in found] == expected
        assert model.network.generation_config is kept
        assert kept.repetition_penalty == 3.0


def test_a_decoder_answers_and_writes_as_the_simulation_does(tmp_path: Path) -> None:
    """It takes no masks: its texts share no rows."""
    folder = checkpoint(tmp_path / "model", {"generation_config.json": json.dumps({"eos_token_id": [2, 29]})})
    made = api.quantize(folder, "quarot-rtn")
    network = Network(convert(made.stored, dtype="float64"), generation_config(folder))
    made.network.double()
    pairs = [("w5 w6 w7 w8", " w9"), ("w5 w6 w7 w8", " w10 w11"), ("w5 w6 w7", " w12"), ("w40", " w41")]
    scorers = [Scorer(one, made.tokenizer, "text", 4) for one in (made.network, network)]
    expected, found = (scorer.log_likelihoods(pairs, ["t"] * 4) for scorer in scorers)
    # transformers computes norms and rotary angles in float32 whatever the model's type, and weights lay in float32.
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    prompts, settings = ["w5 w6 w7", "w8 w9", "w10"], [((), 10), ((), 10), ((), 3)]
    assert scorers[1].generate(prompts, settings, ["t"] * 3) == scorers[0].generate(prompts, settings, ["t"] * 3)


def test_the_rule_is_greedy_and_is_taken_back() -> None:
    model = tiny_model()
    model.generation_config = own = GenerationConfig(do_sample=True, eos_token_id=[2, 29], num_beams=3)
    with suppress(KeyboardInterrupt), greedy(model, tiny_tokenizer(), tokens=5, pad=0) as ends:
        assert ends == (2, 29)
        rule = model.generation_config
        assert (rule.do_sample, rule.num_beams, rule.max_new_tokens, rule.eos_token_id) == (False, None, 5, [2, 29])
        raise KeyboardInterrupt
    assert model.generation_config is own


def test_a_decoder_saved_without_settings_ends_at_the_tokenizers_eos(tmp_path: Path) -> None:
    decoder = convert(build_weights(tiny_model(), None, WITHOUT_QUANTIZERS, 0, progress=False), dtype="float32")
    save_decoder(tmp_path / "decoder", decoder, tiny_tokenizer())
    stored = load_decoder(tmp_path / "decoder")
    assert end_tokens(stored.generation_config, stored.tokenizer) == (2,)
