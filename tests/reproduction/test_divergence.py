"""KL divergence from the full-precision model: against log_softmax in float64, of one pass, and of none from itself."""

import copy
import math
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from reproduction.identity.run import Run
from reproduction.run.stages import runs as stage
from reproduction.run.stages import states
from rotquant.foundation.errors import CheckpointError
from rotquant.metrics.divergence import FloatStates, divergence, float_states
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


def run_of(recipe: dict[str, Any], **metric: Any) -> Run:
    """A run of perplexity on a text."""
    corpora = {"text": {"name": "text", "source": "local", "path": "text"}}
    asked = {"kind": "perplexity", "corpus": "text", "sequence_length": 20, **metric}
    return Run.model_validate(
        {"checkpoint": "m", "checkpoint_digest": "0", "recipe": recipe, "metric": asked, "corpora": corpora}
    )


def test_jobs_with_a_folder_run_the_full_precision_model_once_for_all_runs_on_a_text(
    model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And anew for other windows, batches or another device's arithmetic; never for a run that is not quantized."""
    loaded: list[str] = []
    monkeypatch.setattr(stage, "token_ids", lambda *_: (text, {}))

    def load() -> Any:
        loaded.append("model")
        return model, None

    def found(run: Run, device: str = "cpu", batch_size: int = 8) -> FloatStates:
        made = stage._full_precision(run, load, None, device, batch_size)
        assert made is not None
        return made

    four, three = ({"keys": {"bits": bits, "granularity": "group", "group_size": 4}} for bits in (4, 3))
    assert stage._full_precision(run_of({}), load, None, "cpu", 8) is None
    assert not loaded
    monkeypatch.delenv(states.VARIABLE, raising=False)
    alone = found(run_of(four))
    found(run_of(four))
    assert loaded == ["model"] * 2
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    loaded.clear()
    for again in (found(run_of(four)), found(run_of(three)), found(run_of(four))):
        assert torch.equal(again.states, alone.states)
        assert torch.equal(again.windows, alone.windows)
        assert torch.equal(again.head(again.states), alone.head(alone.states))
    assert loaded == ["model"]
    assert len(found(run_of(four, max_windows=2)).states) == 2
    found(run_of(four), batch_size=4)
    stage._full_precision(run_of(four), load, None, "cuda", 8)
    assert loaded == ["model"] * 4


@pytest.mark.parametrize("rotated", [False, True])
def test_with_a_prefix_the_reference_is_full_precision_with_the_same_prefix(
    rotated: bool, model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a quantizer nothing is lost, though the prefix alone moves every prediction."""
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    monkeypatch.setattr(stage, "token_ids", lambda *_: (text, {}))
    recipe = {"methods": {"prefixed_outliers": {"ids": (5, 9)}}, "rotation": {} if rotated else None}
    recipe |= {"calibration": {"corpus": "text", "samples": 1, "sequence_length": 8}}
    of = run_of(recipe)
    stored = build_weights(copy.deepcopy(model), None, of.recipe, 0, text.ids[None, :8], progress=False)
    save_quantized(tmp_path / "weights", stored)
    stage._full_precision(run_of({**recipe, "methods": {}}), lambda: (model, None), None, "cpu", 8)  # is no such states
    exact = stage._full_precision(of, lambda: (model, None), tmp_path / "weights", "cpu", 8)
    with quantized_forward(stored.model, of.recipe, stored.state):
        with_prefix = perplexity(stored.model, text, TWENTY, exact=exact).as_metrics()["kl"]
        plain = float_states(model, exact.windows, 8)
        moved = perplexity(stored.model, text, TWENTY, exact=plain).as_metrics()["kl"]
    # float32's arithmetic in another basis moves logits by some 1e-5, and KL goes with its square.
    assert abs(with_prefix) < 1e-5 < 1e-3 < moved


@pytest.mark.parametrize("cap", [None, 0.37])
def test_kept_states_come_back_to_the_last_bit_with_the_head_that_makes_logits_of_them(
    cap: float | None, model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    model.config.final_logit_softcapping = cap
    one = float_states(model, metric_windows(model, text, TWENTY), 8)
    assert states.read("one") is None
    states.keep("one", one, model)
    again = states.read("one")
    assert again is not None
    assert torch.equal(again.states, one.states)
    assert torch.equal(again.windows, one.windows)
    logits = one.head(one.states)
    assert torch.equal(again.head(again.states), logits)
    assert cap is None or logits.abs().max() <= cap < model.lm_head(one.states).abs().max()


def test_what_is_kept_is_bounded_and_a_folder_that_cannot_be_written_costs_only_time(
    model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = float_states(model, metric_windows(model, text, TWENTY), 8)
    assert one.nbytes == one.windows.nbytes + one.states.nbytes + model.lm_head.weight.nbytes
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    monkeypatch.setattr(states, "MOST", 2 * one.nbytes)
    for name in "abc":
        states.keep(name, one, model)
    assert [states.read(name) is not None for name in "abc"] == [True, False, False]  # files have a head each
    monkeypatch.setenv(states.VARIABLE, str(tmp_path / "gone"))
    states.keep("a", one, model)
    assert states.read("a") is None


@pytest.mark.parametrize(("most", "computed"), [(2**32, 1), (0, 4)])
def test_of_jobs_that_begin_together_one_computes_what_there_is_room_for(
    most: int, computed: int, model: Any, text: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    monkeypatch.setattr(states, "MOST", most)
    one = float_states(model, metric_windows(model, text, TWENTY), 8)
    found, begun = [], Barrier(4)

    def job() -> None:
        begun.wait()
        with states.computed_once("one"):
            if states.read("one") is None:
                found.append(1)
                states.keep("one", one, model)

    jobs = [Thread(target=job) for _ in range(4)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join(60)
    assert not any(thread.is_alive() for thread in jobs)
    assert len(found) == computed


def test_jobs_wait_for_nothing_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    states._without_room(tmp_path / "one").touch()
    with states.computed_once("one"), states.computed_once("one"):  # the second would wait for the first
        pass
