"""Time and memory of the weights stage at a paper's real shape: rotation and GPTQ of a random-weight model on one GPU.

This proves the path for checkpoints that do not fit this project's own machines: one decoder layer and the calibration
activations lie on the accelerator, everything else on the host. It says nothing about accuracy.
"""

import time
from typing import Any

import torch

from reproduction.benchmarks.learning.models import random_model_on, shape_config
from reproduction.benchmarks.shapes import SHAPES
from rotquant.foundation.environment import environment
from rotquant.recipes.recipe import Recipe
from rotquant.weights.build import build_weights


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
