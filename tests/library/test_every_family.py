"""Families whose layers have more than Llama's, and special sizes: what works is right, the rest is refused."""

import copy
import warnings
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rotquant import api, serving  # noqa: F401 - teaches transformers to run exports
from rotquant.decoder import convert
from rotquant.formats.export import export_compressed, export_plain
from rotquant.foundation.errors import RecipeError
from rotquant.metrics.divergence import float_states
from rotquant.models.architectures import Site, architecture_of, decoder_layers, embedding, linear_of, norm_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.fitting import check_transforms, fitted, substitutes
from rotquant.models.rotation.fusing import fuse_norms, rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity, RotationScheme
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.actions import hooks
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.hessian import Hessian
from rotquant.weights.storage import StoredModel, load_quantized, save_quantized
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.cases import each_once, one_of_each
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.families import FLOATS, SAMPLES, method
from tests.helpers.invariance import invariance_error, norms_in_model_dtype
from tests.helpers.models import FURTHER, tiny_model, tiny_tokens
from tests.helpers.real import real_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning"),
    pytest.mark.filterwarnings("ignore:.*weights of experts see fewer calibration tokens:UserWarning"),
]

#: Layers through which no rotation of the residual stream passes.
POST_NORMS = ("olmo2", "gemma2", "gemma3")
EXPERTS = ("mixtral", "qwen3-moe")
CONVERTED = ("qwen3", "llama-3.1", "smollm-135m", "smollm-360m", "phi-4", "olmo2", "gemma3")


def scheme_of(shape: str) -> RotationScheme:
    """All rotations that a shape has."""
    scheme = RotationScheme()
    found = substitutes(architecture_of(tiny_model(**FURTHER[shape])), scheme.transforms)
    return scheme.model_copy(update={one.field: one.value for one in found})


def build(shape: str, recipe: Recipe, **options: object) -> StoredModel:
    model = tiny_model(**FURTHER[shape] | options)
    recipe, _ = fitted(recipe, architecture_of(model))
    learned = hooks(recipe.learner).learn_rotations(model, recipe, 3, SAMPLES) if recipe.learner else None
    rotations, texts = learned and learned.rotations, dict.fromkeys(recipe.own_texts, SAMPLES)
    return build_weights(model, tiny_tokenizer(), recipe, 3, SAMPLES, texts=texts, rotations=rotations, progress=False)


@torch.no_grad()
def logits(model: nn.Module, stored: StoredModel) -> Tensor:
    with quantized_forward(model, stored.manifest.recipe, stored.state):
        return model(tiny_tokens(), use_cache=False).logits


@cache
def expected_logits(shape: str) -> Tensor:
    with torch.no_grad():
        return tiny_model(**FURTHER[shape])(tiny_tokens(), use_cache=False).logits


def no_r1(inputs: str | int, **others: object) -> RotationScheme:
    return RotationScheme.model_validate({"residual": "none", "inputs": inputs, **others})


#: Transforms of inputs by kind: one that is drawn where v_proj has no R2, and one on a model whose norms would let R1
#: pass, with a router that reads the transformed input too.
INPUTS = [
    ("gemma3", no_r1("orthogonal", values="none")),
    ("gemma2", no_r1("random_hadamard")),
    ("olmo2", no_r1(24)),
    ("olmo2", no_r1("orthogonal")),
    ("qwen3-moe", no_r1("hadamard")),
    ("phi-4", no_r1("random_hadamard")),
]


@pytest.mark.parametrize(("shape", "scheme"), INPUTS, ids=lambda one: getattr(one, "inputs", one))
def test_transforms_of_inputs_do_not_change_the_logits(shape: str, scheme: RotationScheme) -> None:
    model = tiny_model(**FURTHER[shape], dtype=torch.float64)
    assert invariance_error(model, scheme, seed=3, input_ids=tiny_tokens()) <= FLOAT64_BOUND


@pytest.mark.parametrize("shape", POST_NORMS)
def test_outliers_that_no_r1_can_spread_are_spread_at_the_inputs(shape: str) -> None:
    """One feature is 30 times as large as others, which 4 bits then round to zero: half of their energy is asked."""
    model, scheme = tiny_model(**FURTHER[shape]), override(preset("rtn"), {"activations": {"bits": 4}}, "").activations
    with torch.no_grad():
        if shape == "olmo2":
            embedding(model).weight[:, 7] *= 30
        for layer in decoder_layers(model) if shape != "olmo2" else ():
            for site in architecture_of(model).sites[::2]:
                norm_of(layer, site).weight[7] += 30
    errors = []
    for inputs in ("none", "hadamard"):
        rotated, noise = copy.deepcopy(model), []

        def observe(site: Site, x: Tensor, noise: list[Tensor] = noise) -> None:
            if site.name.endswith("_input"):
                noise.append((fake_quantize(x, scheme) - x).square().sum())

        rotate(rotated, no_r1(inputs, heads=False, keys=False, mlp=False))
        transforms = no_r1(inputs, heads=False, keys=False, mlp=False).transforms
        with wrap(rotated, RuntimeQuantization(transforms), observe), torch.no_grad():
            rotated(tiny_tokens(), use_cache=False)
        errors.append(sum(noise))
    assert errors[1] < 0.5 * errors[0]


