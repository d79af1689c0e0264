"""The runs stage: one measurement of a checkpoint, or of stored weights, under a recipe's runtime part."""

import time
from pathlib import Path
from typing import Any

from rotquant.execution.text import token_ids
from rotquant.provenance import code_digest, environment
from rotquant.recipes import Run


def compute_run(
    run: Run, checkpoint: str, folder: Path | None, device: str, batch_size: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure a run; return its metrics (nan and inf are results) and its provenance.

    Args:
        checkpoint: where the run's checkpoint lies, used when the run needs no stored weights.
        folder: the stored weights, or None.
        batch_size: windows per forward pass.

    Raises:
        CheckpointError, CorpusError, ResultError: bad input or damaged weights.
    """
    from rotquant.checkpoints import load_checkpoint
    from rotquant.devices import gpu_name, torch_device, torch_dtype
    from rotquant.evaluation import perplexity
    from rotquant.storage import load_quantized
    from rotquant.weights import quantized_forward

    started = time.perf_counter()
    accelerator = torch_device(device)
    if folder is None:
        model, tokenizer = load_checkpoint(checkpoint, torch_dtype(run.dtype), accelerator)
        manifest = None
    else:
        model, tokenizer, manifest = load_quantized(folder, accelerator, torch_dtype(run.dtype))
    ids, text = token_ids(run.corpora[run.metric.corpus], run.metric.split, tokenizer)
    with quantized_forward(model, run.recipe, manifest):
        result = perplexity(
            model, ids, run.metric.sequence_length, batch_size=batch_size, max_windows=run.metric.max_windows
        )
    provenance = {
        **environment(),
        "code_digest": code_digest("runs", run.recipe),
        "gpu": gpu_name(accelerator),
        "checkpoint": run.checkpoint,
        "checkpoint_digest": run.checkpoint_digest,
        "corpora": {"evaluation": text},
        "seconds": time.perf_counter() - started,
    }
    return result.as_metrics(), provenance
