"""Rotations learned on sampled vectors: losses, what the vectors are, and what learning makes of them."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotquant.foundation.errors import ResultError
from rotquant.methods.outliers import OutlierFeatures
from rotquant.methods.rotation_calibration import RotationCalibration
from rotquant.methods.rotation_calibration import distribution_losses as calibration
from rotquant.methods.rotation_calibration.distribution_losses import (
    emphasized,
    fourth_powers,
    kurtosis,
    learn_rotations,
    rounding,
    whip,
)
from rotquant.methods.rotation_calibration.sampled_vectors import sampled_activations, weight_vectors
from rotquant.models.architectures import architecture_of, decoder_layers, linear_of
from rotquant.models.rotation.fusing import rotate
from rotquant.models.rotation.matrices import LearnedRotations, initial_rotations
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs, observed_inputs
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme
from rotquant.tensors.stiefel import orthonormality_error
from tests.helpers.cases import each_once
from tests.helpers.interrupting import Interrupted
from tests.helpers.invariance import invariance_error
from tests.helpers.models import FAMILIES, FURTHER, tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=6, tokens=16)
R1_AND_R2 = RotationScheme(values="random_hadamard", heads=False)
#: Settings under which every loss moves far on a tiny model.
FAST = {"steps": 30, "value_steps": 30, "vectors": 256, "share": 1.0}
NORMS_BOUND = 1e-5
CAYLEY = {"parametrization": "cayley", "learning_rate": 1.5, "schedule": "linear", "momentum": 0.0}


PROCRUSTES = {"loss": "rounding", "parametrization": "procrustes"}
INPUTS = QuantizationScheme(bits=4, clip_ratio=0.9)


def recipe(scheme: RotationScheme = R1_AND_R2, **settings: Any) -> Recipe:
    methods = {"rotation_calibration": RotationCalibration(**{**FAST, **settings})}
    return Recipe(rotation=scheme, methods=methods, activations=INPUTS if settings.get("loss") == "rounding" else None)


def learn(model: nn.Module, of: Recipe, seed: int = 0, **options: Any) -> LearnedRotations:
    samples = None if of.learned_by[1] is None else SAMPLES
    return learn_rotations(model, of, seed, samples, progress=False, **options)


def test_losses_are_their_sums_and_moments() -> None:
    y = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row, one, two, three in zip(y.tolist(), whip(y), kurtosis(y), fourth_powers(y), strict=True):
        mean = sum(row) / 8
        spread = sum((value - mean) ** 2 for value in row) / 8
        fourth = sum((value - mean) ** 4 for value in row) / 8
        assert one.item() == pytest.approx(sum(math.exp(-abs(value)) for value in row), rel=1e-12)
        assert two.item() == pytest.approx(abs(fourth / spread**2 - 1.8), rel=1e-12)
        assert three.item() == pytest.approx(sum(value**4 for value in row), rel=1e-12)


def inputs_of_rotated(model: nn.Module, of: Recipe, seed: int) -> dict[str, list[Tensor]]:
    """Inputs of each site of the rotated model, layer after layer, as its linear layers read them."""
    rotated, architecture = copy.deepcopy(model), architecture_of(model)
    rotations = initial_rotations(architecture, of.rotation, seed)
    rotate(rotated, of.rotation, rotations=rotations)
    found: dict[str, list[Tensor]] = {site.name: [] for site in architecture.sites}
    shapes = tensor_shapes(architecture, of.transforms)
    tensors = {name: rotations.online(model.dtype)[name] for name in shapes}
    with wrap(rotated, RuntimeQuantization(tensors=tensors, **of.runtime)):
        stream = capture_layer_inputs(rotated, SAMPLES)
        for index, layer in stream.layers("test"):
            with observed_inputs(layer, architecture.sites, lambda name, x: found[name].append(x)):
                stream.advance(index)
    return found


ONLINE = RotationScheme(residual="none", inputs="random_hadamard", values="random_hadamard", heads=False)


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [
        *(({"family": family}, R1_AND_R2) for family in FAMILIES),
        (FURTHER["gemma3"], ONLINE),
        (FURTHER["olmo2"], ONLINE),
    ],
    ids=str,
)
def test_rotated_vectors_are_what_the_rotated_model_reads(shape: dict[str, Any], scheme: RotationScheme) -> None:
    """Up to the norms' rounding, which transformers compute in float32."""
    model, of = tiny_model(**shape, dtype=torch.float64), recipe(scheme)
    architecture = architecture_of(model)
    rotations = initial_rotations(architecture, scheme, 3)
    vectors = sampled_activations(model, of, rotations, SAMPLES, 3, torch.device("cpu"))
    expected = inputs_of_rotated(model, of, 3)
    turned = {name: vectors[name] @ matrix for name, matrix in rotations.tensors().items()}
    for index in range(architecture.num_layers):
        heads = expected["attention_output"][index].reshape(-1, architecture.head_dim)
        assert (turned[f"values.{index}"] - heads).abs().max() <= NORMS_BOUND
    if "residual" in turned:
        sites = ("attention_input", "mlp_input")
        pairs = [expected[name][index] for index in range(architecture.num_layers) for name in sites]
        read = torch.cat([x.reshape(-1, architecture.hidden_size) for x in pairs])
        assert (turned["residual"] - read).abs().max() <= NORMS_BOUND
    for name in (name for name in turned if "input" in name):
        site, _, index = name.partition(".")
        read = expected[site][int(index)].reshape(-1, architecture.hidden_size)
        assert (turned[name] - read).abs().max() <= NORMS_BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_rotated_rows_and_columns_are_those_of_the_rotated_weights(family: str) -> None:
    model, of = tiny_model(family), recipe()
    architecture = architecture_of(model)
    rotations = initial_rotations(architecture, of.rotation, 3)
    found = weight_vectors(model, of, rotations)
    rotate(model, of.rotation, rotations=rotations)
    rows = []
    for layer in decoder_layers(model):
        for site in architecture.sites:
            for name in site.linears:
                weight = linear_of(layer, name).weight.detach()
                rows.append(weight if site.norm is not None else weight.T)
    turned = found["residual"] @ rotations.residual.float()
    wanted = torch.cat(rows)
    # In another order, and v_proj's rows are turned by R2 too, which changes no sum of squares of all its rows.
    assert turned.shape == wanted.shape
    assert turned.square().sum(dim=0) == pytest.approx(wanted.square().sum(dim=0), rel=1e-4)
    assert len(found["values.0"]) == architecture.hidden_size * (architecture.num_heads + architecture.num_kv_heads)


