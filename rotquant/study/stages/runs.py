"""The runs stage: measurements of a checkpoint, or of stored weights, under each recipe's runtime part.

Runs that share weights are measured one after the other on one loaded model, since loading costs as much as measuring.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rotquant.foundation.environment import environment
from rotquant.foundation.progress import task
from rotquant.identity.run import Run
from rotquant.study.stages import measures
from rotquant.study.stages.measures import Measurement, Subject
from rotquant.study.stages.text import token_ids


def measure_runs(
    runs: Sequence[Run],
    checkpoint: str,
    folder: Path | None,
    device: str,
    batch_size: int,
    codes: Sequence[str],
    allow_code_execution: bool = False,
) -> Iterator[tuple[Run, Measurement, dict[str, Any]]]:
    """Measure runs that share their weights; yield each with its measurement (nan and inf are results) and provenance.

    Args:
        checkpoint: where the runs' checkpoint lies, used when they need no stored weights.
        folder: the stored weights, or None.
        batch_size: windows of text per forward pass.
        codes: for each run the digest of the code that this is, for the provenance.
        allow_code_execution: whether programs that the model writes may be run.

    Raises:
        CheckpointError, CorpusError, ResultError: bad input or damaged weights.
    """
    with task("starting"):
        from rotquant.models.checkpoints import load_checkpoint
        from rotquant.tensors.devices import gpu_name, torch_device, torch_dtype
        from rotquant.weights.build import quantized_forward
        from rotquant.weights.storage import load_quantized

    started = time.perf_counter()
    accelerator, dtype = torch_device(device), torch_dtype(runs[0].dtype)
    state = None
    if folder is None:
        model, tokenizer = load_checkpoint(checkpoint, dtype, accelerator)
    else:
        model, tokenizer, state = load_quantized(folder, accelerator, dtype)
    text = functools.cache(lambda spec, split, *more: token_ids(spec, split, tokenizer, *more))
    reference = functools.cache(lambda: load_checkpoint(checkpoint, dtype, accelerator)[0].eval())
    for run, code in zip(runs, codes, strict=True):
        with quantized_forward(model, run.recipe, state):
            subject = Subject(run, model, tokenizer, text, reference, batch_size, state, allow_code_execution, folder)
            measurement = getattr(measures, run.metric.kind)(run.metric, subject)
        provenance = {
            **environment(),
            "code_digest": code,
            "gpu": gpu_name(accelerator),
            "checkpoint": run.checkpoint,
            "checkpoint_digest": run.checkpoint_digest,
            **measurement.source,
            "seconds": time.perf_counter() - started,
        }
        yield run, measurement, provenance
        started = time.perf_counter()
