"""The runs stage: measurements of a checkpoint, or of stored weights, under each recipe's runtime part.

Runs that share weights are measured one after the other on one loaded model, since loading costs as much as measuring.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.environment import environment
from rotquant.foundation.progress import task
from rotquant.recipes.recipe import Run
from rotquant.recipes.schemes import SNR, Magnitudes, Outliers, Perplexity, RangeUse, ZeroShot
from rotquant.study.digests import code_digest
from rotquant.study.stages.text import token_ids
from rotquant.text import NO_BOS, Tokens

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
    text = functools.cache(lambda spec, split: token_ids(spec, split, tokenizer))
    reference = functools.cache(lambda: load_checkpoint(checkpoint, dtype, accelerator)[0].eval())
    for run in runs:
        with quantized_forward(model, run.recipe, state):
            measurement = _measure(run, model, tokenizer, text, reference, batch_size)
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
    run: Run,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: Callable[..., tuple[Tokens, dict[str, Any]]],
    reference: Callable[[], "PreTrainedModel"],
    batch_size: int,
) -> Measurement:
    """Measure a run; `text` yields the tokens of a corpus's split and its provenance, `reference` the checkpoint."""
    metric = run.metric
    note = {"note": NO_BOS} if tokenizer.bos_token_id is None else {}
    if isinstance(metric, ZeroShot):
        from rotquant.metrics import zeroshot

        tasks = zeroshot.prepare(metric, Path(), run.corpora.get(metric.corpus))
        metrics = zeroshot.evaluate(model, tokenizer, metric, tasks, batch_size=ITEMS_PER_WINDOW * batch_size)
        return Measurement(metrics, {"corpora": {}, "tasks": zeroshot.identity(metric, tasks), **note})
    if isinstance(metric, RangeUse):
        from rotquant.metrics.range_use import range_use

        metrics, arrays = range_use(metric)
        return Measurement(metrics, {"corpora": {}}, arrays)
    tokens, identity = text(run.corpora[metric.corpus], metric.split)
    metrics, arrays = _on_text(metric, model, reference, tokens, batch_size)
    return Measurement(metrics, {"corpora": {"evaluation": identity}}, arrays)


def _on_text(
    metric: Perplexity | SNR | Magnitudes | Outliers,
    model: "PreTrainedModel",
    reference: Callable[[], "PreTrainedModel"],
    tokens: Tokens,
    batch_size: int,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and arrays of a metric that looks at a text."""
    if isinstance(metric, Magnitudes):
        from rotquant.metrics.magnitudes import magnitudes

        return magnitudes(model, tokens, metric)
    if isinstance(metric, Outliers):
        from rotquant.metrics.outliers import outlier_statistics

        return outlier_statistics(model, tokens, metric)
    if isinstance(metric, SNR):
        from rotquant.metrics.snr import end_to_end_snr

        return end_to_end_snr(model, reference(), tokens, metric).as_metrics(), {}
    from rotquant.metrics.perplexity import perplexity

    return perplexity(model, tokens, metric, batch_size=batch_size).as_metrics(), {}
