"""The training loop: a training that dies anywhere ends in the bits of one that does not, and says what went wrong."""

import itertools
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rotquant.foundation.errors import ResultError, RotquantError
from rotquant.tensors.faster import FasterKernels
from rotquant.training import state as state_file
from rotquant.training.loop import GradientStep, recomputed, shuffled_batches, train
from rotquant.training.state import Checkpoint
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.processes import run_elsewhere
from tests.helpers.toy import OPTIMIZERS, STEPS, Toy
from tests.helpers.watching import Clock, long_work


class Killed(Exception):  # noqa: N818 - not an error of ours
    """Stands for the end of the process."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, toy: Toy, place: str, step: int) -> Iterator[None]:
    """A block in which a training dies at a place of a step."""

    def die(at: str, now: int) -> None:
        if (at, now) == (place, step):
            raise Killed

    toy.die = die
    save = state_file.save_file

    def dying_save(tensors: Any, path: Path, metadata: Any) -> None:
        save(tensors, path, metadata=metadata)
        die("before the checkpoint is in its place", toy.now)

    with monkeypatch.context() as patch:
        patch.setattr(state_file, "save_file", dying_save)
        yield


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "place", ["between parts", "after the step", "before the checkpoint is in its place", "listening"]
)
def test_a_training_killed_at_any_step_ends_in_the_same_bits(
    optimizer: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Toy(optimizer)
    history = straight.train()
    assert len(history) == STEPS
    for step in range(STEPS):
        path, killed, resumed = tmp_path / f"{step}", Toy(optimizer), Toy(optimizer)
        if place.startswith("before") and (step + 1) % 2 and step + 1 < STEPS:
            continue  # no checkpoint is written there
        with dying(monkeypatch, killed, place, step), pytest.raises(Killed):
            killed.train(path)
        assert resumed.train(path) == history
        assert resumed.same(straight)


def test_a_training_that_dies_at_every_step_gets_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = Toy("AdamW")
    history = straight.train()
    for step in (2, 3, 5):
        toy = Toy("AdamW")
        with dying(monkeypatch, toy, "after the step", step), pytest.raises(Killed):
            toy.train(tmp_path / "file")
    last = Toy("AdamW")
    assert last.train(tmp_path / "file") == history
    assert last.same(straight)


def killed_training(optimizer: str, file: Path, step: int) -> None:
    """Train in this process, which is killed after a step."""
    toy = Toy(optimizer)
    toy.die = lambda *now: os.kill(os.getpid(), signal.SIGKILL) if now == ("after the step", step) else None
    toy.train(file)


@pytest.mark.unflipped
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_process_that_is_killed_is_continued_by_another(optimizer: str, tmp_path: Path) -> None:
    straight, resumed = Toy(optimizer), Toy(optimizer)
    history = straight.train()
    assert run_elsewhere(killed_training, optimizer, tmp_path / "file", 5) == -signal.SIGKILL
    assert resumed.train(tmp_path / "file") == history
    assert resumed.same(straight)


def test_a_finished_training_is_restored_without_a_step(tmp_path: Path) -> None:
    first, again = Toy("Cayley"), Toy("Cayley")
    history = first.train(tmp_path / "file")
    again.step = lambda step: pytest.fail(f"step {step} was taken")  # type: ignore[method-assign]
    assert again.train(tmp_path / "file") == history
    assert again.same(first)


def test_blocks_that_are_tuned_one_after_the_other_continue_at_the_one_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed, resumed = ([Toy("AdamW") for _ in range(3)] for _ in range(3))
    histories = [block.train() for block in straight]
    killed[0].train(tmp_path / "0")
    with dying(monkeypatch, killed[1], "after the step", 4), pytest.raises(Killed):
        killed[1].train(tmp_path / "1")
    steps: list[tuple[int, int]] = []
    for index, block in enumerate(resumed):
        block.die = lambda place, step, index=index: steps.append((index, step)) if place == "listening" else None
        assert block.train(tmp_path / f"{index}") == histories[index]
        assert block.same(straight[index])
    assert steps == [(1, 4), (1, 5), (1, 6), *((2, step) for step in range(STEPS))]


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Toy("AdamW").train(path)
    with pytest.raises(ResultError, match="file belongs to another learning; delete it"):
        Toy("AdamW").train(path, identity="another")
    with pytest.raises(ResultError, match="belongs to another learning"):
        Checkpoint(path, "this").load({"another part": torch.zeros(2)})
    save_file({"weight": torch.zeros(2)}, path, metadata={"identity": "this"})
    with pytest.raises(ResultError, match="belongs to another learning"):
        Toy("AdamW").train(path)


def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Toy("AdamW").train(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "weight": tensors["weight"] * math.nan}, path, metadata=metadata)
    with pytest.raises(ResultError, match=r"is damaged \(tensor weight holds inf or nan\); delete it"):
        Toy("AdamW").train(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ResultError, match="is damaged"):
        Toy("AdamW").train(path)


def test_any_nested_state_comes_back_as_it_was(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    state = {
        0: {"a": weight.T, "tied": weight, "none": None},
        "list": [1, 2.5, (True, "text", torch.tensor(7))],
        "d": {},
    }

    class Anything:
        restored: Any = None

        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, found: dict[str, Any]) -> None:
            self.restored = found

    part, checkpoint = Anything(), Checkpoint(tmp_path / "file", "this")
    checkpoint.save(3, {"part": part}, [{"step": 2, "loss": math.inf}])
    assert checkpoint.load({"part": part}) == (3, [{"step": 2, "loss": math.inf}])
    found = part.restored
    assert torch.equal(found[0].pop("a"), weight.T)
    assert torch.equal(found[0].pop("tied"), weight)
    assert torch.equal(found["list"][2][2], torch.tensor(7))
    assert found["list"][2][:2] == (True, "text")
    assert (found[0], found["list"][:2], found["d"]) == ({"none": None}, [1, 2.5], {})


@pytest.mark.parametrize(
    ("every", "seconds", "written"),
    [(3, None, [3, 6, 7]), (None, 25.0, [3, 6, 7]), (None, None, [7]), (5, 35.0, [4, 5, 7])],
)
def test_checkpoints_come_after_so_many_steps_or_seconds_and_at_the_end(
    every: int | None, seconds: float | None, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    clock = Clock()
    monkeypatch.setattr("rotquant.training.loop.time.monotonic", clock)

    class Noted(Checkpoint):
        def save(self, step: int, *_: Any) -> None:
            found.append(step)

    def step(_: int) -> dict[str, Any]:
        clock.now += 10.0
        return {}

    train(step, STEPS, "waiting", checkpoint=Noted(tmp_path / "file", "this", every, seconds))
    assert found == written


def test_a_process_that_does_not_write_takes_part_in_gathering(tmp_path: Path) -> None:
    asked = []

    class Gathered:
        def state_dict(self) -> dict[str, Any]:
            asked.append(1)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    checkpoint = Checkpoint(tmp_path / "file", "this", every=1, writes=False)
    train(lambda _: {}, 3, "helping", parts={"gathered": Gathered()}, checkpoint=checkpoint)
    assert asked == [1, 1, 1]
    assert not list(tmp_path.iterdir())


def test_steps_without_values_leave_no_record_and_are_not_listened_to() -> None:
    heard: list[dict[str, Any]] = []
    history = train(lambda step: {"loss": step / 2} if step % 2 else {}, 6, "quiet", on_step=heard.append)
    assert history == heard == [{"step": step, "loss": step / 2} for step in (1, 3, 5)]


def test_a_loss_that_is_not_finite_is_one_sentence_and_never_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "file", "this", every=1)
    losses = (1.0, 0.5, math.nan)
    with pytest.raises(RotquantError, match=r"^the loss of tuning is nan at step 2\.$"):
        train(lambda step: {"loss": losses[step]}, 3, "tuning", checkpoint=checkpoint)
    assert checkpoint.load({}) == (2, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}])
    with pytest.raises(RotquantError, match=r"^inf after 0 steps: lower the rate$"):
        train(lambda _: {"loss": math.inf}, 3, "tuning", not_finite="{loss} after {step} steps: lower the rate")


def test_the_latest_values_stand_beside_the_count_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [{"loss": 2.0}, {"perplexity": 9.876}, {}, {"loss": 1.0}]
    noted = {"loss": ".3f", "perplexity": ".1f"}
    checkpoint = Checkpoint(tmp_path / "file", "this", every=1)
    with long_work(monkeypatch):
        train(values.__getitem__, 3, "noting", noted=noted, checkpoint=checkpoint)
        train(values.__getitem__, 4, "noting", noted=noted, checkpoint=checkpoint)
    said = capsys.readouterr().err
    assert "noting: step 3 of 3, loss 2.000, perplexity 9.9, " in said
    assert "noting: step 4 of 4, loss 1.000, perplexity 9.9, " in said


def test_parts_of_a_batch_give_the_gradient_and_the_values_of_the_whole() -> None:
    """Up to float64's rounding."""
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (8, 3):
        weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        weight.grad = torch.full_like(weight, 1e6)  # of an earlier step
        step = GradientStep(
            lambda _, size=size: x.split(size),
            lambda part, weight=weight: (part @ weight).square().sum() / len(x),
            [torch.optim.SGD([weight], lr=0.1)],
        )
        with torch.no_grad():
            values = step(0)
        found.append((weight.detach(), values["loss"]))
    (whole, loss), (parts, total) = found
    assert loss == pytest.approx((x @ torch.ones(5, dtype=torch.float64)).square().mean().item())
    assert total == pytest.approx(loss)
    torch.testing.assert_close(parts, whole)


