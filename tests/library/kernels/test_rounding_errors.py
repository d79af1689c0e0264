"""Rounding errors of rows as a kernel: bit for bit torch's on a GPU, and what learning a rotation takes it for.

Without a GPU the CUDA source runs lane by lane on the CPU (`emulated`), which tests all but what NVIDIA's compiler and
hardware do. There the scheme's range is divided by its steps as torch does it on a GPU.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotquant.foundation.errors import KernelError
from rotquant.kernels.rows import rounding_errors as rows_kernel
from rotquant.kernels.rows.rounding_errors import errors_of
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.rotation.matrices import initial_rotations
from rotquant.models.rotation.network import quantized_network
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme, WeightQuantization
from rotquant.tensors.quantization import choose_qparams, fake_quantize
from rotquant.weights.clipping import clips_of
from tests.helpers.models import tiny_model, tiny_tokens
from tests.library.kernels.emulated import emulate, needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
emulated = pytest.param("cpu", marks=needs_compiler)

TYPES = [torch.float32, torch.float16, torch.bfloat16]
#: How ranges become scales and zero points.
RULES: list[dict[str, Any]] = [
    {"symmetric": True},
    {"symmetric": True, "scale": "full"},
    {"symmetric": False},
    {"symmetric": False, "zero_point": "exact"},
]


def scheme_of(bits: int, rule: dict[str, Any], clip_ratio: float = 1.0, **grain: Any) -> QuantizationScheme:
    return QuantizationScheme(bits=bits, clip_ratio=clip_ratio, **rule, **grain)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal values of some spread and centre for each row, with one large one in every third."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator)
    x += torch.randint(-1, 2, (*shape[:-1], 1), generator=generator)
    x[::3, ..., shape[-1] // 2] *= 6
    return x.to(device, dtype)


def odd_rows(n: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows [16, n]: of one value, of one sign, with what is no number or infinite, next to nothing, very large."""
    x = values(16, n, dtype=dtype, device=device)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x[0], x[1], x[2], x[3], x[4] = 0, 3.3, -0.7, x[3].abs() + 1, -x[4].abs() - 1
    x[5, n // 2], x[6, n - 1], x[7, 0], x[8] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[9, 0], x[9, n - 1] = torch.inf, -torch.inf
    x[10] *= tiny
    x[11] *= tiny / 50  # no normal numbers
    x[12] = 1000 + x[12] * torch.finfo(dtype).eps
    x[13, 0], x[13, n - 1] = largest, -largest
    x[14] = torch.arange(n, device=device) % 15 - 7  # on the grid, or on its ties
    x[15] = (torch.arange(n, device=device) % 29 - 14) / 2
    return x


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Every bit but the signs of zeros."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_as_in_torch(x: Tensor, scheme: QuantizationScheme, clips: Tensor | None = None) -> None:
    arguments = (scheme.bits, scheme.symmetric, scheme.scale == "full", scheme.zero_point == "exact", scheme.clip_ratio)
    expected = fake_quantize(x, scheme, choose_qparams(x, scheme, clips)).sub_(x)
    assert_same(rows_kernel.rounding_errors(x, *arguments, clips), expected)


@dataclass
class Steps:
    """A number by which tensors are divided as on a GPU: multiplied by its reciprocal."""

    number: float

    def __rtruediv__(self, other: Any) -> Any:
        return other * (1 / self.number)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The kernel on tensors of the CPU as well, and torch's arithmetic there as on a GPU."""
    emulate(rows_kernel, monkeypatch)
    monkeypatch.setattr(rows_kernel, "rounding_errors", rows_kernel._cuda)
    if request.node.callspec.params["device"] == "cpu":
        steps = QuantizationScheme.steps
        monkeypatch.setattr(QuantizationScheme, "steps", property(lambda scheme: Steps(steps.__get__(scheme))))


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "grain", [{}, {"granularity": "channel"}, {"granularity": "group", "group_size": 8}, {"granularity": "head"}]
)
def test_on_a_cpu_errors_are_those_of_torch(grain: dict[str, Any], rule: dict[str, Any], dtype: torch.dtype) -> None:
    for clip_ratio in (1.0, 0.9):
        scheme, x = scheme_of(4, rule, clip_ratio, **grain), values(2, 3, 5, 24, dtype=dtype)
        for given in (x, x.transpose(1, 2), x[:0]):
            before = given.clone()
            found = errors_of(given, scheme)
            assert found.shape == given.shape
            assert_same(found, fake_quantize(given, scheme).sub_(given))
            assert torch.equal(given, before)


@pytest.mark.unflipped  # torch.library.opcheck has dispatch modes of its own
def test_the_operator_has_a_shape_rule() -> None:
    for clips in (None, torch.rand(3, 1)):
        given = (torch.randn(3, 16), 4, False, False, True, 0.9, clips)
        torch.library.opcheck(torch.ops.rotquant.rounding_errors.default, given)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("clip_ratio", [1.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "device"),
    [
        *(
            pytest.param(shape, "cpu", marks=needs_compiler)
            for shape in ((5, 1), (70, 8), (35, 16), (9, 64), (3, 100), (3, 257), (2, 576), (2, 1536), (1, 1800))
        ),
        *(pytest.param(shape, "cpu", marks=needs_compiler) for shape in ((1, 2048), (1, 7000))),
        *(
            pytest.param((97, n), "cuda", marks=pytest.mark.gpu)
            for n in (16, 32, 64, 128, 576, 1536, 2048, 4096, 14336, 28672)
        ),
        *(pytest.param((33, n), "cuda", marks=pytest.mark.gpu) for n in (1, 5, 100, 257, 6152, 11007)),
    ],
)
def test_the_kernel_is_torch_bit_for_bit(
    shape: tuple[int, int], device: str, dtype: torch.dtype, rule: dict[str, Any], clip_ratio: float
) -> None:
    x = values(*shape, dtype=dtype, device=device)
    for bits in (2, 4, 8) if device == "cpu" else range(2, 9):
        assert_as_in_torch(x, scheme_of(bits, rule, clip_ratio))
    clips = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(1)).to(device)
    assert_as_in_torch(x, scheme_of(3, rule, clip_ratio), clips)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("device", [emulated, on_gpu])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [9, 40, 1544])
