"""Time and memory of learning rotations and of quantization on a GPU (SpinQuant Table 15, PrefixQuant Table 10).

It is the library's own code on random weights and tokens: time and memory do not depend on their values, except for a
prefix, which is only BOS here. Where not all steps, layers or epochs are done, what the rest would take follows from
those that were, and a cell's arguments say so.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.arguments import CalibrateArguments, LearnRotationsArguments, PrefixQuantArguments, Two
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.shapes import SHAPES, random_model_on, shape_config
from reproduction.benchmarks.timing import Measurements, gpu
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import KernelError
from rotquant.methods.spinquant.cayley_training import learn_rotations
from rotquant.models.stream import memory_peak, reset_memory_peak
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.build import build_weights

#: Steps between measurements of the end-to-end signal-to-noise ratio: what the workflow does, and part of the time.
_SNR_EVERY = 10
_SEED = 0


def learn(arguments: LearnRotationsArguments) -> Measurements:
    """Seconds of learning R1 and every R2 of SpinQuant-hard W16A4KV4 in bfloat16, and the memory it takes.

    Returns:
        seconds: of the whole learning, from the model on its GPU to the rotations; see `learning_seconds`.
        step_seconds: of an ordinary step, with the fastest and the slowest. taken: how many steps were taken.
        setup_seconds: before and after the steps. peak_bytes: allocated by torch on the GPU that had most;
        all_peak_bytes: on all GPUs together.

    Raises:
        RecipeError: the weights do not fit them.
    """
    a, devices = arguments, gpus(arguments.gpus)
    free_all()
    model = random_model_on(devices, shape_config(a.shape), torch.bfloat16, _SEED)
    recipe, samples = _learning_recipe(a), random_tokens(model.config.vocab_size, a.batch_size, a.tokens)
    times: list[float] = []
    for device in devices:
        reset_memory_peak(device)
    start = _now()
    learn_rotations(
        model,
        recipe,
        _SEED,
        samples,
        progress=False,
        snr_every=_SNR_EVERY,
        callback=lambda _: times.append(_now() - start),
    )
    seconds, peaks = learning_seconds(a, times, _now() - start), list(map(memory_peak, devices))
    return seconds | {"peak_bytes": Measurement(max(peaks), "B"), "all_peak_bytes": Measurement(sum(peaks), "B")}


def learning_seconds(arguments: LearnRotationsArguments, times: Sequence[float], end: float) -> Measurements:
    """The times of a learning from when its steps were done.

    Every tenth step and the last also compute the float network, for the signal-to-noise ratio. In a shortened learning
    the ordinary steps are as long as the median of those that were taken, the longer ones as the last. What the first
    step takes beyond such a longer one, as libraries start, belongs to the set-up.

    Args:
        times: seconds from the start to the end of each step that was taken. end: to the end of everything.
    """
    steps = [after - before for before, after in itertools.pairwise(times)]  # all but the first
    longer = steps[-1]
    ordinary = [seconds for step, seconds in enumerate(steps, 1) if not _measures(step, len(times))]
    median, low, high = statistics.median(ordinary), min(ordinary), max(ordinary)
    setup = times[0] - longer + end - times[-1]
    total = Measurement(end, "s")
    if len(times) < arguments.steps:
        number = sum(_measures(step, arguments.steps) for step in range(arguments.steps))
        rest, others = setup + number * longer, arguments.steps - number
        total = Measurement(rest + others * median, "s", rest + others * low, rest + others * high, len(ordinary))
    return {
        "seconds": total,
        "step_seconds": Measurement(median, "s", low, high, len(ordinary)),
        "setup_seconds": Measurement(setup, "s"),
        "taken": Measurement(len(times), "steps"),
    }


def _measures(step: int, steps: int) -> bool:
    """Whether a step also measures the signal-to-noise ratio, as `learn_rotations` decides."""
    return step % _SNR_EVERY == 0 or step + 1 == steps


def gptq(arguments: CalibrateArguments) -> Measurements:
    """Seconds of GPTQ W4 with weight clip search, of all linear layers in decoder layers, in bfloat16.

    The model lies on the GPU, as it does while its rotations are learned.

    Returns:
        seconds: of the whole model. layer_seconds: of one decoder layer, where layers were left out.
    """
    a, device = arguments, gpu()
    layers = shape_config(a.shape).num_hidden_layers
    _quantize(a, device, 1)  # libraries start, kernels are loaded
    if a.layers is None:
        return {"seconds": Measurement(_quantize(a, device, layers), "s")}
    return of_all_layers([_quantize(a, device, number) for number in a.layers], a.layers, layers)


def of_all_layers(seconds: Sequence[float], taken: Two, layers: int) -> Measurements:
    """The time of all layers, and of one, from the seconds of two models of so many layers."""
    (fewer, more), (few, many) = seconds, taken
    layer = (more - fewer) / (many - few)
    return {"seconds": Measurement(more + (layers - many) * layer, "s"), "layer_seconds": Measurement(layer, "s")}


def _quantize(a: CalibrateArguments, device: torch.device, layers: int) -> float:
    """Seconds of the weights stage on a model of so many layers."""
    free_all()
    model = random_model_on((device,), shape_config(a.shape, layers), torch.bfloat16, _SEED)
    samples = random_tokens(model.config.vocab_size, a.samples, a.tokens)
    start = _now()
    build_weights(model, None, preset("gptq"), _SEED, samples, device=device, progress=False)
    return _now() - start


def _learning_recipe(a: LearnRotationsArguments) -> Recipe:
    """The recipe of SpinQuant-hard in its table: activations and KV cache in 4 bits while learning."""
    settings = {"steps": a.taken or a.steps, "batch_size": a.batch_size}
    return override(preset("spinquant-hard"), {"methods": {"spinquant": settings}}, "benchmark")


def random_tokens(vocabulary: int, samples: int, tokens: int) -> Tensor:
    return torch.randint(vocabulary, (samples, tokens), generator=torch.Generator().manual_seed(_SEED))


def gpus(number: int) -> tuple[torch.device, ...]:
    """The first GPUs.

    Raises:
        KernelError: there are fewer.
    """
    gpu()
    found = torch.cuda.device_count()
    if found < number:
        raise KernelError(f"this needs {number} GPUs, and torch sees {found}.")
    return tuple(torch.device("cuda", index) for index in range(number))


def _now() -> float:
    """Seconds by the host's clock, once all GPUs have done what they were given."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return time.perf_counter()