LOSSES = [
    {"loss": "whip", "learning_rate": 0.05},
    {"loss": "kurtosis", **CAYLEY},
    {"weights": 1.0, **CAYLEY},
    {"loss": "kurtosis", "weights": 0.5, **CAYLEY},
    PROCRUSTES,
    {"loss": "rounding", **CAYLEY},
]


@pytest.mark.parametrize(("settings", "shape", "scheme"), each_once(LOSSES, [("qwen3", R1_AND_R2), ("gemma3", ONLINE)]))
def test_learning_lowers_the_loss_and_keeps_the_function(
    shape: str, scheme: RotationScheme, settings: dict[str, Any]
) -> None:
    model, of = tiny_model(**FURTHER[shape], dtype=torch.float64), recipe(scheme, **settings)
    found = learn(model, of)
    assert found.history[-1]["loss"] < 0.97 * found.history[0]["loss"]
    start = initial_rotations(architecture_of(model), scheme, 0).tensors()
    for name, matrix in found.rotations.tensors().items():
        assert orthonormality_error(matrix) <= 1e-12
        assert (matrix - start[name]).abs().max() >= 1e-3
    assert invariance_error(model, scheme, 0, SAMPLES, rotations=found.rotations) <= 1e-9


def test_the_loss_that_is_minimized_is_that_of_all_vectors() -> None:
    """Every rotation has less of its loss over all of its vectors, R2 by layers too, than where it started."""
    model, of = tiny_model(), recipe(loss="kurtosis", **CAYLEY)
    start = initial_rotations(architecture_of(model), of.rotation, 0)
    vectors = sampled_activations(model, of, start, SAMPLES, 0, torch.device("cpu"))
    learned = learn(model, of).rotations.tensors()
    for name, matrix in start.tensors().items():
        before, after = (kurtosis(vectors[name].double() @ one).mean() for one in (matrix, learned[name]))
        assert after < before


