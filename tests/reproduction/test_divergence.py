"""KL divergence from the full-precision model: against log_softmax in float64, of one pass, and of none from itself."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from reproduction.identity.run import Run
from reproduction.run.stages import runs as stage
from rotquant.foundation.errors import CheckpointError
from rotquant.metrics import divergence as kept
from rotquant.metrics.divergence import divergence, float_states
from rotquant.metrics.perplexity import perplexity
from rotquant.models.limits import metric_windows
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import save_quantized
from tests.helpers.models import tiny_model

TWENTY = Perplexity(sequence_length=20)


def noisy(model: torch.nn.Module, size: float) -> torch.nn.Module:
    """A network that is near another."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return other


@pytest.fixture
def model() -> Any:
    return tiny_model(dtype=torch.float32).eval()


@pytest.fixture
def text(model: Any) -> Tokens:
    return Tokens(torch.randint(3, model.config.vocab_size, (207,), generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_the_divergence_is_that_of_float64_softmaxes(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = 5 * torch.randn(50, 300, generator=generator)
    other = exact + spread * torch.randn(50, 300, generator=generator)
    logs = [logits.double().log_softmax(-1) for logits in (exact, other)]
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    found, flips = divergence(exact.clone(), other.log_softmax(-1))
    # A float32 logarithm of a probability is off by some 1e-6 (they reach -100), and so is their mean under p.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(flips, exact.argmax(-1) != other.argmax(-1))
    assert (expected >= 0).all()


def test_each_window_has_its_mean_over_the_positions_that_the_loss_is_of(model: Any, text: Tokens) -> None:
    """The slow way: both networks' logits of each window alone, in float64; the batch does not matter."""
    other, windows = noisy(model, 0.02), metric_windows(model, text, TWENTY)
    exact = float_states(model, windows, 3)
    plain = perplexity(other, text, TWENTY)
    for batch_size in (1, 4, 100):
        found = perplexity(other, text, TWENTY, batch_size=batch_size, exact=exact)
        for place, window in enumerate(windows):
            with torch.no_grad():
                mine, theirs = (net(input_ids=window[None]).logits[0, :-1].double() for net in (other, model))
            expected = kl_div(mine.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none").sum(-1)
            assert found.kl[place] == pytest.approx(expected.mean().item(), rel=1e-3)
            flips = (mine.argmax(-1) != theirs.argmax(-1)).double().mean().item()
            assert found.flips[place] == pytest.approx(flips, abs=1 / 19 + 1e-9)  # of two near tokens either is first
        assert found.nll == pytest.approx(plain.nll, rel=1e-6)
        metrics = found.as_metrics()
        assert metrics["kl"] == pytest.approx(sum(found.kl) / len(found.kl))
        assert sorted(found.kl)[0] <= metrics["kl_median"] <= sorted(found.kl)[-1]
    assert "kl" not in plain.as_metrics()


def test_a_rotation_would_change_nothing_and_more_noise_more(model: Any, text: Tokens) -> None:
    exact = float_states(model, metric_windows(model, text, TWENTY), 8)
    sizes = [perplexity(noisy(model, size), text, TWENTY, exact=exact).as_metrics()["kl"] for size in (0.0, 0.01, 0.05)]
    assert abs(sizes[0]) < 1e-6 < sizes[1] < sizes[2]


def test_a_broken_network_has_no_finite_divergence(model: Any, text: Tokens) -> None:
    exact = float_states(model, metric_windows(model, text, TWENTY), 8)
    broken = noisy(model, math.nan)
    found = perplexity(broken, text, TWENTY, exact=exact).as_metrics()
    assert math.isnan(found["kl"])
    assert math.isnan(found["kl_median"])
    assert math.isnan(found["flips"])


def test_states_of_other_tokens_are_refused(model: Any, text: Tokens) -> None:
    exact = float_states(model, metric_windows(model, text, TWENTY).flip(1), 8)
    with pytest.raises(CheckpointError, match="read other tokens"):
        perplexity(model, text, TWENTY, exact=exact)


def test_a_process_runs_the_full_precision_model_once_for_all_runs_on_a_text(
    model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew for other windows or another device's arithmetic; never for a run that is not quantized."""
    loaded: list[str] = []
    monkeypatch.setattr(kept, "_STATES", {})
    monkeypatch.setattr(stage, "token_ids", lambda *_: (text, {}))

    def load() -> Any:
        loaded.append("model")
        return model, None

    def run(recipe: dict[str, Any], **metric: Any) -> Run:
        corpora = {"text": {"name": "text", "source": "local", "path": "text"}}
        asked = {"kind": "perplexity", "corpus": "text", "sequence_length": 20, **metric}
        return Run.model_validate(
            {"checkpoint": "m", "checkpoint_digest": "0", "recipe": recipe, "metric": asked, "corpora": corpora}
        )

    plain, first = run({}), run({"keys": {"bits": 4, "granularity": "group", "group_size": 4}})
    second = run({"keys": {"bits": 3, "granularity": "group", "group_size": 4}})
    assert stage._full_precision([plain], load, None, "cpu", 8) == {}
    assert not loaded
    found = stage._full_precision([first, plain, second], load, None, "cpu", 8)
    assert set(found) == {first.key, second.key}
    assert found[first.key] is found[second.key]
    again = stage._full_precision([second], load, None, "cpu", 8)
    assert again[second.key] is found[second.key]
    assert loaded == ["model"]
    shorter = run({"keys": {"bits": 4, "granularity": "group", "group_size": 4}}, max_windows=2)
    assert len(stage._full_precision([shorter], load, None, "cpu", 8)[shorter.key].states) == 2
    stage._full_precision([first], load, None, "cuda", 8)
    assert loaded == ["model"] * 3


@pytest.mark.parametrize("rotated", [False, True])
def test_with_a_prefix_the_reference_is_full_precision_with_the_same_prefix(
    rotated: bool, model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a quantizer nothing is lost, though the prefix alone moves every prediction."""
    monkeypatch.setattr(kept, "_STATES", {})
    monkeypatch.setattr(stage, "token_ids", lambda *_: (text, {}))
    recipe = {"methods": {"prefixed_outliers": {"ids": (5, 9)}}, "rotation": {} if rotated else None}
    recipe |= {"calibration": {"corpus": "text", "samples": 1, "sequence_length": 8}}
    of = Run.model_validate(
        {
            "checkpoint": "m",
            "checkpoint_digest": "0",
            "recipe": recipe,
            "metric": {"kind": "perplexity", "corpus": "text", "sequence_length": 20},
            "corpora": {"text": {"name": "text", "source": "local", "path": "text"}},
        }
    )
    stored = build_weights(copy.deepcopy(model), None, of.recipe, 0, text.ids[None, :8], progress=False)
    save_quantized(tmp_path / "weights", stored)
    exact = stage._full_precision([of], lambda: (model, None), tmp_path / "weights", "cpu", 8)[of.key]
    with quantized_forward(stored.model, of.recipe, stored.state):
        with_prefix = perplexity(stored.model, text, TWENTY, exact=exact).as_metrics()["kl"]
        plain = float_states(model, exact.windows, 8)
        moved = perplexity(stored.model, text, TWENTY, exact=plain).as_metrics()["kl"]
    # float32's arithmetic in another basis moves logits by some 1e-5, and KL goes with its square.
    assert abs(with_prefix) < 1e-5 < 1e-3 < moved


def test_what_a_process_keeps_is_bounded(model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is full is emptied; what is larger than all of it is kept alone."""
    one = float_states(model, metric_windows(model, text, TWENTY), 8)
    assert one.nbytes == one.windows.nbytes + one.states.nbytes + model.lm_head.weight.nbytes
    monkeypatch.setattr(kept, "_STATES", {})
    monkeypatch.setattr(kept, "_STATES_BYTES", 2 * one.nbytes)
    for name in "abc":
        kept.keep_states(name, one)
    assert list(kept._STATES) == ["c"]
    monkeypatch.setattr(kept, "_STATES_BYTES", 1)
    kept.keep_states("d", one)
    assert list(kept._STATES) == ["d"]
