"""OSTQuant: scales and rotations keep the function, are learned on the network that they make, and merge into it."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotquant.formats.export import export_plain
from rotquant.foundation.errors import RecipeError
from rotquant.methods.ostquant import OSTQuant, ostquant
from rotquant.methods.ostquant import pair_training as pairs
from rotquant.methods.ostquant.pair_training import kl_top, learn_rotations
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.equivalent import rotary_pairs
from rotquant.models.rotation import network as learned_network
from rotquant.models.rotation.fusing import rotate
from rotquant.models.rotation.matrices import (
    LearnedRotations,
    Rotations,
    initial_rotations,
    load_rotations,
    save_rotations,
)
from rotquant.models.rotation.network import quantized_network
from rotquant.models.rotation.scales import scale_shapes
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import choose_qparams, fake_quantize
from rotquant.weights.build import build_weights
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.borders import tokens_off_borders
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.interrupting import Interrupted
from tests.helpers.invariance import norms_in_model_dtype
from tests.helpers.models import FAMILIES, FURTHER, tiny_model, tiny_tokens

TOKENS, SAMPLES = tiny_tokens(seed=2), tiny_tokens(batch=6, tokens=16)
INPUTS = QuantizationScheme(bits=4, symmetric=False)


def recipe(changes: dict[str, Any] | None = None, **settings: Any) -> Recipe:
    """The preset with few steps; changes to its parts."""
    few = {"steps": 4, "batch_size": 2, **settings}
    return override(override(ostquant(), {"methods": {"ostquant": few, "gptq": None}}, "test"), changes or {}, "test")


def scaled(model: nn.Module, of: Recipe) -> Rotations:
    """Rotations as drawn with random scales from 0.5 to 2; of keys one for two dimensions."""
    architecture = architecture_of(model)
    drawn = initial_rotations(architecture, of.rotation, 4)
    generator = torch.Generator().manual_seed(1)
    pair = rotary_pairs(architecture.head_dim, architecture.head_dim)
    found = {}
    for name, shape in scale_shapes(architecture, drawn.residual is not None).items():
        every = [
            torch.exp2(2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
            for _ in range(architecture.num_layers)
        ]
        found[name] = tuple(one[..., pair] if name == "keys" else one for one in every)
    return Rotations(drawn.residual, drawn.values, drawn.inputs, found)


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens, use_cache=False).logits


def merged(model: nn.Module, of: Recipe, rotations: Rotations) -> nn.Module:
    model = copy.deepcopy(model)
    rotate(model, of.rotation, rotations=rotations)
    return model


VARIANTS = {
    "preset": recipe(),
    "nothing online": recipe({"rotation": {"heads": False, "keys": False, "mlp": False}}),
    "weights too": recipe(network="all"),
    "inputs in place of R1": recipe({"rotation": {"residual": "none", "inputs": "random_hadamard"}}),
}
PAIRS = [
    *product([*FAMILIES, "mixtral", "qwen3"], ["preset"]),
    ("llama", "nothing online"),
    *product(["llama", "phi3", "qwen2", "mixtral", "qwen3"], ["weights too"]),
    *product(["gemma3", "olmo2"], ["inputs in place of R1"]),
]


def model_of(shape: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return tiny_model(**FURTHER.get(shape, {"family": shape}), dtype=dtype)


@pytest.mark.parametrize(("shape", "variant"), PAIRS)
def test_the_learning_network_is_the_merged_quantized_network(shape: str, variant: str) -> None:
    """In float64 the two differ by rounding, on a text that leaves no code to it; unquantized they are the model."""
    model, of = model_of(shape), VARIANTS[variant]
    rotations = scaled(model, of)
    found, weights = merged(model, of, rotations), None
    if OSTQuant.of(of).network == "all":
        weights = of.rounded.scheme
        for layer, name in product(decoder_layers(found), architecture_of(model).linears):
            weight = layer.get_submodule(name).weight.data  # of an expert a part of what is stacked
            weight.copy_(fake_quantize(weight, weights))
    online = {"transforms": of.transforms, "tensors": rotations.online(model.dtype)}
    with norms_in_model_dtype(found), wrap(found, RuntimeQuantization(**{**of.runtime, **online})):
        tokens = tokens_off_borders(partial(logits_of, found))
        expected = logits_of(found, tokens)
    with norms_in_model_dtype(found), wrap(found, RuntimeQuantization(**online)):
        exact = logits_of(found, tokens)
    with norms_in_model_dtype(model):
        plain = logits_of(model, tokens)
        with quantized_network(model, of, rotations, gradient="both", weights=weights):
            logits = logits_of(model, tokens)
    assert weights is not None or (exact - plain).abs().max() <= 1e-9
    assert (logits - expected).abs().max() <= 1e-9
    assert (logits - plain).abs().max() >= 1e-2


def test_the_gradient_is_what_autograd_makes_of_the_merged_site() -> None:
    """Straight-through rounding of x R / S with its ranges, and S R^T in the weight, in the tangent space of R."""
    generator = torch.Generator().manual_seed(0)
    x, towards = (torch.randn(5, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    model, of = tiny_model(), recipe({"activations": {"symmetric": False, "clip_ratio": 1.0}})
    rotation = initial_rotations(architecture_of(model), of.rotation, 4).residual
    scale = torch.rand(64, dtype=torch.float64, generator=generator) + 0.5
    found, expected = ([rotation.clone().requires_grad_(), scale.clone().requires_grad_()] for _ in range(2))
    basis = learned_network.basis_at(
        architecture_of(model),
        of.transforms,
        "both",
        {"residual": found[0]},
        "residual",
        scale=lambda: found[1],
        last=True,
    )
    y = learned_network.LearningNetwork().quantize(x, INPUTS, basis, "place")
    (y * towards).sum().backward()
    signal = x @ expected[0] / expected[1]
    qparams = choose_qparams(signal, INPUTS)
    steps = signal / qparams.scale
    codes = (fake_quantize(signal, INPUTS) / qparams.scale - steps).detach() + steps  # rounding is the identity
    z = (codes * qparams.scale * expected[1]) @ expected[0].mT
    (z * towards).sum().backward()
    assert torch.allclose(y, z, atol=1e-12)
    assert torch.allclose(found[1].grad, expected[1].grad, atol=1e-9)
    move = [matrix.grad - rotation @ matrix.grad.T @ rotation for matrix in (found[0], expected[0])]
    assert torch.allclose(*move, atol=1e-9)
    assert expected[1].grad.abs().max() > 1e-3


def test_kl_top_is_the_sum_over_the_likeliest_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(3, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    total = 0.0
    for one, other in zip(q.softmax(-1).tolist(), p.softmax(-1).tolist(), strict=True):
        chosen = sorted(range(9), key=lambda index: -other[index])[:4]
        total += sum(other[i] * (torch.tensor(other[i] / one[i]).log().item()) for i in chosen)
    assert kl_top(q, p, q, 4).item() == pytest.approx(total, rel=1e-6)
    whole = torch.nn.functional.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="sum")
    assert kl_top(q, p, q, 1000).item() == pytest.approx(whole.item(), rel=1e-12)


def test_the_start_turns_the_weights_covariance_to_a_constant_diagonal() -> None:
    """R = U H for a Hadamard matrix H: H^T diag(eigenvalues) H has the mean of the eigenvalues on its diagonal."""
    model, of = tiny_model(), recipe()
    start = pairs._start(model, of, 0)
    for name, moment in pairs._moments(model, architecture_of(model), residual=True, values=True).items():
        turned = (start[name].T @ moment @ start[name]).diagonal()
        torch.testing.assert_close(turned, turned.mean().expand_as(turned))
        assert moment.diagonal().std() > 0.01 * moment.diagonal().mean()
    rows = torch.cat([torch.randn(8, 4), torch.randn(4, 8).reshape(-1, 4)]).double()
    sums = pairs._Covariance(4)
    sums.add(rows[:8])
    sums.add(rows[8:])
    torch.testing.assert_close(sums.matrix(), torch.cov(rows.T, correction=0))


def learn(model: nn.Module, of: Recipe | None = None, **options: Any) -> LearnedRotations:
    return learn_rotations(model, of or recipe(), 0, SAMPLES, progress=False, **options)


@pytest.mark.parametrize("learned", ["both", "rotations", "scales"])
def test_what_is_learned_moves_and_the_rest_stays(learned: str) -> None:
    model = tiny_model()
    of = recipe(learned=learned)
    start, found = pairs._start(model, of, 0), learn(model, of).rotations.tensors()
    assert found.keys() == start.keys()
    for name, one in found.items():
        scale = name.startswith("scale.")
        moved = (one - start[name]).abs().max().item()
        assert (moved > 1e-4) == (learned in ("both", "scales" if scale else "rotations")), name
        if scale and "keys" in name:
            half = one.shape[-1] // 2
            assert torch.equal(one[:, :half], one[:, half:])
    assert any(name.startswith("scale.") for name in found) == (learned != "rotations")


def outliers(model: nn.Module) -> nn.Module:
    """A model in which rows of up_proj are large and the columns of down_proj that read them small."""
    with torch.no_grad():
        for layer in decoder_layers(model):
            layer.mlp.up_proj.weight[:3] *= 32
            layer.mlp.down_proj.weight[:, :3] /= 32
    return model


def test_scales_are_learned_against_outliers_of_features() -> None:
    """Without R4 a feature of 32 times the others' size takes the codes of all: its scale must grow."""
    of = recipe({"rotation": {"mlp": False}}, learned="scales", steps=30, batch_size=6, scale_lr=0.1)
    found = learn(outliers(tiny_model()), of)
    scales = torch.stack(found.rotations.scales["mlp_output"])
    assert scales[:, :3].mean() > 1.2 * scales[:, 3:].mean()
    assert found.history[-1]["loss"] < 0.8 * found.history[0]["loss"]