def test_steps_of_values_and_a_start_that_is_not_learned() -> None:
    model = tiny_model()
    of = recipe(steps=3, value_steps=0)
    start, found = initial_rotations(architecture_of(model), of.rotation, 0), learn(model, of)
    assert len(found.history) == 3
    assert (found.rotations.values[0] - start.values[0]).abs().max() <= 1e-6
    assert learn(model, recipe(steps=0, value_steps=0)).history == []


def test_the_principal_direction_becomes_one_offset_of_all_features() -> None:
    """A model whose embeddings share a direction: behind R1 it is a constant, which the mean over features takes."""
    model, of = tiny_model(), recipe(start="principal", steps=0, value_steps=0)
    with torch.no_grad():
        model.model.embed_tokens.weight += 3.0 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    architecture = architecture_of(model)
    drawn = initial_rotations(architecture, of.rotation, 0)
    vectors = sampled_activations(model, of, drawn, SAMPLES, 0, torch.device("cpu"))["residual"].double()
    share = {}
    for name, rotation in (("drawn", drawn), ("principal", learn(model, of).rotations)):
        y = vectors @ rotation.residual
        share[name] = (y.mean(dim=-1).square().sum() * y.shape[-1] / y.square().sum()).item()
    direction = torch.linalg.svd(vectors, full_matrices=False).Vh[0]
    largest = ((vectors @ direction).square().sum() / vectors.square().sum()).item()
    assert share["principal"] == pytest.approx(largest, rel=1e-6)
    assert share["drawn"] < 0.5 * largest


EIGENVECTORS: dict[str, Any] = {"start": "eigenvectors", "steps": 0, "value_steps": 0}


def of_outliers(scheme: RotationScheme = R1_AND_R2, share: float = 0.125, **settings: Any) -> Recipe:
    methods = {
        "rotation_calibration": RotationCalibration(**{**FAST, **EIGENVECTORS, **settings}),
        "outliers": OutlierFeatures(share=share, bits=8, statistic="square"),
    }
    return Recipe(rotation=scheme, methods=methods, activations=INPUTS, calibration=Calibration())


def test_the_largest_eigenvectors_come_last_and_each_part_is_turned_at_random() -> None:
    """Behind R1 the parts are uncorrelated, and the eighth has the sum of the largest eigenvalues, spread evenly."""
    model, of = tiny_model(), of_outliers()
    drawn = initial_rotations(architecture_of(model), of.rotation, 0)
    vectors = sampled_activations(model, of, drawn, SAMPLES, 0, torch.device("cpu"))["residual"].double()
    values = torch.linalg.eigvalsh(vectors.T @ vectors)
    found = learn(model, of).rotations
    moments = (vectors @ found.residual).T @ (vectors @ found.residual)
    largest = len(values) // 8
    assert moments[:-largest, -largest:].abs().max() <= 1e-4 * values[-1]  # matrices are learned in float32
    assert moments.diagonal()[-largest:].sum() == pytest.approx(values[-largest:].sum().item(), rel=1e-4)
    assert torch.linalg.eigvalsh(moments[-largest:, -largest:]) == pytest.approx(values[-largest:], rel=1e-3)
    assert moments.diagonal()[-largest:].max() < values[-1]  # no feature is an eigenvector
    other = learn(model, of, seed=1).rotations
    assert not torch.allclose(found.residual[:, -largest:], other.residual[:, -largest:], atol=0.1)
    assert found.values is not None
    assert drawn.values is not None
    assert torch.allclose(found.values[0], drawn.values[0], atol=1e-6)


