"""Block-wise fine-tuning (EfficientQAT's Block-AP, PrefixQuant Sec. 5.2): what it learns, stores and continues."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.block_ap import BlockAP, block_training
from rotquant.methods.block_ap.block_training import _share
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe, parse_recipe
from rotquant.training.state import Checkpoint
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import StoredModel
from tests.helpers.cases import only
from tests.helpers.interrupting import Interrupted, MortalCheckpoint
from tests.helpers.models import FAMILIES, outlier_model, tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=8, tokens=24, seed=3)
CHANNEL = {"scheme": {"bits": 4, "granularity": "channel"}, "clip_search": False}
GROUPS = {"scheme": {"bits": 2, "granularity": "group", "group_size": 16, "symmetric": False}, "clip_search": False}
STATIC: dict[str, Any] = {
    "activations": {"bits": 4, "granularity": "tensor", "dynamic": False},
    "keys": {"bits": 4, "granularity": "head", "dynamic": False},
    "values": {"bits": 4, "granularity": "head", "dynamic": False},
}
GRID = {"coarse": 4, "fine": 2}


def recipe(rounding: dict[str, Any] = CHANNEL, sections: dict[str, Any] = STATIC, **settings: Any) -> Recipe:
    """Everything static by default, tuned for a few steps at rates that a tiny model feels."""
    text = {"corpus": "modules", "samples": len(SAMPLES), "sequence_length": SAMPLES.shape[1]}
    asked = {"text": text, "epochs": 4, "scale_lr": 1e-3, "weight_lr": 1e-3, "scales": GRID, **settings}
    return parse_recipe({"methods": {"block_ap": asked}, "weights": rounding, **sections}, "the test's")


def build(asked: Recipe, model: torch.nn.Module | None = None, checkpoint: Checkpoint | None = None) -> StoredModel:
    """Its weights, of a model in float64 by default."""
    model = model or outlier_model(dtype=torch.float64)
    return build_weights(model, None, asked, 0, texts={"block_ap": SAMPLES}, checkpoint=checkpoint, progress=False)


@pytest.mark.parametrize("weights", [CHANNEL, GROUPS])
@pytest.mark.parametrize("sections", [STATIC, {}])
def test_the_outputs_of_each_block_come_nearer_to_those_of_the_full_precision_block(weights, sections) -> None:
    history = build(recipe(weights, sections, scale_lr=1e-4, weight_lr=1e-4)).history
    for block in range(2):
        losses = [record["loss"] for record in history if record["block"] == block]
        assert len(losses) == 4 * 2  # epochs times batches of 4
        assert sum(losses[-2:]) < sum(losses[:2])  # of the same samples


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_trained_and_what_is_stored_is_what_training_saw(family: str, monkeypatch) -> None:
    """The first layer runs with its integers exactly as its last step would have seen it."""
    seen: dict[str, Any] = {}
    rounding = block_training.round_block

    def look(context, learned, index, layer):
        if index == 0:
            seen["start"] = {name: dict(tensors) for name, tensors in vars(learned).items()}
            with (
                torch.no_grad(),
                block_training.wrap(
                    context.model, context.quantized({n: block_training.QParams(s) for n, s in learned.static.items()})
                ),
            ):
                stream = seen["stream"]
                seen["output"] = block_training.block_output(
                    layer, learned, context.recipe.rounded.scheme, stream.hidden, stream.kwargs[0]
                )
        rounding(context, learned, index, layer)

    model = tiny_model(family, dtype=torch.float64)
    seen["stream"] = capture_layer_inputs(model, SAMPLES)
    monkeypatch.setattr(block_training, "round_block", look)
    asked = recipe()
    stored = build(asked, model)
    with quantized_forward(stored.model, asked, stored.state):
        output = torch.cat(list(seen["stream"].outputs(0)))
    assert torch.equal(output, seen["output"])
    before = tiny_model(family, dtype=torch.float64)
    untuned = build(recipe(epochs=1, weight_lr=1e-30, scale_lr=1e-30), before)
    for key, qparams in stored.state.static.items():
        assert not torch.equal(qparams.scale, untuned.state.static[key].scale), key
    for name, weight in stored.weights.items():
        assert not torch.equal(weight.qparams.scale, untuned.weights[name].qparams.scale)
        assert not torch.equal(weight.codes, untuned.weights[name].codes)


def test_norms_are_trained_where_asked_and_run_as_they_were_trained() -> None:
    """The loss of the stored layer on the text of the last step is what its next step would have seen."""
    before = dict(outlier_model(dtype=torch.float64).named_parameters())
    for norms in (False, True):
        asked = recipe(norms=norms)
        stored = build(asked)
        gains = {name: gain for name, gain in stored.model.named_parameters() if "layernorm" in name}
        assert len(gains) == 4
        assert all(torch.equal(gain, before[name]) != norms for name, gain in gains.items())
        assert torch.equal(stored.model.model.norm.weight, before["model.norm.weight"])
    with quantized_forward(stored.model, asked, stored.state):
        stream = capture_layer_inputs(stored.model, SAMPLES)
        found = torch.cat(list(stream.outputs(0)))
    exact = capture_layer_inputs(outlier_model(dtype=torch.float64), SAMPLES)
    loss = (found - torch.cat(list(exact.outputs(0)))).square().mean().item()
    losses = [record["loss"] for record in stored.history if record["block"] == 0]
    assert loss < 1.05 * sum(losses[-2:]) / 2  # the mean of both halves of the text, one step later


def test_zero_points_are_trained_and_stay_whole() -> None:
    trained, untrained = (
        build(recipe(GROUPS, {}, weights=None, scale_lr=rate, weight_lr=1e-30)) for rate in (0.3, 1e-30)
    )
    points = [weight.qparams.zero_point for weight in trained.weights.values()]
    assert all(torch.equal(point, point.round()) for point in points)
    before = [weight.qparams.zero_point for weight in untrained.weights.values()]
    assert any(not torch.equal(one, other) for one, other in zip(points, before, strict=True))


def test_tuning_brings_the_logits_nearer_to_those_of_the_model() -> None:
    errors = []
    for rate in (1e-30, 1e-3):
        model = outlier_model(dtype=torch.float64)
        with torch.no_grad():
            exact = model(SAMPLES, use_cache=False).logits
        asked = recipe(epochs=10, weight_lr=rate, scale_lr=rate)
        stored = build(asked, model)
        with quantized_forward(model, asked, stored.state), torch.no_grad():
            errors.append((model(SAMPLES, use_cache=False).logits - exact).norm().item())
    assert errors[1] < 0.95 * errors[0], errors


@pytest.mark.parametrize("loss", ["mse", "relative"])
def test_the_loss_is_the_error_of_a_block_s_outputs_or_that_of_each_token_over_its_mean_square(loss: str) -> None:
    model = outlier_model(dtype=torch.float64)
    with torch.no_grad():
        wanted = model(SAMPLES, use_cache=False, output_hidden_states=True).hidden_states[1]
    nothing = {"scale_lr": 1e-30, "weight_lr": 1e-30, "epochs": 1, "batch_size": len(SAMPLES)}
    history = build(recipe(sections={}, loss=loss, **nothing), model).history  # which leaves rounded weights in it
    with torch.no_grad():
        found = model(SAMPLES, use_cache=False, output_hidden_states=True).hidden_states[1]
    errors, squares = (found - wanted).square().mean(-1), wanted.square().mean(-1)
    expected = errors.mean() if loss == "mse" else (errors / squares).mean()
    assert history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)  # the loss is taken in float32
    assert errors.mean().item() != pytest.approx((errors / squares).mean().item(), rel=0.1)


# In the first block, between the two, in the second.
@pytest.mark.parametrize("lives", only([15], [6, 15, 19]))
def test_a_killed_tuning_continues_with_the_same_bits(lives: int, tmp_path: Path) -> None:
    asked = recipe()
    whole = build(asked)
    about = tmp_path / "file", "this", 1
    with pytest.raises(Interrupted):
        build(asked, checkpoint=MortalCheckpoint(*about, lives=iter(range(lives))))
    again = build(asked, checkpoint=Checkpoint(*about))
    assert again.history == whole.history
    for name, weight in whole.weights.items():
        assert torch.equal(weight.codes, again.weights[name].codes)
        assert torch.equal(weight.qparams.scale, again.weights[name].qparams.scale)
    for key, qparams in whole.state.static.items():
        assert torch.equal(qparams.scale, again.state.static[key].scale)


def test_a_finished_block_leaves_a_file_without_moments(tmp_path: Path) -> None:
    build(recipe(), checkpoint=Checkpoint(tmp_path / "file", "this"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.block-0", "file.block-1"]


def test_the_cosine_ends_at_a_tenth() -> None:
    shares = [_share(BlockAP(schedule="cosine"), 10, step) for step in (0, 5, 10)]
    assert shares == pytest.approx([1.0, 0.55, 0.1])
    assert _share(BlockAP(), 10, 7) == 1.0


def test_gradients_are_clipped_together_where_asked() -> None:
    free, clipped = (build(recipe(clip_gradients=norm)).history[-1]["loss"] for norm in (None, 1e-12))
    assert free != clipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_models_are_tuned_in_float32(dtype: torch.dtype) -> None:
    history = build(recipe(), outlier_model(dtype=dtype)).history
    first = [record["loss"] for record in history if record["block"] == 0]
    assert sum(first[-2:]) < sum(first[:2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounding": {"scheme": {"bits": 4, "granularity": "channel"}}}, "set weights.clip_search to false"),
        ({"sections": {"activations": {**STATIC["activations"], "symmetric": False}}}, "activations.symmetric to true"),
        ({"batch_size": 16}, "block_ap.batch_size is 16, and block_ap.text.samples only 8: take more samples"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**changes)


def test_a_loss_that_is_not_finite_is_one_sentence() -> None:
    model = outlier_model()
    model.model.layers[0].mlp.down_proj.weight.data *= 1e30  # what its rounding adds has no finite square
    with pytest.raises(RotquantError, match=r"fine-tuning is (nan|inf) in block 0 .* lower methods"):
        build(recipe(), model)