def test_an_interrupted_learning_continues_with_the_same_result(tmp_path: Path) -> None:
    model, file = tiny_model(), tmp_path / "checkpoint.safetensors"
    straight = learn(model).rotations.tensors()

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        learn(model, checkpoint=file, checkpoint_every=1, callback=stop)
    for name, one in learn(model, checkpoint=file).rotations.tensors().items():
        assert torch.equal(one, straight[name]), name


def test_scales_survive_their_file(tmp_path: Path) -> None:
    learned = learn(tiny_model())
    save_rotations(tmp_path / "rotations.safetensors", learned.rotations, learned.history)
    found = load_rotations(tmp_path / "rotations.safetensors")
    assert all(torch.equal(one, found.tensors()[name]) for name, one in learned.rotations.tensors().items())
    assert found.scales.keys() == {"attention_input", "mlp_input", "keys", "values", "mlp_output"}


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_merge_into_weights_of_16_bits(family: str) -> None:
    """Rounding of bfloat16, 0.4 percent of a weight, is what remains; rotations alone leave as much."""
    of = recipe({"rotation": {"heads": False, "keys": False, "mlp": False}})
    expected, model = logits_of(tiny_model(family)), tiny_model(family, dtype=torch.bfloat16)
    rotations = scaled(model, of)
    lost = []
    for one in (rotations, replace(rotations, scales={})):
        logits = logits_of(merged(model, of, one).float())
        lost.append(((logits - expected).norm() / expected.norm()).item())
    assert lost[0] < 1.5 * lost[1] < 0.05


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3"])
def test_an_export_has_the_logits_of_the_stored_model(shape: str, tmp_path: Path) -> None:
    """Nothing but quantizers acts at run time, as with a learned R1 and R2."""
    model, of = model_of(shape, torch.float32), recipe({"rotation": {"heads": False, "keys": False, "mlp": False}})
    stored = build_weights(model, tiny_tokenizer(), of, 0, rotations=scaled(model, of), progress=False)
    save_quantized(tmp_path / "quantized", stored)
    expected = logits_of(load_quantized(tmp_path / "quantized")[0])
    export_plain(tmp_path / "quantized", tmp_path / "plain")
    assert torch.equal(logits_of(load_checkpoint(tmp_path / "plain", torch.float32)[0]), expected)


def test_scales_that_do_not_fit_are_refused() -> None:
    model, of = tiny_model(), recipe()
    rotations = scaled(model, of)
    for name, every, sentence in (
        ("keys", rotations.scales["keys"][:1], "the scales of keys do not belong"),
        ("o_proj", rotations.scales["keys"], "the scales of o_proj do not belong"),
        ("values", tuple(-one for one in rotations.scales["values"]), "the scales of values are not positive"),
    ):
        bad = Rotations(rotations.residual, rotations.values, {}, {**rotations.scales, name: every})
        with pytest.raises(RecipeError, match=sentence):
            rotate(copy.deepcopy(model), of.rotation, rotations=bad)


def test_a_recipe_without_quantizers_or_rotations_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs an activations, keys or values section"):
        recipe({"activations": None, "keys": None, "values": None})
    with pytest.raises(RecipeError, match="there is no rotation to learn"):
        recipe({"rotation": None})
    assert OSTQuant.of(ostquant()).learned == "both"
