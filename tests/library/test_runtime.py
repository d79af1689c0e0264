"""Online transforms and quantizers in a running model: what is quantized, where, once, and removed without a trace."""

import pytest
import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors import hadamard
from rotquant.tensors.quantization import ColumnSplit, QParams, fake_quantize
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens

INPUTS = QuantizationScheme(bits=4, clip_ratio=0.9)
CACHE = QuantizationScheme(bits=4, symmetric=False, granularity="head", clip_ratio=0.95)
EVERYTHING = RuntimeQuantization(transforms=RotationScheme().transforms, activations=INPUTS, keys=CACHE, values=CACHE)


def inputs_of_linears(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What every linear layer of the model reads during one forward pass."""
    read: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: read.update({name: args[0]}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return read


def levels(x: Tensor) -> int:
    """Largest number of different values in a row."""
    return max(row.unique().numel() for row in x.flatten(0, -2))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_lm_head_reads_at_most_sixteen_levels_per_token(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    with wrap(model, EVERYTHING):
        read = inputs_of_linears(model, tokens)
    assert levels(read.pop("lm_head")) > 16
    assert len(read) == len(architecture_of(model).linears) * 2
    for name, x in read.items():
        assert levels(x) <= 16, name


@pytest.mark.parametrize("family", FAMILIES)
def test_online_transforms_act_before_o_proj_and_down_proj(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    architecture, layer = architecture_of(model), decoder_layers(model)[0]
    transforms = {
        architecture.query.name: lambda x: x,
        architecture.attention_output: lambda x: hadamard.head_hadamard_transform(x, architecture.num_heads),
        architecture.up.name: lambda x: x,
        architecture.mlp_output: hadamard.hadamard_transform,
    }
    before: dict[str, Tensor] = {}
    for name in transforms:  # registered before wrap(): these hooks see what the model computed
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: before.update({name: args[0]}))
    with wrap(model, RuntimeQuantization(transforms=RotationScheme().transforms)):
        after = inputs_of_linears(model, tokens)
    for name, transform in transforms.items():
        assert torch.allclose(after[f"model.layers.0.{name}"], transform(before[name]), atol=1e-5), name


def test_the_quantizer_sees_transformed_input() -> None:
    model, tokens = tiny_model(num_layers=1), tiny_tokens()
    only_mlp = RotationScheme(residual="none", values="none", heads=False, keys=False)
    raw = inputs_of_linears(model, tokens)["model.layers.0.mlp.down_proj"]
    # down_proj is called by itself: in a whole pass its input would differ, the MLP's input being quantized too.
    layer = decoder_layers(model)[0]
    with wrap(model, RuntimeQuantization(transforms=only_mlp.transforms, activations=INPUTS)):
        seen: dict[str, Tensor] = {}
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        layer.mlp.down_proj(raw)
    assert torch.equal(seen["x"], fake_quantize(hadamard.hadamard_transform(raw), INPUTS))


def test_a_site_is_quantized_once_for_all_its_readers() -> None:
    model = tiny_model()
    with wrap(model, EVERYTHING):
        read = inputs_of_linears(model, tiny_tokens())
    for layer in ("model.layers.0.", "model.layers.1."):
        assert read[layer + "self_attn.q_proj"] is read[layer + "self_attn.k_proj"] is read[layer + "self_attn.v_proj"]
        assert read[layer + "mlp.gate_proj"] is read[layer + "mlp.up_proj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_it_restores_the_model_exactly(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    before, names = model(tokens).logits, list(model.state_dict())
    handle = wrap(model, EVERYTHING)
    assert list(model.state_dict()) == names
    assert not torch.equal(model(tokens).logits, before)
    handle.remove()
    handle.remove()
    assert torch.equal(model(tokens).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_empty_one_changes_nothing() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    before = model(tokens).logits
    with wrap(model, RuntimeQuantization()):
        assert torch.equal(model(tokens).logits, before)


def test_eight_bit_everything_stays_near_the_model_and_four_bit_is_further_away() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    expected = model(tokens).logits
    rotate(model, RotationScheme(), seed=0)
    errors = []
    for bits in (8, 4, 2):
        inputs = QuantizationScheme(bits=bits)
        cache = QuantizationScheme(bits=bits, symmetric=False, granularity="head")
        with wrap(model, RuntimeQuantization(RotationScheme().transforms, inputs, cache, cache)):
            errors.append(((model(tokens).logits - expected).norm() / expected.norm()).item())
    # Rounding noise halves with each bit: 8 bits are 16 times better than 4 (measured 0.02, 0.3, 1.3).
    assert errors[0] < 0.05
    assert errors[0] < errors[1] / 8
    assert errors[1] < errors[2]


@pytest.mark.parametrize("online", ["float32", "float16"])
def test_the_online_transform_computes_in_the_type_the_scheme_names(online: str) -> None:
    model = tiny_model(num_layers=1)
    rotation = RotationScheme(online_dtype=online)
    down = decoder_layers(model)[0].mlp.down_proj
    x = torch.randn(5, down.in_features, generator=torch.Generator().manual_seed(0))
    seen: dict[str, Tensor] = {}
    with wrap(model, RuntimeQuantization(transforms=rotation.transforms)):
        down.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        down(x)
    assert torch.equal(seen["x"], hadamard.hadamard_transform(x, compute_dtype=getattr(torch, online)))
    error = (seen["x"] - hadamard.hadamard_transform(x.double())).abs().max()
    assert (error > 1e-4) == (online == "float16")


def test_static_scales_are_used_instead_of_the_inputs_own() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    architecture = architecture_of(model)
    scheme = QuantizationScheme(bits=4, granularity="tensor", dynamic=False)
    keys = [(layer, site.name) for layer in range(2) for site in architecture.sites]
    static = {key: QParams(torch.tensor(0.5 + 0.1 * index)) for index, key in enumerate(keys)}
    with wrap(model, RuntimeQuantization(activations=scheme, static=static)):
        read = inputs_of_linears(model, tokens)
    for layer, site in ((layer, site) for layer in range(2) for site in architecture.sites):
        codes = read[f"model.layers.{layer}.{site.linears[0]}"] / static[layer, site.name].scale
        assert torch.allclose(codes, codes.round(), atol=1e-5)
        assert codes.min().round() >= -8
        assert codes.max().round() <= 7


def test_missing_static_scales_are_one_clear_error() -> None:
    scheme = QuantizationScheme(bits=4, granularity="tensor", dynamic=False)
    static = {(0, "attention_input"): QParams(torch.tensor(1.0))}
    with pytest.raises(RecipeError, match="static scales are missing for layer 0, attention_output"):
        wrap(tiny_model(), RuntimeQuantization(activations=scheme, static=static))


def test_outlier_features_of_a_site_keep_their_values() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    permutation = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    split = ColumnSplit(permutation, outliers=8)
    raw = inputs_of_linears(model, tokens)["model.layers.0.self_attn.q_proj"]
    grouped = QuantizationScheme(bits=4, granularity="group", group_size=8)
    with wrap(model, RuntimeQuantization(activations=grouped, outliers={(0, "attention_input"): split})):
        read = inputs_of_linears(model, tokens)["model.layers.0.self_attn.q_proj"]
    assert torch.equal(read[..., split.outlier_columns], raw[..., split.outlier_columns])
    normal = fake_quantize(raw[..., split.normal_columns], grouped)
    assert torch.equal(read[..., split.normal_columns], normal)


@pytest.mark.parametrize(
    ("size", "outliers", "message"),
    [
        (65, {}, r"group size 65 exceeds the 64 features of layer 0's self_attn\.q_proj and"),
        (16, {(1, "mlp_output"): 90}, r"group size 16 exceeds the 6 features of layer 1's mlp\.down_proj that"),
    ],
)
def test_a_group_larger_than_a_row_names_the_layer_before_anything_is_installed(
    size: int, outliers: dict[tuple[int, str], int], message: str
) -> None:
    model = tiny_model()
    splits = {key: ColumnSplit(torch.arange(96), count) for key, count in outliers.items()}
    scheme = QuantizationScheme(bits=4, granularity="group", group_size=size)
    with pytest.raises(RecipeError, match=message):
        wrap(model, RuntimeQuantization(activations=scheme, outliers=splits))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_added_after_wrapping_see_rotated_unquantized_inputs() -> None:
    """What GPTQ's Hessian needs (QuaRot Sec. 4, stage 2a)."""
    model, tokens = tiny_model(), tiny_tokens()
    rotate(model, RotationScheme(), seed=0)
    with wrap(model, RuntimeQuantization(transforms=RotationScheme().transforms)):
        read = inputs_of_linears(model, tokens)
    assert all(levels(x) > 16 for x in read.values())


def test_gradients_reach_the_weights_through_every_quantizer() -> None:
    model, tokens = tiny_model(), tiny_tokens()
    with wrap(model, EVERYTHING):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_o_projs_input_may_have_a_scale_for_each_head(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    o_proj = f"model.layers.0.{architecture_of(model).attention_output}"
    per_head = QuantizationScheme(bits=3, symmetric=False, granularity="head")
    raw = inputs_of_linears(model, tokens)[o_proj].unflatten(-1, (4, 16))
    with wrap(model, RuntimeQuantization(attention_output=per_head)):
        read = inputs_of_linears(model, tokens)
    expected = torch.stack([fake_quantize(raw[..., head, :], per_head) for head in range(4)], dim=-2).flatten(-2)
    assert torch.equal(read[o_proj], expected)
    with wrap(model, RuntimeQuantization(activations=INPUTS, attention_output=per_head)):
        read = inputs_of_linears(model, tokens)
    assert max(levels(head) for head in read[o_proj].unflatten(-1, (4, 16)).unbind(-2)) <= 8
    assert levels(read[o_proj]) > 16
    assert levels(read[f"model.layers.0.{architecture_of(model).mlp_output}"]) <= 16


def test_attention_output_takes_the_place_of_static_scales_and_refuses_other_granularities() -> None:
    model = tiny_model()
    static = QuantizationScheme(bits=4, granularity="tensor", dynamic=False)
    scales = {
        (index, site.name): QParams(torch.tensor(0.5))
        for index in range(2)
        for site in architecture_of(model).sites
        if site.name != "attention_output"
    }
    per_head = QuantizationScheme(bits=4, granularity="head")
    wrap(model, RuntimeQuantization(activations=static, static=scales, attention_output=per_head)).remove()
    with pytest.raises(RecipeError, match="static scales are missing for layer 0, attention_output"):
        wrap(model, RuntimeQuantization(activations=static, static=scales))
    with pytest.raises(RecipeError, match="attention_output takes granularity head, not token"):
        wrap(model, RuntimeQuantization(activations=INPUTS, attention_output=INPUTS))