# Logits lie between -6 and 6; measured maxima over all shapes: 6e-6 and 2e-14.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, FLOAT64_BOUND)])
@pytest.mark.parametrize("shape", FURTHER)
def test_rotation_does_not_change_the_logits(shape: str, dtype: torch.dtype, bound: float) -> None:
    model = tiny_model(**FURTHER[shape], dtype=dtype)
    assert invariance_error(model, scheme_of(shape), seed=3, input_ids=tiny_tokens()) <= bound


@pytest.mark.parametrize("shape", FURTHER)
def test_what_cannot_be_rotated_is_refused_and_a_preset_does_without(shape: str) -> None:
    architecture = architecture_of(tiny_model(**FURTHER[shape]))
    problems = {
        **dict.fromkeys(
            ("residual", "inputs"),
            "norms after attention and MLP, whose gains let no rotation .* --set rotation.residual=none "
            "--set rotation.inputs=hadamard",
        ),
        "heads": r"no Hadamard matrix of size \d+ \(number of attention heads\).* --set rotation.heads=false",
    }
    missing = {"residual", "inputs"} if shape in POST_NORMS else {"heads"} if shape.startswith("smollm") else set()
    for field in missing:
        with pytest.raises(RecipeError, match=problems[field]):
            check_transforms(architecture, RotationScheme().transforms)
    recipe, sentence = fitted(preset("quarot"), architecture)
    assert {one.field for one in substitutes(architecture, RotationScheme().transforms)} == missing
    assert bool(sentence) == bool(missing)
    check_transforms(architecture, recipe.transforms)


@pytest.mark.parametrize("shape", FURTHER)
def test_fused_norms_do_not_change_the_logits(shape: str) -> None:
    model = tiny_model(**FURTHER[shape], dtype=torch.float64)
    with norms_in_model_dtype(model), torch.no_grad():
        expected = model(tiny_tokens(), use_cache=False).logits
        fuse_norms(model)
        assert (model(tiny_tokens(), use_cache=False).logits - expected).abs().max() <= FLOAT64_BOUND


# 8 bits move the logits by 1 to 4 percent, and by up to 8 where a token goes to another expert; a transform without its
# inverse would, by about their own size.
@pytest.mark.parametrize(
    ("shape", "name"), [*each_once([*FURTHER], ["quarot", "atom-128g"]), ("gemma3", "spinquant-hard")]
)
def test_rounding_keeps_the_function_and_a_stored_model_is_loaded_bit_for_bit(
    shape: str, name: str, tmp_path: Path
) -> None:
    stored = build(shape, method(name, bits=8))
    found, expected = logits(stored.model, stored), expected_logits(shape)
    assert 0.0 < (found - expected).norm() / expected.norm() < (0.12 if shape in EXPERTS else 0.06)
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    architecture = architecture_of(model)
    assert len(state.manifest.quantized) == architecture.num_layers * len(architecture.linears)
    assert torch.equal(logits(model, stored), found)


#: Families whose layers have more than Llama's.
TRAITED = ("qwen3", "mixtral", "qwen3-moe", "olmo2", "gemma2", "gemma3")
#: The mathematical reason why a method is nothing for a family.
REASONS = {
    ("olmo2", "smoothquant"): "no norms before attention and MLP, and SmoothQuant divides what those norms give",
    **{(shape, "cushioncache"): "experts, and CushionCache sums errors of inputs by text" for shape in EXPERTS},
    **{
        (shape, name): "experts, and FlatQuant learns a block by all of its tokens"
        for shape in EXPERTS
        for name in ("flatquant", "flatquant-gptq")
    },
    **{(shape, "wush"): "experts, and WUSH has one matrix for all who read an input" for shape in EXPERTS},
}
#: Methods of few bits, and of static scales of whole tensors, with the largest change of the logits beside their own
#: size; the others have 8 bits, which change 1 to 4 percent, and up to 8 where a token goes to another expert.
COARSE = {
    **dict.fromkeys(("qoq", "qoq-channel", "quip-sharp"), 0.5),
    **dict.fromkeys(("qift", "rcp", "bitdistiller", "bitdistiller-rotated"), 1.0),
}
STATIC_SCALES = dict.fromkeys(("cushioncache", "prefixquant", "prefixquant-tuned"), 0.25)


