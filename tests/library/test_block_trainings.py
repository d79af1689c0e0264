"""Trainings of one decoder block after the other continue where they were killed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.training.state import Checkpoint
from rotquant.weights.build import build_weights
from rotquant.weights.storage import StoredModel
from tests.helpers.cases import only
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.interrupting import Interrupted, MortalCheckpoint
from tests.helpers.models import tiny_model, tiny_tokens

STEPS = 4
SAMPLES = tiny_tokens(batch=4, tokens=24)
METHODS = {
    "flatquant": ("flatquant", {"flatquant": {"steps": STEPS, "batch_size": 2}}),
    "let": ("omniquant", {"omniquant": {"steps": STEPS, "batch_size": 2}}),
    "lwc": ("duquant-lwc", {"lwc": {"steps": STEPS, "batch_size": 2}}),
}


def build(method: str, **options: Any) -> StoredModel:
    name, settings = METHODS[method]
    of = override(preset(name), {"methods": settings}, "test")
    return build_weights(tiny_model(), tiny_tokenizer(), of, 0, SAMPLES, progress=False, **options)


@pytest.fixture(scope="module")
def whole() -> dict[str, StoredModel]:
    return {method: build(method) for method in METHODS}


# In the first block, after its last step, in the second block.
@pytest.mark.parametrize("lives", only([11], [3, 7, 11]))
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_training_continues_with_the_same_bits(
    whole: dict[str, StoredModel], method: str, lives: int, tmp_path: Path
) -> None:
    about = tmp_path / "file", "this", 1
    with pytest.raises(Interrupted):
        build(method, checkpoint=MortalCheckpoint(*about, lives=iter(range(lives))))
    again = build(method, checkpoint=Checkpoint(*about))
    for name, weight in whole[method].weights.items():
        assert torch.equal(weight.dequantize(torch.float64), again.weights[name].dequantize(torch.float64))
    torch.testing.assert_close(again.state.tensors, whole[method].state.tensors, rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.block-0", "file.block-1"]
