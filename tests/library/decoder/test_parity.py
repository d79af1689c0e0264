"""A converted decoder is the simulated model: the same numbers where only codes are rounded, and close in 16 bits.

In floating point two correct programs differ in last bits, a code that lies at a rounding boundary then becomes its
neighbour, a whole quantization step away, and every later layer sees other noise. So equality is shown in float64,
where no code flips, and in 16 bits layer by layer on equal inputs, with the flips counted.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rotquant import api
from rotquant.decoder import Decoder, Generation, convert
from rotquant.decoder.config import LINEARS
from rotquant.decoder.network import Network
from rotquant.metrics import perplexity as evaluation
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.checkpoints import load_tokenizer
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens, tokenize
from tests.helpers.cases import one_in, only
from tests.helpers.checkpoints import with_few_layers
from tests.helpers.models import TINY_SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

SHIPPED = Path(__file__).parents[3] / "workflow/resources/models"
MODELS = ("rq-7b", "rq-13b", "rq-70b", "rq-llama3", "rq-phi3", "rq-qwen2")
#: One whose head size the 4-bit cache's kernels have, and one whose keys and values are only rounded.
ON_GPU = ("rq-llama3", "rq-phi3")
LENGTH = 192
TWO, EIGHT = (Perplexity(sequence_length=LENGTH, max_windows=count) for count in (2, 8))


class Bound(NamedTuple):
    """Most of the codes of an input that may flip, and the largest relative error of a layer's output."""

    flipped: float
    error: float


#: Inputs that are not transformed are rounded alike on both sides: what differs is how weights and outputs are rounded.
#: Transformed inputs the simulation rounds to 16 bits and the kernels do not, an error of at most 2^-12 (2^-9) of a
#: value of 1.5 steps on average, so about 5e-4 (4e-3) of the codes flip to a neighbour. Each moves its product by a
#: step: outputs differ by sqrt(flipped) steps over about two, the inputs' deviation.
PLAIN = {"float16": Bound(0, 6e-4), "bfloat16": Bound(0, 5e-3)}
TRANSFORMED = {"float16": Bound(1.5e-3, 0.015), "bfloat16": Bound(0.01, 0.035)}

CALIBRATION = {"samples": 4, "sequence_length": 64}

#: A prefix in the cache before every text; which tokens stand in it does not matter here.
PREFIXED = override(
    preset("quarot-rtn"),
    {
        "methods": {"prefixed_outliers": {"ids": [7, 2, 11, 3, 5]}},
        "calibration": CALIBRATION,
    },
    "",
)

#: One scale for each head, from calibration text (PrefixQuant).
STATIC_CACHE = {
    part: {"symmetric": True, "dynamic": False, "granularity": "head", "clip_ratio": 0.8} for part in ("keys", "values")
}

#: What most people deploy: 4-bit weights in groups of 128, nothing else quantized.
WEIGHTS_ALONE = {
    "weights": {"scheme": {"granularity": "group", "group_size": 128}},
    **dict.fromkeys(("activations", "keys", "values")),
}

#: Everything that can be converted, in addition to QuaRot itself.
RECIPES = {
    "no rotation": override(preset("rtn"), {"activations": {"clip_ratio": 0.9}}, ""),
    "groups": override(preset("quarot-rtn"), {"weights": {"scheme": {"granularity": "group", "group_size": 128}}}, ""),
    "8-bit inputs": override(preset("quarot-rtn"), {"activations": {"bits": 8}}, ""),
    "16-bit cache": preset("quarot-rtn").model_copy(update={"keys": None, "values": None}),
    "no rotation of keys": override(preset("quarot-rtn"), {"rotation": {"keys": False}}, ""),
    "float16 transforms": override(preset("quarot-rtn"), {"rotation": {"online_dtype": "float16"}}, ""),
    "static": override(
        preset("quarot-rtn"),
        {
            "activations": {"dynamic": False, "granularity": "tensor"},
            "calibration": CALIBRATION,
        },
        "",
    ),
    "static cache": override(preset("quarot-rtn"), {**STATIC_CACHE, "calibration": CALIBRATION}, ""),
    "static cache, one scale": override(
        preset("quarot-rtn"),
        {
            **{part: {**scheme, "granularity": "tensor"} for part, scheme in STATIC_CACHE.items()},
            "calibration": CALIBRATION,
        },
        "",
    ),
    "all static, prefix": override(
        PREFIXED, {**STATIC_CACHE, "activations": {"dynamic": False, "granularity": "tensor"}}, ""
    ),
    "W4A16": override(preset("rtn"), WEIGHTS_ALONE, ""),
    "W4A16, GPTQ": override(preset("gptq"), {**WEIGHTS_ALONE, "calibration": CALIBRATION}, ""),
    "W4A16, scales of rows, rotation": preset("quarot-rtn").model_copy(update={"activations": None}),
    "prefix": PREFIXED,
    "prefix, 16-bit cache": PREFIXED.model_copy(update={"keys": None, "values": None}),
    "prefix, no rotation of keys": override(PREFIXED, {"rotation": {"keys": False}}, ""),
}


