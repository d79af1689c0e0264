"""A converted decoder of 2-bit codes into tables is the simulated model (RCP Sec. 4.4); see test_parity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rotquant import api
from rotquant.commands.root import cli
from rotquant.decoder import Decoder, Generation, convert, load_decoder, save_decoder
from rotquant.decoder.config import LINEARS, InputScheme, Precision
from rotquant.decoder.conversion import check_convertible, pack_tables, precision_of
from rotquant.decoder.linear import LinearInputs, PackedLinear, empty_weight
from rotquant.decoder.network import Network
from rotquant.foundation.errors import KernelError, RecipeError
from rotquant.foundation.files import folder_size
from rotquant.kernels.products.lut import LutWeight, spread_features
from rotquant.metrics import perplexity as evaluation
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.codebook import CodebookWeight
from rotquant.text import Tokens, tokenize
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import StoredModel, save_quantized
from tests.helpers.cases import only
from tests.helpers.codebooks import build_levels, table_recipe
from tests.helpers.models import TINY_SHAPE, tiny_model, tiny_tokens

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

#: Shipped models, and the largest power of two that divides all their widths; head sizes 64, 64 and 72, of which the
#: kernels' 4-bit cache has the first two.
MODELS = {"rq-llama3": 64, "rq-70b": 64, "rq-phi3": 32}
WINDOWS = Perplexity(sequence_length=192, max_windows=2)

#: Around 2-bit weights in groups of 128.
RECIPES = {
    "w2a4kv4": table_recipe(128),
    "w2a4kv16": table_recipe(128).model_copy(update={"keys": None, "values": None}),
    "w2a16kv16": table_recipe(128).model_copy(update={"activations": None, "keys": None, "values": None}),
    "groups of 64": table_recipe(64),
    "groups of 16": table_recipe(16),
    "rows": table_recipe(None),
    "no rotation": override(table_recipe(128), {"rotation": None}, ""),
    "no rotation across heads": override(table_recipe(128), {"rotation": {"heads": False}}, ""),
    "static": override(
        table_recipe(128), {"activations": {"dynamic": False, "granularity": "tensor"}, "calibration": {}}, ""
    ),
    "prefix": override(
        table_recipe(128), {"methods": {"prefixed_outliers": {"ids": [5, 9, 1]}}, "calibration": {}}, ""
    ),
}


def exact(name: str) -> tuple[torch.nn.Module, Decoder, Tokens]:
    """The simulated model and the converted one in float64 on the same codes and levels, and a text."""
    network, tokenizer = shallow(name)
    recipe = table_recipe(MODELS[name])
    stored = build_levels(network, recipe, tokenizer)
    prose = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    return *in_float64(stored, recipe), tokenize(prose, tokenizer)


def shallow(name: str) -> tuple[Any, Any]:
    """The first four layers of a shipped model, all of one kind, and its tokenizer."""
    network, tokenizer = load_checkpoint(f"workflow/resources/models/{name}", torch.float32, "cpu")
    network.model.layers, network.config.num_hidden_layers = network.model.layers[:4], 4
    return network, tokenizer


def in_float64(stored: StoredModel, recipe: Recipe) -> tuple[torch.nn.Module, Decoder]:
    """The simulated model, its weights the levels themselves, and the converted one."""
    network: Any = stored.model
    network.double()
    parameters = dict(network.named_parameters())
    for name, weight in stored.weights.items():
        assert torch.equal(parameters[name], weight.dequantize(torch.float64))
    quantized_forward(network, recipe, stored.state)
    return network, convert(stored, dtype="float64")


@pytest.mark.parametrize("name", only(["rq-phi3"], MODELS))
def test_perplexity_and_greedy_tokens_are_the_simulated_ones(name: str) -> None:
    network, decoder, text = exact(name)
    expected = evaluation.perplexity(network, text, WINDOWS).perplexity
    found = evaluation.perplexity(Network(decoder), text, WINDOWS).perplexity
    # Seven digits; transformers computes norms in float32 whatever the model's type, which moves the eighth.
    assert found == pytest.approx(expected, rel=2e-7)
    prompt = text.whole[:80].view(2, 40)
    found = Generation(decoder, 2, 48).generate(prompt, 8)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = network.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, 40:]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_every_convertible_recipe_is_computed(recipe: Recipe) -> None:
    network, decoder = in_float64(build_levels(random_model(), recipe, samples=tiny_tokens(4, 24) % 64), recipe)
    tokens = tiny_tokens(4, 24) % 64
    with torch.no_grad():
        expected = network(input_ids=tokens, use_cache=False).logits
    # As in test_parity: the last bits of transformers' norms seldom move a code and what follows in its text.
    equal = torch.isclose(decoder.logits(tokens), expected, rtol=1e-5, atol=1e-5).flatten(1).all(dim=1)
    assert equal.sum() >= 3, equal


def random_model() -> LlamaForCausalLM:
    """Widths are multiples of 128, the size of the kernel's groups."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_SHAPE)).eval()