def pairs() -> list[object]:
    """Every family with every preset; each method on one of the six, and what is refused, without `--long` too."""
    names = sorted(set(all_presets()) - {"baseline"})
    usual = {case.values[0] for case in one_of_each(names, COARSE | FLOATS) if not case.marks}
    return [
        pytest.param(
            shape,
            name,
            marks=() if (name in usual and (i + j) % 6 == 0) or (shape, name) in REASONS else pytest.mark.long,
        )
        for i, name in enumerate(names)
        for j, shape in enumerate(TRAITED)
    ]


@pytest.mark.parametrize(("shape", "name"), pairs())
def test_every_method_keeps_the_function_of_every_family_or_says_why_it_cannot(shape: str, name: str) -> None:
    """The function after a prefix is that of prefix and text; a transform without its inverse changes logits by about
    their own size."""
    recipe = method(name, bits=None if name in COARSE else 8)
    options = {"sliding_window": 64} if recipe.has_role("prefix") and shape.startswith("gemma") else {}
    if reason := REASONS.get((shape, name)):
        with pytest.raises(RecipeError, match=f"model have {reason}"):
            build(shape, recipe)
        return
    stored = build(shape, recipe, **options)
    prefix = next((kept["ids"] for kept in stored.state.tensors.values() if "ids" in kept), torch.empty(0).long())
    with torch.no_grad():
        text = torch.cat([prefix.expand(2, -1), tiny_tokens()], dim=1)
        expected = tiny_model(**FURTHER[shape] | options)(text, use_cache=False).logits[:, len(prefix) :]
    error = (logits(stored.model, stored) - expected).norm() / expected.norm()
    assert 0.0 < error < (COARSE | STATIC_SCALES | FLOATS).get(name, 0.12 if shape in EXPERTS else 0.06)


@pytest.mark.parametrize(
    ("shape", "rotation"),
    [*((shape, {}) for shape in CONVERTED), *((shape, {"inputs": "orthogonal"}) for shape in ("olmo2", "gemma3"))],
)
def test_a_decoder_computes_what_the_quantized_model_does(shape: str, rotation: dict[str, object]) -> None:
    quarot, _ = fitted(preset("quarot-rtn"), architecture_of(tiny_model(**FURTHER[shape])))
    stored = build(shape, override(quarot, {"weights": {"clip_search": False}, "rotation": rotation}, ""))
    model, recipe = stored.model.double(), stored.manifest.recipe
    parameters = dict(model.named_parameters())
    for name, weight in stored.weights.items():
        parameters[name].data = weight.codes.double() * weight.qparams.scale.double()
    decoder = convert(stored, dtype="float64")
    tokens = tiny_tokens(tokens=decoder.config.window or 12)
    with quantized_forward(model, recipe, stored.state), torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    # transformers computes norms and rotary angles in float32 whatever the model's type.
    torch.testing.assert_close(decoder.logits(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", FURTHER)
def test_a_checkpoint_is_loaded_and_a_model_without_online_transforms_exported(shape: str, tmp_path: Path) -> None:
    """An exported model of transformers alone has the logits of the quantized one whose inputs are not rounded."""
    tiny_model(**FURTHER[shape]).save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    model, tokenizer = load_checkpoint(tmp_path / "plain", torch.float32)
    with torch.no_grad():
        assert torch.equal(model(tiny_tokens(), use_cache=False).logits, expected_logits(shape))
    recipe = override(method("rtn"), dict.fromkeys(("activations", "keys", "values")), "")
    stored = build_weights(model, tokenizer, recipe, 0, progress=False)
    save_quantized(tmp_path / "quantized", stored)
    export_plain(tmp_path / "quantized", tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation=model.config._attn_implementation
    ).eval()
    with torch.no_grad():
        found = exported(tiny_tokens(), use_cache=False).logits
    # Experts run in another order of sums in transformers' own function.
    torch.testing.assert_close(found, logits(model, stored), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "name"), [*product(FURTHER, ["quarot-rtn"]), ("gemma3", "spinquant-hard")])
def test_a_packed_export_has_the_logits_of_the_quantized_model(shape: str, name: str, tmp_path: Path) -> None:
    stored = build(shape, method(name))
    save_quantized(tmp_path / "quantized", stored)
    if shape in EXPERTS:
        with pytest.raises(RecipeError, match="experts in one parameter, of which compressed-tensors"):
            export_compressed(tmp_path / "quantized", tmp_path / "packed")
        return
    export_compressed(tmp_path / "quantized", tmp_path / "packed")
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", attn_implementation=stored.model.config._attn_implementation
    )
    with torch.no_grad():
        found = exported.eval()(tiny_tokens(), use_cache=False).logits
    assert torch.equal(found, logits(stored.model, stored))


