"""Block-wise trainings whose steps a GPU replays: what is recorded and when, and that their results stay.

Without a GPU a stand-in for the graph computes each part anew from inputs of its own, as a graph does.
"""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotquant.methods.block_ap import block_training as block_ap
from rotquant.methods.flatquant import block_training as flatquant
from rotquant.models.architectures import architecture_of
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.training import replay
from rotquant.training.loop import GradientStep
from rotquant.training.replay import LEAST_STEPS, WARM_UP, Replay
from rotquant.training.state import Checkpoint
from rotquant.weights import reconstruction
from rotquant.weights.build import build_weights
from rotquant.weights.storage import StoredModel
from tests.helpers.capturing import Capturing, Watched
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.interrupting import Interrupted, MortalCheckpoint
from tests.helpers.models import FAMILIES, FURTHER, tiny_model, tiny_tokens
from tests.helpers.replaying import Stand, counted, on_gpu, stand_in

SAMPLES = tiny_tokens(batch=8, tokens=24)
STEPS = LEAST_STEPS
#: Models by what distinguishes their layers.
MODELS: dict[str, Callable[[], Any]] = {
    **{family: partial(tiny_model, family) for family in FAMILIES},
    **{name: partial(tiny_model, **FURTHER[name]) for name in ("olmo2", "gemma2", "gemma3")},  # pyright: ignore[reportArgumentType]
}
EXPERTS = partial(tiny_model, **FURTHER["mixtral"])  # pyright: ignore[reportArgumentType]
TRAINED = {"block_ap": block_ap, "omniquant": reconstruction, "flatquant": flatquant}


