"""Transforms: each kind is the matrix that it describes, weights undo it, and what does not fit is refused."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rotquant.decoder.config import Precision
from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.fitting import check_transforms
from rotquant.models.rotation.fusing import fuse_inverse
from rotquant.models.simulation.kv_cache import KVQuantizer, QuantizedCache
from rotquant.models.simulation.queries import quantized_queries
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.transforms import Chain, of_layer
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.recipes.transforms import Transform, at, at_site
from rotquant.tensors.hadamard import hadamard_matrix, random_orthogonal_matrix
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.build import build_weights, runtime_quantization
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.invariance import invariance_error
from tests.helpers.models import AWKWARD, tiny_model, tiny_tokens

#: Products of some matrices of condition numbers below 100 in float64.
ROUNDING = {"rtol": 0, "atol": 1e-11}
#: float64: what remains is the rounding of transformers' float32 norms and rotary tables.
EXACT = {"rtol": 0, "atol": 1e-5}
FEATURES, HEADS = 24, 4
EIGHT_BITS = QuantizationScheme(bits=8, symmetric=False, granularity="head")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def invertible(*shape: int, seed: int = 0) -> Tensor:
    """Far from singular and from orthogonal."""
    return random(*shape, seed=seed) / shape[-1] ** 0.5 + 2 * torch.eye(shape[-1], dtype=torch.float64)


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return random_orthogonal_matrix(size, generator(seed)).contiguous()


def hadamard(size: int) -> Tensor:
    return hadamard_matrix(size, torch.float64) * size**-0.5


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def make(
    kind: str = "hadamard", made_of: Mapping[str, Tensor] | None = None, **fields: object
) -> tuple[Transform, dict[str, Tensor]]:
    """An online transform and its tensors."""
    given = dict(made_of or {})
    defaults = {"name": "one", "kind": kind, "location": "mlp_output", "online": True, "tensors": tuple(given)}
    return Transform.model_validate(defaults | fields), given


BLOCKS = torch.stack([orthogonal(8, seed) for seed in range(3)])
ORDER = torch.randperm(FEATURES, generator=generator())
SCALE = random(FEATURES).abs() + 0.1
LEFT, RIGHT = invertible(4), invertible(6, seed=1)

#: A transform with its tensors, and the matrix M that it is by its description alone.
CASES: dict[str, tuple[tuple[Transform, dict], Tensor]] = {
    "hadamard": (make("hadamard"), hadamard(FEATURES)),
    "hadamard in blocks": (make("hadamard", size=12), torch.block_diag(hadamard(12), hadamard(12))),
    "hadamard across heads": (
        make("hadamard", location="across_heads"),
        torch.kron(hadamard(HEADS), eye(FEATURES // HEADS)),
    ),
    "a stored hadamard": (make("random_hadamard", {"m": hadamard(FEATURES)}), hadamard(FEATURES)),
    "orthogonal": (make("orthogonal", {"m": orthogonal(FEATURES)}), orthogonal(FEATURES)),
    "orthogonal, a block for all": (make("orthogonal", {"m": BLOCKS[0]}, size=8), torch.block_diag(*[BLOCKS[0]] * 3)),
    "orthogonal, one stacked block for all": (
        make("orthogonal", {"m": BLOCKS[:1]}, size=8),
        torch.block_diag(*[BLOCKS[0]] * 3),
    ),
    "orthogonal, a block for each": (make("orthogonal", {"m": BLOCKS}, size=8), torch.block_diag(*BLOCKS)),
    "the second of several": (make("orthogonal", {"m": BLOCKS}, size=8, part=1), torch.block_diag(*[BLOCKS[1]] * 3)),
    "orthogonal across heads": (
        make("orthogonal", {"m": orthogonal(HEADS)}, location="across_heads"),
        torch.kron(orthogonal(HEADS), eye(FEATURES // HEADS)),
    ),
    "matrix": (make("matrix", {"m": invertible(FEATURES)}), invertible(FEATURES)),
    "matrix across heads": (
        make("matrix", {"m": invertible(HEADS)}, location="across_heads"),
        torch.kron(invertible(HEADS), eye(FEATURES // HEADS)),
    ),
    "factorized": (make("factorized", {"left": LEFT, "right": RIGHT}), torch.kron(LEFT, RIGHT)),
    "factorized in blocks": (
        make("factorized", {"left": LEFT, "right": RIGHT[:3, :3]}, size=12),
        torch.block_diag(*[torch.kron(LEFT, RIGHT[:3, :3])] * 2),
    ),
    "permutation": (make("permutation", {"order": ORDER}), eye(FEATURES)[:, ORDER]),
    "scaling": (make("scaling", {"scale": SCALE}), torch.diag(1 / SCALE)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_transform_is_its_matrix_and_weights_undo_it(case: str) -> None:
    (transform, tensors), matrix = CASES[case]
    chain = Chain([transform], tensors, HEADS)
    x, weight = random(2, 5, FEATURES, seed=2), random(7, FEATURES, seed=3)
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(chain(x), x @ matrix, **ROUNDING)
    torch.testing.assert_close(chain.inverse(x), x @ inverse, **ROUNDING)
    torch.testing.assert_close(chain.of_weight(weight), weight @ inverse.T, **ROUNDING)
    torch.testing.assert_close(chain.inverse(chain(x)), x, **ROUNDING)
    torch.testing.assert_close(chain(x) @ chain.of_weight(weight).T, x @ weight.T, rtol=0, atol=1e-10)
    assert (chain(x) - x).abs().max() > 0.1


def test_transforms_act_in_their_order() -> None:
    chosen = ("matrix", "permutation", "scaling", "hadamard", "factorized")
    names = {case: {name: f"{case}.{name}" for name in CASES[case][0][1]} for case in chosen}
    transforms = [
        CASES[case][0][0].model_copy(update={"tensors": tuple(names[case][name] for name in CASES[case][0][0].tensors)})
        for case in chosen
    ]
    tensors = {names[case][name]: tensor for case in chosen for name, tensor in CASES[case][0][1].items()}
    chain, x = Chain(transforms, tensors, HEADS), random(5, FEATURES)
    matrix = torch.linalg.multi_dot([CASES[case][1] for case in chosen])
    torch.testing.assert_close(chain(x), x @ matrix, rtol=0, atol=1e-10)
    torch.testing.assert_close(chain.inverse(chain(x)), x, rtol=0, atol=1e-10)
    torch.testing.assert_close(chain.of_weight(x) @ matrix.T, x, rtol=0, atol=1e-10)


def test_activations_of_16_bits_are_rounded_once() -> None:
    (first, tensors), matrix = CASES["matrix"]
    second, scale = make("scaling", {"scale": SCALE.float()})
    x = random(50, FEATURES).bfloat16()
    found = Chain([first, second], {"m": tensors["m"].float(), **scale})(x)
    exact = x.double() @ matrix @ torch.diag(1 / SCALE)
    assert found.dtype == torch.bfloat16
    # Of equal sums, half a unit in the last place of 8 bits; float32's own rounding decides a tie in a thousand.
    assert (found.double() - exact).abs().max() <= (exact.abs() * 2**-8).max() * 1.01
    assert (found == exact.bfloat16()).double().mean() > 0.99


def test_tensors_follow_their_input_to_another_device() -> None:
    (transform, tensors), _ = CASES["factorized"]
    assert Chain([transform], tensors)(torch.ones(5, FEATURES, device="meta")).device.type == "meta"


def test_without_transforms_nothing_happens() -> None:
    x, chain = random(3, 5), Chain(())
    assert not chain
    assert all(torch.equal(function(x), x) for function in (chain, chain.inverse, chain.of_weight))


def of_model(model: nn.Module, location: str, kind: str) -> tuple[Transform, dict[str, Tensor]]:
    """An online transform at a location, of other tensors in each layer."""
    shape = architecture_of(model)
    features = shape.num_heads if location == "across_heads" else shape.site(location).features
    sizes = {"factorized": (4, features // 4), "blocks": (4,)}.get(kind, (features,))
    layers = range(shape.num_layers)
    tensors = {
        f"{location}.{place}": torch.stack([invertible(size, size, seed=10 * layer + place) for layer in layers])
        for place, size in enumerate(sizes)
    }
    if kind == "blocks":
        return make("matrix", tensors, location=location, size=4)
    if kind == "scaling":
        tensors = {f"{location}.0": torch.stack([random(features, seed=layer).abs() + 0.1 for layer in layers])}
    if kind == "permutation":
        tensors = {f"{location}.0": torch.stack([torch.randperm(features, generator=generator(i)) for i in layers])}
    return make(kind, tensors, location=location)


@torch.no_grad()
@pytest.mark.parametrize("shape", AWKWARD)
def test_online_transforms_and_weights_with_the_inverse_leave_the_logits_as_they_are(shape: str) -> None:
    """What FlatQuant asks for: factorized at the sites, matrices across heads, scales, and orders of features."""
    model, tokens = tiny_model(**AWKWARD[shape], dtype=torch.float64), tiny_tokens()  # pyright: ignore[reportArgumentType]
    before, online = model(tokens, use_cache=False).logits, RuntimeQuantization()
    places = (
        ("attention_input", "factorized"),
        ("across_heads", "matrix"),
        ("attention_output", "scaling"),
        ("mlp_input", "permutation"),
        ("mlp_input", "blocks"),
        ("mlp_output", "factorized"),
    )
    for number, (location, kind) in enumerate(places):
        transform, tensors = of_model(model, location, kind)
        renamed = {f"{number}.{name}": tensor for name, tensor in tensors.items()}
        online = online.with_transforms([transform.model_copy(update={"tensors": tuple(renamed)})], renamed)
    architecture = architecture_of(model)
    for index, layer in enumerate(decoder_layers(model)):
        for site in architecture.sites:
            chain = Chain(
                at_site(online.transforms, site.name), of_layer(online.tensors, index), architecture.num_heads
            )
            fuse_inverse(layer, site, chain)
    assert (model(tokens, use_cache=False).logits - before).abs().max() > 0.1
    with wrap(model, online):
        torch.testing.assert_close(model(tokens, use_cache=False).logits, before, **EXACT)


@pytest.mark.parametrize("what", ["keys", "values"])
def test_keys_and_values_are_quantized_in_the_basis_of_their_transform_of_each_layer(what: str) -> None:
    matrices = torch.stack([invertible(16, seed=layer) for layer in range(2)])
    location = {"keys": "queries_keys", "values": "values"}[what]
    transform, tensors = make("matrix", {"m": matrices}, location=location)
    quantizer = KVQuantizer(EIGHT_BITS, EIGHT_BITS, (transform,), tensors=tensors)
    states = {"keys": random(2, 2, 9, 16), "values": random(2, 2, 9, 16, seed=1)}
    cache = QuantizedCache(quantizer)
    for layer, matrix in enumerate(matrices):
        found = dict(zip(states, cache.update(*states.values(), layer), strict=True))
        for name, x in states.items():
            expected = fake_quantize(x, EIGHT_BITS)
            if name == what:
                expected = fake_quantize(x @ matrix, EIGHT_BITS) @ torch.linalg.inv(matrix)
                assert (expected - fake_quantize(x, EIGHT_BITS)).abs().max() > 1e-3
            torch.testing.assert_close(found[name], expected, **ROUNDING)
        for one, other in zip(found.values(), quantizer.fake(*states.values(), layer), strict=True):
            torch.testing.assert_close(one, other, **ROUNDING)


@torch.no_grad()
def test_a_model_reads_transformed_keys_and_values() -> None:
    """With 8 bits the logits hardly change, and do without the transforms' inverses."""
    model, tokens = tiny_model(dtype=torch.float64), tiny_tokens()
    before = model(tokens, use_cache=False).logits
    stacked = torch.stack([invertible(16, seed=layer) for layer in range(2)])
    both = [make("matrix", {"m": stacked}, location=location)[0] for location in ("queries_keys", "values")]
    quantization = RuntimeQuantization(keys=EIGHT_BITS, values=EIGHT_BITS).with_transforms(both, {"m": stacked})
    with wrap(model, quantization):
        logits = model(tokens, use_cache=False).logits
        torch.testing.assert_close(model(tokens, use_cache=True).logits, logits, rtol=0, atol=1e-9)
    assert 0 < (logits - before).abs().max() < 0.05


