"""Benchmarks of optimization time without a GPU: how few steps stand for all, and what is run. Times are not tested."""

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch.optim.optimizer import register_optimizer_step_post_hook

from reproduction.benchmarks import distillation, learning
from reproduction.benchmarks import shapes as learning_models
from reproduction.benchmarks.arguments import (
    CalibrateArguments,
    DistillArguments,
    LearnRotationsArguments,
    PrefixQuantArguments,
    SharedDistillArguments,
)
from reproduction.benchmarks.learning import gptq, learn, learning_seconds
from reproduction.benchmarks.shapes import SHAPES, random_model_on, shape_config
from rotquant.foundation.errors import ConfigError, KernelError
from rotquant.methods.gptq import GPTQ
from rotquant.methods.spinquant import SpinQuant
from rotquant.methods.spinquant import cayley_training as spinquant
from rotquant.models.architectures import decoder_layers
from rotquant.models.memory import size_in_bytes
from tests.helpers.cases import only
from tests.helpers.speed import files_timed

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small shape, and a GPU that is the CPU."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(learning, "gpu", lambda: CPU)
    monkeypatch.setattr(learning, "gpus", lambda number: (CPU,) * number)
    monkeypatch.setattr(distillation, "gpus", lambda number: (CPU,) * number)
    monkeypatch.setattr(distillation, "gpu", lambda: CPU)


def times_of(steps: int, *, before: float, ordinary: float, longer: float) -> list[float]:
    """When each of so many steps is done, every tenth and the last being longer."""
    taken = [longer if step % 10 == 0 or step == steps - 1 else ordinary for step in range(steps)]
    return [before + done for done in itertools.accumulate(taken)]


def test_few_steps_stand_for_all_where_steps_are_alike() -> None:
    seconds = {}
    for taken in (3, 6, 30, 100):
        times = times_of(taken, before=7.0, ordinary=2.0, longer=3.0)
        seconds[taken] = learning_seconds(LearnRotationsArguments(shape="any", taken=taken), times, times[-1] + 1.0)
    for taken, measured in seconds.items():
        # 100 steps, 11 of them longer: 0, 10, ..., 90 and 99.
        assert measured["seconds"].value == pytest.approx(7 + 89 * 2 + 11 * 3 + 1)
        assert measured["setup_seconds"].value == pytest.approx(8.0)
        assert measured["step_seconds"].value == pytest.approx(2.0)
        assert measured["taken"].value == taken


def test_a_slow_first_step_counts_once() -> None:
    times = [at + 5.0 for at in times_of(6, before=0.0, ordinary=2.0, longer=3.0)]
    measured = learning_seconds(LearnRotationsArguments(shape="any", taken=6), times, times[-1])
    assert measured["seconds"].value == pytest.approx(5 + 89 * 2 + 11 * 3)


def test_the_spread_of_the_whole_is_that_of_its_ordinary_steps() -> None:
    times = list(itertools.accumulate([3.0, 2.0, 2.5, 1.5, 3.0]))
    measured = learning_seconds(LearnRotationsArguments(shape="any", taken=5), times, times[-1])
    assert measured["step_seconds"].low == 1.5
    assert measured["step_seconds"].high == 2.5
    assert measured["seconds"].high - measured["seconds"].low == pytest.approx(89.0)