def test_gradients_are_clipped_before_the_optimizers_and_rates_change_after_them() -> None:
    order: list[str] = []
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizers = [torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.5**step)

    def clip() -> None:
        order.append("clip")
        torch.nn.utils.clip_grad_norm_([weight], 1.0)

    def backward(loss: Tensor) -> None:
        order.append("backward")
        loss.backward()

    step = GradientStep(
        lambda _: [None], lambda _: weight.square().sum(), optimizers, [schedule], clip=clip, backward=backward
    )
    assert [step(number) for number in range(2)] == [{"loss": 9.0}, {"loss": pytest.approx(4.0)}]
    assert order == ["backward", "clip"] * 2
    assert weight.item() == pytest.approx(3.0 - 1.0 - 0.5)  # a gradient of norm 1, rates 1 and 1/2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_recomputes_its_layers_has_the_same_gradients(family: str) -> None:
    gradients, passes = [], []
    model = tiny_model(family).eval()
    model.get_input_embeddings().requires_grad_(False)  # as where other parameters than the model's are learned
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    for active in (False, True):
        model.zero_grad()
        passes.clear()
        with recomputed(model, active):
            assert not any(
                module.training for module in model.modules() if not hasattr(module, "gradient_checkpointing")
            )
            with FasterKernels():
                loss = model(tiny_tokens(), use_cache=False).logits.square().mean()
            loss.backward()  # where torch suspends the mode, and layers take it again
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
        assert len(passes) == len(model.model.layers) * (1 + active)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("training", [False, True])