def test_a_description_and_its_tensors_survive_files(tmp_path: Path) -> None:
    (transform, tensors), _ = CASES["factorized in blocks"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "tensors.safetensors")
    (tmp_path / "transform.json").write_text(transform.model_dump_json())
    read = Transform.model_validate_json((tmp_path / "transform.json").read_text())
    x = random(3, FEATURES)
    assert read == transform
    chain = Chain([read], load_file(tmp_path / "tensors.safetensors"))
    assert torch.equal(chain(x), Chain([transform], tensors)(x))


def test_stored_weights_give_the_transforms_of_their_method_back(tmp_path: Path) -> None:
    recipe = override(preset("duquant"), {"methods": {"duquant": {"block_size": 8, "search_steps": 4}}}, "test")
    stored = build_weights(tiny_model(), tiny_tokenizer(), recipe, 0, tiny_tokens(4), progress=False)
    save_quantized(tmp_path / "model", stored)
    _, _, state = load_quantized(tmp_path / "model")
    found, expected = (runtime_quantization(recipe, one) for one in (state, stored.state))
    assert found.transforms == expected.transforms
    assert {one.location for one in found.transforms} > {"attention_input", "queries_keys"}
    assert {name for one in found.transforms for name in one.tensors} == found.tensors.keys()
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


