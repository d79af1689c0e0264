"""Rotations are drawn as their scheme says, from one generator, and survive storage exactly."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.models.architectures import architecture_of
from rotquant.models.rotation.matrices import (
    Rotations,
    check_rotations,
    initial_rotations,
    load_history,
    load_rotations,
    save_rotations,
)
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors import hadamard
from rotquant.tensors.stiefel import orthonormality_error
from tests.helpers.models import tiny_model

ARCHITECTURE = architecture_of(tiny_model(num_layers=3))
KINDS = [
    (residual, values)
    for residual in ("none", "hadamard", "orthogonal")
    for values in ("none", "hadamard", "random_hadamard", "orthogonal")
]


def draw(residual: str, values: str, seed: int = 0) -> Rotations:
    return initial_rotations(ARCHITECTURE, RotationScheme(residual=residual, values=values), seed)


@pytest.mark.parametrize(("residual", "values"), KINDS)
def test_every_kind_is_orthogonal_and_of_the_models_sizes(residual: str, values: str) -> None:
    rotations = draw(residual, values)
    assert (rotations.residual is None) == (residual == "none")
    assert (rotations.values is None) == (values == "none")
    sizes = [64] * (residual != "none") + [16] * 3 * (values != "none")
    for size, matrix in zip(sizes, rotations.tensors().values(), strict=True):
        assert matrix.dtype == torch.float64
        assert matrix.shape == (size, size)
        assert orthonormality_error(matrix) <= 1e-12


@pytest.mark.parametrize(("residual", "values"), KINDS)
def test_the_seed_decides(residual: str, values: str) -> None:
    first, again, other = (draw(residual, values, seed).tensors() for seed in (1, 1, 2))
    for name, matrix in first.items():
        assert torch.equal(matrix, again[name])
        drawn = name == "residual" or values != "hadamard"
        assert torch.equal(matrix, other[name]) != drawn


@pytest.mark.parametrize("residual", ["hadamard", "orthogonal"])
def test_r1_is_drawn_first_so_that_r2_does_not_change_it(residual: str) -> None:
    expected = draw(residual, "none").residual
    assert all(torch.equal(draw(residual, values).residual, expected) for _, values in KINDS)


def test_hadamard_values_are_exact_and_the_same_in_all_layers_and_drawn_ones_differ() -> None:
    exact = draw("none", "hadamard").values
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for matrix in exact:
        assert torch.allclose(x @ matrix, hadamard.hadamard_transform(x), atol=1e-12)
    for values in ("random_hadamard", "orthogonal"):
        first, second, third = draw("none", values).values
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


def test_drawing_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    draw("orthogonal", "orthogonal")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("residual", "values"), KINDS)
def test_storage_is_exact(residual: str, values: str, tmp_path: Path) -> None:
    rotations, history = draw(residual, values), [{"step": 0, "loss": 2.5, "site_snr": {"0.mlp_input": 18.25}}]
    save_rotations(tmp_path / "rotations.safetensors", rotations, history)
    loaded = load_rotations(tmp_path / "rotations.safetensors").tensors()
    assert list(loaded) == list(rotations.tensors())
    assert all(torch.equal(loaded[name], matrix) for name, matrix in rotations.tensors().items())
    assert load_history(tmp_path / "rotations.safetensors") == history


def test_online_rotations_of_inputs_are_drawn_for_each_layer_and_site_and_stored(tmp_path: Path) -> None:
    scheme = RotationScheme(residual="none", inputs="random_hadamard", values="random_hadamard")
    rotations = initial_rotations(ARCHITECTURE, scheme, seed=1)
    matrices = [matrix for site in ("attention_input", "mlp_input") for matrix in rotations.inputs[site]]
    assert len(matrices) == 2 * ARCHITECTURE.num_layers
    assert all(orthonormality_error(matrix) <= 1e-12 for matrix in matrices)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(matrices, 2))
    check_rotations(ARCHITECTURE, scheme, rotations)
    save_rotations(tmp_path / "rotations.safetensors", rotations, [])
    loaded = load_rotations(tmp_path / "rotations.safetensors")
    assert loaded.tensors().keys() == rotations.tensors().keys()
    assert all(torch.equal(matrix, loaded.tensors()[name]) for name, matrix in rotations.tensors().items())
    fewer = replace(rotations, inputs={"attention_input": rotations.inputs["attention_input"]})
    with pytest.raises(RecipeError, match=r"3 of attention_input, 3 of mlp_input, and got .* 3 of attention_input\."):
        check_rotations(ARCHITECTURE, scheme, fewer)


def test_what_is_not_a_file_of_rotations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rotations.safetensors"
    with pytest.raises(ResultError, match="do not exist"):
        load_rotations(path)
    save_rotations(path, draw("hadamard", "none"), [])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ResultError, match="damaged"):
        load_rotations(path)
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ResultError, match="holds no rotations"):
        load_rotations(tmp_path / "model" / "model.safetensors")
