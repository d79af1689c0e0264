"""Benchmarks without a GPU: what each of them computes, what it counts, and what it refuses. Times are never tested."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from reproduction.benchmarks import arguments
from reproduction.benchmarks import timing as measurement
from reproduction.benchmarks.arguments import FakeQuantizeArguments, RoundRowsArguments
from reproduction.benchmarks.attention import decode_attentions, float_case, int4_case
from reproduction.benchmarks.layers import linear, linear_case
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.rows import fake_quantize_case, quantize_case, round_rows_case, transform_call
from reproduction.benchmarks.timing import Case, fastest, measure
from rotquant.foundation.errors import KernelError
from rotquant.kernels.launch import overlap

pytestmark = pytest.mark.filterwarnings("ignore::rotquant.kernels.launch.operators.SlowKernelWarning")

CPU = torch.device("cpu")


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that runs every input set once and says one microsecond."""

    def time_gpu(call: Callable[[int], object], sets: int = 1, *, replays: int = 1, settle: float = 0.0) -> Measurement:
        for index in range(sets):
            call(index)
        return Measurement(1e-6, "s", 1e-6, 1e-6, replays, sets)

    monkeypatch.setattr(measurement, "time_gpu", time_gpu)
    monkeypatch.setattr(measurement, "rotations", lambda size, device: 3)
    monkeypatch.setattr(measurement, "gpu", lambda: CPU)


@pytest.mark.usefixtures("stopped_clock")
def test_inputs_and_outputs_are_counted_once_and_every_set_is_used() -> None:
    seen = []

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(x.data_ptr())
        return x * y

    measured = measure(Case(run, (torch.ones(8, dtype=torch.float16), torch.ones(8)), operations=8))
    assert measured["seconds"].value == 1e-6
    assert measured["bytes"].value == 8 * (2 + 4 + 4)
    assert measured["operations"].value == 8
    assert len(set(seen)) == 3


def layer(implementation: str, **fields: object) -> arguments.LinearArguments:
    return arguments.LinearArguments(
        **{"tokens": 32, "in_features": 256, "out_features": 48, "implementation": implementation} | fields
    )


@pytest.mark.parametrize("implementation", ["fp16", "bf16", "int8", "int4", "int4-grouped", "int4-a8", "w2a16", "w2a4"])
def test_every_layer_makes_16_bit_outputs_of_its_size(implementation: str) -> None:
    y = linear_case(layer(implementation), CPU)()
    assert y.shape == (32, 48)
    assert y.dtype == (torch.bfloat16 if implementation == "bf16" else torch.float16)
    assert y.isfinite().all()
    assert y.unique().numel() > 100


@pytest.mark.parametrize("implementation", ["int4", "int4-a8", "w2a4", "w16a4"])
@pytest.mark.parametrize("quantization", ["none", "dynamic", "static"])
@pytest.mark.parametrize("hadamard", ["none", "float32", "float16"])
def test_what_happens_online_to_the_input_is_a_choice(implementation: str, quantization: str, hadamard: str) -> None:
    y = linear_case(layer(implementation, quantization=quantization, hadamard=hadamard), CPU)()
    assert y.shape == (32, 48)
    assert y.isfinite().all()


def test_overlapping_is_switched_on_around_the_call_alone() -> None:
    case = linear_case(layer("int4", overlapped=True), CPU)
    assert case().shape == (32, 48)
    assert not overlap._overlapping.get()


