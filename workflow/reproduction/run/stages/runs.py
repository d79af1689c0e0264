"""The runs stage: measurements of a checkpoint, or of stored weights, under each recipe's runtime part.

Runs that share weights are measured one after the other on one loaded model, since loading costs as much as measuring.
The full-precision model's states on a text are computed once in a process, before the stored weights are loaded, so
that only one model is in memory at a time. Where a method puts a prefix in front of every text, the full-precision
model has the same prefix: it moves predictions by itself, which is no error of quantization.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.identity.run import Run, named
from reproduction.run.provenance import of_checkpoint
from reproduction.run.stages import measures
from reproduction.run.stages.measures import MetricResult, Subject
from reproduction.run.stages.text import token_ids
from rotquant.foundation.environment import environment
from rotquant.foundation.progress import task

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.metrics.divergence import FloatStates
    from rotquant.models.simulation.prefix import Prefix
    from rotquant.recipes.recipe import Recipe


def measure_runs(
    runs: Sequence[Run],
    checkpoint: str,
    folder: Path | None,
    device: str,
    batch_size: int,
    codes: Sequence[str],
    allow_code_execution: bool = False,
) -> Iterator[tuple[Run, MetricResult, dict[str, Any]]]:
    """Measure runs that share their weights; yield each with its measurement (nan and inf are results) and provenance.

    Args:
        checkpoint: the runs' checkpoint, used when they need no stored weights.
        folder: the stored weights, or None.
        batch_size: windows of text per forward pass.
        codes: for each run the digest of this code, for the provenance.
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
    as_it_is = functools.partial(load_checkpoint, checkpoint, dtype, accelerator)
    if folder is None:
        model, tokenizer = plain = as_it_is()
        exact = _full_precision(runs, lambda: plain, None, str(accelerator), batch_size)
    else:
        exact = _full_precision(runs, as_it_is, folder, str(accelerator), batch_size)
        model, tokenizer, state = load_quantized(folder, accelerator, dtype)
    text = functools.cache(lambda spec, split, *more: token_ids(spec, split, tokenizer, *more))
    reference = functools.cache(lambda: as_it_is()[0].eval())
    for run, code in zip(runs, codes, strict=True):
        with quantized_forward(model, run.recipe, state):
            more = (state, allow_code_execution, folder, exact.get(run.key))
            subject = Subject(run, model, tokenizer, text, reference, batch_size, *more)
            measurement = getattr(measures, run.metric.kind)(run.metric, subject)
        provenance = {
            **environment(),
            "code_digest": code,
            "gpu": gpu_name(accelerator),
            **of_checkpoint(run, checkpoint),
            **measurement.source,
            "seconds": time.perf_counter() - started,
        }
        yield run, measurement, provenance
        started = time.perf_counter()


def _full_precision(
    runs: Sequence[Run],
    as_it_is: "Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]",
    folder: Path | None,
    device: str,
    batch_size: int,
) -> "dict[str, FloatStates]":
    """The full-precision model's last states on the windows of each quantized perplexity run, by the run's key; those
    that this process lacks are computed on one loaded model.

    Args:
        as_it_is: yields the checkpoint with its tokenizer.
        folder: the runs' stored weights, or None.
    """
    from rotquant.metrics import divergence
    from rotquant.models.integrity import tensors_digest
    from rotquant.models.limits import metric_windows
    from rotquant.models.simulation.runtime import RuntimeQuantization, wrap

    stored = None if folder is None else _stored_prefix(runs[0].recipe, folder)
    found: dict[str, FloatStates] = {}
    of_text: dict[str, FloatStates] = {}
    model, tokenizer = None, None
    for run in runs:
        metric = run.metric
        if metric.kind != "perplexity" or (plain := run.unquantized.key) == run.key:
            continue
        about = f"{plain} {device} {batch_size} {stored and tensors_digest(stored)}"
        known = of_text.get(about) or divergence.saved_states(about)
        if known is None:
            if model is None or tokenizer is None:
                model, tokenizer = as_it_is()
            planned = run.texts.get(named(metric.corpus, metric.split, None))
            tokens, _ = token_ids(run.corpora[metric.corpus], metric.split, tokenizer, None, planned)
            windows = metric_windows(model, tokens, metric)
            prefix = None if stored is None else _reference_prefix(model.eval(), run.recipe, stored)
            with wrap(model.eval(), RuntimeQuantization(prefix=prefix)):
                states = divergence.float_states(model, windows, batch_size, tokens.bos)
            known = divergence.keep_states(about, states)
        found[run.key] = of_text[about] = known
    return found


def _stored_prefix(recipe: "Recipe", folder: Path) -> "dict[str, Tensor] | None":
    """Tokens, keys and values of the prefix that is stored with the weights; None where there is none."""
    from rotquant.weights.storage import read_method_tensors

    chooser = next((name for name, method in recipe.methods.items() if "prefix" in method.roles), None)
    found = {} if chooser is None else read_method_tensors(folder, chooser)
    return found if len(found.get("ids", ())) else None


def _reference_prefix(model: "PreTrainedModel", recipe: "Recipe", stored: "dict[str, Tensor]") -> "Prefix | None":
    """The same prefix for the unchanged checkpoint: the stored keys and values where the weights are in its basis, as
    tuned ones are, else those of the tokens."""
    from rotquant.models.simulation.prefix import compute_prefix, stored_ids, stored_prefix

    if recipe.rotation is None and not recipe.has_role("transformation"):
        return stored_prefix(stored)
    return compute_prefix(model, stored_ids(stored), next(model.parameters()).device)
