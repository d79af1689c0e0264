"""Streaming layer by layer: the numbers of the whole model at once, whatever the batch, and nothing left behind."""

import pytest
import torch

from rotquant.models.architectures import architecture_of, base_model, decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.schemes import RotationScheme
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens

#: float32 sums in another order (micro-batches); activations of the tiny models are of order 1 to 10.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def inputs_of_all_sites(model: torch.nn.Module, samples: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """What every site's first linear layer reads in an ordinary forward pass."""
    seen, hooks = {}, []
    for index, layer in enumerate(decoder_layers(model)):
        for site in architecture_of(model).sites:

            def remember(_module: object, inputs: tuple, key: tuple[int, str] = (index, site.name)) -> None:
                seen[key] = inputs[0]

            hooks.append(layer.get_submodule(site.linears[0]).register_forward_pre_hook(remember))
    with torch.no_grad():
        model(samples, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_fed_what_an_ordinary_forward_pass_gives_it(family: str) -> None:
    model, samples = tiny_model(family), tiny_tokens(batch=5, tokens=12)
    expected = inputs_of_all_sites(model, samples)
    stream = capture_layer_inputs(model, samples, batch_size=2)
    for index, _layer in stream.layers("test"):
        for site in stream.architecture.sites:
            parts: list[torch.Tensor] = []
            stream.feed(index, site, parts.append)
            torch.testing.assert_close(torch.cat(parts), expected[index, site.name], **TOLERANCE)
        stream.advance(index)
    last_hidden = base_model(model).norm(stream.hidden)
    with torch.no_grad():
        torch.testing.assert_close(last_hidden, base_model(model)(samples).last_hidden_state, **TOLERANCE)


def test_sliding_windows_keep_their_mask() -> None:
    model = tiny_model("mistral", sliding_window=4)
    samples = tiny_tokens(batch=3, tokens=16)
    stream = capture_layer_inputs(model, samples, batch_size=2)
    for index, _ in stream.layers("test"):
        stream.advance(index)
    with torch.no_grad():
        expected = base_model(model)(samples).last_hidden_state
        full = tiny_model("mistral", sliding_window=None)
        assert not torch.allclose(base_model(full)(samples).last_hidden_state, expected, **TOLERANCE)
    torch.testing.assert_close(base_model(model).norm(stream.hidden), expected, **TOLERANCE)


@pytest.mark.parametrize("remember", [True, False])
def test_later_sites_see_weights_that_were_changed_at_earlier_ones(
    remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not remember:
        monkeypatch.setattr("rotquant.models.stream.RECORD_BYTES", {"cpu": 0, "cuda": 0})
    model, samples = tiny_model(), tiny_tokens(batch=3, tokens=10)
    stream = capture_layer_inputs(model, samples, batch_size=2)
    fed: dict[tuple[int, str], torch.Tensor] = {}
    with torch.no_grad():
        for index, layer in stream.layers("test"):
            for site in stream.architecture.sites:
                parts: list[torch.Tensor] = []
                stream.feed(index, site, parts.append)
                fed[index, site.name] = torch.cat(parts)
                for name in site.linears:
                    layer.get_submodule(name).weight.mul_(0.9)
            stream.advance(index)
    # the changed model as a whole gives every site what the stream gave it: nothing that came later matters to it
    expected = inputs_of_all_sites(model, samples)
    for key, value in fed.items():
        torch.testing.assert_close(value, expected[key], **TOLERANCE)


def test_online_transforms_act_before_a_site_is_seen() -> None:
    model, samples, scheme = tiny_model(), tiny_tokens(batch=2, tokens=8), RotationScheme()
    rotate(model, scheme, seed=0)
    with wrap(model, RuntimeQuantization(transforms=scheme.transforms)):
        expected = inputs_of_all_sites(model, samples)
        stream = capture_layer_inputs(model, samples)
        parts: list[torch.Tensor] = []
        for index, _ in stream.layers("test"):
            stream.feed(index, stream.architecture.site("mlp_output"), parts.append)
            stream.advance(index)
    torch.testing.assert_close(parts[1], expected[1, "mlp_output"], **TOLERANCE)


def test_the_model_is_left_as_it_was() -> None:
    model, samples = tiny_model(), tiny_tokens(batch=2, tokens=8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    stream = capture_layer_inputs(model, samples)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("interrupted")

    for site in stream.architecture.sites:
        stream.feed(0, site, lambda _: None)
    with pytest.raises(RuntimeError, match="interrupted"):
        stream.feed(0, stream.architecture.sites[3], fail)
    assert dict(model.named_modules()) == modules
    assert all("forward" not in vars(module) for module in modules.values())
    assert all(not module._forward_pre_hooks for module in modules.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