@pytest.mark.parametrize("shape", EXPERTS)
def test_experts_read_what_is_routed_to_them_and_each_has_its_own_weight(shape: str) -> None:
    model = tiny_model(**FURTHER[shape])
    stream = capture_layer_inputs(model, SAMPLES)
    site, layer = stream.architecture.site("mlp_output"), decoder_layers(model)[0]
    seen = dict.fromkeys(site.linears, 0)
    stream.feed_experts(0, site, lambda name, x: seen.update({name: seen[name] + len(x)}))
    assert len(seen) == 4
    assert sum(seen.values()) == SAMPLES.numel() * 2  # every token goes to two experts
    stacked = layer.mlp.experts.down_proj
    for index, name in enumerate(site.linears):
        assert linear_of(layer, name).weight.data_ptr() == stacked[index].data_ptr()


def test_an_expert_of_few_tokens_is_rounded_with_damping_and_one_of_none_to_nearest(monkeypatch) -> None:
    model = tiny_model(**FURTHER["mixtral"], num_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0] = 0.0
        model.model.layers[0].mlp.gate.weight[1:] *= 50.0  # the first expert is chosen by next to no token
    recipe, _ = fitted(method("quarot"), architecture_of(model))
    damped, shrunk = [], Hessian.shrunk
    monkeypatch.setattr(Hessian, "shrunk", lambda hessian: damped.append(hessian.tokens) or shrunk(hessian))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build_weights(model, None, recipe, 3, SAMPLES[:1], progress=False)
    (sentence,) = [str(one.message) for one in said if "experts" in str(one.message)]
    assert "8 weights of experts see fewer calibration tokens than they have inputs" in sentence
    assert len(damped) == 8
    assert sum(damped) == 2 * 2 * SAMPLES[:1].numel()  # both linear layers of the two experts of each token
    few, none = Hessian(4), Hessian(4)
    few.add(torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(few.shrunk().diagonal(), torch.tensor([4.75, 0.75, 0.75, 0.75]))  # 3/4 of the mean 1
    assert not none.shrunk().any()


def test_the_exact_logits_of_a_capped_model_are_capped() -> None:
    model = tiny_model(**FURTHER["gemma2"])
    states = float_states(model, tiny_tokens(), batch_size=2)
    torch.testing.assert_close(states.head(states.states), expected_logits("gemma2"), rtol=1e-4, atol=1e-5)


def test_scores_and_logits_are_capped_wherever_a_model_comes_from(tmp_path: Path) -> None:
    """torch's own attention function would leave the cap on scores out without a word."""
    uncapped = tiny_model(**FURTHER["gemma2"] | {"attn_logit_softcapping": None})
    with torch.no_grad():
        assert (uncapped(tiny_tokens(), use_cache=False).logits - expected_logits("gemma2")).abs().max() > 0.1
    assert expected_logits("gemma2").abs().max() < FURTHER["gemma2"]["final_logit_softcapping"]
    stored = build("gemma2", method("rtn"))
    save_quantized(tmp_path / "model", stored)
    assert load_quantized(tmp_path / "model")[0].config._attn_implementation == "eager"


@pytest.mark.parametrize(("name", "times"), [("quarot-rtn", 5), ("quarot", 3)])
def test_quarot_keeps_a_real_model_with_norms_after_attention_and_mlp(name: str, times: float) -> None:
    """Without transforms of inputs the two were 277 and 124 times full precision's; with them 3.2 and 2.1."""
    folder, metric = (
        real_model("gemma3-270m"),
        Perplexity(corpus="text", sequence_length=512, max_windows=4, bos="window"),
    )
    corpus = CorpusSpec(name="text", source="local", path=str(folder.parent / "c4.txt"))
    text = (folder.parent / "wiki.txt").read_text(encoding="utf-8")
    small = {"calibration": {"corpus": "text", "samples": 16, "sequence_length": 512, "bos": "window"}}
    recipe, sentence = api.fit(folder, override(preset(name), small if preset(name).calibration else {}, ""))
    assert "rotation.inputs=hadamard" in sentence
    quantized = api.quantize(folder, recipe, corpus=corpus, device="cpu", dtype=torch.float32)
    found, exact = (api.perplexity(one, corpus, metric, text=text).perplexity for one in (quantized, api.load(folder)))
    assert exact < found < times * exact
