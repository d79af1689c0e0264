"""The runs stage: measurements of a checkpoint, or of stored weights, under each recipe's runtime part.

Runs that share weights are measured one after the other on one loaded model, since loading costs as much as measuring.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.execution.text import token_ids
from rotquant.provenance import code_digest, environment
from rotquant.recipes import Run
from rotquant.schemes import Magnitudes, Perplexity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Items of a zero-shot task per window of text that fits into a batch; they are about this much shorter.
ITEMS_PER_WINDOW = 8


@dataclass(frozen=True)
class Measurement:
    """What a metric found. `source`: what provenance says of its text or tasks; `arrays`: what figures need."""

    metrics: dict[str, float]
    source: dict[str, Any]
    arrays: dict[str, Any] = field(default_factory=dict)


def measure_runs(
    runs: Sequence[Run], checkpoint: str, folder: Path | None, device: str, batch_size: int
) -> Iterator[tuple[Run, Measurement, dict[str, Any]]]:
    """Measure runs that share their weights; yield each with its measurement (nan and inf are results) and provenance.

    Args:
        checkpoint: where the runs' checkpoint lies, used when they need no stored weights.
        folder: the stored weights, or None.
        batch_size: windows of text per forward pass.

    Raises:
        CheckpointError, CorpusError, ResultError: bad input or damaged weights.
    """
    from rotquant.checkpoints import load_checkpoint
    from rotquant.devices import gpu_name, torch_device, torch_dtype
    from rotquant.storage import load_quantized
    from rotquant.weights import quantized_forward

    started = time.perf_counter()
    accelerator, dtype = torch_device(device), torch_dtype(runs[0].dtype)
    manifest = None
    if folder is None:
        model, tokenizer = load_checkpoint(checkpoint, dtype, accelerator)
    else:
        model, tokenizer, manifest = load_quantized(folder, accelerator, dtype)
    text = functools.cache(lambda spec, split: token_ids(spec, split, tokenizer))
    for run in runs:
        with quantized_forward(model, run.recipe, manifest):
            measurement = _measure(run, model, tokenizer, text, batch_size)
        provenance = {
            **environment(),
            "code_digest": code_digest("runs", run.recipe, run.metric),
            "gpu": gpu_name(accelerator),
            "checkpoint": run.checkpoint,
            "checkpoint_digest": run.checkpoint_digest,
            **measurement.source,
            "seconds": time.perf_counter() - started,
        }
        yield run, measurement, provenance
        started = time.perf_counter()


def _measure(
    run: Run, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", text: Any, batch_size: int
) -> Measurement:
    metric = run.metric
    if isinstance(metric, Perplexity):
        from rotquant.evaluation import perplexity

        ids, identity = text(run.corpora[metric.corpus], metric.split)
        result = perplexity(
            model,
            ids,
            metric.sequence_length,
            batch_size=batch_size,
            max_windows=metric.max_windows,
            bos=metric.bos,
        )
        return Measurement(result.as_metrics(), {"corpora": {"evaluation": identity}})
    if isinstance(metric, Magnitudes):
        from rotquant.activations import magnitudes

        ids, identity = text(run.corpora[metric.corpus], metric.split)
        metrics, arrays = magnitudes(model, ids, metric)
        return Measurement(metrics, {"corpora": {"evaluation": identity}}, arrays)
    from rotquant import zeroshot

    tasks = zeroshot.prepare(metric, Path(), run.corpora.get(metric.corpus))
    metrics = zeroshot.evaluate(model, tokenizer, metric, tasks, batch_size=ITEMS_PER_WINDOW * batch_size)
    return Measurement(metrics, {"corpora": {}, "tasks": zeroshot.identity(metric, tasks)})