def test_codes_and_tables_are_those_that_were_stored() -> None:
    stored = build_levels(random_model(), table_recipe(128))
    decoder = convert(stored)
    for index, layer in enumerate(decoder.layers):
        for name, site in zip(LINEARS, architecture_of(stored.model).sites, strict=True):
            parts = [stored.weights[f"model.layers.{index}.{part}.weight"] for part in site.linears]
            codes, table = getattr(layer, name).packed.unpack()
            assert torch.equal(codes, torch.cat([part.codes for part in parts]))
            assert torch.equal(table, torch.cat([part.levels for part in parts]))


def test_the_commands_convert_evaluate_and_generate(tmp_path: Path) -> None:
    """From a folder of stored codes and tables to text, and the folders are equally large."""
    source, folder, recipe = tmp_path / "quantized", tmp_path / "decoder", table_recipe(64)
    network, tokenizer = shallow("rq-llama3")
    save_quantized(source, build_levels(network, recipe, tokenizer))
    run = CliRunner().invoke
    assert run(cli, ["convert", str(source), "-o", str(folder), "--dtype", "float32"]).exit_code == 0
    loaded, window = api.load(folder), torch.arange(3, 35)[None]
    assert torch.equal(loaded.network(input_ids=window).logits, convert(source, dtype="float32").logits(window))
    text = run(cli, ["generate", str(folder), "--prompt", "Return the", "--tokens", "4"]).stdout
    ids = tokenize("Return the", loaded.tokenizer).whole[None]
    new = Generation(loaded.network.decoder, 1, 32).generate(ids, 4)
    assert text == "Return the" + loaded.tokenizer.decode(new[0].tolist()) + "\n"
    three = tmp_path / "three"
    network, tokenizer = shallow("rq-llama3")
    save_quantized(three, build_levels(network, table_recipe(64, bits=3), tokenizer))
    with pytest.raises(RecipeError, match=r"the model has 3-bit weights, which cannot be converted: .* simulated\.$"):
        run(cli, ["convert", str(three), "-o", str(tmp_path / "other")], catch_exceptions=False)
    assert not (tmp_path / "other").exists()


def test_folders_before_and_after_conversion_are_equally_large(tmp_path: Path) -> None:
    """Stored codes and tables take the space of those that the kernel reads, but for groups read in pairs."""
    model = random_model().to(torch.bfloat16)
    stored = build_levels(model, table_recipe(128))
    save_quantized(tmp_path / "quantized", stored)
    save_decoder(tmp_path / "decoder", convert(stored))
    before, after = (folder_size(tmp_path / name, "*.safetensors") for name in ("quantized", "decoder"))
    added = model.config.num_hidden_layers * 128 * model.config.hidden_size * 2.5 / 8  # down_proj has three groups
    norms = 2 * model.config.hidden_size * (2 * model.config.num_hidden_layers + 1)  # fused in the decoder
    headers = 10_000
    assert abs(after - added - (before - norms)) < headers < (before - norms) / 20


def test_a_trained_model_is_converted() -> None:
    """What the method itself stores, after a few steps: tables are float16, and both networks agree."""
    model, ids = random_model(), tiny_tokens(4, 16) % 64
    settings = {"text": {"samples": 4, "sequence_length": 16}, "epochs": 2, "batch_size": 2, "start_samples": 2}
    settings |= {"temperature": None, "validation_share": 0.0}
    recipe = override(preset("rcp"), {"methods": {"rcp": settings}}, "")
    stored = build_weights(model, None, recipe, 0, texts={"rcp": ids}, progress=False)
    assert {weight.levels.dtype for weight in stored.weights.values()} == {torch.float16}
    network, decoder = in_float64(stored, recipe)
    with torch.no_grad():
        expected = network(input_ids=ids, use_cache=False).logits
    # As above.
    equal = torch.isclose(decoder.logits(ids), expected, rtol=1e-5, atol=1e-5).flatten(1).all(dim=1)
    assert equal.sum() >= 3, equal