def test_a_quantized_layer_reads_fewer_bytes_and_does_as_many_operations() -> None:
    # One token and many outputs, so that weights are nearly everything: 16 bits, 4 bits, 2 bits and a table of four
    # 16-bit levels for every 128 weights (half a bit each).
    sizes = {"tokens": 1, "out_features": 4096}
    bits = {"fp16": 16, "int4": 4, "w2a4": 2.5}
    cases = {name: linear_case(layer(name, **sizes), CPU) for name in bits}
    for name, case in cases.items():
        weight = 256 * 4096 * bits[name] / 8
        assert weight <= measurement.nbytes(case.inputs) <= weight + 4 * 4096 + 2048
        assert case.operations == cases["fp16"].operations


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"implementation": "fp16", "hadamard": "float32"}, "takes its input as it is"),
        ({"implementation": "fp8", "quantization": "dynamic"}, "takes its input as it is"),
        ({"implementation": "fp16", "product": "gemv"}, "only W4 products"),
        ({"implementation": "fp8", "overlapped": True}, "no kernel of ours"),
        ({"implementation": "int8", "tokens": 1}, "takes 17 rows"),
        ({"implementation": "int4-grouped", "in_features": 192}, "groups of 128"),
        ({"implementation": "int4", "in_features": 100}, "multiple of 64"),
    ],
)
def test_impossible_layers_are_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        layer(**fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_without_a_gpu_says_so() -> None:
    with pytest.raises(KernelError, match="need an NVIDIA GPU"):
        linear(layer("fp16"))


def step(implementation: str, **fields: object) -> arguments.DecodeAttentionArguments:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "cache": 65, "implementation": implementation}
    return arguments.DecodeAttentionArguments(**sizes | fields)


@pytest.mark.parametrize("prefix", [0, 4])
@pytest.mark.parametrize("implementation", ["int4", "int4-static"])
@pytest.mark.parametrize("hadamard", ["none", "float32", "float16"])
def test_the_quantized_step_appends_its_token_and_attends_to_it(
    hadamard: str, implementation: str, prefix: int
) -> None:
    case = int4_case(step(implementation, hadamard=hadamard), CPU, prefix)
    _, _, _, k_codes, v_codes, *_ = case.inputs
    before = k_codes.clone(), v_codes.clone()
    y = case()
    assert y.shape == (2, 4, 64)
    assert y.isfinite().all()
    assert not torch.equal(before[0], k_codes)
    assert not torch.equal(before[1], v_codes)


def test_the_16_bit_step_appends_its_token_and_attends_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "reproduction.benchmarks.attention.fastest_attention",
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention,
    )
    case = float_case(step("fp16", kv_heads=4), CPU)
    _, new, cache = case.inputs
    assert case().shape == (2, 4, 1, 64)
    assert torch.equal(cache[:, :, :, -1:], new)


def test_query_heads_may_be_rows_of_one_query() -> None:
    # The two forms name the same scores; the CPU has no flash backend, so the grouping is tested by its reshaping.
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    rows = attend(q.view(2, 2, 2, 8), k, v).view_as(q)
    torch.testing.assert_close(rows, attend(q, k, v, enable_gqa=True))
    assert {name.split(", ")[1] for name in decode_attentions()} == {"grouped", "rows"}


@pytest.mark.parametrize(
    ("fields", "sentence"), [({"kv_heads": 3}, "cannot share"), ({"hadamard": "float32"}, "needs no Hadamard")]
)
def test_impossible_steps_are_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        step("fp16", **fields)


@pytest.mark.parametrize("before", ["none", "hadamard", "rms-norm", "residual-rms-norm", "rms-norm-hadamard"])
@pytest.mark.parametrize("scale", ["dynamic", "static"])
def test_eager_torch_and_the_fused_operators_quantize_alike(before: str, scale: str) -> None:
    asked = {"rows": 7, "features": 128, "before": before, "scale": scale, "output": "held"}
    ours = quantize_case(arguments.QuantizeArguments(**asked, implementation="ours"), CPU)
    eager = quantize_case(arguments.QuantizeArguments(**asked, implementation="torch"), CPU)
    codes, expected = ours.run(*ours.inputs)[0], eager.run(*ours.inputs)[0]
    # The eager form rounds to 16 bits before it divides: a code may move by one, and few do.
    moved = (codes.short() - expected.short()).abs()
    assert moved.max() <= 1
    assert moved.float().mean() < 0.02


