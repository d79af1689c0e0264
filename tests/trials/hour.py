"""Trial of an hour with a pretrained model: seconds of what evidence on it is made of, and on a GPU where they go.

It reads ROTQUANT_REAL_MODELS and ROTQUANT_REAL_TEXT as `tests.trials.real` does, and ROTQUANT_HOUR_MODEL, which is
smollm2-135m by default. Each part runs twice, first to load what it needs, then under torch's profiler. A quantized
network is measured with products of TF32 and in bfloat16 too: does its loss stay within the noise of windows?
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rotquant import api
from rotquant.metrics.perplexity import PerplexityResult, mean_with_error
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import tensor_core_products
from rotquant.text import corpus_spec
from tests.trials.real import _folder
from tests.trials.trial import Trial, run

#: Kernels that a part's profile names, those that take longest first.
_NAMED = 12


def body(trial: Trial) -> None:
    """Quantize by GPTQ, learn rotations, tune block by block, and measure."""
    checkpoint = _folder("MODELS") / os.environ.get("ROTQUANT_HOUR_MODEL", "smollm2-135m")
    corpus, device = corpus_spec(str(_folder("TEXT"))), "cuda" if torch.cuda.is_available() else "cpu"
    samples, length, windows, steps = (8, 64, 2, 1) if trial.quick else (128, 2048, 64, 5)
    text = {"samples": samples, "sequence_length": length}
    metric = Perplexity(corpus=corpus.name, sequence_length=length, max_windows=windows)

    def made(name: str, **changes: Any) -> api.Model:
        recipe, _ = api.fit(checkpoint, override(preset(name), changes, name))
        return api.quantize(checkpoint, recipe, corpus=corpus, device=device)

    learned = {"spinquant": {"steps": steps, "text": text}, "gptq": None}
    plain = {"clip_search": False}
    tuned = {"block_ap": {"epochs": 1, "text": {"samples": samples, "sequence_length": min(512, length)}}}
    timed(
        trial, f"a rotation learned in {steps} steps", partial(made, "spinquant-hard", methods=learned, weights=plain)
    )
    timed(trial, "block-wise training, one epoch", partial(made, "quarot-w4a16-tuned", methods=tuned))
    model = timed(trial, "rotation and GPTQ", partial(made, "quarot", calibration=text))
    measure = partial(api.perplexity, model, corpus, metric)
    found: dict[str, PerplexityResult] = {"float32": timed(trial, f"{windows} windows in float32", measure)}
    with tensor_core_products():
        found["products of TF32"] = timed(trial, f"{windows} windows with products of TF32", measure)
    model.network.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    found["bfloat16"] = timed(trial, f"{windows} windows in bfloat16", measure)
    for words, one in found.items():
        trial.check("A loss is finite", one.nll < 1e9, str(one))
        moved = [a - b for a, b in zip(one.by_window, found["float32"].by_window, strict=True)]
        trial.figure(f"nats of {words} beyond float32", "{:+.5f} ± {:.5f}".format(*mean_with_error(moved)))


def timed(trial: Trial, what: str, part: Callable[[], Any]) -> Any:
    """Run a part twice; tell its seconds, its kernels and those that take longest on a GPU, or operators on a CPU."""
    part()
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        started = time.perf_counter()
        result = part()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started

    def took(event: Any) -> float:
        return (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6

    device = DeviceType.CUDA if on_gpu else DeviceType.CPU  # a GPU's events have the calls that launch them beside them
    events = [event for event in profiled.key_averages() if event.device_type == device]
    events.sort(key=took, reverse=True)
    busy = sum(map(took, events))
    trial.figure(f"{what}: seconds", f"{seconds:.1f}, busy {busy:.1f}, kernels {sum(one.count for one in events):,}")
    for event in events[:_NAMED]:
        trial.say(f"  {took(event):7.2f} s {event.count:8,} x {event.key[:110]}")
    return result


if __name__ == "__main__":
    run("hour", (__doc__ or "").splitlines()[0], body)