def test_recomputing_leaves_the_model_as_it_was(training: bool) -> None:
    model = tiny_model().train(training)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(Killed), recomputed(model):
        raise Killed
    assert not model.is_gradient_checkpointing
    assert [dict(vars(module)) for module in model.modules()] == before
    model.gradient_checkpointing_enable()
    function = model.model.layers[0]._gradient_checkpointing_func
    with recomputed(model, preserve_rng_state=False):
        assert model.model.layers[0]._gradient_checkpointing_func is not function
    assert model.model.layers[0]._gradient_checkpointing_func is function
    assert model.is_gradient_checkpointing


def test_the_steps_of_two_trainings_do_not_touch_global_random_state() -> None:
    before = torch.get_rng_state()
    for optimizer in itertools.islice(OPTIMIZERS, 2):
        Toy(optimizer).train()
    assert torch.equal(torch.get_rng_state(), before)


def test_every_sample_is_used_before_any_comes_again() -> None:
    batches = list(shuffled_batches(6, batch_size=2, steps=6, seed=0))
    for epoch in (batches[:3], batches[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(6))


def test_the_seed_decides_the_order() -> None:
    first, again, other = (torch.cat(list(shuffled_batches(20, 5, 4, seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_batch_holds_no_more_than_there_is() -> None:
    assert [len(batch) for batch in shuffled_batches(3, batch_size=8, steps=2, seed=0)] == [3, 3]
