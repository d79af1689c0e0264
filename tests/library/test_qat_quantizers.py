"""Trainable quantizers of weights, and the search for the clips they start from."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.qat import start
from rotquant.qat.quantizers import LARGEST_SHARE, Kind, make_quantizer
from rotquant.qat.start import (
    SHARES,
    Clips,
    Rounding,
    Target,
    clip_weight,
    float_rounding,
    level_rounding,
    search_clips,
    uniform_rounding,
)
from rotquant.tensors.codebook import pack_indices, packed_length, unpack_indices
from rotquant.tensors.partition import StraightThrough
from rotquant.tensors.quantization import QParams, fake_quantize
from rotquant.tensors.value_range import clipped_range, uniform_scheme

OUT, IN, SIZE = 6, 48, 16
BITS: dict[Kind, tuple[int, ...]] = {
    "range": (2, 3),
    "learned_range": (2, 3),
    "ldp": (2,),
    "n2uq": (2,),
    "nf3": (3,),
    "nf3_ldp": (3,),
}
LEARNED = {"learned_range": "gamma beta", "ldp": "gamma beta s1 s2", "n2uq": "gamma beta s1 s2"}
LEARNED["nf3_ldp"] = "gamma beta s1"
CASES = [(kind, bits) for kind, widths in BITS.items() for bits in widths]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_clips(seed: int = 3) -> Clips:
    low, high = 0.55 + 0.45 * torch.rand(2, OUT, IN // SIZE, 1, generator=torch.Generator().manual_seed(seed))
    return Clips(low, high)


def test_there_is_a_case_for_every_kind() -> None:
    assert set(BITS) == set(get_args(Kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_what_is_frozen_equals_what_was_trained_bit_for_bit(kind: Kind, bits: int, dtype: torch.dtype) -> None:
    weight = random(OUT, IN, dtype=dtype)
    quantizer = make_quantizer(kind, weight, SIZE, bits, random_clips())
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    value, frozen = quantizer(weight.requires_grad_()), quantizer.freeze(weight)
    assert value.dtype == dtype
    assert value.requires_grad
    assert frozen.codes.dtype == torch.uint8
    assert (frozen.shape, frozen.bits, frozen.group_size) == ((OUT, IN), bits, SIZE)
    assert frozen.levels.shape == (OUT, IN // SIZE, 2**bits)
    assert not frozen.levels.requires_grad
    assert torch.equal(frozen.dequantize(dtype), value)
    assert torch.equal(frozen.to("cpu").dequantize(dtype), value)
    assert len(value[0, :SIZE].unique()) > 2


@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_every_parameter_and_the_weight_are_trained(kind: Kind, bits: int) -> None:
    weight = random(OUT, IN).requires_grad_()
    quantizer = make_quantizer(kind, weight, SIZE, bits, random_clips())
    names = dict(quantizer.named_parameters())
    assert set(names) == set(LEARNED.get(kind, "").split())
    assert all(p.shape == (OUT, IN // SIZE, 1) and p.dtype == torch.float32 for p in names.values())
    (quantizer(weight) * random(OUT, IN, seed=1)).sum().backward()
    for parameter in (weight, *names.values()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.ne(0).any(dim=-1).all()


@pytest.mark.parametrize(
    ("kind", "straight_through"),
    [
        ("ldp", "step"),
        ("ldp", "ramp"),
        ("n2uq", "step"),
        ("n2uq", "ramp"),
        ("learned_range", "step"),
        ("nf3_ldp", "step"),
    ],
)
def test_training_its_parameters_lowers_the_error_of_a_layers_output(
    kind: Kind, straight_through: StraightThrough
) -> None:
    weight, inputs = random(16, 128), random(256, 128, seed=1)
    quantizer = make_quantizer(kind, weight, 64, BITS[kind][0], straight_through=straight_through)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02)
    errors = []
    for _ in range(150):
        error = (inputs @ (quantizer(weight) - weight).T).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    # Half of the least gain over three seeds: of two bits 0.52 to 0.71 was left, of three bits 0.84 to 0.90.
    assert errors[-1] < (0.95 if kind == "nf3_ldp" else 0.85) * errors[0]


def test_where_quantizers_start() -> None:
    weight, clips = random(OUT, IN), random_clips()
    clips.high[0] = 1.0  # whose logit would be infinite
    quantizer = make_quantizer("ldp", weight, SIZE, 2, clips)
    kept = torch.sigmoid(quantizer.gamma)
    assert torch.allclose(kept, clips.high.clamp(max=LARGEST_SHARE))
    assert torch.allclose(kept[0], torch.full_like(kept[0], LARGEST_SHARE))
    assert torch.allclose(torch.sigmoid(quantizer.beta), clips.low.clamp(max=LARGEST_SHARE))
    assert torch.allclose(torch.sigmoid(quantizer.s1), torch.tensor(1 / 3))
    assert torch.equal(quantizer.s2, torch.zeros_like(quantizer.s2))
    # Without clips nearly all of the range, so that a largest weight moves by a hundredth; the float's zero stays zero.
    whole = make_quantizer("nf3_ldp", weight, SIZE, 3)
    extreme = weight.view(OUT, -1, SIZE).amax(-1)
    assert torch.allclose(whole(weight).view(OUT, -1, SIZE).amax(-1), LARGEST_SHARE * extreme)
    assert whole.freeze(weight).levels[..., 3].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("kind", "size", "bits", "sentence"),
    [
        ("ldp", 32, 2, "group size 32 does not divide the 48 columns"),
        ("ldp", 16, 3, "takes 2 bits, not 3"),
        ("nf3", 16, 2, "takes 3 bits, not 2"),
        ("range", 16, 4, "takes 2 or 3 bits, not 4"),
    ],
)
def test_what_does_not_fit_is_one_sentence(kind: Kind, size: int, bits: int, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        make_quantizer(kind, random(OUT, IN), size, bits)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 48])
def test_packing_of_levels_is_lossless_and_has_no_air(bits: int, length: int) -> None:
    codes = torch.randint(2**bits, (5, length), generator=torch.Generator().manual_seed(length), dtype=torch.uint8)
    packed = pack_indices(codes, bits)
    assert packed.shape == (5, packed_length(length, bits))
    if length % 8 == 0:
        assert packed.shape[-1] * 8 == length * bits
    assert torch.equal(unpack_indices(packed, bits, length), codes)
    stream = sum(int(code) << bits * place for place, code in enumerate(codes[0]))  # the first in the lowest bits
    assert bytes(packed[0].tolist()) == stream.to_bytes(packed.shape[-1], "little")


def slow_search(weight: Tensor, inputs: Tensor, rounded: Rounding, target: Target) -> tuple[Tensor, Tensor]:
    """Group by group and pair by pair, on the outputs themselves: low and high shares [out, groups, 1]."""
    low, high = torch.ones(2, OUT, IN // SIZE, 1, dtype=weight.dtype)
    for row, group in product(range(OUT), range(IN // SIZE)):
        columns = slice(group * SIZE, group * SIZE + SIZE)
        w, x = weight[row, columns], inputs[:, columns]
        least = float("inf")
        for share_high, share_low in product(SHARES, SHARES):
            kept = Clips(*(torch.full((1, 1, 1), share, dtype=w.dtype) for share in (share_low, share_high)))
            value_range = kept.value_range(w.view(1, 1, -1))
            clipped = w.clamp(value_range.low.item(), value_range.high.item())
            q = rounded(w.view(1, 1, -1), value_range).flatten()
            error = (x @ q - x @ (w if target == "weight" else clipped)).square().sum().item()
            if error < least * (1 - 1e-9):  # the two sums differ in last bits
                least, low[row, group], high[row, group] = error, share_low, share_high
    return low, high


@pytest.mark.parametrize("target", ["weight", "clipped"])
@pytest.mark.parametrize(
    "rounded", [uniform_rounding(2), uniform_rounding(3), level_rounding(2), float_rounding(3)], ids=range(4)
)
def test_the_search_finds_the_clips_of_least_output_error(
    rounded: Rounding, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, inputs = random(OUT, IN, dtype=torch.float64), random(200, IN, seed=1, dtype=torch.float64)
    inputs = inputs @ random(IN, IN, seed=2, dtype=torch.float64)  # correlated features
    weight[:, 3] *= 4  # what to clip
    expected = slow_search(weight, inputs, rounded, target)
    clips = search_clips(weight, inputs.T @ inputs, SIZE, rounded, target=target)
    assert torch.equal(clips.low, expected[0])
    assert torch.equal(clips.high, expected[1])
    assert len(clips.low.unique()) > 3
    monkeypatch.setattr("rotquant.qat.start._ELEMENTS", {"cpu": 2 * IN})  # two rows at a time
    in_parts = search_clips(weight, inputs.T @ inputs, SIZE, rounded, target=target)
    assert torch.equal(in_parts.low, clips.low)
    assert torch.equal(in_parts.high, clips.high)
    one = start._search
    monkeypatch.setattr(start, "_search", lambda *arguments: one(*arguments[:-1], 7))  # pairs, as on a GPU
    together = search_clips(weight, inputs.T @ inputs, SIZE, rounded, target=target)
    assert torch.equal(together.low, clips.low)
    assert torch.equal(together.high, clips.high)


def test_level_rounding_is_what_partitioning_starts_as_and_eq_1_with_an_exact_zero_point() -> None:
    weight, clips = random(OUT, IN), random_clips()
    clips = Clips(clips.low.clamp(max=LARGEST_SHARE), clips.high.clamp(max=LARGEST_SHARE))
    view = weight.unflatten(1, (-1, SIZE))
    own = level_rounding(2)(view, clips.value_range(view)).flatten(1)
    # float32 in both, by other ways; no element lies within its last bits of a threshold.
    torch.testing.assert_close(own, make_quantizer("ldp", weight, SIZE, 2, clips)(weight), rtol=1e-5, atol=1e-6)
    low, high = clips.value_range(view)
    for bits in (2, 3):
        scale = (high - low) / (2**bits - 1)
        exact = ((view - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
        torch.testing.assert_close(level_rounding(bits)(view, clips.value_range(view)), exact, rtol=1e-5, atol=1e-6)


def test_ldp_without_learned_partitions_is_lwc_with_an_exact_zero_point() -> None:
    """RCP's `lwc_exact`, values and gradients, against rounding to even levels by the scheme with exact zero points."""
    weight = random(OUT, IN, dtype=torch.float64).requires_grad_()
    clips, upstream = random_clips(), random(OUT, IN, seed=1, dtype=torch.float64)
    partitioned = make_quantizer("ldp", weight, SIZE, 2, clips)
    partitioned(weight).backward(upstream)
    other = weight.detach().clone().requires_grad_()
    plain = make_quantizer("learned_range", other, SIZE, 2, clips)
    view = other.unflatten(1, (-1, SIZE))
    low, high = clipped_range(view, plain.gamma, plain.beta)
    scale = (high - low) / 3
    scheme = uniform_scheme(2).model_copy(update={"zero_point": "exact"})
    clipped = torch.clamp(view, low, high)  # the paper's W_rc: without it half a step beyond the ends has a gradient
    rounded = fake_quantize(clipped, scheme, QParams(scale, -low / scale)).flatten(1)
    rounded.backward(upstream)
    # Parameters are float32, and so are thirds of the range that partitions make of them: 1e-7 of a range.
    torch.testing.assert_close(partitioned(weight), rounded, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, other.grad, rtol=1e-5, atol=1e-5)
    for name in ("gamma", "beta"):
        gradients = (quantizer.get_parameter(name).grad for quantizer in (partitioned, plain))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_clipped_weights_have_the_range_that_the_learned_one_starts_with() -> None:
    """BitDistiller's start and RCP's: the dynamic range of the one is the learned range of the other."""
    weight, clips = random(OUT, IN, dtype=torch.float64), random_clips()
    clips = Clips(clips.low.clamp(max=LARGEST_SHARE), clips.high.clamp(max=LARGEST_SHARE))
    clipped = clip_weight(weight, clips, SIZE)
    assert (clipped != weight).any()
    dynamic = make_quantizer("range", clipped, SIZE, 2)(clipped)
    learned = make_quantizer("learned_range", weight, SIZE, 2, clips)(weight)
    # Parameters are float32: shares agree to 1e-7.
    torch.testing.assert_close(dynamic, learned, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("straight_through", ["step", "ramp"])
@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_a_gpu_computes_what_the_cpu_computes(kind: Kind, bits: int, straight_through: StraightThrough) -> None:
    found = []
    for device in ("cpu", "cuda"):
        weight = random(OUT, IN, dtype=torch.float64).to(device).requires_grad_()
        clips = random_clips()
        clips = Clips(clips.low.to(device), clips.high.to(device))
        quantizer = make_quantizer(kind, weight, SIZE, bits, clips, straight_through)
        value = quantizer(weight)
        assert torch.equal(quantizer.freeze(weight).dequantize(weight.dtype), value)
        value.backward(random(OUT, IN, seed=1, dtype=torch.float64).to(device))
        found.append([part.detach().cpu() for part in (value, weight.grad, *(p.grad for p in quantizer.parameters()))])
    # Parameters are float32, and so are their gradients and the logits they start from: to 2e-7 of each.
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-6, atol=1e-6, check_dtype=True)


@pytest.mark.gpu
def test_the_search_on_a_gpu_finds_the_clips_of_the_cpu() -> None:
    weight, inputs = random(OUT, IN, dtype=torch.float64), random(200, IN, seed=1, dtype=torch.float64)
    moment = inputs.T @ inputs
    cpu = search_clips(weight, moment, SIZE, uniform_rounding(2))
    cuda = search_clips(weight.cuda(), moment.cuda(), SIZE, uniform_rounding(2))
    assert torch.equal(cuda.low.cpu(), cpu.low)
    assert torch.equal(cuda.high.cpu(), cpu.high)