def test_online_rotations_of_inputs_are_of_the_eigenvectors_of_their_own_inputs() -> None:
    scheme = RotationScheme(residual="none", inputs="orthogonal", values="none", heads=False, keys=False, mlp=False)
    model, of = tiny_model(), of_outliers(scheme)
    drawn = initial_rotations(architecture_of(model), of.rotation, 0)
    vectors = sampled_activations(model, of, drawn, SAMPLES, 0, torch.device("cpu"))["mlp_input.1"].double()
    y = vectors @ learn(model, of).rotations.inputs["mlp_input"][1]
    largest = torch.linalg.eigvalsh(vectors.T @ vectors)[-len(y[0]) // 8 :].sum()
    assert y[:, -len(y[0]) // 8 :].square().sum() == pytest.approx(largest.item(), rel=1e-4)


def test_how_many_outlier_features_there_are_decides_the_rotation() -> None:
    one, other = of_outliers(), of_outliers(share=0.25)
    assert one.learned() != other.learned()
    plain = {"outliers": OutlierFeatures(share=0.25, bits=8)}
    assert recipe().learned() == recipe().model_copy(update={"methods": {**recipe().methods, **plain}}).learned()


def test_weights_alone_need_no_text() -> None:
    assert not recipe(weights=1.0).reads_text
    assert recipe(weights=1.0, start="principal").reads_text
    assert recipe(weights=0.5).reads_text
    assert preset("optrot").own_texts == {}


def test_weights_count_in_the_unit_of_the_activations() -> None:
    model = tiny_model()
    first = {share: learn(model, recipe(weights=share, steps=1, value_steps=0)) for share in (0.0, 0.25, 0.75, 1.0)}
    losses = {share: found.history[0]["loss"] for share, found in first.items()}
    assert losses[0.25] == pytest.approx(losses[0.0], rel=1e-4)
    assert losses[0.75] == pytest.approx(losses[0.0], rel=1e-4)
    assert losses[1.0] == pytest.approx(1.0, rel=1e-5)


def test_every_vector_comes_once_before_any_comes_again() -> None:
    pool = calibration._Pool(torch.arange(12.0)[:, None], whip, 1.0, 5)
    turns = [torch.cat([pool.draw(step, 4) for step in range(3 * turn, 3 * turn + 3)]) for turn in range(2)]
    assert all(sorted(turn.flatten().tolist()) == list(range(12)) for turn in turns)
    assert not torch.equal(*turns)


def rounded(row: list[float]) -> list[float]:
    """A row on the grid of 4 bits that its largest value spans."""
    scale = max(map(abs, row)) / 7
    return [scale * max(-8, min(7, round(value / scale))) for value in row]


def test_a_step_of_procrustes_is_the_best_rotation_to_the_rounded_vectors() -> None:
    """The trace of R^T X^T Q is largest for U V^T, and every other rotation is farther; loss and step by lists."""
    model, of = tiny_model(), recipe(**PROCRUSTES, steps=1, value_steps=0, vectors=10_000)
    start = initial_rotations(architecture_of(model), of.rotation, 0)
    x = sampled_activations(model, of, start, SAMPLES, 0, torch.device("cpu"))["residual"].double()
    targets = torch.tensor([rounded(row) for row in (x.float() @ start.residual.float()).tolist()], dtype=torch.float64)
    found = learn(model, of)
    errors = (x @ start.residual - targets).square().sum(dim=-1)
    assert found.history[0]["loss"] == pytest.approx(errors.mean().item(), rel=1e-4)  # vectors are float32
    u, _, v = torch.linalg.svd(x.T @ targets)
    assert (found.rotations.residual - u @ v).abs().max() <= 1e-4
    best = (x @ found.rotations.residual - targets).square().sum()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        skew = 0.02 * torch.randn(len(u), len(u), dtype=torch.float64, generator=generator)
        other = found.rotations.residual @ torch.linalg.matrix_exp(skew - skew.T)
        assert (x @ other - targets).square().sum() > best


def test_massive_tokens_are_the_ones_that_a_grid_meets_unrotated() -> None:
    """Rows of one or two large values lose .3 % of their length; Gaussian ones with a peak of 6 sigma some 20 %."""
    scheme = QuantizationScheme(bits=4)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    x[:, 0] = 6.0
    x[[2, 4]] = 0.01
    x[2, 5] = -30.0
    x[4, [1, 9]] = 20.0
    found = emphasized(x, scheme, 100.0)
    for row, before, after in zip(range(6), x, found, strict=True):
        lost = sum((a - b) ** 2 for a, b in zip(before.tolist(), rounded(before.tolist()), strict=True))
        massive = (lost / sum(value**2 for value in before.tolist())) ** 0.5 < 8.5 / 64
        assert massive == (row in (2, 4))
        assert torch.equal(after, (100.0 if massive else 1.0) * before)
    assert torch.allclose(rounding(found, scheme)[[2, 4]], 1e4 * rounding(x, scheme)[[2, 4]], rtol=1e-4)


def test_massive_tokens_win_where_they_weigh_more() -> None:
    """With a factor, their error after learning is less than without one, and that of the others is more."""
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[SAMPLES[0, 0]] *= 0.01
        model.model.embed_tokens.weight[SAMPLES[0, 0], 3] = 50.0
    scheme, errors = QuantizationScheme(bits=4), {}
    for factor in (1.0, 100.0):
        of = recipe(**PROCRUSTES, massive=factor, vectors=10_000, value_steps=0)
        start = initial_rotations(architecture_of(model), of.rotation, 0)
        x = sampled_activations(model, of, start, SAMPLES, 0, torch.device("cpu"))["residual"]
        massive = emphasized(x, scheme, 100.0).norm(dim=-1) > 10 * x.norm(dim=-1)
        lost = rounding(x @ learn(model, of).rotations.residual.float(), scheme)
        errors[factor] = lost[massive].mean().item(), lost[~massive].mean().item()
    assert 0 < massive.sum() < len(massive)
    assert errors[100.0][0] < errors[1.0][0]
    assert errors[100.0][1] > errors[1.0][1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"massive": 2.0}, "for loss 'rounding'"),
        ({"parametrization": "procrustes"}, "for loss 'rounding'"),
        ({**PROCRUSTES, "weights": 0.5}, "knows no loss of weights"),
        (EIGENVECTORS, "and methods.outliers"),
        ({**EIGENVECTORS, "steps": 3}, "set steps to 0"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(**changes)


def test_rounding_is_of_whole_vectors() -> None:
    with pytest.raises(ValueError, match="of vectors without outlier features"):
        of_outliers(**{**PROCRUSTES, "start": "drawn", "steps": 3})


def test_rounding_needs_a_quantizer_of_inputs() -> None:
    settings = RotationCalibration(**PROCRUSTES)
    with pytest.raises(ValueError, match="needs an activations section"):
        Recipe(rotation=R1_AND_R2, methods={"rotation_calibration": settings})


@pytest.mark.parametrize("settings", [{}, CAYLEY, PROCRUSTES], ids=["qr", "cayley", "procrustes"])
def test_an_interrupted_learning_continues_with_the_same_result(settings: dict[str, Any], tmp_path: Path) -> None:
    model, of, file = tiny_model(), recipe(steps=7, value_steps=5, **settings), tmp_path / "checkpoint.safetensors"
    straight = learn(model, of)

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        learn(model, of, checkpoint=file, checkpoint_every=2, callback=stop)
    again = learn(model, of, checkpoint=file)
    assert straight.history == again.history
    for name, matrix in straight.rotations.tensors().items():
        assert torch.equal(matrix, again.rotations.tensors()[name])
    with pytest.raises(ResultError, match="belongs to another learning"):
        learn(model, of, seed=1, checkpoint=file)


def test_heads_that_share_a_value_head_add_to_its_gradient() -> None:
    """DartQuant's loss is a mean over tokens of a sum over all features of o_proj's input."""
    generator = torch.Generator().manual_seed(0)
    start = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    vectors, of = torch.randn(64, 8, generator=generator), recipe()
    one, four = (calibration._Learned(start, of, "values.0", vectors, None, 0, sharing) for sharing in (1, 4))
    for learned in (one, four):
        (part,) = learned._batch(0)
        learned._loss(part).backward()
    torch.testing.assert_close(four._parameter.grad, 4 * one._parameter.grad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, PROCRUSTES, {"massive": 10.0, **PROCRUSTES}], ids=["whip", "rounding", "massive"]
)
def test_where_vectors_lie_changes_no_bit_on_a_gpu(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, of, lay = tiny_model(), recipe(steps=5, value_steps=3, **settings), []
    near = calibration._near

    def seen(*arguments: Any) -> Any:
        found = [*near(*arguments)]
        lay.append({x.device.type for one in found for x in one.values()})
        return found

    monkeypatch.setattr(calibration, "_near", seen)
    there = learn(model, of, device="cuda").rotations.tensors()
    monkeypatch.setattr(calibration, "_ON_GPU", 0.0)
    host = learn(model, of, device="cuda").rotations.tensors()
    assert lay == [{"cuda"}, {"cpu"}]
    for name, matrix in there.items():
        assert torch.equal(matrix, host[name])
