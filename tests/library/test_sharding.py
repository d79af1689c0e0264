"""A model too large for one GPU is spread over several, layer by layer, and comes back."""

import pytest
import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models import placement as sharding
from rotquant.models.memory import size_in_bytes
from rotquant.models.placement import device_map, placed
from tests.helpers.models import tiny_model, tiny_tokens


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_layers_stay_whole_and_in_order(tied: bool) -> None:
    model = tiny_model(num_layers=6, tied=tied)
    places = device_map(model, {0: size_in_bytes(model) * 2 // 3, 1: size_in_bytes(model)})
    layers = [places[f"model.layers.{index}"] for index in range(6)]
    assert set(layers) == {0, 1}
    assert layers == sorted(layers)
    assert places["model.embed_tokens"] == 0
    assert places["lm_head"] == (0 if tied else 1)


def test_a_model_larger_than_all_gpus_is_one_sentence() -> None:
    model = tiny_model(num_layers=6)
    with pytest.raises(RecipeError, match="2 GPUs have 0 GiB for them"):
        device_map(model, {0: size_in_bytes(model) // 4, 1: size_in_bytes(model) // 4})


def test_on_the_cpu_a_model_stays_as_it_is() -> None:
    model = tiny_model()
    expected = model(tiny_tokens()).logits
    with placed(model, "cpu"):
        assert torch.equal(model(tiny_tokens()).logits, expected)
    assert not hasattr(model, "_hf_hook")


def function_of(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a model wherever it lies, and the gradient of their squares by every parameter, on the host."""
    model.zero_grad()
    logits = model(tiny_tokens().to(model.get_input_embeddings().weight.device)).logits
    logits.square().sum().backward()
    return logits.detach().cpu(), {name: one.grad.cpu() for name, one in model.named_parameters()}


@pytest.mark.gpu
def test_spread_over_two_gpus_a_model_has_the_same_function_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held beside one GPU, not the CPU: norms compute in float32 whatever the model, and round otherwise there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    model = tiny_model(num_layers=6, dtype=torch.float64)
    with placed(model, "cuda:0"):
        expected, gradients = function_of(model)
    size = size_in_bytes(model)  # of which a share is for weights
    monkeypatch.setattr(sharding, "_free_memory", lambda: {0: size, 1: size})
    with placed(model, "cuda"):
        assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
        logits, found = function_of(model)
    # Equal kernels on equal GPUs; float64 leaves room for another order of summation.
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
