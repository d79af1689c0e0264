"""The library in four verbs: `quantize` a checkpoint, `load` what was quantized, measure `perplexity`, `zero_shot`.

The command line and the workflow call the same functions. A `Model` is ready to run: its forward contains the online
transforms and quantizers of its recipe. Long work says on standard error how far it is.
"""

import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rotquant.decoder.network import Network
from rotquant.decoder.storage import load_decoder, read_decoder_manifest
from rotquant.formats.reading import load_compressed
from rotquant.foundation.errors import CorpusError, RecipeError, ResultError
from rotquant.foundation.files import file_digest
from rotquant.foundation.progress import task
from rotquant.metrics import lm_eval
from rotquant.metrics import perplexity as evaluation
from rotquant.metrics.bos import bos_note
from rotquant.metrics.cost import FullPrecision, QuantizationCost, cost, reference
from rotquant.metrics.key_bias import key_bias_note
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import (
    config_of,
    load_checkpoint,
    load_config,
    load_tokenizer,
    local_folder,
    model_max_length,
)
from rotquant.models.companions import companions
from rotquant.models.digests import checkpoint_digest
from rotquant.models.fitting import check_fits, fitted
from rotquant.models.folders import PACKED, check_kind, check_weight_files, embedding_type, kind_of
from rotquant.models.limits import ModelLimits, advised_length, check_kept
from rotquant.models.placement import current_gpu, fits
from rotquant.models.rotation.matrices import (
    Rotations,
    check_made_of,
    ends_of,
    load_history,
    load_rotations,
    save_rotations,
)
from rotquant.models.simulation.prefix import prefix_holds
from rotquant.models.simulation.runtime import Handle, scales_by_text
from rotquant.recipes.corpus import CHARACTERS_PER_TOKEN
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.tensors.devices import learning_dtype
from rotquant.text import (
    BOS,
    CorpusSpec,
    adds_bos,
    bos_of,
    calibration_samples,
    check_split,
    load_text,
    text_digest,
    tokenize,
)
from rotquant.weights.actions import hooks
from rotquant.weights.build import build_weights, check_recipe, quantized_forward
from rotquant.weights.storage import (
    check_settings,
    load_quantized,
    prefix_tokens,
    round_ends,
    save_quantized,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rotquant.training.state import Checkpoint
    from rotquant.weights.storage import StoredModel


#: Characters of calibration text on which a model is tried with and without BOS.
_BOS_CHARACTERS = 4000
#: Windows and their tokens by which `quantize` tells what it cost.
CHECKED_WINDOWS, CHECKED_TOKENS = 2, 512
#: Tokens that no model reads at once.
_LONGEST = 10**9
#: How many times the text of those windows is read, so that they are apart.
_READ_FOR_CHECK = 8


@dataclass(frozen=True)
class Model:
    """A model with its recipe at work.

    network: the transformers model, or a converted decoder in its place; `handle.remove()` removes the online
        transforms and quantizers from the former.
    stored: integers and manifest, where weights were quantized in this process; `save` writes them.
    reference: what the full-precision model said of the text that `cost` compares on.
    """

    network: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    recipe: Recipe
    handle: "Handle"
    stored: "StoredModel | None" = None
    reference: FullPrecision | None = None

    def cost(self, device: torch.device | str = "cpu") -> QuantizationCost | None:
        """What quantization cost on the text that `quantize` was told to check; None where it was told of none.

        Args:
            device: where the model runs meanwhile.
        """
        return None if self.reference is None else cost(self.network, self.reference, device)

    def save(self, folder: str | Path, source: dict[str, Any] | None = None) -> None:
        """Write packed weights, manifest, tokenizer and the checkpoint's other files to `folder`.

        `load` reads it back bit for bit. What stays behind: `rotquant.models.companions.left_out`.
        """
        if self.stored is None:
            raise ResultError("only a model from quantize() holds integers to save; copy the loaded folder instead.")
        save_quantized(folder, self.stored, source)


def quantize(
    checkpoint: str | Path,
    recipe: Recipe | str,
    *,
    corpus: CorpusSpec | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rotations: str | Path | None = None,
    batch_size: int | None = None,
    training: "Checkpoint | None" = None,
    placed: bool = True,
    check: Perplexity | FullPrecision | None = None,
) -> Model:
    """Apply a recipe to a checkpoint; learn its rotations before, where it says so.

    Args:
        checkpoint: a local folder or hub id.
        recipe: a recipe, or a preset's name: then with texts no longer than the model's context, and with what `fit`
            changes, of which a warning tells.
        corpus: text whose train split calibrates and rotations are learned on, such as `corpus_spec("wikitext2")` of
            `rotquant.text`; None where the recipe reads none.
        seed: of the random rotation, the calibration sample and the order of learning.
        rotations: file of learned rotations, read where it exists and else written, so that several recipes share
            them; an interrupted learning continues.
        batch_size: sequences that pass the model together, where weights are made; default by their length.
        training: where a method that trains weights continues if it was interrupted.
        check: windows of the corpus that the full-precision model reads before the work, so that `Model.cost` can tell
            what it cost, or what it said of them before (`Model.reference`); without, nothing is read and kept.
        placed: whether the quantized network ends on the device, if it fits there; else it stays on the host.

    The model passes the device one layer at a time.

    Raises:
        RotquantError: bad input, in one sentence, before the expensive part.
    """
    if isinstance(recipe, str):
        recipe, changed = fit(checkpoint, limits_of(checkpoint).shorten(preset(recipe)))
        if changed:
            warnings.warn(changed, stacklevel=2)
    if corpus is None and (recipe.reads_text or check is not None):
        raise RecipeError("the recipe or the check reads text: pass a corpus.")
    corpus = cast(CorpusSpec, corpus)  # which nothing below reads where it is None
    if rotations is not None and recipe.learner is None:
        raise RecipeError("the recipe learns no rotations: leave the file of rotations out.")
    folder = local_folder(checkpoint)
    check_kind(folder, "plain")
    check_weight_files(folder)
    limits_of(folder).check_texts(recipe)
    tokenizer = load_tokenizer(folder)  # too short a text is reported before the weights are read
    digest, made_of = checkpoint_digest(checkpoint), None
    if rotations is not None:
        made_of = _made_of(recipe, digest, corpus, seed, dtype)
        if Path(rotations).exists():
            check_made_of(rotations, made_of)
    samples = (
        calibration_tokens(corpus, cast(Calibration, recipe.calibration), tokenizer, seed)
        if recipe.needs_calibration
        else None
    )
    texts = {name: calibration_tokens(corpus, text, tokenizer, seed) for name, text in recipe.own_texts.items()}
    network, tokenizer = load_checkpoint(folder, dtype, "cpu")
    check_recipe(network, recipe, samples, texts)
    files = companions(folder)
    check_settings(network, tokenizer, files)  # before rotations are learned
    _warn_of_bos(network, tokenizer, recipe, corpus)
    if note := key_bias_note(network, recipe):
        warnings.warn(note, stacklevel=2)
    known = full_precision(network, tokenizer, corpus, check, device) if isinstance(check, Perplexity) else check
    source: dict[str, Any] = {"checkpoint": str(checkpoint), "checkpoint_digest": digest}
    if recipe.reads_text:
        source["corpus"] = corpus.model_dump(mode="json")
    learned = None
    if recipe.learner is not None:
        trained = network if dtype == learning_dtype(dtype) else load_checkpoint(folder, learning_dtype(dtype))[0]
        learned, source["rotation"] = _learned(trained, tokenizer, recipe, corpus, seed, device, rotations, made_of)
        del trained  # a second model, where its type is another
    with current_gpu(device):
        stored = build_weights(
            network,
            tokenizer,
            recipe,
            seed,
            samples,
            texts=texts,
            rotations=learned,
            device=device,
            batch_size=batch_size,
            checkpoint=training,
            companions=files,
        )
        round_ends(network, getattr(torch, embedding_type(folder)))
    state = replace(stored.state, manifest=stored.manifest.model_copy(update={"source": source}))
    if placed and fits(network, device):
        network.to(device)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    elif placed:
        warnings.warn(
            f"{device} has no room for the model, which stays on the host: save it, or run it there", stacklevel=2
        )
    handle = quantized_forward(network, recipe, state)
    return Model(network, tokenizer, recipe, handle, replace(stored, state=state), known)


def check_metric(checkpoint: str | Path, corpus: CorpusSpec) -> Perplexity | None:
    """Two windows of at most 512 tokens of a corpus, for `quantize(check=...)`: of its validation split, or else of its
    test split, which nothing is calibrated on; None where it has neither."""
    limits = limits_of(checkpoint)
    length = limits.length(usual=min(CHECKED_TOKENS, (limits.context or 2 * CHECKED_TOKENS) // 2))  # room for a prefix
    for split in ("validation", "test"):
        with suppress(CorpusError):
            check_split(corpus, split)
            return Perplexity(corpus=corpus.name, split=split, sequence_length=length, max_windows=CHECKED_WINDOWS)
    return None


def full_precision(
    network: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    corpus: CorpusSpec,
    metric: Perplexity,
    device: torch.device | str,
) -> FullPrecision | None:
    """What a full-precision network says of windows of the head of a split, for `quantize(check=...)`; None where the
    split is too short for one, or a GPU has no room."""
    wanted = metric.sequence_length * (metric.max_windows or 1)
    try:
        text = load_text(corpus, metric.split, max_characters=_READ_FOR_CHECK * CHARACTERS_PER_TOKEN * wanted)
        tokens = tokenize(text, tokenizer)
        begins = "none" if tokens.bos is None else "window"
        with current_gpu(device):
            return reference(network, tokens, metric.model_copy(update={"bos": begins}), device)
    except CorpusError:
        return None


def _warn_of_bos(
    network: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", recipe: Recipe, corpus: CorpusSpec
) -> None:
    """Warn where a recipe reads text without BOS and the model needs it."""
    calibration = recipe.calibration if recipe.needs_calibration else None
    read = [text for text in (calibration, *(one.own_text for one in recipe.methods.values())) if text is not None]
    if read and adds_bos(tokenizer) and any(text.bos != "window" for text in read):
        piece = tokenize(load_text(corpus, "train", max_characters=_BOS_CHARACTERS), tokenizer)
        if note := bos_note(network, piece, True, "text"):
            warnings.warn(note, stacklevel=3)


def _made_of(recipe: Recipe, digest: str, corpus: CorpusSpec, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """The settings that decide which rotations a recipe learns."""
    _, text = recipe.learned_by
    read = None if text is None else text_digest(corpus, "train", text.characters)
    kind = str(learning_dtype(dtype)).removeprefix("torch.")
    return {**recipe.learned(), "model": digest, "text": read, "seed": seed, "dtype": kind}


def _learned(
    network: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    recipe: Recipe,
    corpus: CorpusSpec,
    seed: int,
    device: torch.device | str,
    file: str | Path | None,
    made_of: dict[str, Any] | None,
) -> tuple[Rotations, dict[str, Any]]:
    """The rotations that a recipe learns, from the file or learned now, and what the manifest says of them."""
    if file is not None and Path(file).exists():
        return load_rotations(file), {"file": str(file), "digest": file_digest(file), **ends_of(load_history(file))}
    started = time.perf_counter()
    learner, text = recipe.learned_by
    samples = None if text is None else calibration_tokens(corpus, text, tokenizer, seed)
    unfinished = None if file is None else Path(f"{file}.unfinished")
    with current_gpu(device):
        learned = hooks(learner).learn_rotations(network, recipe, seed, samples, device=device, checkpoint=unfinished)
    record = {"seconds": time.perf_counter() - started, **ends_of(learned.history)}
    if file is not None and unfinished is not None:
        save_rotations(file, learned.rotations, learned.history, made_of)
        unfinished.unlink(missing_ok=True)
        record |= {"file": str(file), "digest": file_digest(file)}
    return learned.rotations, record


def load(
    path: str | Path,
    recipe: Recipe | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Model:
    """Load a folder written by `quantize`, `rotquant convert` or `rotquant export`, a plain checkpoint, or one of
    packed weights by another library: compressed-tensors, GPTQ or AWQ.

    Args:
        recipe: what acts at run time, where it differs from what the folder was made for; a plain checkpoint has none,
            and a converted one is what it is.
        dtype: default: the folder's own, which alone reproduces its numbers, and a decoder's only one; float32 for a
            plain checkpoint.

    Raises:
        RotquantError: bad input, in one sentence.
    """
    kind, state = kind_of(path), None
    if kind == "decoder":
        return _load_decoder(path, recipe, device, dtype)
    if kind == "quantized":
        network, tokenizer, state = load_quantized(path, device, dtype)
        recipe = recipe or state.recipe
    elif kind in PACKED.values():
        packed = load_compressed(path, device, dtype)
        recipe = recipe or packed.recipe
        return Model(packed.model, packed.tokenizer, recipe, packed.run(recipe))
    else:
        network, tokenizer = load_checkpoint(path, dtype or torch.float32, device)
        recipe = recipe or Recipe()
    return Model(network, tokenizer, recipe, quantized_forward(network, recipe, state))


def _load_decoder(
    path: str | Path, recipe: Recipe | None, device: torch.device | str, dtype: torch.dtype | None
) -> Model:
    if recipe is not None:
        raise RecipeError(f"{path} is a converted decoder, whose recipe is fixed: convert another model instead.")
    own = read_decoder_manifest(path).precision.dtype
    if dtype not in (None, getattr(torch, own)):
        raise RecipeError(
            f"{path} is a converted decoder of {own}, which is fixed: `rotquant convert --dtype` sets it."
        )
    with task("loading the model"):
        stored = load_decoder(path, device)
    # which has what is asked of a transformers model here
    network: Any = Network(stored.decoder, stored.generation_config)
    return Model(network, cast("PreTrainedTokenizerBase", stored.tokenizer), Recipe(), Handle())


def limits_of(path: str | Path) -> ModelLimits:
    """Limits of what a model reads, tokens at once and the vocabulary: of a checkpoint or a folder of ours, without its
    weights.

    Raises:
        RotquantError: bad input, in one sentence.
    """
    advised, kind = advised_length(model_max_length(path)), kind_of(path)
    if kind == "decoder":
        config = read_decoder_manifest(path).config
        return ModelLimits(config.max_positions, config.vocabulary, advised)
    prefix = prefix_tokens(path) if kind == "quantized" else 0
    config = load_config(Path(path), quantized=True) if kind in PACKED.values() else config_of(path)
    return ModelLimits.of(config, advised, prefix)


def fit(checkpoint: str | Path, recipe: Recipe, fixed: Collection[str] = ()) -> tuple[Recipe, str]:
    """A preset as the sizes of a checkpoint allow it: `rotquant.models.fitting.fitted`, without its weights.

    Args:
        fixed: fields of the rotation that stay as they are.

    Raises:
        RotquantError: bad input, or what does not fit and has no substitute, in one sentence.
    """
    config = config_of(checkpoint)
    architecture = architecture_of(config)
    recipe, sentence = fitted(recipe, architecture, fixed)
    check_fits(recipe, architecture)
    ModelLimits.of(config).check_texts(recipe)
    return recipe, sentence


def perplexity(
    model: Model,
    corpus: CorpusSpec,
    metric: Perplexity | None = None,
    *,
    text: str | None = None,
    batch_size: int = 8,
) -> evaluation.PerplexityResult:
    """Perplexity of a model by the papers' protocol (see `rotquant.metrics.perplexity`).

    Args:
        metric: of this corpus; default, windows of 2048 tokens, or fewer where the model's context or its tokenizer's
            `model_max_length` says so, of the test split.
        text: that split, where it has been read already.

    Raises:
        RecipeError: the metric is of another corpus, of longer windows than the model's context, or of windows whose KV
            cache stays in full precision as a whole.
        CorpusError: the text cannot be read or is shorter than one window.
    """
    if metric is None:
        advised = advised_length(model.tokenizer.model_max_length)
        length = ModelLimits.of(model.network.config, advised, model.recipe.prefix_tokens).length()
        metric = Perplexity(corpus=corpus.name, sequence_length=length)
    if corpus.name != metric.corpus:
        raise RecipeError(
            f"the metric is of corpus {metric.corpus!r}, and the corpus given is {corpus.name!r}: name this one in the "
            "metric."
        )
    check_kept(model.recipe, metric.sequence_length)
    text = load_text(corpus, metric.split) if text is None else text
    tokens = tokenize(text, model.tokenizer)
    found = evaluation.perplexity(model.network, tokens, metric, batch_size=batch_size)
    return replace(found, note=found.note or bos_note(model.network, tokens, adds_bos(model.tokenizer), metric.bos))


def zero_shot(
    model: Model,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    include_path: str | Path | None = None,
    task_data: str | Path | None = None,
    batch_size: int = 8,
    bos: BOS | None = None,
) -> dict[str, Any]:
    """What lm-eval says of a model, by its own names, rules and numbers: `rotquant.metrics.lm_eval.evaluate`.

    Args:
        bos: where items have BOS, `text` and `window` alike; None leaves it to the tokenizer. Items after a prefix that
            holds BOS have none.

    Raises:
        RecipeError, TaskError: see there.
    """
    network, tokenizer = model.network, model.tokenizer
    begins = None if bos is None else bos != "none"
    limits = ModelLimits.of(network.config, None, model.recipe.prefix_tokens)
    return lm_eval.evaluate(
        network,
        tokenizer,
        tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        include_path=None if include_path is None else Path(include_path),
        task_data=None if task_data is None else Path(task_data),
        batch_size=1 if isinstance(network, Network) or scales_by_text(network) else batch_size,
        bos=False if prefix_holds(network, bos_of(tokenizer)) else begins,
        max_length=limits.length(usual=_LONGEST) if limits.prefix else None,
    )


def calibration_tokens(
    corpus: CorpusSpec, calibration: Calibration, tokenizer: "PreTrainedTokenizerBase", seed: int = 0
) -> Tensor:
    """Calibration samples of a corpus, int64 [samples, sequence_length]: random windows of its train split's head.

    Args:
        seed: the run's, which draws them.
    """
    tokens = tokenize(load_text(corpus, "train", max_characters=calibration.characters), tokenizer)
    return calibration_samples(tokens, calibration, seed)