def unsearched(recipe: Recipe) -> Recipe:
    """A recipe without the search of scales, most of the time, which decides nothing here; `RECIPES` have it."""
    return override(recipe, {"weights": {"clip_search": False}}, "")


#: Any prose will do that stays as it is: nothing here depends on how well it is predicted.
PROSE = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> CorpusSpec:
    """A text for calibration: tokenizing the default one takes longer than the rest of a test."""
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text(PROSE)
    return CorpusSpec(name="prose", source="local", path=str(path))


@cache
def text(name: str) -> Tokens:
    return tokenize(PROSE, load_tokenizer(SHIPPED / name))


def exact(checkpoint: Path, recipe: Recipe, prose: CorpusSpec) -> tuple[torch.nn.Module, Decoder]:
    """The simulated model and the converted one in float64, on the same integers and scales."""
    model = api.quantize(checkpoint, recipe, corpus=prose)
    network, parameters = model.network.double(), dict(model.network.named_parameters())
    for weight_name, weight in model.stored.weights.items():
        scale = weight.qparams.scale.double()
        codes = weight.codes.double()
        grouped = codes.unflatten(1, (scale.shape[1], -1)) if scale.dim() == 3 else codes
        parameters[weight_name].data = (grouped * scale).reshape(codes.shape)
    return network, convert(model.stored, dtype="float64")


RTN = preset("quarot-rtn")


@pytest.mark.parametrize(
    ("name", "recipe"),
    only(
        [("rq-70b", RTN), ("rq-phi3", PREFIXED)],
        [*((name, RTN) for name in MODELS), *((name, PREFIXED) for name in ON_GPU)],
    ),
    ids=[*MODELS, *(f"{name}-prefix" for name in ON_GPU)],
)
def test_perplexity_and_greedy_tokens_are_the_simulated_ones(
    name: str, recipe: Recipe, prose: CorpusSpec, tmp_path: Path
) -> None:
    """Of the first four layers: all of a model are of one kind."""
    network, decoder = exact(with_few_layers(SHIPPED / name, 4, tmp_path), unsearched(recipe), prose)
    expected = evaluation.perplexity(network, text(name), TWO).perplexity
    found = evaluation.perplexity(Network(decoder), text(name), TWO).perplexity
    assert found == pytest.approx(expected, rel=1e-6)  # norms are float32, see below
    prompt = text(name).whole[:80].view(2, 40)
    found = Generation(decoder, 2, 48).generate(prompt, 8)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = network.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, 40:]
    assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose widths are multiples of 128, the size of the kernels' groups; no shipped one has such."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = load_tokenizer(SHIPPED / "rq-llama3")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(**{**TINY_SHAPE, "vocab_size": len(tokenizer)}, bos_token_id=tokenizer.bos_token_id)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", one_in(2, RECIPES.values()), ids=RECIPES.keys())
def test_every_convertible_recipe_is_computed(recipe: Recipe, wide: Path, prose: CorpusSpec) -> None:
    network, decoder = exact(wide, recipe, prose)
    windows = text("rq-llama3").whole[:LENGTH].view(4, -1)
    with torch.no_grad():
        expected = network(input_ids=windows, use_cache=False).logits
    # transformers' norms are float32 whatever the model; the final norm's rounding shows in the logits. Seldom, on some
    # processor, one of these roundings moves a code and what follows in its window; a wrong conversion fails in all.
    equal = torch.isclose(decoder.logits(windows), expected, rtol=1e-5, atol=1e-5).flatten(1).all(dim=1)
    assert equal.sum() >= 3, equal


