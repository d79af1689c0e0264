"""FlatQuant: learned matrices keep the function, lower the block's error, and act as they were learned."""

import pytest
import torch

from rotquant.foundation.errors import RecipeError
from rotquant.methods.flatquant import FlatQuant, factor_sizes, flatquant
from rotquant.methods.flatquant import block_training as flat
from rotquant.methods.flatquant.block_training import LearnedMatrix, with_duals
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.build import build_weights, quantized_forward, runtime_quantization
from rotquant.weights.reconstruction import DecoderBlock, Parameters
from rotquant.weights.storage import StoredModel
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import FAMILIES, FURTHER, outlier_model, tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=8, tokens=24)


def recipe(**settings: object) -> Recipe:
    return override(flatquant(), {"methods": {"flatquant": {"steps": 40, "batch_size": 2, **settings}}}, "test")


def build(of: Recipe, model: torch.nn.Module | None = None, device: str = "cpu") -> StoredModel:
    return build_weights(model or tiny_model(), tiny_tokenizer(), of, 0, SAMPLES, device=device, progress=False)


@pytest.mark.parametrize(("features", "sizes"), [(576, (24, 24)), (4096, (64, 64)), (11008, (86, 128)), (7, (1, 7))])
def test_the_two_factors_are_the_divisors_next_to_the_root(features: int, sizes: tuple[int, int]) -> None:
    assert factor_sizes(features) == sizes