def recipe(method: str, steps: int = STEPS, changes: dict[str, Any] | None = None) -> Recipe:
    """A method's own recipe with so many steps, of 4 samples each."""
    sizes: dict[str, Any] = {"steps": steps, "batch_size": 4}
    sections: dict[str, Any] = {}
    if method == "block_ap":  # 2 batches an epoch; R3, R4, and scales of weights, inputs and cache
        text = {"corpus": "modules", "samples": len(SAMPLES), "sequence_length": SAMPLES.shape[1]}
        grid = {"coarse": 4, "fine": 2}
        sizes = {"epochs": steps // 2, "text": text, "scales": grid, "clip_gradients": 1.0, "norms": True}
        sections = {"methods": {"prefixed_outliers": None}}
    name = "prefixquant-tuned" if method == "block_ap" else method
    asked = override(override(preset(name), sections, "test"), {"methods": {method: sizes}}, "test")
    return override(asked, changes or {}, "test")


def build(asked: Recipe, model: nn.Module, device: str = "cpu", checkpoint: Checkpoint | None = None) -> StoredModel:
    return build_weights(
        model,  # pyright: ignore[reportArgumentType]
        tiny_tokenizer(),
        asked,
        0,
        SAMPLES,
        texts={"block_ap": SAMPLES},
        device=device,
        checkpoint=checkpoint,
        progress=False,
    )


def watched(method: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Capturing]:
    """What the steps of a method's trainings dispatched, first layer's first."""
    seen: list[Capturing] = []
    monkeypatch.setattr(Watched, "seen", seen, raising=False)
    monkeypatch.setattr(TRAINED[method], "Replay", Watched)
    monkeypatch.setattr(replay, "LEAST_STEPS", 2 * WARM_UP)
    changes = {"rotation": None} if architecture_of(model).traits & {"post_norms", "bare_inputs"} else {}
    build(recipe(method, 2 * WARM_UP, changes if method == "block_ap" else {}), model)
    return seen


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("method", TRAINED)
def test_what_a_gpu_records_neither_copies_from_the_host_nor_waits(method: str, family: str, monkeypatch) -> None:
    """And it reads the same addresses at each step, else it would compute with what lay there once. Its products of
    float32 are the tensor cores'."""
    seen = watched(method, MODELS[family](), monkeypatch)
    assert {step.products for step in seen} == {"tf32"}
    assert len(seen) == 2 * WARM_UP  # of both layers
    assert set().union(*(step.refused for step in seen)) == set()
    for steps in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert all(step.outside == steps[0].outside for step in steps)


@pytest.mark.parametrize("method", ["block_ap", "omniquant"])
def test_layers_of_experts_are_not_recorded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens an expert sees decides what runs."""
    assert watched(method, EXPERTS(), monkeypatch) == []


def test_the_watch_sees_what_no_graph_holds() -> None:
    x = torch.ones(3, 3)
    for refused in (
        lambda: torch.tensor([1.0]),
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x[x > 0],
        lambda: torch.where(x > 0),
        lambda: torch.linalg.inv(x + torch.eye(3)),
        lambda: torch.equal(x, x),
    ):
        with Capturing() as capturing:
            refused()
        assert capturing.refused, refused
    with Capturing() as capturing:
        (x + 1).mul_(2)
        y = torch.zeros(3)
        y.view(1, 3).add_(x[:1])
    assert (capturing.refused, capturing.outside) == (set(), {x.untyped_storage().data_ptr()})


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    return stand_in(monkeypatch)


class Regression:
    """A training of one weight: `parts` gives the sizes of the parts of each step."""

    def __init__(self, parts: list[list[int]], **settings: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.ones(5))
        self.replay = Replay([self.weight], len(parts), **settings)
        optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        batches = [[(torch.randn(size, 5, generator=generator),) for size in sizes] for sizes in parts]
        with self.replay:
            step = GradientStep(batches.__getitem__, self.loss, [optimizer], replay=self.replay)
            self.losses = [step(number)["loss"] for number in range(len(parts))]

    def loss(self, part: tuple[Tensor]) -> Tensor:
        return (part[0] @ self.weight - 2).square().mean()

    def same(self, other: "Regression") -> bool:
        return self.losses == other.losses and torch.equal(self.weight, other.weight)


def test_some_parts_run_kernel_by_kernel_and_all_others_by_one_graph(stand: type[Stand], monkeypatch) -> None:
    replayed = Regression([[4]] * STEPS)
    assert (len(stand.made), len(stand.calls)) == (1, STEPS - WARM_UP)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert replayed.same(Regression([[4]] * STEPS))
    assert len(stand.made) == 1


@pytest.mark.parametrize(("steps", "pure"), [(STEPS - 1, True), (STEPS, False)])
def test_nothing_is_recorded_in_few_steps_or_of_what_is_not_pure(stand: type[Stand], steps: int, pure: bool) -> None:
    Regression([[4]] * steps, pure=pure)
    assert stand.made == []


def test_parts_of_another_shape_and_what_is_added_to_them_run_kernel_by_kernel(stand, monkeypatch) -> None:
    parts = [[4]] * STEPS + [[3]] + [[3, 4]] * 2 + [[4, 3]] + [[4]]
    replayed = Regression(parts)
    assert (len(stand.made), len(stand.calls)) == (1, STEPS - WARM_UP + 2)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert replayed.same(Regression(parts))


@pytest.mark.parametrize("many", [2, 3, WARM_UP + 2])
def test_further_parts_of_a_step_have_a_graph_that_adds(many: int, stand: type[Stand], monkeypatch) -> None:
    replayed = Regression([[4] * many] * STEPS)
    without = -(-WARM_UP // many)  # steps that begin among the parts before a recording
    assert (len(stand.made), len(stand.calls)) == (2, (STEPS - without) * many)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert replayed.same(Regression([[4] * many] * STEPS))


def test_a_recording_that_fails_is_said_once_and_the_training_goes_on(stand, monkeypatch) -> None:
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        try:
            raise RuntimeError("operation not permitted\nand more")
        finally:
            raise RuntimeError("the recording could not be ended")

    monkeypatch.setattr(replay, "Recorded", fail)
    with pytest.warns(UserWarning, match=r"CUDA graph \(operation not permitted\): steps are launched") as warned:
        failed = [Regression([[4]] * STEPS) for _ in range(2)]
    assert len(tried) == len(warned) == 1
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    whole = Regression([[4]] * STEPS)
    assert all(one.same(whole) for one in failed)


def test_the_graph_goes_with_the_training(stand: type[Stand]) -> None:
    gc.disable()
    try:
        trained = Regression([[4]] * STEPS)
        assert stand.made[0]() is None
        assert trained.weight.grad is None
    finally:
        gc.enable()


@pytest.mark.parametrize("method", TRAINED)
def test_trainings_through_the_stand_in_have_the_same_bits(method: str, stand: type[Stand], monkeypatch) -> None:
    """So no method needs of a part what is not in its tensors."""
    replayed = build(recipe(method), tiny_model())
    assert len(stand.calls) == 2 * (STEPS - WARM_UP)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert_same(replayed, build(recipe(method), tiny_model()))


def assert_same(one: StoredModel, other: StoredModel) -> None:
    """Equal histories, weights and learned tensors."""
    assert one.history == other.history
    for name, weight in one.weights.items():
        assert torch.equal(weight.codes, other.weights[name].codes), name
        assert torch.equal(weight.qparams.scale, other.weights[name].qparams.scale), name
    for key, qparams in one.state.static.items():
        assert torch.equal(qparams.scale, other.state.static[key].scale), key
    for method, tensors in one.state.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.state.tensors[method][name]), name
    others = other.model.state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in one.model.state_dict().items())


class Losses(list[float]):
    """Hears the losses of trainings, also of those that keep no history."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        whole = GradientStep.__call__

        def call(step: GradientStep, number: int) -> dict[str, Any]:
            values = whole(step, number)
            self.append(values["loss"])
            return values

        monkeypatch.setattr(GradientStep, "__call__", call)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    with counted(monkeypatch) as found:
        yield found


@on_gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", TRAINED)
def test_a_replayed_training_has_the_bits_of_one_without_graphs(method, family, replays, monkeypatch) -> None:
    """A graph launches the kernels of the steps before it, and none of them adds in an order that varies."""
    found, losses = [], []
    for least in (LEAST_STEPS, 10**9):
        monkeypatch.setattr(replay, "LEAST_STEPS", least)
        with monkeypatch.context() as patch:
            losses.append(Losses(patch))
            changes = {"rotation": None} if method == "block_ap" and family == "gemma3" else {}
            found.append(build(recipe(method, changes=changes), MODELS[family](), "cuda"))
    assert len(replays) == 2 * (STEPS - WARM_UP)
    assert len(losses[0]) == 2 * STEPS
    assert losses[0] == losses[1]
    assert_same(*found)


@on_gpu
def test_a_smaller_last_batch_runs_between_replays(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (LEAST_STEPS, 10**9):
        monkeypatch.setattr(replay, "LEAST_STEPS", least)
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.ones(5, device="cuda"))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        sizes = ([4] * 5 + [3]) * 3
        parts = [(torch.randn(size, 5, generator=generator).cuda(),) for size in sizes]
        with Replay([weight], len(sizes)) as used:
            step = GradientStep(
                lambda number, parts=parts: [parts[number]],
                lambda part, weight=weight: (part[0] @ weight - 2).square().mean(),
                [optimizer],
                clip=lambda weight=weight: nn.utils.clip_grad_norm_([weight], 0.5),
                replay=used,
            )
            found.append(([step(number)["loss"] for number in range(len(sizes))], weight.detach()))
    assert len(replays) == 15 - WARM_UP
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@on_gpu
@pytest.mark.parametrize("lives", [24, 90])  # in the first block, in the second
def test_a_killed_training_continues_with_the_same_bits_on_a_gpu(lives: int, replays, tmp_path: Path) -> None:
    asked = recipe("block_ap", 2 * STEPS)
    whole = build(asked, tiny_model(), "cuda")
    about = tmp_path / "file", "this", 1
    with pytest.raises(Interrupted):
        build(asked, tiny_model(), "cuda", MortalCheckpoint(*about, lives=iter(range(lives))))
    before = len(replays)
    assert_same(whole, build(asked, tiny_model(), "cuda", Checkpoint(*about)))
    assert len(replays) > before


@on_gpu
@pytest.mark.parametrize("method", TRAINED)
def test_a_block_leaves_no_memory_behind(method: str, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in use where a block's training begins are those of the block before; and afterwards none are kept."""
    build(recipe(method), tiny_model(), "cuda")  # tables of kernels and workspaces stay for the process
    begins: list[int] = []
    whole = Replay.__enter__

    def enter(used: Replay) -> Replay:
        gc.collect()
        begins.append(torch.cuda.memory_allocated())
        return whole(used)

    monkeypatch.setattr(Replay, "__enter__", enter)
    model = tiny_model(num_layers=4)
    gc.collect()
    before = torch.cuda.memory_allocated()
    build(recipe(method), model, "cuda")
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    assert len(begins) == 4
    assert begins[3] - begins[2] <= max(0, begins[2] - begins[1])  # what is kept of every layer, such as tensors
    assert replays


_FAILING = """
import warnings, torch
from torch import nn
from rotquant.training import replay
from rotquant.training.loop import GradientStep
found = []
for steps in (replay.LEAST_STEPS, replay.LEAST_STEPS - 1):
    weight = nn.Parameter(torch.ones(5, device="cuda"))
    x = torch.arange(20.0, device="cuda").reshape(4, 5)

    def loss(part):
        error = (part[0] @ weight - 2).square().mean()
        return error * 2 if error.item() > 1 else error

    with warnings.catch_warnings(record=True) as warned, replay.Replay([weight], steps) as used:
        warnings.simplefilter("always")
        step = GradientStep(lambda _: [(x,)], loss, [torch.optim.AdamW([weight], lr=0.1)], replay=used)
        for number in range(replay.LEAST_STEPS - 1):
            step(number)
    found.append(weight.detach())
    print(len(warned), *(str(one.message) for one in warned))
assert torch.equal(*found), found
assert torch.cuda.current_stream() == torch.cuda.default_stream()
"""


@on_gpu
def test_a_step_that_cannot_be_recorded_is_said_and_trains_on() -> None:
    """In a process of its own: torch keeps the memory of the recording."""
    done = subprocess.run([sys.executable, "-c", _FAILING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("1 a training's step could not be recorded as a CUDA graph (")
    assert second == "0"