def test_a_rotation_is_five_transforms() -> None:
    found = RotationScheme(mlp=8, keys=4, online_dtype="float16").transforms
    assert [(one.name, one.kind, one.location, one.size, one.online, one.origin) for one in found] == [
        ("R1", "random_hadamard", "residual", None, False, "drawn"),
        ("R2", "hadamard", "values", None, False, "fixed"),
        ("heads", "hadamard", "across_heads", None, True, "fixed"),
        ("R3", "hadamard", "queries_keys", 4, True, "fixed"),
        ("R4", "hadamard", "mlp_output", 8, True, "fixed"),
    ]
    assert {one.dtype for one in found if one.online} == {"float16"}
    assert at(found, "values", online=True) == ()
    learned = preset("spinquant-hard").transforms
    assert [one.name for one in learned if one.origin == "learned"] == ["R1", "R2"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"location": "nowhere"}, "^location: Input should be 'residual', .* or 'mlp_output' \\(given 'nowhere'\\)"),
        ({"kind": "fourier"}, "kind: Input should be 'hadamard'"),
        ({"kind": "factorized", "tensors": ("one",)}, "kind factorized names 2 tensors, not 1"),
        ({"kind": "orthogonal"}, "kind orthogonal names 1 tensors, not 0"),
        ({"location": "residual"}, "fused into the weights: it cannot be online"),
        ({"kind": "scaling", "tensors": ("s",), "size": 4}, "size has no meaning for a scaling"),
        ({"location": "across_heads", "size": 2}, "one matrix of all heads"),
        ({"size": 0}, "size: Input should be greater than 0"),
    ],
)
def test_a_description_that_means_nothing_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError) as error:
        make(**fields)  # pyright: ignore[reportArgumentType]
    problem = first_problem(error.value)
    assert "\n" not in problem
    assert re.search(sentence, problem), problem