@pytest.mark.parametrize("group_size", [128, 64])
def test_a_folder_gives_back_the_decoder(group_size: int, tmp_path: Path) -> None:
    decoder = convert(build_levels(random_model(), table_recipe(group_size)))
    save_decoder(tmp_path / "decoder", decoder)
    loaded = load_decoder(tmp_path / "decoder").decoder
    assert loaded.precision == decoder.precision
    tokens = tiny_tokens(2, 12) % 64
    assert torch.equal(loaded.logits(tokens), decoder.logits(tokens))
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_weight_takes_two_bits_and_a_half() -> None:
    """The paper's 2 bits and four float16 levels for 128 weights (Sec. 4.4), in memory and in the folder alike."""
    decoder = convert(build_levels(random_model(), table_recipe(128)))
    for layer in decoder.layers:
        for name in LINEARS:
            inputs, outputs = decoder.config.features(name)
            assert inputs % 128 == outputs % 16 == 0
            bits = 8 * sum(buffer.nbytes for buffer in getattr(layer, name).buffers())
            odd = inputs // 128 % 2  # the kernel reads groups in pairs
            assert bits == 2.5 * (inputs + 128 * odd) * outputs


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": {"scheme": {"bits": 3}}}, "3-bit weights"),
        ({"weights": {"scheme": {"granularity": "tensor", "group_size": None}}}, "2-bit weights per tensor"),
        ({"activations": {"bits": 8}}, "8-bit inputs"),
        ({"activations": {"symmetric": False}}, "asymmetric inputs"),
        ({"keys": {"bits": 2}}, "a 2-bit cache"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(RecipeError, match=f"the model has {sentence}, which cannot be converted: .*\\.$"):
        precision_of(table_recipe(128, **changes))


def test_weights_that_are_no_tables_are_refused() -> None:
    recipe = table_recipe(8)
    with pytest.raises(RecipeError, match="2-bit weights without tables, which cannot be converted"):
        convert(build_weights(tiny_model(), None, recipe, 0))
    four = override(preset("quarot-rtn"), {"weights": {"scheme": {"granularity": "group", "group_size": 128}}}, "")
    stored = build_levels(random_model(), table_recipe(128))
    manifest = stored.manifest.model_copy(update={"recipe": four})
    with pytest.raises(RecipeError, match="4-bit weights without scales, which cannot be converted"):
        convert(StoredModel(stored.model, None, stored.weights, type(stored.state)(manifest, {}, {})))


def test_before_anything_is_stored_a_recipe_says_whether_there_will_be_tables() -> None:
    config = random_model().config
    check_convertible(preset("rcp"), config)
    with pytest.raises(RecipeError, match="2-bit weights without tables, which cannot be converted"):
        check_convertible(table_recipe(128), config)


def test_levels_that_float16_does_not_hold_are_refused() -> None:
    codes, levels = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(16, 1, 4)
    assert pack_tables({"fine": CodebookWeight(codes, levels)}).shape == (16, 128)
    for level in (1 + 2**-12, 7e4):
        strange = CodebookWeight(codes, levels + level)
        with pytest.raises(RecipeError, match="levels in odd that are no float16 numbers, which cannot be converted"):
            pack_tables({"fine": CodebookWeight(codes, levels), "odd": strange})


def test_a_layer_of_wrong_groups_or_inputs_is_one_sentence() -> None:
    with pytest.raises(KernelError, match="tables of 128 weights do not divide 100"):
        empty_weight(Precision(weights="lut2"), 100, 16)
    for scheme in (InputScheme(bits=8), InputScheme(packed=True)):
        with pytest.raises(ValueError, match="look-up tables take 4-bit inputs, a byte each"):
            Precision(weights="lut2", inputs=scheme)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 40, 300])
@pytest.mark.parametrize("group_size", [128, 64, 24, 256])
def test_few_rows_and_many_multiply_alike(group_size: int, rows: int) -> None:
    """The kernel that reads codes, and the weight written out for a prefill, against float64."""
    ins, outs = 1536, 272
    levels = 0.02 * torch.randn(outs, ins // group_size, 4, device="cuda")
    codes = torch.randint(0, 4, (outs, ins), dtype=torch.uint8, device="cuda")
    stored = CodebookWeight(codes, levels.sort().values.half())
    inputs = LinearInputs(InputScheme(clip_ratio=0.9))
    lut: LutWeight = pack_tables({"it": stored})
    assert lut.shape == (outs, spread_features(ins, group_size))
    layer = PackedLinear(inputs, lut, dtype=torch.float32, table_group=group_size)
    x = torch.randn(rows, ins, device="cuda", dtype=torch.float16)
    quantized = inputs(x)
    expected = (quantized.codes[:, :ins].double() * quantized.scale.double()[:, None]) @ stored.dequantize(
        torch.float64
    ).T
    # Of integers and levels that float16 holds float32 sums are rounded alone; see tests/library/kernels/test_lut.py.
    assert (layer(x).double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.gpu
def test_perplexity_on_a_gpu() -> None:
    """Kernels against references on a CPU, up to the noise of flipped codes, as in test_parity."""
    stored = build_levels(random_model(), table_recipe(128))
    decoder, text = convert(stored), Tokens(tiny_tokens(1, 512)[0] % 64)
    windows = Perplexity(sequence_length=64, max_windows=8)
    expected = evaluation.perplexity(Network(decoder), text, windows).perplexity
    found = evaluation.perplexity(Network(decoder.to("cuda")), text, windows).perplexity
    assert abs(found / expected - 1) < 0.06
