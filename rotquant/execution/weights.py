"""The weights stage: a checkpoint becomes rotated and quantized weights in a folder that many runs share.

It connects loading, calibration text and `rotquant.weights`; what happens to the weights is decided by the recipe
alone.
"""

import time
from pathlib import Path
from typing import Any

from rotquant.corpora import CALIBRATION_CHARACTERS, calibration_samples
from rotquant.execution.text import token_ids
from rotquant.provenance import code_digest, environment
from rotquant.recipes import Run


def compute_weights(run: Run, checkpoint: str, folder: Path, device: str) -> dict[str, Any]:
    """Build the stored weights of a run into `folder` and return their provenance.

    Args:
        checkpoint: where the run's checkpoint lies: a local folder or a hub id.
        folder: replaced as a whole once the new weights are complete.
        device: cpu, cuda, cuda:N or auto.

    Raises:
        CheckpointError, CorpusError, RecipeError: bad input, before the expensive part.
    """
    from rotquant.checkpoints import load_checkpoint
    from rotquant.devices import gpu_name, torch_device, torch_dtype
    from rotquant.storage import save_quantized
    from rotquant.weights import build_weights

    started = time.perf_counter()
    accelerator = torch_device(device)
    model, tokenizer = load_checkpoint(checkpoint, torch_dtype(run.dtype), "cpu")
    samples, corpora = None, {}
    calibration = run.recipe.calibration
    if run.recipe.needs_calibration and calibration is not None:
        spec = run.corpora[calibration.corpus]
        ids, corpora["calibration"] = token_ids(spec, "train", tokenizer, CALIBRATION_CHARACTERS)
        samples = calibration_samples(ids, calibration.samples, calibration.sequence_length, calibration.seed)
    stored = build_weights(model, tokenizer, run.recipe, run.seed, samples, device=accelerator)
    provenance = {
        **environment(),
        "code_digest": code_digest("weights", run.recipe),
        "gpu": gpu_name(accelerator),
        "checkpoint": run.checkpoint,
        "checkpoint_digest": run.checkpoint_digest,
        "corpora": corpora,
        "stages": stored.seconds,
        "seconds": time.perf_counter() - started,
    }
    save_quantized(folder, stored, provenance)
    return provenance
