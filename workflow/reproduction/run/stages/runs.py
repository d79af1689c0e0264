"""The runs stage: measurement of a checkpoint, or of stored weights, under a recipe's runtime part.

The full-precision model's states on a text are computed first, so that only one model is in memory at a time; runs on
one model and text share them (`stages.states`). Where a method puts a prefix in front of every text, the full-precision
model has the same prefix: it moves predictions by itself, which is no error of quantization.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.identity.run import Run, named
from reproduction.run.provenance import PLAIN, WITH_PREFIX, of_checkpoint
from reproduction.run.stages import measures
from reproduction.run.stages.measures import MetricResult, Subject
from reproduction.run.stages.text import token_ids
from rotquant.foundation.environment import environment
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.progress import task

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.metrics.divergence import FloatStates
    from rotquant.models.simulation.prefix import Prefix
    from rotquant.recipes.recipe import Recipe

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


def measure_run(
    run: Run,
    checkpoint: str,
    folder: Path | None,
    device: str,
    batch_size: int,
    code: str,
    allow_code_execution: bool = False,
) -> tuple[MetricResult, dict[str, Any]]:
    """Measure a run; its measurement (nan and inf are results) and its provenance.

    Args:
        checkpoint: the run's checkpoint, used when it needs no stored weights.
        folder: the stored weights, or None.
        batch_size: windows of text per forward pass.
        code: the digest of this code, for the provenance.
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
    accelerator, dtype = torch_device(device), torch_dtype(run.dtype)
    as_it_is = functools.partial(load_checkpoint, checkpoint, dtype, accelerator)
    exact = _full_precision(run, as_it_is, folder, str(accelerator), batch_size)
    model, tokenizer, state = (*as_it_is(), None) if folder is None else load_quantized(folder, accelerator, dtype)
    text = functools.cache(lambda spec, split, *more: token_ids(spec, split, tokenizer, *more))
    reference = functools.cache(lambda: as_it_is()[0].eval())
    with quantized_forward(model, run.recipe, state):
        more = (state, allow_code_execution, folder, exact)
        subject = Subject(run, model, tokenizer, text, reference, batch_size, *more)
        measurement = getattr(measures, run.metric.kind)(run.metric, subject)
    provenance = {
        **environment(methods=run.recipe.methods),
        "code_digest": code,
        "gpu": gpu_name(accelerator),
        **of_checkpoint(run, checkpoint),
        **measurement.source,
        **({} if exact is None else {"reference": _reference(run.recipe, folder)}),
        "seconds": time.perf_counter() - started,
    }
    return measurement, provenance


def _full_precision(
    run: Run, as_it_is: Callable[[], Loaded], folder: Path | None, device: str, batch_size: int
) -> "FloatStates | None":
    """The full-precision model's last states on the windows of a quantized perplexity run; None for any other.

    Args:
        as_it_is: yields the checkpoint with its tokenizer.
        folder: the run's stored weights, or None.
    """
    metric = run.metric
    if metric.kind != "perplexity" or (plain := run.unquantized.key) == run.key:
        return None
    from reproduction.run.stages import states
    from rotquant.metrics.divergence import float_states
    from rotquant.models.integrity import tensors_digest
    from rotquant.models.limits import metric_windows
    from rotquant.models.simulation.runtime import RuntimeQuantization, wrap

    stored = None if folder is None else _stored_prefix(run.recipe, folder)
    about = short_hash(canonical_json([plain, device, batch_size, stored and tensors_digest(stored)]))
    with states.computed_once(about):
        if (known := states.read(about)) is not None:
            return known
        model, tokenizer = as_it_is()
        planned = run.texts.get(named(metric.corpus, metric.split, None))
        tokens, _ = token_ids(run.corpora[metric.corpus], metric.split, tokenizer, None, planned)
        windows = metric_windows(model, tokens, metric)
        prefix = None if stored is None else _reference_prefix(model.eval(), run.recipe, stored)
        with wrap(model.eval(), RuntimeQuantization(prefix=prefix)):
            found = float_states(model, windows, batch_size, tokens.bos)
        states.keep(about, found, model)
        return found


def _reference(recipe: "Recipe", folder: Path | None) -> str:
    return WITH_PREFIX if folder is not None and _stored_prefix(recipe, folder) else PLAIN


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