@pytest.mark.parametrize("dtype", PLAIN)
def test_a_linear_layer_differs_by_rounding(dtype: str) -> None:
    check_linear_layers("rq-llama3", dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("name", ON_GPU)
def test_a_linear_layer_on_a_gpu_differs_as_little(name: str, dtype: str) -> None:
    check_linear_layers(name, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [preset("quarot-rtn"), PREFIXED], ids=["quarot", "prefix"])
@pytest.mark.parametrize("name", ON_GPU)
def test_perplexity_on_a_gpu(name: str, recipe: Recipe, prose: CorpusSpec) -> None:
    """Kernels against references on a CPU: equal up to the noise of flipped codes over 8 windows.

    That noise: embeddings disturbed by a thousandth move this perplexity by 1.3 % (standard deviation over 8 draws), so
    two runs differ by 1.8 %, and 6 % are three times that. Layer by layer, above, nothing is left to noise.
    """
    decoder = convert(api.quantize(SHIPPED / name, recipe, corpus=prose).stored)
    expected = evaluation.perplexity(Network(decoder), text(name), EIGHT).perplexity
    found = evaluation.perplexity(Network(decoder.to("cuda")), text(name), EIGHT).perplexity
    assert abs(found / expected - 1) < 0.06


def check_linear_layers(name: str, dtype: str, device: str) -> None:
    """Every linear layer of the decoder on the input that the simulated one had, against what that one returned."""
    model = api.quantize(SHIPPED / name, unsearched(preset("quarot-rtn")))
    decoder = convert(model.stored, dtype=dtype, device=device)
    network = model.network.to(device, getattr(torch, dtype))
    window = text(name).whole[:LENGTH].view(2, -1).to(device)
    for index, simulated in enumerate(record(network, window)):
        layer = decoder.layers[index]
        for linear, site in zip(LINEARS, architecture_of(network).sites, strict=True):
            module, seen = getattr(layer, linear), simulated[site.name]
            if site.norm is not None:
                _, x = module.inputs.after_norm(seen.before, None, None, decoder.config.norm_eps)
            else:
                x = module.inputs(seen.before)
            values = (x.codes.float() * x.scale[:, None])[:, : site.features]
            # The largest of a row is clipped to code 7, so it is seven steps.
            step = seen.quantized.float().abs().amax(-1, keepdim=True) / 7
            flipped = ((values - seen.quantized.float()).abs() > step / 2).float().mean().item()
            error = (module.product(x).float() - seen.output.float()).norm() / seen.output.float().norm()
            bound = (TRANSFORMED if site.norm is None else PLAIN)[dtype]
            # The kernel's norm may differ from torch's in the last bit before it rounds to 16.
            slack = 1e-3 if device == "cuda" else 0
            assert flipped <= bound.flipped + slack, (index, linear)
            assert error <= bound.error + slack**0.5 / 2, (index, linear)


@dataclass
class Recorded:
    """What a site of the simulated layer saw: [rows, features] before and after its quantizer, and its output."""

    before: Tensor | None = None
    quantized: Tensor | None = None
    output: Tensor | None = None


def record(network: torch.nn.Module, window: Tensor) -> list[dict[str, Recorded]]:
    """Run the simulated model; for each layer what its sites saw."""
    layers: list[dict[str, Recorded]] = []
    handles = []
    for layer in decoder_layers(network):
        sites = {site.name: Recorded() for site in architecture_of(network).sites}
        for site in architecture_of(network).sites:
            seen, linears = sites[site.name], [layer.get_submodule(part) for part in site.linears]

            def before(_: object, args: tuple[Tensor, ...], seen: Recorded = seen) -> None:
                seen.before = args[0].flatten(0, -2)

            def quantized(_: object, args: tuple[Tensor, ...], seen: Recorded = seen) -> None:
                seen.quantized = args[0].flatten(0, -2)

            def output(_: object, __: object, y: Tensor, seen: Recorded = seen) -> None:
                parts = [] if seen.output is None else [seen.output]
                seen.output = torch.cat([*parts, y.flatten(0, -2)], dim=-1)

            first = linears[0] if site.norm is None else layer.get_submodule(site.norm)
            handles.append(first.register_forward_pre_hook(before, prepend=True))
            handles.append(linears[0].register_forward_pre_hook(quantized))
            handles += [linear.register_forward_hook(output) for linear in linears]
        layers.append(sites)
    with torch.no_grad():
        network(input_ids=window, use_cache=False)
    for handle in handles:
        handle.remove()
    return layers
