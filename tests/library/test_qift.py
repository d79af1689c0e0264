"""Two-bit weights on a grid without zero: levels, scales, feedback of errors, storage."""

from pathlib import Path

import pytest
import torch

from rotquant.foundation.errors import RecipeError
from rotquant.methods.qift import Qift, qift
from rotquant.methods.qift.zero_free_grid import LEVELS, _quantize, search_scales
from rotquant.models.architectures import architecture_of
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.codebook import CodebookWeight
from rotquant.weights.bits import bits_per_weight
from rotquant.weights.build import build_weights
from rotquant.weights.error_feedback import error_spread
from rotquant.weights.storage import StoredModel, load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=8, tokens=24)


def small(**settings: object) -> Recipe:
    changes = {"weights": {"scheme": {"group_size": 16}}, "methods": {"qift": settings}}
    return override(qift(), changes, "test")


def build(recipe: Recipe, dtype: torch.dtype = torch.float32) -> StoredModel:
    return build_weights(tiny_model(dtype=dtype), tiny_tokenizer(), recipe, 0, SAMPLES, progress=False)


def weights_of(stored: StoredModel) -> dict[str, CodebookWeight]:
    return {name: weight for name, weight in stored.weights.items() if isinstance(weight, CodebookWeight)}


def test_the_scale_has_the_least_error_of_all_shares() -> None:
    block = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = Qift(smallest=0.4, shares=7)
    found = search_scales(block, settings)
    for row, scale in zip(block.T, found, strict=True):
        errors = {}
        for step in range(7):
            share = (1 - 0.1 * step) * row.abs().max().item() / 1.5
            distances = (row[:, None] - share * torch.tensor(LEVELS, dtype=torch.float64)).abs()
            errors[share] = distances.amin(dim=-1).square().sum().item()
        assert scale.item() == pytest.approx(min(errors, key=lambda share: errors[share]), rel=1e-6)


def test_levels_are_symmetric_and_never_zero() -> None:
    for weight in weights_of(build(small())).values():
        ends = weight.levels[..., -1]
        assert torch.equal(weight.levels[..., 0], -ends)
        assert (ends > 0).all()
        inner = weight.levels[..., 2] / ends
        assert inner.float() == pytest.approx(torch.full_like(inner, 1 / 3).float(), rel=2e-3)  # float16
        assert weight.codes.max() <= 3


def test_nearest_has_less_error_of_weights_and_feedback_less_of_outputs() -> None:
    """On inputs of few directions feedback moves errors to where no input shows them."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64, dtype=torch.float64)
    x = torch.randn(400, 8, dtype=torch.float64) @ torch.randn(8, 64, dtype=torch.float64)
    x += 0.05 * torch.randn(400, 64, dtype=torch.float64)
    spread = error_spread(x.T @ x, 0.01)
    errors = {}
    for rounding in ("gptq", "nearest"):
        found = _quantize(weight, spread, 16, Qift(rounding=rounding)).dequantize(torch.float64)
        errors[rounding] = ((found - weight).square().sum().item(), ((found - weight) @ x.T).square().sum().item())
    assert errors["nearest"][0] < errors["gptq"][0]
    assert errors["gptq"][1] < 0.7 * errors["nearest"][1]


def test_a_stored_model_comes_back_with_equal_codes(tmp_path: Path) -> None:
    stored = build(small())
    save_quantized(tmp_path / "model", stored)
    again, _, _ = load_quantized(tmp_path / "model", "cpu", torch.float32)
    before = stored.model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    # 2 bits, and for 16 weights two ends of 16 bits
    bits = bits_per_weight(stored.manifest.recipe, architecture_of(stored.model), stored.manifest.quantized)
    assert bits["total"] == pytest.approx(4.0)


def test_groups_that_do_not_divide_a_width_are_refused() -> None:
    with pytest.raises(RecipeError, match="groups of 10 do not divide the 64 features of"):
        build(override(small(), {"weights": {"scheme": {"group_size": 10}}}, "test"))


@pytest.mark.parametrize(
    "scheme", [{"bits": 3}, {"symmetric": False}, {"granularity": "tensor", "group_size": None}], ids=str
)
def test_other_weights_are_refused(scheme: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="qift takes symmetric weights of 2 bits"):
        override(qift(), {"weights": {"scheme": scheme}}, "test")
