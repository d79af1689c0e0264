"""The rotations stage: R1 and R2 learned once (SpinQuant Sec. 3.2) for all weights that are made with them.

It connects loading, text and the method of the recipe that learns; only the recipe decides what is learned, and on
which network. An interrupted learning leaves its last checkpoint in the folder and continues from there.
"""

import time
from pathlib import Path
from typing import Any

from reproduction.identity.names import HISTORY_FILE, ROTATIONS_FILE
from reproduction.identity.run import Run
from reproduction.run.provenance import of_checkpoint
from reproduction.run.stages.text import text_samples
from rotquant.foundation.environment import environment, largest_memory
from rotquant.foundation.files import file_digest, write_json
from rotquant.foundation.progress import task


def compute_rotations(run: Run, checkpoint: str, folder: Path, device: str, code: str) -> dict[str, Any]:
    """Learn the rotations of a run into `folder`: the matrices and the history of their learning.

    Args:
        checkpoint: the run's checkpoint: a local folder or a hub id.
        folder: kept where it exists; each file in it is replaced as a whole.
        device: cpu, cuda, cuda:N or auto. code: the digest of this code, for the provenance.

    Returns:
        The provenance, which the caller writes.

    Raises:
        CheckpointError, CorpusError, RecipeError: bad input, before the expensive part.
    """
    with task("starting"):
        from rotquant.models.checkpoints import load_checkpoint
        from rotquant.models.rotation.matrices import ends_of, save_rotations
        from rotquant.models.stream import memory_peak
        from rotquant.tensors.devices import gpu_name, learning_dtype, torch_device, torch_dtype
        from rotquant.weights.actions import hooks

    started = time.perf_counter()
    learner, text = run.recipe.learned_by
    accelerator = torch_device(device)
    model, tokenizer = load_checkpoint(checkpoint, learning_dtype(torch_dtype(run.dtype)), "cpu")
    samples, corpora = None, {}
    if text is not None:
        samples, corpora["learning"] = text_samples(run, text, tokenizer)
    unfinished = folder / f"unfinished-{code}"  # a learning that other code began is not continued
    learn = hooks(learner).learn_rotations
    learned = learn(model, run.recipe, run.seed, samples, device=accelerator, checkpoint=unfinished)
    save_rotations(folder / ROTATIONS_FILE, learned.rotations, learned.history)
    write_json(folder / HISTORY_FILE, learned.history)
    for path in folder.glob("unfinished-*"):
        path.unlink()
    return {
        **environment(methods=[learner.name]),
        "code_digest": code,
        "gpu": gpu_name(accelerator),
        **of_checkpoint(run, checkpoint),
        "corpora": corpora,
        "key": run.rotation_key,
        "digest": file_digest(folder / ROTATIONS_FILE),
        "seed": run.seed,
        "learning": learner.model_dump(mode="json"),
        **ends_of(learned.history),
        "seconds": time.perf_counter() - started,
        "peak_bytes": largest_memory([memory_peak(accelerator)]),
    }
