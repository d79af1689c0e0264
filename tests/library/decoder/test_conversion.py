"""What can be converted, what is refused, and that a folder gives back what was written."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rotquant import api
from rotquant.cli import app
from rotquant.commands.root import cli
from rotquant.decoder import Generation, convert, load_decoder, save_decoder
from rotquant.decoder.conversion import check_config, precision_of
from rotquant.foundation.errors import CheckpointError, RecipeError, ResultError, RotquantError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.build import build_weights, quantized_forward
from tests.helpers.checkpoints import with_few_layers
from tests.helpers.models import AWKWARD, FURTHER, tiny_model, tiny_tokens
from tests.helpers.sealing import reseal

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

QUAROT = preset("quarot-rtn")
WITHOUT_R1 = override(QUAROT, {"rotation": {"residual": "none"}}, "")
#: Unclipped inputs of o_proj would tie: a text's first token attends to itself alone, so they are whole multiples of
#: the values' steps, and where the largest is 14 steps every odd one lies between two codes.
UNROTATED = override(preset("rtn"), {"activations": {"clip_ratio": 0.9}}, "")


#: As PrefixQuant has it; a clip ratio is of no meaning then.
STATIC_CACHE = {part: {"symmetric": True, "dynamic": False} for part in ("keys", "values")} | {"calibration": {}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": None}, "unquantized weights"),
        ({"weights": {"scheme": {"bits": 3}}}, "3-bit weights"),
        ({"weights": {"scheme": {"symmetric": False}}}, "asymmetric weights"),
        ({"weights": {"scheme": {"granularity": "group", "group_size": 64}}}, "groups of 64 weights"),
        ({"activations": {"symmetric": False}}, "asymmetric inputs"),
        ({"rotation": {"mlp": 32}}, "R4 in blocks"),
        ({"attention_output": {"bits": 4, "granularity": "head"}}, "o_proj inputs of their own"),
        ({"activations": {"bits": 6}}, "6-bit inputs"),
        ({"activations": {"granularity": "group", "group_size": 128}}, "dynamic input scales per group"),
        ({"activations": {"granularity": "tensor"}}, "dynamic input scales per tensor"),
        ({"keys": None}, "a cache that is half quantized"),
        ({"keys": {"bits": 3}}, "a 3-bit cache"),
        ({"values": {"symmetric": True}}, "a symmetric cache with dynamic scales"),
        ({"values": {"symmetric": True, "dynamic": False}, "calibration": {}}, "a cache whose scales are half static"),
        (STATIC_CACHE | {"values": {"dynamic": False}}, "an asymmetric cache with static scales"),
        (STATIC_CACHE | {"values": {"symmetric": True, "dynamic": False, "bits": 8}}, "a 8-bit cache"),
        (
            STATIC_CACHE | {"keys": {"symmetric": True, "dynamic": False, "granularity": "group", "group_size": 16}},
            "static scales of a cache per group",
        ),
        ({"values": {"group_size": 16}}, "groups of different size for keys and values"),
        ({"methods": {"outliers": {"features": 8}}, "calibration": {}}, "outlier features"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(RecipeError, match=f"the model has {sentence}, which cannot be converted: .*\\.$"):
        precision_of(override(QUAROT, changes, ""))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("phi-3-longrope", "longrope rotary embeddings"),
        ("mixtral", "experts"),
        ("qwen3-moe", "experts"),
        ("gemma2", "a cap on the logits"),
    ],
)
def test_architectures_that_the_decoder_lacks_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=f"the model has {sentence}, which cannot be converted"):
        check_config(tiny_model(**(AWKWARD | FURTHER)[name]).config)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(AWKWARD["llama-2"], id="llama-2"),
        pytest.param(AWKWARD["llama-3"], id="llama-3"),
        pytest.param(AWKWARD["phi-3"], id="phi-3"),
        pytest.param({"family": "llama", "attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"family": "qwen2", "tied": True}, id="qwen2"),
        pytest.param(FURTHER["qwen3"], id="qwen3"),
        pytest.param(FURTHER["llama-3.1"], id="llama-3.1"),
        pytest.param(FURTHER["phi-4"], id="phi-4"),
        pytest.param(AWKWARD["mistral"] | {"sliding_window": 11}, id="mistral"),
    ],
)
@pytest.mark.parametrize("recipe", [QUAROT, WITHOUT_R1, UNROTATED], ids=["quarot", "without-r1", "unrotated"])
def test_every_family_is_computed(settings: dict, recipe: Recipe) -> None:
    model = tiny_model(**settings)
    stored = build_weights(model, None, recipe, 0)
    model.double()
    parameters = dict(model.named_parameters())
    for name, weight in stored.weights.items():
        parameters[name].data = weight.codes.double() * weight.qparams.scale.double()
    decoder = convert(stored, dtype="float64")
    tokens = torch.arange(22).view(2, 11)
    with quantized_forward(model, recipe, stored.state), torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    # transformers computes norms and rotary angles in float32 whatever the model's type.
    torch.testing.assert_close(decoder.logits(tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_decoder_reads_no_text_longer_than_the_window_of_the_models_attention(tmp_path: Path) -> None:
    decoder = convert(build_weights(tiny_model(**AWKWARD["mistral"]), None, QUAROT, 0), dtype="float32")
    assert decoder.config.max_positions == 6
    save_decoder(tmp_path / "decoder", decoder, None)
    decoder = load_decoder(tmp_path / "decoder").decoder
    assert decoder.logits(tiny_tokens(1, 6)).shape[1] == 6
    with pytest.raises(RotquantError, match=r"a window of 6 tokens .* use texts of at most 6 tokens"):
        decoder.logits(tiny_tokens(1, 7))


PREFIX = {"methods": {"prefixed_outliers": {"ids": [5, 9, 1]}}, "calibration": {}}
SAMPLES = tiny_tokens(2, 12)


@pytest.mark.parametrize("settings", [AWKWARD["llama-3"], {"family": "qwen2", "tied": True}], ids=["llama-3", "qwen2"])
@pytest.mark.parametrize(
    "recipe",
    [override(QUAROT, PREFIX, ""), override(WITHOUT_R1, PREFIX, ""), override(QUAROT, PREFIX | STATIC_CACHE, "")],
    ids=["quarot", "without-r1", "static-cache"],
)
def test_a_prefix_is_converted(settings: dict, recipe: Recipe) -> None:
    model = tiny_model(**settings)
    stored = build_weights(model, None, recipe, 0, samples=SAMPLES)
    model.double()
    parameters = dict(model.named_parameters())
    for name, weight in stored.weights.items():
        parameters[name].data = weight.codes.double() * weight.qparams.scale.double()
    decoder = convert(stored, dtype="float64")
    assert decoder.config.prefix == 3
    tokens = tiny_tokens(2, 30)
    with quantized_forward(model, recipe, stored.state), torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    # transformers computes norms and rotary angles in float32 whatever the model's type.
    torch.testing.assert_close(decoder.logits(tokens), expected, rtol=1e-5, atol=1e-5)
    cache, pieces = decoder.new_cache(2, 30), []
    for piece in tokens.split([4, 1, 25], dim=1):
        pieces.append(decoder.prefill(piece, cache) if piece.shape[1] > 1 else decoder.decode(piece[:, 0], cache))
    torch.testing.assert_close(torch.stack(pieces), expected[:, [3, 4, 29]].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_model_without_outlier_tokens_has_no_prefix() -> None:
    recipe = override(QUAROT, {"methods": {"prefixed_outliers": {"threshold": 1e6}}, "calibration": {}}, "")
    decoder = convert(build_weights(tiny_model(bos_token_id=None), None, recipe, 0, samples=SAMPLES))
    assert decoder.config.prefix == 0
    assert not any("prefix" in name for name in decoder.state_dict())


@pytest.mark.parametrize(
    "recipe",
    [QUAROT, override(QUAROT, PREFIX, ""), override(QUAROT, PREFIX | STATIC_CACHE, "")],
    ids=["quarot", "prefix", "prefix-static-cache"],
)
def test_a_folder_gives_back_the_decoder(recipe: Recipe, tmp_path: Path) -> None:
    stored = build_weights(tiny_model(), None, recipe, 0, samples=SAMPLES)
    decoder = convert(stored)
    save_decoder(tmp_path / "decoder", decoder, source={"of": "a test"})
    loaded = load_decoder(tmp_path / "decoder")
    assert loaded.manifest.source == {"of": "a test"}
    assert loaded.decoder.config == decoder.config
    assert loaded.decoder.precision == decoder.precision
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(loaded.decoder.logits(tokens), decoder.logits(tokens))
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(loaded.decoder.state_dict()[name], tensor)


def test_a_damaged_folder_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "decoder"
    save_decoder(folder, convert(build_weights(tiny_model(), None, QUAROT, 0)))
    manifest = json.loads((folder / "decoder.json").read_text())
    for change, error, sentence in (
        ({"config": manifest["config"] | {"hidden": 32}}, CheckpointError, "expected"),
        ({"config": manifest["config"] | {"layers": 1}}, CheckpointError, "should not be there"),
        ({"config": manifest["config"] | {"layers": 3}}, CheckpointError, "is missing"),
        ({"config": manifest["config"] | {"prefix": 3}}, CheckpointError, "prefix_keys is missing"),
        ({"files": ["other.safetensors"]}, CheckpointError, "other.safetensors is missing"),
        ({"files": ["../decoder.safetensors"]}, ResultError, "damaged"),
        ({"format_version": 3}, ResultError, "damaged"),
    ):
        reseal(folder / "decoder.json", **{**manifest, **change})
        with pytest.raises(error, match=sentence):
            load_decoder(folder)
    (folder / "decoder.json").write_text(json.dumps(manifest))
    data = (folder / "decoder.safetensors").read_bytes()
    (folder / "decoder.safetensors").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load_decoder(folder)


def test_the_command_converts_evaluates_and_generates(tmp_path: Path) -> None:
    source, folder = tmp_path / "quantized", tmp_path / "decoder"
    short = with_few_layers(Path("workflow/resources/models/rq-llama3"), 4, tmp_path / "short")
    api.quantize(short, QUAROT).save(source)
    run = CliRunner().invoke
    assert run(cli, ["convert", str(source), "-o", str(folder), "--dtype", "float32"]).exit_code == 0
    loaded = api.load(folder)
    window = torch.arange(3, 35)[None]
    assert torch.equal(loaded.network(input_ids=window).logits, convert(source, dtype="float32").logits(window))
    text = run(cli, ["generate", str(folder), "--prompt", "Return the", "--tokens", "4"]).stdout
    ids = loaded.tokenizer("Return the", add_special_tokens=False)["input_ids"]
    prompt = torch.tensor([[loaded.tokenizer.bos_token_id, *ids]])
    new = Generation(loaded.network.decoder, 1, 32).generate(prompt, 4)
    assert text == "Return the" + loaded.tokenizer.decode(new[0].tolist()) + "\n"
    with pytest.raises(RecipeError, match="recipe is fixed"):
        api.load(folder, QUAROT)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RotquantError, match="is not a decoder"):
        run(cli, ["convert", str(source), "-o", str(tmp_path / "full")], catch_exceptions=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported.\n\n"),
    ],
)
def test_a_full_gpu_is_one_sentence(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Torch says so, or the driver, where other processes have the memory."""

    def exhausted(*_: object) -> None:
        raise error

    monkeypatch.setattr("rotquant.decoder.load_decoder", exhausted)
    with pytest.raises(SystemExit, match="2"):
        app(["generate", str(tmp_path), "--prompt", "x", "--device", "cpu"])
    assert "the GPU's memory does not suffice" in capsys.readouterr().err