def test_matrices_start_orthogonal_and_have_the_learned_singular_values_and_duals() -> None:
    """Of sizes that alternate, each alone and all at once; in float64, whose rounding is far below a step."""
    generator = torch.Generator().manual_seed(0)
    learned = [LearnedMatrix(size, generator).double() for size in (6, 4, 6, 1)]
    for one, (matrix, _) in zip(learned, with_duals(learned), strict=True):
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(one.values)).double(), rtol=0, atol=1e-6)
    with torch.no_grad():
        for one in learned:
            one.left.normal_(generator=generator)
            one.right.normal_(generator=generator)
            one.values.copy_(torch.arange(1.0, 1.0 + len(one.values)))
    for one, (matrix, dual) in zip(learned, with_duals(learned), strict=True):
        found = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(found, one.values.flip(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(matrix @ dual.mT, torch.eye(len(one.values)).double(), rtol=0, atol=1e-10)
        ((alone, _),) = with_duals([one])
        torch.testing.assert_close(alone, matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_transforms_alone_keep_the_function(family: str) -> None:
    """With weights of 8 bits and nothing else quantized what remains is their rounding."""
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(tiny_tokens(), use_cache=False).logits
    changes = {"weights": {"scheme": {"bits": 8}}, "activations": None, "keys": None, "values": None}
    stored = build(override(recipe(steps=10), changes, "test"), model)
    with quantized_forward(stored.model, stored.manifest.recipe, stored.state), torch.no_grad():
        found = stored.model(tiny_tokens(), use_cache=False).logits
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.long
def test_training_lowers_the_error_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = []

    def kept(*arguments: object, **options: object) -> list[dict[str, float]]:
        histories.append(train(*arguments, **options))
        return histories[-1]

    train = flat.train_block
    monkeypatch.setattr(flat, "train_block", kept)
    build(recipe(steps=80, batch_size=8), outlier_model())  # all samples in each step
    assert len(histories) == 2
    for history in histories:
        losses = [record["loss"] for record in history]
        assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


@pytest.mark.parametrize(("of_model", "trained"), [("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_a_block_trains_in_the_type_of_its_model(monkeypatch: pytest.MonkeyPatch, of_model: str, trained: str) -> None:
    """Or in bfloat16 for float16. The first loss is that of float32 but for codes that rounding flips, and it falls."""
    losses: dict[str, list[float]] = {}
    seen, train = set(), flat.train_block

    def kept(block: DecoderBlock, *arguments: object) -> object:
        seen.add(block.kwargs["position_embeddings"][0].dtype)
        history = train(block, *arguments)
        losses.setdefault(name, []).append(history[0]["loss"])
        assert history[-1]["loss"] < 0.9 * history[0]["loss"]
        return history

    monkeypatch.setattr(flat, "train_block", kept)
    for name in (of_model, "float32"):
        build(recipe(batch_size=8), outlier_model().to(getattr(torch, of_model)).to(getattr(torch, name)))
    assert seen == {getattr(torch, trained), torch.float32}
    assert losses[of_model] == pytest.approx(losses["float32"], rel=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_first_loss_of_a_cpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """But for codes that its products, of TF32 or bfloat16, flip. It falls, by a recorded graph from some step on."""
    losses: dict[str, list[float]] = {"cpu": [], "cuda": []}
    train = flat.train_block

    def kept(*arguments: object) -> object:
        history = train(*arguments)
        losses[device].append(history[0]["loss"])
        assert history[-1]["loss"] < 0.9 * history[0]["loss"]
        return history

    monkeypatch.setattr(flat, "train_block", kept)
    for device in losses:
        build(recipe(batch_size=8), outlier_model().to(dtype), device)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.2)


@pytest.mark.parametrize("group_size", [None, 16])
def test_weights_are_rounded_as_they_were_while_learning(
    monkeypatch: pytest.MonkeyPatch, group_size: int | None
) -> None:
    """In float64 no code lies beside a border."""
    blocks, train = [], flat.train_block

    def kept(block: DecoderBlock, parameters: Parameters, learned: flat.FlatBlock, *arguments: object) -> object:
        history = train(block, parameters, learned, *arguments)
        with torch.no_grad():
            for pair in learned.clipping.values():  # far from each other, and from where they start
                pair[0].uniform_(-1, 4)
                pair[1].uniform_(-1, 4)
            blocks.append(learned.weights(parameters, block.architecture, of.rounded.scheme, torch.float64))
        return history

    monkeypatch.setattr(flat, "train_block", kept)
    of = recipe(steps=2)
    if group_size:
        of = override(of, {"weights": {"scheme": {"granularity": "group", "group_size": group_size}}}, "test")
    model = tiny_model(dtype=torch.float64)
    stored = build(of, model)
    for index, expected in enumerate(blocks):
        for name in architecture_of(model).linears:
            found = stored.weights[f"model.layers.{index}.{name}.weight"].dequantize(torch.float64)
            torch.testing.assert_close(found, expected[f"{name}.weight"].detach(), rtol=0, atol=1e-9)


def error(of: Recipe) -> float:
    """Relative error of the logits of a model with outlier features."""
    model = outlier_model()
    with torch.no_grad():
        expected = model(tiny_tokens(seed=3), use_cache=False).logits
    stored = build(of, model)
    with quantized_forward(stored.model, stored.manifest.recipe, stored.state), torch.no_grad():
        found = stored.model(tiny_tokens(seed=3), use_cache=False).logits
    return ((found - expected).norm() / expected.norm()).item()


def test_learned_matrices_are_better_than_none() -> None:
    none = override(flatquant(), {"methods": {"flatquant": None}}, "test")
    assert error(recipe(steps=80)) < 0.8 * error(none)


def test_inputs_are_clipped_as_was_learned() -> None:
    stored = build(recipe())
    clips = stored.state.tensors["flatquant"]["mlp_input.clip"]
    assert clips.shape == (2,)
    assert ((clips > 0) & (clips < 1)).all()
    found = runtime_quantization(stored.manifest.recipe, stored.state)
    assert found.clips[1, "mlp_input"] == clips[1].item()
    architecture = architecture_of(stored.model)
    assert len(found.clips) == architecture.num_layers * len(architecture.sites)


def test_a_clip_of_one_site_is_that_of_its_quantizer() -> None:
    """Against quantizing by hand what the norm before the MLP gives, in one layer of two."""
    model, scheme = tiny_model(), recipe().activations
    layer = decoder_layers(model)[1]
    seen: list[torch.Tensor] = []
    with wrap(model, RuntimeQuantization(activations=scheme, clips={(1, "mlp_input"): 0.5})):
        raw = layer.post_attention_layernorm.register_forward_hook(lambda _m, _i, x: seen.append(x), prepend=True)
        read = layer.mlp.gate_proj.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
        model(tiny_tokens(), use_cache=False)
        raw.remove()
        read.remove()
    before, after = seen
    assert torch.equal(after, fake_quantize(before, scheme.model_copy(update={"clip_ratio": 0.5})))
    assert not torch.equal(after, fake_quantize(before, scheme))


def test_what_it_cannot_learn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set rotation\.inputs to none, rotation\.heads and rotation\.mlp to false"):
        override(flatquant(), {"rotation": {"mlp": True}}, "test")
    with pytest.raises(ValueError, match="weights of granularity channel or group"):
        override(flatquant(), {"weights": {"scheme": {"granularity": "tensor"}}}, "test")
    with pytest.raises(RecipeError, match="layers of this mixtral model have experts, and FlatQuant"):
        build(recipe(), tiny_model(**FURTHER["mixtral"]))
    assert FlatQuant().budget(recipe()).rates == (("transformation_lr", 5e-3), ("clipping_lr", 5e-2))