ONES = torch.ones(2, 96)
SQUARE = torch.eye(96).expand(2, 96, 96)


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (make("hadamard", size=36), "one cannot have blocks of 36 of 96 features: choose a size that divides them"),
        (make("hadamard", location="queries_keys", size=6), "blocks of 6 of 16 features"),
        (make("scaling", tensors=("s",)), "needs a tensor s of each layer"),
        (make("scaling", {"s": ONES[:1]}), "needs a tensor s of each layer"),
        (make("scaling", {"s": ONES.unsqueeze(1)}, part=1), "needs a tensor s of each layer"),
        (make("scaling", {"s": ONES[:, :95]}), r"do not fit the 96 features of mlp_output: s \(95,\)"),
        (make("permutation", {"s": ONES}, location="mlp_input"), "do not fit the 64 features of mlp_input"),
        (make("orthogonal", {"m": SQUARE}, size=48), r"mlp_output: m \(96, 96\)"),
        (make("orthogonal", {"m": SQUARE[:, :48, :48].unsqueeze(1).expand(2, 3, 48, 48)}, size=48), "do not fit"),
        (make("factorized", {"a": SQUARE[:, :8, :8], "b": SQUARE[:, :10, :10]}), r"a \(8, 8\), b \(10, 10\)"),
        (make("matrix", {"m": SQUARE}, location="across_heads"), "the 4 features of across_heads"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_installed(
    transform: tuple[Transform, dict[str, Tensor]], sentence: str
) -> None:
    model, tokens = tiny_model(), tiny_tokens()
    before = model(tokens).logits
    with pytest.raises(RecipeError, match=sentence) as error:
        wrap(model, RuntimeQuantization().with_transforms([transform[0]], transform[1]))
    assert "\n" not in str(error.value)
    assert torch.equal(model(tokens).logits, before)


def test_queries_refuse_a_transform_whose_inverse_they_would_need() -> None:
    transform, _ = make("matrix", {"m": SQUARE}, location="queries_keys")
    with pytest.raises(RecipeError, match="queries are quantized after a Hadamard transform alone"):
        quantized_queries(tiny_model(), EIGHT_BITS, (transform,))


def test_a_decoder_has_hadamard_transforms_alone() -> None:
    for transform in (make("scaling", {"s": ONES})[0], make("hadamard", size=8)[0], *RotationScheme().transforms[:1]):
        with pytest.raises(ValidationError, match=f"the kernels have no transform like {transform.name}"):
            Precision(transforms=(transform,))


def test_keys_in_blocks_are_quantized_in_the_basis_of_each_block() -> None:
    """SAW-INT4's keys: what the cache gives back is each block of a key rotated, rounded with its head, and back."""
    model, scheme = tiny_model(), RotationScheme(residual="none", values="none", heads=False, keys=4, mlp=False)
    assert invariance_error(model, scheme, 0, tiny_tokens()) <= 1e-4
    keys = QuantizationScheme(bits=4, symmetric=False, granularity="head")
    block = hadamard_matrix(4, torch.float32) / 2
    turn = torch.block_diag(*[block] * 4)
    x = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    chain = Chain(at(scheme.transforms, "queries_keys"))
    found = chain.inverse(fake_quantize(chain(x), keys))
    expected = fake_quantize(x @ turn, keys) @ turn.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        RecipeError, match=r"R3 cannot have blocks of 12 of 16 features: change the recipe, --set rotation\.keys"
    ):
        check_transforms(architecture_of(model), RotationScheme(keys=12).transforms)
