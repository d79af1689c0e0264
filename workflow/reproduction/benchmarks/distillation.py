"""Cost of quantization-aware training on a GPU: time and memory of BitDistiller's and RCP's steps (RCP Table 8).

It is the library's own training on random weights and tokens, stopped after a few steps: neither time nor memory
depends on their values, and all steps are alike. The cost of omitted layers is extrapolated. `sharing` has the same of
a training that several GPUs share.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.optim.optimizer import register_optimizer_step_post_hook

from reproduction.benchmarks.arguments import DistillArguments, SharedDistillArguments
from reproduction.benchmarks.learning import free_all, gpus, random_tokens
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import random_model_on, shape_config
from reproduction.benchmarks.timing import Measurements, gpu
from rotquant.foundation.files import read_json, write_json
from rotquant.models.stream import memory_peak, reset_memory_peak
from rotquant.qat.engine import Engine, make_engine
from rotquant.qat.method import SelfDistillation
from rotquant.qat.training import Training
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.training.replay import LEAST_STEPS, WARM_UP
from rotquant.weights.context import QuantizationContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 0
_PRESETS = {"BitDistiller": "bitdistiller", "BitDistiller rotated": "bitdistiller-rotated", "RCP": "rcp"}


def distill(arguments: DistillArguments) -> Measurements:
    """Seconds and memory of training a model of bfloat16, from parameters, gradients and moments in float32.

    Returns:
        seconds: of all steps of the training. step_seconds: of one, with the fastest and the slowest where the model is
        whole. peak_bytes: allocated by torch while steps are taken. layer_seconds, layer_bytes: what one decoder layer
        adds, where layers were left out.
    """
    a, layers = arguments, shape_config(arguments.shape).num_hidden_layers
    if a.layers is None:
        return of_steps(a, *_costs(a, layers))
    (fewer, less), (more, greater) = (_costs(a, number) for number in a.layers)
    between, rest = a.layers[1] - a.layers[0], layers - a.layers[1]
    layer = (statistics.median(more) - statistics.median(fewer)) / between
    added = (greater - less) / between
    step = statistics.median(more) + rest * layer
    return {
        "seconds": Measurement(a.steps * step, "s"),
        "step_seconds": Measurement(step, "s"),
        "peak_bytes": Measurement(greater + rest * added, "B"),
        "layer_seconds": Measurement(layer, "s"),
        "layer_bytes": Measurement(added, "B"),
    }


def of_steps(a: DistillArguments, times: list[float], peak: int) -> Measurements:
    """Measurements of a training whose model was whole, from seconds of some of its steps and their memory."""
    step = Measurement(statistics.median(times), "s", min(times), max(times), len(times))
    low, high = (None if end is None else a.steps * end for end in (step.low, step.high))
    seconds = Measurement(a.steps * step.value, "s", low, high, step.replays)
    return {"seconds": seconds, "step_seconds": step, "peak_bytes": Measurement(peak, "B")}


def _costs(a: DistillArguments, layers: int) -> tuple[list[float], int]:
    """Seconds of steps on a model of so many layers, and their memory."""
    free_all()
    device = gpu()
    return take_steps(
        a, random_model_on((device,), shape_config(a.shape, layers), torch.bfloat16, _SEED), Engine(device)
    )


def take_steps(a: DistillArguments, model: "PreTrainedModel", engine: Engine) -> tuple[list[float], int]:
    """Train a model for some steps; the seconds of those after the first two, and the memory that they take.

    Where steps are recorded as a CUDA graph, the steps before the recording are taken in addition.
    """
    device = engine.device
    unrecorded = WARM_UP if device.type == "cuda" and a.steps >= LEAST_STEPS else 0
    model.requires_grad_(True)
    recipe = _recipe(a)
    ((name, settings),) = recipe.methods.items()
    texts = {name: random_tokens(model.config.vocab_size, a.samples, a.tokens)}
    context = QuantizationContext(model, recipe, None, _SEED, device, None, texts=texts)
    training = _Started(context, cast(SelfDistillation, settings), engine)
    clock = _Clock(device, a.taken + unrecorded)
    with register_optimizer_step_post_hook(clock), contextlib.suppress(_EnoughError):
        training.run()
    return [after - before for before, after in itertools.pairwise(clock.times)][1 + unrecorded :], memory_peak(device)


def _recipe(a: DistillArguments) -> Recipe:
    """The method as its preset has it; the teacher's confidence is given and the text read, since steps are timed."""
    recipe = preset(_PRESETS[a.method])
    ((name, _),) = recipe.methods.items()
    text = {"samples": a.samples, "sequence_length": a.tokens}
    settings = {"text": text, "epochs": a.epochs, "batch_size": a.batch_size, "confidence": 0.5}
    settings |= {"temperature": None, "validation_share": 0.0}
    return override(recipe, {"methods": {name: settings}}, "benchmark")


class _Started(Training):
    """A training whose clips begin nowhere in particular: the search for them is no part of a step."""

    def _begin(self, resumed: bool) -> None:
        """Make the quantizers alone, as where a checkpoint has their parameters."""
        del resumed
        super()._begin(True)


class _EnoughError(Exception):
    """Raised after the timed steps, to stop."""


class _Clock:
    """Notes when each step has changed the parameters, and stops after some.

    The optimizer calls it. The memory that is taken before the second step does not count.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device = device
        self.steps = steps
        self.times: list[float] = []

    def __call__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            reset_memory_peak(self.device)
        if len(self.times) == self.steps:
            raise _EnoughError


_SEED = 0


def distill_shared(arguments: SharedDistillArguments) -> Measurements:
    """Seconds and memory of training a whole model of bfloat16 on one or more GPUs; see `distillation.distill`.

    Returns:
        seconds, step_seconds: of the first process, which waits for the others in each step. peak_bytes: allocated by
        torch on the GPU that has most.
    """
    a, devices = arguments, gpus(arguments.gpus)
    free_all()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        start_processes(_share, (a, shape_config(a.shape), devices, place), len(devices), start_method="spawn")
        costs = [read_json(_found(place, rank), "costs of a process") for rank in range(len(devices))]
    return of_steps(a, costs[0]["times"], max(one["peak"] for one in costs))


def _share(rank: int, a: SharedDistillArguments, config: Any, devices: tuple[torch.device, ...], place: Path) -> None:
    """In each process: take part in the training's first steps. The model begins on the host, as a loaded one does."""
    device = devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting = f"file://{place.absolute()}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=len(devices))
    try:
        model = random_model_on((device,), config, torch.bfloat16, _SEED, host=torch.device("cpu"))
        times, peak = take_steps(a, model, make_engine(device, a.at_once))
        write_json(_found(place, rank), {"times": times, "peak": peak})
    finally:
        dist.destroy_process_group()


def _found(place: Path, rank: int) -> Path:
    return place / f"{rank}.json"
