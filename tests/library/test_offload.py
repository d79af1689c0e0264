"""Moments of AdamW and layers of a model on the host: equal bits, less of a GPU's memory."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rotquant.models.memory import size_in_bytes
from rotquant.models.placement import matrices, offloaded
from rotquant.training.offload import OffloadedAdamW, host_tensors
from rotquant.training.state import Checkpoint
from tests.helpers.models import tiny_model, tiny_tokens

SHAPES = [(7, 33), (100,), (), (64, 64), (3, 3)]


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def groups(of: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": of[:2], "lr": 1e-2}, {"params": of[2:], "lr": 3e-3}]


def take(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps of drawn gradients; the last parameter has none at first."""
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    of = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in of:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        of[-1].grad = None if step < 2 else of[-1].grad
        optimizer.step()
        schedule.step()


def devices() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_moments_on_the_host_give_the_bits_of_adamw(decay: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotquant.training.offload._TILE", 64)  # a multiple of what a CPU handles at once
    plain, ours = parameters(device), parameters(device)
    one, other = AdamW(groups(plain), weight_decay=decay, fused=True), OffloadedAdamW(groups(ours), weight_decay=decay)
    for optimizer in (one, other):
        take(optimizer, range(5))
    assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
    states = one.state_dict()["state"], other.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for place, values in states[0].items():
        for name, value in values.items():
            assert torch.equal(value.cpu(), states[1][place][name].cpu())
            assert name == "step" or not states[1][place][name].is_cuda


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("first", "second"), [(AdamW, OffloadedAdamW), (OffloadedAdamW, AdamW)])
def test_either_optimizer_continues_from_the_others_state(
    first: type[AdamW], second: type[AdamW], device: str, tmp_path: object
) -> None:
    def make(kind: type[AdamW], of: list[nn.Parameter]) -> AdamW:
        return kind(groups(of), **({"fused": True} if kind is AdamW else {}))

    straight, of = parameters(device), parameters(device)
    take(make(AdamW, straight), range(6))
    before = make(first, of)
    take(before, range(3))
    kept = Checkpoint(tmp_path / "state", "test")
    kept.save(3, {"optimizer": before}, [])
    after = make(second, of)
    assert kept.load({"optimizer": after}) == (3, [])
    for group, start in zip(after.param_groups, (1e-2, 3e-3), strict=True):
        assert group["lr"] == pytest.approx(start * 0.9**3)
    schedule = copy.deepcopy([group["lr"] for group in after.param_groups])
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(step)
        for parameter in of:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        for group, rate in zip(after.param_groups, schedule, strict=True):
            group["lr"] = rate * 0.9 ** (step - 3)
        after.step()
    for one, other in zip(straight, of, strict=True):
        # Rates of a schedule that continues are products in another order.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_parts_of_one_block_are_stored_without_copies(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    block = torch.arange(96, dtype=torch.uint8)
    parts = {"a": block[:32].view(torch.float32), "b": block[32:].view(torch.float32)}
    kept = Checkpoint(tmp_path / "state", "test")
    found = {name: torch.zeros_like(part) for name, part in parts.items()}
    copied = []
    monkeypatch.setattr(torch.Tensor, "to", lambda *_, **__: copied.append(1))
    kept.save(1, parts, [])
    monkeypatch.undo()
    assert not copied
    kept.load(found)
    assert all(torch.equal(part, found[name]) for name, part in parts.items())


@pytest.mark.gpu
def test_memory_of_a_gpu_falls_by_what_lies_on_the_host() -> None:
    def peak(kind: type[AdamW], **options: bool) -> int:
        torch.cuda.empty_cache()
        of = [nn.Parameter(torch.ones(2**26, device="cuda"))]
        of[0].grad = torch.ones_like(of[0])
        torch.cuda.reset_peak_memory_stats()
        optimizer = kind(of, **options)
        optimizer.step()
        return torch.cuda.max_memory_allocated()

    tiles = 3 * 2 * 4 * 2**24
    assert peak(AdamW, fused=True) - peak(OffloadedAdamW) >= 8 * 2**26 - tiles - 2**21


@pytest.mark.gpu
def test_a_model_with_layers_on_the_host_computes_the_same_bits_in_less_memory() -> None:
    model, ids = tiny_model(hidden_size=1024, intermediate_size=2048, num_layers=8, num_heads=8), tiny_tokens().cuda()
    layer = sum(matrix.nbytes for matrix in matrices(model.model.layers[0]))

    def measured(resident: int) -> tuple[torch.Tensor, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with offloaded(model, "cuda", resident), torch.no_grad():
            return torch.stack([model(ids, use_cache=False).logits for _ in range(3)]).cpu(), (
                torch.cuda.max_memory_allocated() - before
            )

    whole, most = measured(size_in_bytes(model))
    streamed, least = measured(2 * layer)
    assert torch.equal(whole, streamed)
    assert most - least >= 2.9 * layer  # of eight, two stay, and up to three are on their way


@pytest.mark.gpu
def test_memory_of_the_host_is_page_locked() -> None:
    (tensor,) = host_tensors([torch.ones(3, 5, dtype=torch.bfloat16)], torch.device("cuda"))
    assert tensor.is_pinned()
    assert tensor.shape == (3, 5)