def test_odd_rows_are_as_in_torch(n: int, dtype: torch.dtype, rule: dict[str, Any], device: str) -> None:
    x = odd_rows(n, dtype, device)
    for bits, clip_ratio in ((2, 1.0), (4, 0.9), (4, 1.0), (5, 0.37), (8, 0.9)):
        assert_as_in_torch(x, scheme_of(bits, rule, clip_ratio))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(
    ("bits", "device"),
    [
        pytest.param(4, "cpu", marks=needs_compiler),  # others are the same lanes
        *(pytest.param(bits, "cuda", marks=pytest.mark.gpu) for bits in range(2, 9)),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_groups_heads_and_parts_of_tensors_are_taken(rule: dict[str, Any], bits: int, device: str) -> None:
    whole = values(3, 4, 5, 96, dtype=torch.bfloat16, device=device)
    schemes = [scheme_of(bits, rule, granularity="group", group_size=size) for size in (16, 32, 6)]
    for scheme in (scheme_of(bits, rule), scheme_of(bits, rule, granularity="head"), *schemes):
        for x in (whole, whole.transpose(1, 2), whole[1:, :, 1:], whole[:0], whole.flatten()[96:480].view(4, 96)):
            own = torch.rand_like(choose_qparams(x, scheme).scale)  # one for each scale, as a search gives them
            for clips in (None, own) if bits == 4 else (None,):
                found = errors_of(x, scheme, clips)
                assert found.shape == x.shape
                assert_same(found, fake_quantize(x, scheme, choose_qparams(x, scheme, clips)).sub_(x))


@pytest.mark.parametrize(
    ("dtype", "scheme", "why"),
    [
        (torch.float64, scheme_of(4, RULES[0]), "16 or 32 bits"),
        (torch.float32, scheme_of(4, RULES[0], granularity="tensor"), "each row"),
        (torch.float32, QuantizationScheme(bits=8, type="float"), "integers"),
        (torch.float32, QuantizationScheme(bits=4, symmetric=False, granularity="head", rule="vllm"), "integers"),
        (torch.float32, scheme_of(4, RULES[0], granularity="group", group_size=16), "multiple of the group size"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(dtype: torch.dtype, scheme: QuantizationScheme, why: str) -> None:
    assert why in str(rows_kernel.problem(torch.zeros(2, 24, dtype=dtype), scheme))
    for one in TYPES:
        accepted = scheme_of(4, RULES[3], granularity="group", group_size=12)
        assert rows_kernel.problem(torch.zeros(2, 24, dtype=one), accepted) is None


@pytest.mark.gpu
def test_a_tensor_that_the_kernel_cannot_read_is_refused() -> None:
    with pytest.raises(KernelError, match="float64"):
        rows_kernel.rounding_errors(torch.randn(4, 16, device="cuda").double(), 4, True, False, False, 1.0, None)
    with pytest.raises(KernelError, match=r"clip ratios has shape \(3, 1\)"):
        errors_of(torch.randn(4, 16, device="cuda"), scheme_of(4, RULES[0]), torch.rand(3, 1, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("gradient", "places"), [("errors", 6), ("scales", 4), ("both", 4)])
def test_learning_is_the_same_by_the_kernel(
    gradient: Any, places: int, weights: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched at those places of a layer whose scales R1 gets no gradient from, and the loss does not move.

    R1's gradient may by the order of attention's sums on a GPU: far less than 1 % of its largest number.
    """
    inputs, cache = QuantizationScheme(bits=4, symmetric=False), scheme_of(4, RULES[0], 0.9, granularity="head")
    scheme = RotationScheme(values="random_hadamard", heads=False)
    of = Recipe(rotation=scheme, activations=inputs, attention_output=cache, keys=cache, values=cache)
    model, tokens = cast(nn.Module, tiny_model(dtype=dtype)).to("cuda"), tiny_tokens(seed=2).cuda()
    drawn = initial_rotations(architecture_of(model), scheme, 4)
    assert drawn.residual is not None
    residual = drawn.residual.to("cuda").requires_grad_()
    launched: list[Tensor] = []
    rounded = WeightQuantization(scheme=scheme_of(4, RULES[0], granularity="channel"), clip_search=True)
    of_weights = {"weights": rounded.scheme, "clips": clips_of(rounded)} if weights else {}

    def learn(problem: Any) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(rows_kernel, "problem", problem)
        with quantized_network(model, of, replace(drawn, residual=residual), gradient=gradient, **of_weights):
            loss = cross_entropy(model(tokens).logits.flatten(0, 1).float(), tokens.flatten())
            return loss.detach(), torch.autograd.grad(loss, residual)[0]

    run, known = rows_kernel.errors_of, rows_kernel.problem
    monkeypatch.setattr(rows_kernel, "errors_of", lambda x, *of: launched.append(x) or run(x, *of))
    loss, slope = learn(lambda *_: "not asked for")
    assert not launched
    found, its_slope = learn(known)
    linears = sum(len(site.linears) for site in architecture_of(model).sites) if weights and gradient == "errors" else 0
    assert len(launched) == (places + linears) * len(decoder_layers(model))
    assert torch.equal(found, loss)
    torch.testing.assert_close(its_slope, slope, rtol=0, atol=0.01 * slope.abs().max().item())
