"""Quantization-aware trainings whose steps a GPU replays: what is recorded, and that results stay to the last bit."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rotquant.methods.llm_qat import data_free_distillation as llm_qat
from rotquant.models.masks import kept_masks
from rotquant.qat import steps, training
from rotquant.qat.engine import Engine
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.training import replay
from rotquant.training.replay import LEAST_STEPS, WARM_UP
from tests.helpers.capturing import Capturing, Watched, as_recorded
from tests.helpers.models import FAMILIES, FURTHER, tiny_model
from tests.helpers.qat import KINDS, TEXT, build, recipe
from tests.helpers.replaying import Stand, counted, on_gpu, stand_in

#: Models by what distinguishes their layers; those after the families have no rotation of the residual stream.
MODELS: dict[str, Callable[..., Any]] = {
    **{family: partial(tiny_model, family) for family in FAMILIES},
    **{name: partial(tiny_model, **FURTHER[name]) for name in ("olmo2", "gemma3")},  # pyright: ignore[reportArgumentType]
}
BATCHES = 2  # of an epoch, 4 samples each
#: Of a training in a stand-in's hands or watched: as many again as are computed first.
FEW_STEPS = 2 * WARM_UP
#: The bytes that are kept for the backward pass, and of the teacher's states: all, or none.
KEPT = {"kept": 2**29, "recomputed": 0}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    monkeypatch.setattr(replay, "LEAST_STEPS", FEW_STEPS)
    return stand_in(monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    with counted(monkeypatch) as found:
        yield found


def keep(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(training.KEPT_BYTES, device, most)
        monkeypatch.setitem(training._STATE_BYTES, device, most)


def trained(
    kind: str, model: Any, device: str = "cpu", at_once: int | None = None, steps: int = FEW_STEPS, **changes: Any
) -> Any:
    """A self-distillation of so many steps."""
    batches = 1 if kind == "authors" else BATCHES  # samples are held out
    of = recipe(kind, **{"epochs": steps // batches, **changes})
    return build(of, model, device=device, batch_size=at_once)


def trained_llm_qat(model: Any, number: int = FEW_STEPS, device: str = "cpu") -> list[dict[str, Any]]:
    amounts = {"samples": 12, "sequence_length": 16, "steps": number, "batch_size": 4, "learning_rate": 1e-3}
    return llm_qat.train_model(model, override(preset("llm-qat"), {"methods": {"llm_qat": amounts}}, "test"), 0, device)


def replayed_parts(in_two: bool, number: int = FEW_STEPS) -> int:
    """How many parts a graph computes, of one or two in each of so many steps."""
    return 2 * (number - 2) if in_two else number - WARM_UP


def assert_same(one: Any, other: Any) -> None:
    """Equal histories, weights and tables."""
    assert one.history == other.history
    for name, weight in one.weights.items():
        assert torch.equal(weight.codes, other.weights[name].codes), name
        assert torch.equal(weight.levels, other.weights[name].levels), name
    assert_same_parameters(one.model, other.model)


def assert_same_parameters(one: Any, other: Any) -> None:
    others = other.state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in one.state_dict().items())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Capturing]:
    """What the steps of trainings dispatched."""
    found: list[Capturing] = []
    monkeypatch.setattr(Watched, "seen", found, raising=False)
    monkeypatch.setattr(steps, "Replay", Watched)
    monkeypatch.setattr(llm_qat, "Replay", Watched)
    monkeypatch.setattr(replay, "LEAST_STEPS", FEW_STEPS)
    return found


def assert_recordable(seen: list[Capturing]) -> None:
    assert len(seen) == WARM_UP
    assert set().union(*(step.refused for step in seen)) == set()
    assert {step.products for step in seen} == {"tf32"}
    assert all(step.outside == seen[0].outside for step in seen)


@pytest.mark.parametrize("most", KEPT)
@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, "llama") for kind in KINDS if kind != "authors"), *(("range", family) for family in MODELS)],
)
def test_what_a_gpu_records_neither_copies_from_the_host_nor_waits(kind, family, most, seen, monkeypatch) -> None:
    """And it reads the same addresses at each step, else it would compute with what lay there once."""
    keep(KEPT[most], monkeypatch)
    # Families may have layers of two kinds; a kind of quantizer is the same in each layer.
    trained(kind, MODELS[family](num_layers=2 if kind == "range" else 1))
    assert_recordable(seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_llm_qat_neither_copies_from_the_host_nor_waits(family: str, seen: list[Capturing]) -> None:
    trained_llm_qat(tiny_model(family))
    assert_recordable(seen)


@pytest.mark.parametrize("window", [None, 6])
def test_recorded_passes_have_the_masks_of_others(window: int | None) -> None:
    def mask() -> Any:
        found: list[Any] = []
        hook = model.model.layers[0].register_forward_pre_hook(
            lambda _module, _args, given: found.append(given["attention_mask"]), with_kwargs=True
        )
        model(TEXT, use_cache=False)
        hook.remove()
        return found[0]

    model: Any = tiny_model("mistral", sliding_window=window)
    plain = mask()
    assert (plain is None) == (window is None)
    with kept_masks(model):
        before = mask()
        with as_recorded():
            assert mask() is before
    with as_recorded():
        assert mask() is not None
    assert plain is before or torch.equal(plain, before)


@pytest.mark.parametrize("most", KEPT)
@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize(("kind", "family"), [("ldp", "llama"), ("range", "mistral"), ("authors", "qwen2")])
def test_trainings_through_the_stand_in_have_the_same_bits(kind, family, at_once, most, stand, monkeypatch) -> None:
    """Also where a step has two parts."""
    keep(KEPT[most], monkeypatch)
    replayed = trained(kind, MODELS[family](), at_once=at_once)
    assert len(stand.calls) == replayed_parts(at_once is not None)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert_same(replayed, trained(kind, MODELS[family](), at_once=at_once))


@pytest.mark.parametrize("samples", [None, 2])
def test_llm_qat_through_the_stand_in_has_the_same_bits(samples, stand: type[Stand], monkeypatch) -> None:
    if samples is not None:
        monkeypatch.setitem(llm_qat.LOGITS_AT_ONCE, "cpu", samples * 16 * 96)
    one, other = tiny_model(), tiny_model()
    history = trained_llm_qat(one)
    assert len(stand.calls) == replayed_parts(samples is not None)
    monkeypatch.setattr(replay, "_on_gpu", lambda part: False)
    assert history == trained_llm_qat(other)
    assert_same_parameters(one, other)


def test_unequal_parts_experts_and_masks_of_the_host_are_not_recorded(stand: type[Stand]) -> None:
    """Parts of another shape would need the graph's memory once more; numbers decide what experts and gemma2 run."""
    trained("range", tiny_model(num_layers=1), at_once=3)
    for name in ("mixtral", "gemma2"):
        trained("range", tiny_model(**FURTHER[name]))  # pyright: ignore[reportArgumentType]
    assert stand.made == []