def free_all() -> None:
    """Free the memory of earlier cells, so that they do not affect peaks and places of weights."""
    gc.collect()
    torch.cuda.empty_cache()


_SEED = 0
#: The methods whose time counts for a part, by the titles in a manifest's record of costs.
_PARTS = {
    "prefix": ("prefixed outlier tokens",),
    "grid": ("grid search of weights' scales", "grid search of static scales"),
    "tuning": ("block-wise fine-tuning",),
}


def prefixquant(arguments: PrefixQuantArguments) -> Measurements:
    """Seconds of a part of PrefixQuant in bfloat16, the model on its GPU.

    Returns:
        seconds: of the whole model. layer_seconds: of one decoder layer. peak_bytes: allocated by torch.
    """
    a = arguments
    layers = shape_config(a.shape).num_hidden_layers
    _costs(a, 1, a.taken[0])  # libraries start, kernels are loaded
    if a.part == "tuning":
        (fewer, _), (more, peak) = (_costs(a, 1, epochs) for epochs in a.taken)
        epoch = (more - fewer) / (a.taken[1] - a.taken[0])
        layer = fewer + (a.epochs - a.taken[0]) * epoch
        return {
            "seconds": Measurement(layers * layer, "s"),
            "layer_seconds": Measurement(layer, "s"),
            "peak_bytes": Measurement(peak, "B"),
        }
    (fewer, _), (more, peak) = (_costs(a, number, 1) for number in a.layers)
    return of_all_layers((fewer, more), a.layers, layers) | {"peak_bytes": Measurement(peak, "B")}


def _costs(a: PrefixQuantArguments, layers: int, epochs: int) -> tuple[float, int]:
    """Seconds and memory of the part on a model of so many layers, tuned for so many epochs."""
    free_all()
    model = random_model_on((gpu(),), shape_config(a.shape, layers), torch.bfloat16, _SEED)
    samples = random_tokens(model.config.vocab_size, a.samples, a.tokens)
    stored = build_weights(
        model, None, _recipe(a, epochs), _SEED, samples[:8], texts={"block_ap": samples}, device=gpu(), progress=False
    )
    titles = _PARTS[a.part]
    seconds = sum(stored.manifest.seconds[title] for title in titles)
    return seconds, max(stored.manifest.peak_bytes.get(title, 0) for title in titles)


def _recipe(a: PrefixQuantArguments, epochs: int) -> Recipe:
    """PrefixQuant as its paper has it, with or without fine-tuning."""
    if a.part != "tuning":
        return preset("prefixquant")
    settings = {"epochs": epochs, "text": {"samples": a.samples, "sequence_length": a.tokens}}
    return override(preset("prefixquant-tuned"), {"methods": {"block_ap": settings}}, "benchmark")


def benchmark_quantization(
    shape: str,
    recipe: Recipe,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_layers: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the weights stage once on a random model with random calibration tokens.

    Args:
        shape: a name in `reproduction.benchmarks.shapes.SHAPES`.
        recipe: what to do; its calibration section gives the number and length of samples.
        num_layers: fewer layers than the shape has, for a quick trial.

    Returns:
        The record: settings, `seconds` by stage and in total, `peak_gpu_bytes` (allocated by torch), environment.
    """
    model = random_model_on((device,), shape_config(shape, num_layers), dtype, seed, host=torch.device("cpu"))
    samples = None
    if recipe.calibration:
        size = (recipe.calibration.samples, recipe.calibration.sequence_length)
        generator = torch.Generator().manual_seed(recipe.calibration.seed)
        samples = torch.randint(model.config.vocab_size, size, generator=generator)
    start = time.perf_counter()
    stored = build_weights(model, None, recipe, seed, samples, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    total = time.perf_counter() - start
    return {
        "benchmark": "quantize",
        "shape": shape,
        "dimensions": SHAPES[shape],
        "layers": model.config.num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        "recipe": recipe.model_dump(mode="json"),
        "seconds": {**stored.seconds, "total": total},
        "peak_gpu_bytes": max(stored.manifest.peak_bytes.values(), default=0),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "environment": environment(),
    }
