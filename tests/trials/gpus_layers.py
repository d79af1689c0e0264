"""Trial of layers of Llama-3-70B's widths that are quantized on either of two GPUs, by GPTQ and by OmniQuant.

The quick form has a tiny model, on processes of the CPU where there are no two GPUs.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from reproduction.benchmarks.learning import random_tokens
from reproduction.benchmarks.shapes import random_model_on, shape_config
from rotquant.models.integrity import tensors_digest
from rotquant.models.placement import current_gpu
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.weights.build import build_weights
from rotquant.weights.packing import all_weight_tensors
from tests.trials.gpus import several_gpus
from tests.trials.material import TINY, tiny_config
from tests.trials.trial import Trial, run


@dataclass(frozen=True)
class Work:
    """Layers of a shape that a method quantizes by so much text. steps: of a method that is trained."""

    method: str
    shape: str
    layers: int
    samples: int
    tokens: int
    steps: int = 0


WHOLE = {
    "GPTQ": Work("gptq", "llama-3-70b", 2, 128, 2048),
    "OmniQuant": Work("omniquant", "llama-2-7b", 2, 16, 2048, 32),
}
QUICK = {"GPTQ": Work("gptq", TINY, 1, 2, 64), "OmniQuant": Work("omniquant", TINY, 1, 2, 64, 2)}


@dataclass(frozen=True)
class Done:
    """Seconds, bytes that the GPU allocates, and the digest of the weights."""

    seconds: float
    peak: int
    digest: str


def body(trial: Trial) -> None:
    """Quantize by one process twice, and by two at a time."""
    device, works = ("cuda" if several_gpus(trial) else "cpu"), (QUICK if trial.quick else WHOLE)
    devices = [f"{device}:{index}" if device == "cuda" else device for index in (0, 1)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for work in QUICK.values():  # imports, and a GPU's libraries
            list(pool.map(_quantize, devices, [work] * 2))
        for name, work in works.items():
            alone = [pool.submit(_quantize, devices[0], work).result() for _ in range(2)]
            both = list(pool.map(_quantize, devices, [work] * 2))
            amount = f"{work.layers} layers of {work.shape}, {work.samples} samples of {work.tokens} tokens"
            trial.figure(name, amount + (f", {work.steps} steps" if work.steps else ""))
            trial.figure(f"seconds of {name} by one alone", round(min(one.seconds for one in alone), 1))
            trial.figure(f"seconds of {name} by two at a time, the slower", round(max(one.seconds for one in both), 1))
            trial.figure(f"GiB of a GPU that {name} allocates", round(alone[0].peak / 2**30, 1))
            equal = len({one.digest for one in (*alone, *both)}) == 1
            if work.steps and device == "cuda":
                again = len({one.digest for one in alone}) == 1
                trial.figure(f"equal bits of {name} twice on one GPU", "yes" if again else "no")
                trial.figure(f"equal bits of {name} on each GPU", "yes" if equal else "no")
            else:
                trial.check(f"{name} gives equal bits, again and on each GPU", equal, str([*alone, *both]))


def _quantize(device: str, work: Work) -> Done:
    """Quantize a random model of the host."""
    place = torch.device(device)
    config = tiny_config(work.layers, 1000) if work.shape == TINY else shape_config(work.shape, work.layers)
    model = random_model_on((place,), config, torch.bfloat16, host=torch.device("cpu"))
    ids = random_tokens(model.config.vocab_size, work.samples, work.tokens)
    recipe = preset(work.method)
    if work.steps:
        recipe = override(recipe, {"methods": {work.method: {"steps": work.steps}}}, "trial")
    started = time.perf_counter()
    with current_gpu(device):
        stored = build_weights(model, None, recipe, 0, ids, device=place, progress=False)
    seconds = time.perf_counter() - started
    peak = max(stored.manifest.peak_bytes.values(), default=0)
    return Done(seconds, peak, tensors_digest(all_weight_tensors(stored.weights)))


if __name__ == "__main__":
    run("gpus_layers", __doc__.splitlines()[0], body)