def test_a_whole_learning_is_as_long_as_it_was() -> None:
    times = times_of(100, before=1.0, ordinary=0.5, longer=0.7)
    measured = learning_seconds(LearnRotationsArguments(shape="any"), times, 123.0)
    assert measured["seconds"].value == 123.0
    assert measured["seconds"].low is None


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_timed_is_the_librarys_learning_of_the_papers_setting(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    calls = []

    def recorded(model: torch.nn.Module, recipe: object, *arguments: object, **options: object) -> object:
        calls.append((recipe, arguments[1].shape))
        return spinquant.learn_rotations(model, recipe, *arguments, **options)

    monkeypatch.setattr(learning, "learn_rotations", recorded)
    measured = learn(LearnRotationsArguments(shape="tiny", batch_size=2, tokens=16, taken=4, gpus=gpus))
    ((recipe, shape),) = calls
    assert shape == (2, 16)
    assert (SpinQuant.of(recipe).steps, SpinQuant.of(recipe).batch_size) == (4, 2)
    assert (recipe.activations.bits, recipe.keys.bits, recipe.values.bits) == (4, 4, 4)
    assert recipe.rotation.mlp
    assert measured["taken"].value == 4
    assert measured["seconds"].value > measured["step_seconds"].value > 0


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("layers", "built"), [(None, [1, 4]), ((1, 3), [1, 1, 3])])
def test_gptq_is_timed_whole_or_by_its_layers(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[int, int] | None, built: list[int]
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(learning, "_now", lambda: 10.0 * next(clock))
    found = []

    def build_weights(model: torch.nn.Module, _: None, recipe: object, *__: object, **___: object) -> None:
        found.append(len(decoder_layers(model)))
        assert GPTQ.of(recipe)
        assert recipe.weights
        assert recipe.rotation is None
        for _ in range(len(decoder_layers(model))):
            next(clock)

    monkeypatch.setattr(learning, "build_weights", build_weights)
    measured = gptq(CalibrateArguments(shape="tiny", samples=2, tokens=16, layers=layers))
    assert found == built
    assert measured["seconds"].value == pytest.approx(10.0 + 4 * 10.0)


@pytest.mark.usefixtures("on_the_cpu")
def test_gptq_runs_on_a_random_model() -> None:
    measured = gptq(CalibrateArguments(shape="tiny", samples=2, tokens=16, layers=(1, 2)))
    assert set(measured) == {"seconds", "layer_seconds"}


def test_weights_are_random_and_norms_are_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    first, second, other = (
        random_model_on((CPU,), shape_config("tiny"), torch.bfloat16, seed=seed) for seed in (0, 0, 1)
    )
    weights = [model.model.layers[2].mlp.down_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    # 2048 normal values: their deviation is known to 1 / sqrt(2 * 2048), 1.6 %; four times that.
    assert weights[0].float().std() == pytest.approx(0.02, rel=0.065)
    assert torch.equal(first.model.norm.weight, torch.ones(32, dtype=torch.bfloat16))
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert first(torch.arange(8)[None]).logits.isfinite().all()


def test_two_gpus_share_the_layers_evenly_and_in_order() -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(shape_config("llama-3-70b")).to(torch.bfloat16)
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    places = learning_models._spread(model, devices)
    layers = [places[f"model.layers.{index}"].index for index in range(80)]
    assert layers == sorted(layers)
    assert 39 <= layers.count(0) <= 42
    # Of an H200's 139 GiB half is left for what learning needs.
    assert size_in_bytes(model) / 2 < 139 / 2 * 2**30


def test_the_digest_of_a_time_covers_the_library_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    learned, calibrated = files_timed("learn", monkeypatch), files_timed("gptq", monkeypatch)
    spinquant_files = {f"rotquant/methods/spinquant/{name}.py" for name in ("__init__", "cayley_training")}
    shared = {f"rotquant/models/rotation/{name}.py" for name in ("learning", "learning_memory", "network")}
    assert spinquant_files | shared | {"rotquant/tensors/stiefel.py"} <= learned
    gptq_files = {"rotquant/methods/gptq/__init__.py", "rotquant/methods/gptq/columns.py"}
    assert gptq_files | {"rotquant/models/stream.py", "rotquant/kernels/hadamard/choice.py"} <= calibrated
    # Methods that are not timed, and what says in words what is: edits of these leave the record as it is.
    assert not [path for path in learned | calibrated if path.startswith("rotquant/recipes/")]
    methods = {path for path in learned | calibrated if path.startswith("rotquant/methods/")}
    assert methods == spinquant_files | gptq_files
    assert not gptq_files & learned


def test_layers_and_epochs_that_are_left_out_take_what_the_last_ones_took(monkeypatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(learning, "_costs", lambda a, layers, epochs: (5.0 + 3.0 * layers + 2.0 * epochs, 7))
    found = learning.prefixquant(PrefixQuantArguments(shape="tiny", part="grid"))
    assert found["layer_seconds"].value == 3.0
    assert found["seconds"].value == 5.0 + 4 * 3.0 + 2.0  # of four layers
    tuned = learning.prefixquant(PrefixQuantArguments(shape="tiny", part="tuning"))
    assert tuned["layer_seconds"].value == 5.0 + 3.0 + 20 * 2.0
    assert tuned["seconds"].value == 4 * tuned["layer_seconds"].value
    assert tuned["peak_bytes"].value == 7


@pytest.mark.parametrize("part", only(["grid"], ["prefix", "grid", "tuning"]))
def test_the_parts_of_prefixquant_are_timed_alone(part, on_the_cpu, monkeypatch) -> None:
    costs, built = learning._costs, []

    def watched(*arguments):
        built.append(costs(*arguments))
        return built[-1]

    monkeypatch.setattr(learning, "_costs", watched)
    found = learning.prefixquant(PrefixQuantArguments(shape="tiny", part=part, samples=4, tokens=16))
    assert len(built) == 3  # the first warms up
    assert all(seconds > 0.0 for seconds, _ in built)
    assert found["seconds"].unit == "s"


def test_mistrals_shape_is_known_beside_the_others() -> None:
    config = shape_config("mistral-7b")
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 14336, 32768)
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (32, 8, 32)
    with pytest.raises(ConfigError, match="unknown shape 'mistral-8b'"):
        shape_config("mistral-8b")


def test_steps_and_layers_that_give_no_time_are_refused() -> None:
    with pytest.raises(ValidationError, match="taken must be at least 3 steps"):
        LearnRotationsArguments(shape="any", taken=2)
    with pytest.raises(ValidationError, match="taken must be at least 3 steps"):
        LearnRotationsArguments(shape="any", steps=5, taken=6)
    with pytest.raises(ValidationError, match="a number and a larger one"):
        CalibrateArguments(shape="any", layers=(3, 3))
    with pytest.raises(ValidationError, match=r"taken\n.* a number and a larger one"):
        PrefixQuantArguments(shape="any", part="tuning", taken=(2, 2))


def test_too_few_gpus_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "gpu", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(KernelError, match="this needs 2 GPUs, and torch sees 1"):
        learn(LearnRotationsArguments(shape="llama-3-70b", gpus=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(KernelError, match="need an NVIDIA GPU"):
        learn(LearnRotationsArguments(shape="llama-2-7b"))


def test_what_is_distilled_is_as_the_table_says() -> None:
    for method, rotated in (("BitDistiller", False), ("BitDistiller rotated", True), ("RCP", True)):
        recipe = distillation._recipe(DistillArguments(shape="tiny", method=method, batch_size=4, epochs=16))
        ((name, settings),) = recipe.methods.items()
        schemes = (recipe.weights.scheme, recipe.activations, recipe.keys, recipe.values)
        assert [scheme.bits for scheme in schemes] == [2, 4, 4, 4]
        assert (recipe.rotation is not None) == rotated
        assert (settings.batch_size, settings.epochs, settings.text.sequence_length) == (4, 16, 1024)
        assert settings.steps == DistillArguments(shape="tiny", method=method, batch_size=4, epochs=16).steps == 32000
        assert (settings.title == "RCP") == (method == "RCP") == (name == "rcp")


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("layers", [None, (1, 3)])
@pytest.mark.parametrize("method", ["BitDistiller", "RCP"])
def test_steps_of_a_training_stand_for_all(
    monkeypatch: pytest.MonkeyPatch, method: str, layers: tuple[int, int] | None
) -> None:
    """By a clock that goes on by one in each step and by ten in each decoder layer that it trains."""
    monkeypatch.setitem(SHAPES, "tiny", TINY | {"hidden_size": 128, "intermediate_size": 128})
    seen: list[int] = []
    begin = distillation.Training.__init__

    def counted(self, stage, *arguments) -> None:
        begin(self, stage, *arguments)
        seen.append(len(decoder_layers(stage.model)))
        assert all(parameter.requires_grad for parameter in stage.model.parameters())

    monkeypatch.setattr(distillation.Training, "__init__", counted)
    clock = [0.0]

    def stepped(*_) -> None:
        clock[0] += 1.0 + 10 * seen[-1]

    monkeypatch.setattr(distillation.time, "perf_counter", lambda: clock[0])
    asked = DistillArguments(
        shape="tiny", method=method, batch_size=2, tokens=16, samples=20, epochs=3, taken=5, layers=layers
    )
    with register_optimizer_step_post_hook(stepped):
        measured = distillation.distill(asked)
    assert seen == ([4] if layers is None else [1, 3])
    assert measured["step_seconds"].value == pytest.approx(41.0)
    assert measured["seconds"].value == pytest.approx(30 * 41.0)
    if layers is None:
        assert measured["step_seconds"].replays == 3
    else:
        assert measured["layer_seconds"].value == pytest.approx(10.0)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_shared_training_is_timed_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process, this one; tests/library/test_qat_engine.py has trainings that two share."""

    def start(function, arguments, processes: int, start_method: str) -> None:
        assert (processes, start_method) == (1, "spawn")
        function(0, *arguments)

    monkeypatch.setattr(distillation, "start_processes", start)
    monkeypatch.setitem(SHAPES, "tiny", TINY | {"hidden_size": 128, "intermediate_size": 128})
    amounts = {"batch_size": 4, "tokens": 16, "samples": 20, "epochs": 3, "taken": 5}
    shared = SharedDistillArguments(shape="tiny", method="RCP", gpus=1, at_once=2, **amounts)
    measured = distillation.distill_shared(shared)
    assert measured["step_seconds"].replays == 3
    assert measured["seconds"].value == pytest.approx(15 * measured["step_seconds"].value)
    assert measured["step_seconds"].low > 0
    assert measured["peak_bytes"].value >= 0


def test_unequal_shares_of_a_batch_are_refused() -> None:
    with pytest.raises(ValidationError, match="batches of 4 have no equal shares for 3 GPUs"):
        SharedDistillArguments(shape="tiny", method="RCP", batch_size=4, gpus=3)
    with pytest.raises(ValidationError, match="layers are not left out"):
        SharedDistillArguments(shape="tiny", method="RCP", layers=(1, 2))


def test_a_distillation_of_no_length_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 4 steps"):
        DistillArguments(shape="tiny", method="RCP", taken=3)
    with pytest.raises(ValidationError, match="a number and a larger one"):
        DistillArguments(shape="tiny", method="RCP", layers=(2, 2))
