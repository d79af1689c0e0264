"""The weights stage: a checkpoint is rotated and quantized into a folder that many runs share.

It connects loading, calibration text and `rotquant.weights.build`; only the recipe decides what happens to the weights.
An interrupted training leaves its last checkpoint next to the folder and continues from there.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.identity.names import ROTATION_RECORD, ROTATIONS_FILE
from reproduction.identity.run import Run
from reproduction.run.provenance import of_checkpoint
from reproduction.run.stages.text import text_samples
from rotquant.foundation.environment import environment, largest_memory
from rotquant.foundation.files import canonical_json, read_object, replacing, short_hash
from rotquant.foundation.progress import task

if TYPE_CHECKING:
    from rotquant.weights.storage import StoredModel


def compute_weights(
    run: Run, checkpoint: str, folder: Path, device: str, code: str, rotation: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Build the stored weights of a run into `folder`; return their provenance and the history of their training.

    Args:
        checkpoint: the run's checkpoint: a local folder or a hub id.
        folder: replaced as a whole once the new weights are complete.
        device: cpu, cuda, cuda:N or auto. code: the digest of this code, for the provenance.
        rotation: the folder of the learned rotations, if the recipe needs them.

    Raises:
        CheckpointError, CorpusError, RecipeError: bad input, before the expensive part.
    """
    with task("starting"):
        from rotquant.models.checkpoints import load_checkpoint, local_folder
        from rotquant.models.companions import companions
        from rotquant.models.rotation.matrices import load_rotations
        from rotquant.tensors.devices import gpu_name, torch_device, torch_dtype
        from rotquant.training.state import Checkpoint
        from rotquant.weights.build import build_weights
        from rotquant.weights.storage import save_quantized

    started = time.perf_counter()
    accelerator = torch_device(device)
    rotations = None if rotation is None else load_rotations(rotation / ROTATIONS_FILE)
    place = local_folder(checkpoint)
    model, tokenizer = load_checkpoint(place, torch_dtype(run.dtype), "cpu")
    samples, corpora = None, {}
    calibration = run.recipe.calibration
    if run.recipe.needs_calibration and calibration is not None:
        samples, corpora["calibration"] = text_samples(run, calibration, tokenizer)
    texts = {}
    for name, text in run.recipe.own_texts.items():
        texts[name], corpora[name] = text_samples(run, text, tokenizer)
    learned = None if rotation is None else read_object(rotation / ROTATION_RECORD, "record of rotations")
    # a training with other code or other rotations is not continued
    unfinished = folder.with_name(f"unfinished-{short_hash(canonical_json([code, learned]))}")
    kept = Checkpoint(unfinished, str(run.weights_key), every=None, seconds=_interval(model.num_parameters()))
    stored = build_weights(
        model,
        tokenizer,
        run.recipe,
        run.seed,
        samples,
        texts=texts,
        rotations=rotations,
        device=accelerator,
        checkpoint=kept,
        companions=companions(place),
    )
    provenance = {
        **environment(methods=run.recipe.methods),
        "code_digest": code,
        "gpu": gpu_name(accelerator),
        **of_checkpoint(run, checkpoint),
        "corpora": corpora,
        **({} if learned is None else {"rotation": learned}),
        "bits_per_weight": _bits(stored),
        "stages": stored.seconds,
        "seconds": time.perf_counter() - started,
        "peak_bytes": largest_memory(stored.manifest.peak_bytes.values()),
    }
    with replacing(folder):  # which is the workflow's, whatever an interruption left there
        save_quantized(folder, stored, provenance)
    for path in folder.parent.glob("unfinished-*"):
        path.unlink()
    return provenance, list(stored.history or ())


def _bits(stored: "StoredModel") -> dict[str, float]:
    """Effective bits per weight by part (`rotquant.weights.bits`)."""
    from rotquant.models.architectures import architecture_of
    from rotquant.weights.bits import bits_per_weight

    floats = 8 * stored.model.dtype.itemsize
    shapes = stored.manifest.quantized
    return bits_per_weight(stored.state.recipe, architecture_of(stored.model), shapes, floats, stored.state.tensors)


def _interval(parameters: int) -> float:
    """Seconds between checkpoints, so that writing parameters and two moments at 1 GB/s takes a twentieth of them."""
    return max(10.0, 20 * 12e-9 * parameters)
