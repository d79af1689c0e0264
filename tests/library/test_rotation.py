"""Rotating a model does not change its logits (QuaRot Sec. 3.2), whatever its shape, and changes what it should."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers, embedding, final_norm, lm_head
from rotquant.models.fitting import check_transforms
from rotquant.models.rotation.fusing import fuse_norms, rotate
from rotquant.models.rotation.matrices import Rotations, initial_rotations
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors import hadamard
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.invariance import invariance_error
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens

NO_ROTATION = RotationScheme(residual="none", values="none", heads=False, keys=False, mlp=False)

# The bounds are the project's. Logits lie between -6 and 6; measured maxima over families and shapes: 9e-6 and 4e-14.
FLOAT32_BOUND = 1e-4

#: Shapes as awkward as real ones: (name, arguments, whether the number of heads has a Hadamard matrix).
SHAPES = {
    "head_dim 12, 8 heads": ({"hidden_size": 96, "num_heads": 8, "num_kv_heads": 2}, True),
    "head_dim 16, 20 heads": ({"hidden_size": 320, "num_heads": 20, "num_kv_heads": 4, "intermediate_size": 172}, True),
    "head_dim 32, 12 heads": ({"hidden_size": 384, "num_heads": 12, "num_kv_heads": 12}, True),
    "head_dim 64, 5 heads": ({"hidden_size": 320, "num_heads": 5, "num_kv_heads": 1, "intermediate_size": 108}, False),
    "head_dim 128, 2 heads": ({"hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 112}, True),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("residual", ["hadamard", "orthogonal", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_whatever_the_residual_rotation(family: str, residual: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied, dtype=torch.float64)
    error = invariance_error(model, RotationScheme(residual=residual), seed=3, input_ids=tiny_tokens())
    assert error <= FLOAT64_BOUND


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_logits_stay_on_awkward_shapes(family: str, shape: str) -> None:
    arguments, heads = SHAPES[shape]
    model = tiny_model(family, dtype=torch.float64, num_layers=1, **arguments)
    assert invariance_error(model, RotationScheme(heads=heads), seed=0, input_ids=tiny_tokens()) <= FLOAT64_BOUND


@pytest.mark.parametrize("part", ["residual", "values", "heads", "mlp"])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_each_rotation_alone_keeps_the_logits(family: str, part: str) -> None:
    alone = NO_ROTATION.model_copy(update={part: "hadamard" if part in ("residual", "values") else True})
    model = tiny_model(family, dtype=torch.float64)
    assert invariance_error(model, alone, seed=0, input_ids=tiny_tokens()) <= FLOAT64_BOUND


def test_logits_stay_with_biases_everywhere_and_a_head_dimension_of_its_own() -> None:
    model = tiny_model("llama", dtype=torch.float64, attention_bias=True, mlp_bias=True, head_dim=32)
    assert invariance_error(model, RotationScheme(), seed=0, input_ids=tiny_tokens()) <= FLOAT64_BOUND


def test_the_two_halves_of_a_rotation_need_each_other() -> None:
    """The check above would be empty if an unwrapped rotated model had the same logits too."""
    model, tokens = tiny_model(), tiny_tokens()
    expected = model(tokens).logits
    rotate(model, RotationScheme(), seed=0)
    assert (model(tokens).logits - expected).abs().max() > 0.1
    with wrap(model, RuntimeQuantization(transforms=RotationScheme().transforms)):
        assert (model(tokens).logits - expected).abs().max() <= FLOAT32_BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_norms_keeps_the_logits_and_leaves_ones(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    expected = model(tokens).logits
    fuse_norms(model)
    assert (model(tokens).logits - expected).abs().max() <= FLOAT32_BOUND
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(norms) == 2 * 2 + 1
    assert all((norm == 1.0).all() for norm in norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scheme_with_everything_off_leaves_every_weight_as_it_is(family: str) -> None:
    model, original = tiny_model(family, tied=True), tiny_model(family, tied=True)
    rotate(model, NO_ROTATION)
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in original.named_parameters())
    assert lm_head(model).weight is embedding(model).weight


def test_without_r1_norms_and_embeddings_stay() -> None:
    model, original = tiny_model(tied=True), tiny_model(tied=True)
    rotate(model, RotationScheme(residual="none"))
    changed = {
        name for name, weight in original.named_parameters() if not torch.equal(model.get_parameter(name), weight)
    }
    assert {name.split(".", 3)[3] for name in changed} == {
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    }


def test_the_residual_stream_is_multiplied_by_q() -> None:
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens()
    before = embedding(model)(tokens)
    rotate(model, RotationScheme(), seed=5)
    rotation = initial_rotations(architecture_of(model), RotationScheme(), seed=5).residual
    assert torch.allclose(embedding(model)(tokens), before @ rotation, atol=1e-12)


def test_values_are_multiplied_by_an_exact_hadamard_matrix_head_by_head() -> None:
    scheme = NO_ROTATION.model_copy(update={"values": "hadamard"})
    model = tiny_model("qwen2", dtype=torch.float64)
    fuse_norms(model)
    rotated = copy.deepcopy(model)
    rotate(rotated, scheme, seed=0)
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values, rotated_values = (decoder_layers(m)[0].self_attn.v_proj(x).unflatten(-1, (2, 16)) for m in (model, rotated))
    assert torch.allclose(rotated_values, hadamard.hadamard_transform(values), atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_become_two_weights_that_survive_saving(family: str, tmp_path: Path) -> None:
    model, tokens = tiny_model(family, tied=True), tiny_tokens()
    assert lm_head(model).weight is embedding(model).weight
    rotate(model, RotationScheme(heads=False, mlp=False), seed=0)
    assert lm_head(model).weight.data_ptr() != embedding(model).weight.data_ptr()
    assert model.config.tie_word_embeddings is False
    model.tie_weights()
    assert lm_head(model).weight is not embedding(model).weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_storage_type_and_parameter_names_are_kept_and_each_weight_is_rounded_once() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    exact = copy.deepcopy(model).to(torch.float64)
    rotate(model, RotationScheme(), seed=0)
    rotate(exact, RotationScheme(), seed=0)
    expected = exact.state_dict()
    assert set(model.state_dict()) == set(expected)
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def learned(model: torch.nn.Module, seed: int = 0) -> Rotations:
    """Rotations of no special form, as learning gives them."""
    scheme = RotationScheme(residual="orthogonal", values="orthogonal")
    return initial_rotations(architecture_of(model), scheme, seed)


@pytest.mark.parametrize("values", ["hadamard", "random_hadamard", "orthogonal"])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_whatever_the_rotations_of_the_values(family: str, heads: bool, values: str) -> None:
    scheme = RotationScheme(values=values, heads=heads)
    model = tiny_model(family, dtype=torch.float64)
    assert invariance_error(model, scheme, seed=3, input_ids=tiny_tokens()) <= FLOAT64_BOUND


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_logits_stay_with_given_rotations_on_awkward_shapes(family: str, shape: str) -> None:
    """Grouped queries, biases, fused projections: whatever is learned, the function is the same."""
    arguments, heads = SHAPES[shape]
    biases = {} if family == "phi3" else {"attention_bias": True}
    model = tiny_model(family, dtype=torch.float64, num_layers=2, **arguments, **biases)
    scheme = RotationScheme(values="random_hadamard", heads=heads)
    error = invariance_error(model, scheme, seed=0, input_ids=tiny_tokens(), rotations=learned(model))
    assert error <= FLOAT64_BOUND


def test_values_of_each_layer_are_multiplied_by_its_own_rotation() -> None:
    scheme = NO_ROTATION.model_copy(update={"values": "orthogonal"})
    model = tiny_model("qwen2", dtype=torch.float64)
    fuse_norms(model)
    rotated, rotations = copy.deepcopy(model), initial_rotations(architecture_of(model), scheme, seed=4)
    rotate(rotated, scheme, seed=4)
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for index, rotation in enumerate(rotations.values):
        before, after = (decoder_layers(m)[index].self_attn.v_proj(x).unflatten(-1, (2, 16)) for m in (model, rotated))
        assert torch.allclose(after, before @ rotation, atol=1e-12)
    assert not torch.allclose(*rotations.values)


def test_drawn_rotations_and_the_same_ones_given_make_the_same_weights() -> None:
    scheme = RotationScheme(values="random_hadamard")
    drawn, given = tiny_model(), tiny_model()
    rotate(drawn, scheme, seed=2)
    rotate(given, scheme, rotations=initial_rotations(architecture_of(given), scheme, seed=2))
    assert all(torch.equal(weight, given.state_dict()[name]) for name, weight in drawn.state_dict().items())


def test_rotations_that_do_not_fit_are_refused_before_any_weight_is_touched() -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fitting = learned(model)
    for scheme, rotations, message in (
        (RotationScheme(residual="none"), fitting, "expected R1 absent and 2 R2, and got R1 present and 2 R2"),
        (RotationScheme(values="none"), fitting, "expected R1 present and 0 R2"),
        (RotationScheme(), Rotations(fitting.residual, fitting.values[:1]), "and 1 R2"),
        (RotationScheme(), Rotations(fitting.residual[:32, :32], fitting.values), r"residual has shape \(32, 32\)"),
        (RotationScheme(), Rotations(1.01 * fitting.residual, fitting.values), "residual is not orthogonal"),
    ):
        with pytest.raises(RecipeError, match=message):
            rotate(model, scheme, rotations=rotations)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_rotating_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    rotate(tiny_model(), RotationScheme(residual="orthogonal"), seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_centering_subtracts_each_embedding_rows_mean_and_nothing_from_a_tied_head() -> None:
    scheme = RotationScheme(center_embeddings=True)
    model = tiny_model(tied=True, dtype=torch.float64)
    tokens, gain = embedding(model).weight.detach().clone(), final_norm(model).weight.detach().clone()
    rotate(model, scheme, seed=0)
    rotation = initial_rotations(architecture_of(model), scheme, seed=0).residual
    assert torch.allclose(embedding(model).weight, (tokens - tokens.mean(-1, keepdim=True)) @ rotation)
    assert torch.allclose(lm_head(model).weight, tokens * gain @ rotation)


@pytest.mark.parametrize(
    ("arguments", "scheme", "message"),
    [
        (
            {"hidden_size": 80, "num_heads": 5, "num_kv_heads": 5},
            {},
            r"size 5 \(number of attention heads\).*--set rotation.heads=false\.$",
        ),
        (
            {"hidden_size": 84, "num_heads": 14, "num_kv_heads": 2},
            {"values": "none", "keys": False},
            r"size 14 .*heads=false",
        ),
        ({"hidden_size": 50, "num_heads": 1, "num_kv_heads": 1}, {"values": "none"}, r"size 50 .*residual=orthogonal"),
        ({"intermediate_size": 90}, {}, r"size 90 .*intermediate size.*mlp=2\.$"),
        ({"intermediate_size": 90}, {"mlp": 4}, r"blocks of 4 of 90 features.*mlp=2\.$"),
        ({"head_dim": 18}, {}, r"size 18 .*head dimension.*values=orthogonal --set rotation.keys=false"),
    ],
)
def test_a_missing_hadamard_matrix_is_named_before_any_weight_is_touched(
    arguments: dict[str, int], scheme: dict[str, bool], message: str
) -> None:
    model = tiny_model(**arguments)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(RecipeError, match=message):
        rotate(model, RotationScheme(**scheme), seed=0)
    with pytest.raises(RecipeError, match=message):
        wrap(model, RuntimeQuantization(transforms=RotationScheme(**scheme).transforms))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_the_shapes_of_real_models_can_be_rotated() -> None:
    """Hidden size, heads, kv heads, FFN width of models that the papers evaluate, and of others of the families."""
    shapes = {
        "Llama-2-7B": (4096, 32, 32, 11008),
        "Llama-2-13B": (5120, 40, 40, 13824),
        "Llama-2-70B": (8192, 64, 8, 28672),
        "Llama-3-8B and Mistral-7B": (4096, 32, 8, 14336),
        "Llama-3.2-1B": (2048, 32, 8, 8192),
        "Llama-3.2-3B": (3072, 24, 8, 8192),
        "Qwen2-1.5B": (1536, 12, 2, 8960),
        "Qwen2-7B": (3584, 28, 4, 18944),
        "Qwen2-72B": (8192, 64, 8, 29568),
        "Phi-3-mini": (3072, 32, 32, 8192),
        "Phi-3-medium": (5120, 40, 10, 17920),
    }
    for hidden, heads, kv_heads, intermediate in shapes.values():
        config = tiny_model().config
        config.hidden_size, config.num_attention_heads = hidden, heads
        config.num_key_value_heads, config.intermediate_size, config.head_dim = kv_heads, intermediate, hidden // heads
        check_transforms(architecture_of(config), RotationScheme().transforms)
