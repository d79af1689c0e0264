"""Cost of PrefixQuant on a GPU: finding a prefix, searching scales and tuning blocks (PrefixQuant Sec. E, Table 10).

The library's code runs on random weights and tokens: time and memory do not depend on their values, except for a
prefix, which is only BOS here. The cost of omitted layers and epochs is extrapolated.
"""

import torch

from reproduction.benchmarks.learning import PrefixQuantArguments
from reproduction.benchmarks.learning.benchmarks import free_all, of_all_layers, random_tokens
from reproduction.benchmarks.learning.models import random_model_on, shape_config
from reproduction.benchmarks.records import Measurement
from reproduction.benchmarks.timing.case import Measurements, gpu
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.build import build_weights

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

    Raises:
        ConfigError: an unknown shape.
        KernelError: there is no GPU.
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