@pytest.mark.parametrize("before", ["hadamard", "rms-norm-hadamard"])
def test_floats_are_timed_as_outputs_of_the_transform(before: str) -> None:
    asked = {"rows": 7, "features": 128, "before": before, "implementation": "ours"}
    exact = {}
    for output in ("fp8", "nvfp4", "mxfp4"):
        case = quantize_case(arguments.QuantizeArguments(**asked, output=output), CPU)
        codes, scale = case.run(*case.inputs)
        exact[output] = codes.shape[1], scale.shape[1:]
    assert exact == {"fp8": (128, ()), "nvfp4": (64, (8,)), "mxfp4": (64, (4,))}


@pytest.mark.parametrize("change", [{"before": "none"}, {"implementation": "torch"}, {"scale": "static"}])
def test_floats_of_anything_else_are_refused(change: dict[str, str]) -> None:
    asked = {"rows": 7, "features": 128, "output": "fp8", "before": "hadamard", "implementation": "ours"}
    with pytest.raises(ValidationError, match="output of our transform alone"):
        arguments.QuantizeArguments.model_validate(asked | change)


def weights(**fields: object) -> FakeQuantizeArguments:
    return FakeQuantizeArguments(**{"out_features": 4, "in_features": 256, "dtype": "float32"} | fields)


@pytest.mark.parametrize("kind", ["range", "learned_range", "ldp", "n2uq", "nf3", "nf3_ldp"])
def test_torch_and_ours_are_the_same_fake_quantization(kind: str) -> None:
    ours, eager = (
        fake_quantize_case(weights(kind=kind, phase="both", implementation=name), CPU) for name in ("ours", "torch")
    )
    learned = {"range": 0, "learned_range": 2, "nf3": 0, "nf3_ldp": 3}.get(kind, 4)
    assert len(ours.inputs) == 2 + learned
    found, expected = ours.run(*ours.inputs), eager.run(*ours.inputs)
    assert len(found) == len(expected) == 2 + learned
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)
    alone = {
        phase: fake_quantize_case(weights(kind=kind, phase=phase, implementation="ours"), CPU)
        for phase in ("forward", "backward")
    }
    assert torch.equal(alone["forward"].run(*ours.inputs), found[0])
    assert torch.equal(alone["backward"].run(*ours.inputs)[0], found[1])


def test_rows_are_rounded_alike_with_and_without_gradients() -> None:
    both, forward = (
        round_rows_case(
            RoundRowsArguments(out_features=4, in_features=64, phase=phase, implementation="ours"), torch.device("cpu")
        )
        for phase in ("both", "forward")
    )
    value, to_weight, to_scale = both.run(*both.inputs)
    assert torch.equal(value, forward.run(*both.inputs)[0])
    assert to_weight.shape == value.shape
    assert to_scale.shape == (4, 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"phase": "backward", "implementation": "torch"}, "ask for both"),
        ({"phase": "both", "implementation": "ours", "in_features": 200}, "groups of 128"),
    ],
)
def test_impossible_fake_quantizations_are_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        weights(**fields)


def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(KernelError, match="hadacore is not installed here"):
        transform_call(arguments.TransformArguments(rows=1, features=64, implementation="hadacore"))


def test_the_fastest_of_what_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    times = {"slow": 3e-6, "quick": 1e-6}
    cases = {name: Case(lambda: None, (), operations=len(name)) for name in times}
    by_operations = {len(name): seconds for name, seconds in times.items()}

    def measured(case: Case, *, replays: int) -> dict[str, Measurement]:
        case()
        return {"seconds": Measurement(by_operations[case.operations], "s")}

    monkeypatch.setattr(measurement, "measure", measured)
    assert fastest([Case(refused, ()), *cases.values()]) is cases["quick"]
    with pytest.raises(KernelError, match="none of the calls"):
        fastest([Case(refused, ())])