def test_what_is_offloaded_is_not_recorded(stand: type[Stand], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "make_engine", partial(Engine, offloads=True))
    trained("range", tiny_model(num_layers=1))
    assert stand.made == []


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", KEPT)
@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize(
    ("kind", "family"), [("ldp", "llama"), ("nf3_ldp", "llama"), ("range", "gemma3"), ("authors", "qwen2")]
)
def test_a_replayed_training_has_the_bits_of_one_without_graphs(
    kind, family, at_once, most, dtype, replays, monkeypatch
) -> None:
    """A graph launches the kernels of the steps before it, and none of them adds in an order that varies."""
    keep(KEPT[most], monkeypatch)
    found = []
    for least in (LEAST_STEPS, 10**9):
        monkeypatch.setattr(replay, "LEAST_STEPS", least)
        found.append(trained(kind, MODELS[family](dtype=dtype), "cuda", at_once, LEAST_STEPS))
    assert len(replays) == replayed_parts(at_once is not None, LEAST_STEPS)
    assert_same(*found)


@on_gpu
@pytest.mark.parametrize("samples", [None, 2])
def test_a_replayed_llm_qat_has_the_bits_of_one_without_graphs(samples, replays, monkeypatch) -> None:
    if samples is not None:
        monkeypatch.setitem(llm_qat.LOGITS_AT_ONCE, "cuda", samples * 16 * 96)
    models, histories = [tiny_model(), tiny_model()], []
    for least, model in zip((LEAST_STEPS, 10**9), models, strict=True):
        monkeypatch.setattr(replay, "LEAST_STEPS", least)
        histories.append(trained_llm_qat(model, LEAST_STEPS, "cuda"))
    assert len(replays) == replayed_parts(samples is not None, LEAST_STEPS)
    assert histories[0] == histories[1]
    assert_same_parameters(*models)
