"""The search for clip ratios as a kernel: its reference against every candidate's error in float64, the kernel too.

Without a GPU the CUDA source runs lane by lane on the CPU (`emulated`), which tests all but what NVIDIA's compiler and
hardware do.
"""

import pytest
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError
from rotquant.kernels.rows import clip_search
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.tensors.quantization import choose_qparams, grouped, quantize
from rotquant.weights.clipping import clips_of, search_clip
from tests.library.kernels.emulated import emulate, needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
emulated = pytest.param("cpu", marks=needs_compiler)

#: How ranges become scales: symmetric or not, and a symmetric one's divisor.
RULES = [{"symmetric": True}, {"symmetric": True, "scale": "full"}, {"symmetric": False}]
NORMS = [2.0, 2.4]


def scheme_of(bits: int, rule: dict[str, object], group_size: int | None = None) -> QuantizationScheme:
    granularity = "channel" if group_size is None else "group"
    return QuantizationScheme(bits=bits, granularity=granularity, group_size=group_size, **rule)


def weight_of(out: int, features: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal values of some spread and centre for each row, with one large one in every third."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, features, generator=generator) * torch.rand(out, 1, generator=generator)
    weight += torch.randint(-1, 2, (out, 1), generator=generator) * 0.5
    weight[::3, features // 2] *= 6
    return weight.to(device)


def errors_of(weight: Tensor, scheme: QuantizationScheme, norm: float) -> Tensor:
    """sum |error|^norm of all candidates for every scale, float64 [80, ...]: exact for float32's scales and codes."""
    view, errors = grouped(weight, scheme), []
    rows = scheme.model_copy(update={"granularity": "channel", "group_size": None})
    for ratio in 1.0 - torch.arange(80, dtype=weight.dtype, device=weight.device) / 100:
        qparams = choose_qparams(view, rows, ratio)
        codes = quantize(view, qparams, rows).double()
        if qparams.zero_point is not None:
            codes -= qparams.zero_point
        errors.append((codes * qparams.scale.double() - view.double()).abs().pow(norm).sum(-1, keepdim=True))
    return torch.stack(errors)


def assert_best(ratios: Tensor, weight: Tensor, scheme: QuantizationScheme, norm: float) -> None:
    """No candidate is better by more than the 1e-5 that float32 makes of powers and their sums.

    Nor by more than a scale's last bit, which is another where torch divides by a number as CPUs do: of a few values
    a candidate may hit all, and have no other error.
    """
    errors = errors_of(weight, scheme, norm)
    assert ratios.shape == errors.shape[1:]
    chosen = ((1 - ratios) * 100).round().long()
    torch.testing.assert_close(ratios, 1 - chosen.to(ratios.dtype) / 100, rtol=1e-6, atol=0)
    of_chosen = errors.gather(0, chosen.unsqueeze(0))[0]
    view = grouped(weight, scheme).double()
    last_bit = (view.abs() * torch.finfo(torch.float32).eps).pow(norm).sum(-1, keepdim=True)
    assert (of_chosen <= errors.amin(0) * (1 + 1e-5) + last_bit).all()


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on tensors of the CPU as well."""
    emulate(clip_search, monkeypatch)
    monkeypatch.setattr(clip_search, "best_ratios", clip_search._cuda)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("bits", "group_size"), [(2, None), (4, None), (3, 16), (8, 32), (4, 1)])
def test_the_reference_is_the_search_in_torch(
    bits: int, group_size: int | None, rule: dict[str, object], norm: float
) -> None:
    weight, scheme = weight_of(7, 96), scheme_of(bits, rule, group_size)
    weight[2] = 0
    found = clip_search.search(weight, scheme, norm)
    assert_best(found, weight, scheme, norm)
    exact = clip_search.search(weight.double(), scheme, norm)
    torch.testing.assert_close(exact, search_clip(weight.double(), scheme, norm), rtol=0, atol=0)


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    torch.library.opcheck(torch.ops.rotquant.best_ratios.default, (torch.randn(3, 16), 4, False, False, 2.4))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "group_size", "device"),
    [
        *(
            pytest.param((5, 100), None, "cpu", marks=needs_compiler),
            pytest.param((3, 257), None, "cpu", marks=needs_compiler),
        ),
        *(pytest.param((6, 192), size, "cpu", marks=needs_compiler) for size in (None, 8, 64)),
        *(pytest.param(shape, None, "cuda", marks=pytest.mark.gpu) for shape in ((576, 576), (1536, 576), (576, 1536))),
        *(pytest.param((64, 1536), size, "cuda", marks=pytest.mark.gpu) for size in (16, 64, 128)),
        *(
            pytest.param(shape, None, "cuda", marks=pytest.mark.gpu)
            for shape in ((9, 12288), (3, 28672), (33, 100), (5, 9))
        ),
    ],
)
def test_no_candidate_is_better_than_the_kernels(
    shape: tuple[int, int], group_size: int | None, device: str, bits: int, rule: dict[str, object], norm: float
) -> None:
    weight, scheme = weight_of(*shape, device=device), scheme_of(bits, rule, group_size)
    weight[1] = 0
    ratios = clip_search.search(weight, scheme, norm)
    assert_best(ratios, weight, scheme, norm)
    assert (ratios[1] == 1).all()


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("norm", NORMS)
def test_values_between_two_codes_are_as_good_by_either(norm: float, device: str) -> None:
    """Rows of halves and whole numbers, for which many candidates put values on ties."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randint(-14, 15, (8, 64), generator=generator) / 2).to(device)
    weight[:, 0] = 7
    for scheme in (scheme_of(4, RULES[0]), scheme_of(4, RULES[1])):
        assert_best(clip_search.search(weight, scheme, norm), weight, scheme, norm)
    positive, scheme = weight.abs(), scheme_of(4, RULES[2])
    assert_best(clip_search.search(positive, scheme, norm), positive, scheme, norm)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("norm", NORMS)
def test_rows_without_a_least_error_are_not_clipped(norm: float, rule: dict[str, object], device: str) -> None:
    weight, scheme = weight_of(6, 40, device=device), scheme_of(4, rule)
    expected = clip_search.search(weight, scheme, norm)
    weight[1, 3], weight[2, 39], weight[3, 0], weight[4] = torch.nan, torch.inf, -torch.inf, 0
    found = clip_search.search(weight, scheme, norm)
    assert (found[1:5] == 1).all()
    assert torch.equal(found[[0, 5]], expected[[0, 5]])
    assert (clip_search._reference(weight, 4, scheme.symmetric, scheme.scale == "full", norm)[1:5] == 1).all()


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
def test_long_rows_keep_their_digits(device: str) -> None:
    """Errors of neighbouring candidates differ by some 1e-4, which sums of 12288 squares must still show."""
    weight, scheme = weight_of(2, 12288, device=device), scheme_of(8, RULES[1])
    assert_best(clip_search.search(weight, scheme, 2.0), weight, scheme, 2.0)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
def test_tensors_without_values_and_parts_of_tensors_are_taken(device: str) -> None:
    scheme, whole = scheme_of(4, RULES[2]), weight_of(8, 33, device=device)
    assert clip_search.search(whole[:0], scheme, 2.0).shape == (0, 1)
    expected = clip_search.search(whole, scheme, 2.0)
    assert torch.equal(clip_search.search(whole[1:], scheme, 2.0), expected[1:])
    assert torch.equal(clip_search.search(whole.T.contiguous().T, scheme, 2.0), expected)


@pytest.mark.parametrize(
    ("dtype", "scheme", "why"),
    [
        (torch.float64, scheme_of(4, RULES[0]), "float32 weights"),
        (torch.float32, QuantizationScheme(bits=4, granularity="tensor"), "channel or group"),
        (torch.float32, QuantizationScheme(bits=8, type="float", granularity="channel"), "integers"),
        (torch.float32, scheme_of(4, RULES[0], 16), "multiple of the group size"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(dtype: torch.dtype, scheme: QuantizationScheme, why: str) -> None:
    assert why in str(clip_search.problem(torch.zeros(2, 24, dtype=dtype), scheme))
    assert clip_search.problem(torch.zeros(2, 24), scheme_of(4, RULES[2], 12)) is None


@pytest.mark.parametrize("group_size", [None, 8])
def test_on_a_cpu_learning_searches_in_torch(group_size: int | None) -> None:
    weight, scheme = weight_of(5, 29), scheme_of(4, RULES[2], group_size)
    search = clips_of(WeightQuantization(scheme=scheme, clip_norm=2.4))
    assert search is not None
    assert torch.equal(search(weight), search_clip(weight, scheme, 2.4))
    assert clips_of(WeightQuantization(scheme=scheme, clip_search=False)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("group_size", [None, 64, 100])
def test_on_a_gpu_learning_searches_by_the_kernel_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, group_size: int | None, norm: float
) -> None:
    launched: list[Tensor] = []
    run = clip_search.best_ratios
    monkeypatch.setattr(clip_search, "best_ratios", lambda x, *rest: launched.append(x) or run(x, *rest))
    scheme = scheme_of(4, RULES[0], group_size)
    search = clips_of(WeightQuantization(scheme=scheme, clip_norm=norm))
    assert search is not None
    weight = weight_of(96, 192, device="cuda")
    for given in (weight, weight.T.contiguous().T):
        ratios = search(given)
        if group_size != 100:  # groups of 100 leave a shorter one
            assert_best(ratios, weight, scheme, norm)
    assert len(launched) == (0 if group_size == 100 else 2)
    assert search(weight.double()).dtype == torch.float64


@pytest.mark.gpu
def test_a_tensor_that_the_kernel_cannot_read_is_refused() -> None:
    with pytest.raises(KernelError, match="float32"):
        clip_search.best_ratios(torch.randn(4, 16, device="cuda").half(), 4, True, False, 2.0)
