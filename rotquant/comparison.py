"""Models on one text against a reference: what each loses in perplexity, KL divergence and first choices, and its size.

Each model is anything that `rotquant.api.load` reads. One of them is in memory at a time: the reference's last hidden
states are kept, from which its head makes the distributions that the others' are compared with
(`rotquant.metrics.divergence`).
"""

import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotquant import api
from rotquant.decoder.config import LINEARS
from rotquant.decoder.network import Network
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import folder_size
from rotquant.foundation.progress import task
from rotquant.metrics.bos import bos_note
from rotquant.metrics.divergence import float_states
from rotquant.metrics.perplexity import PerplexityResult, mean_with_error, paired_ratio, perplexity
from rotquant.models.architectures import base_model
from rotquant.models.checkpoints import load_tokenizer, local_folder
from rotquant.models.folders import kind_of, read_safetensors_header
from rotquant.models.limits import metric_windows
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import gpu_name
from rotquant.tensors.faster import FasterKernels
from rotquant.text import CorpusSpec, adds_bos, load_text, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Forward passes that are timed, after one that is not.
_PASSES = 3
#: Tensors of linear layers, by their names in files: of checkpoints and quantized folders, and of decoders.
_OF_LAYERS = re.compile(r"(^|\.)layers\.\d+\.(?!.*(norm|bias))")
_OF_DECODERS = re.compile(rf"layers\.\d+\.({'|'.join(LINEARS)})\.(?!bias)")


@dataclass(frozen=True)
class MeasuredModel:
    """A model of a comparison.

    format: plain, quantized (a folder of `rotquant quantize`), decoder, or who packed it (`models.folders.Kind`).
    bytes: of its safetensors files. parameters: how many the model has; of one that a rotation gave a head apart from
        the embedding, as many as the reference has.
    bits_per_weight: stored bits of the decoder layers' linear layers with scales, zero points, tables and what else
        belongs to them, over the number of their weights. bits_per_parameter: of all files, embedding and head
        included, over all parameters.
    tokens_per_second: of a forward pass of one window on `device` in the type `dtype`: median of three; None where it
        was not timed. What is quantized runs as a simulation there, so only a decoder's is the speed of integers.
    """

    model: str
    format: str
    perplexity: PerplexityResult
    bytes: int
    parameters: int
    bits_per_weight: float
    bits_per_parameter: float
    tokens_per_second: float | None
    device: str
    dtype: str


@dataclass(frozen=True)
class ComparedModel(MeasuredModel):
    """A model against the reference on the same windows; each pair is a mean and its standard error over windows.

    ratio: its perplexity over the reference's. kl: KL(reference || model) of the next token, nats. flips: share of
    positions at which the likeliest next token is another one, percent.
    """

    ratio: tuple[float, float]
    kl: tuple[float, float]
    flips: tuple[float, float]


@dataclass(frozen=True)
class ModelComparison:
    """A reference and the models that were measured against it, in the order in which they were named."""

    reference: MeasuredModel
    models: tuple[ComparedModel, ...]

    def as_data(self) -> dict[str, Any]:
        """Plain data, each window's numbers included."""
        return asdict(self)


def compare(
    reference: str | Path,
    models: Sequence[str | Path],
    corpus: CorpusSpec,
    *,
    metric: Perplexity | None = None,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    timing: bool = False,
) -> ModelComparison:
    """Measure models on the same windows of a text.

    Args:
        reference, models: folders or hub ids; the models' predictions are compared with the reference's.
        metric: windows and split; default: the test split in windows as long as all models allow, at most 2048.
        dtype: as in `rotquant.api.load`; a decoder keeps its own.
        timing: whether forward passes are timed too.

    Raises:
        CheckpointError: the models' tokenizers or vocabularies differ, before weights are read.
        RotquantError: other bad input, in one sentence.
    """
    names = (reference, *models)
    folders = [local_folder(name) for name in names]
    tokenizer = _shared_tokenizer(folders, names)
    metric = metric or Perplexity(corpus=corpus.name, sequence_length=window_length(folders))
    tokens = tokenize(load_text(corpus, metric.split), tokenizer)

    def load(folder: Path) -> nn.Module:
        return api.load(folder, device=device, dtype=None if kind_of(folder) == "decoder" else dtype).network

    def measure(name: str | Path, folder: Path, network: nn.Module, **known: Any) -> MeasuredModel:
        words = f"perplexity of {name}"
        found = perplexity(network, tokens, metric, batch_size=batch_size, description=words, exact=known.get("exact"))
        window = metric_windows(network, tokens, metric)[:1] if timing else None
        return _measured(name, folder, network, found, window, known.get("parameters"))

    network = load(folders[0])
    exact = float_states(network, metric_windows(network, tokens, metric), batch_size, tokens.bos)
    first = measure(reference, folders[0], network)
    note = first.perplexity.note or bos_note(network, tokens, adds_bos(tokenizer), metric.bos)
    first = replace(first, perplexity=replace(first.perplexity, note=note))
    del network  # but for its head, which `exact` holds
    others = []
    for name, folder in zip(models, folders[1:], strict=True):
        network = load(folder)
        others.append(measure(name, folder, network, exact=exact, parameters=first.parameters))
        del network
    return ModelComparison(first, tuple(_against(other, first) for other in others))


def _against(model: MeasuredModel, reference: MeasuredModel) -> ComparedModel:
    found = model.perplexity
    return ComparedModel(
        **vars(model),
        ratio=paired_ratio(found, reference.perplexity),
        kl=mean_with_error(found.kl),
        flips=mean_with_error([100 * one for one in found.flips]),
    )


def window_length(models: Sequence[str | Path], asked: int | None = None) -> int:
    """Tokens per window that all models allow: as asked for, else as long as possible, at most 2048.

    Raises:
        RecipeError: one has a shorter context than asked for.
    """
    return min(api.limits_of(model).length(asked) for model in models)


def _shared_tokenizer(folders: Sequence[Path], names: Sequence[str | Path]) -> "PreTrainedTokenizerBase":
    """The tokenizer of all models.

    Raises:
        CheckpointError: one has another, or another number of token ids.
    """
    first, *others = map(load_tokenizer, folders)
    sizes = [api.limits_of(folder).vocabulary for folder in folders]
    for other, name, size in zip(others, names[1:], sizes[1:], strict=True):
        same = first.get_vocab() == other.get_vocab() and first.bos_token_id == other.bos_token_id
        if not same or size != sizes[0]:
            raise CheckpointError(
                f"{names[0]} and {name} have different {'vocabularies' if same else 'tokenizers'}, so their "
                "distributions of the next token cannot be compared: give two models of one tokenizer."
            )
    return first


def _measured(
    name: str | Path,
    folder: Path,
    network: nn.Module,
    found: PerplexityResult,
    window: Tensor | None,
    reference: int | None,
) -> MeasuredModel:
    """A model's facts. window: what is timed. reference: how many parameters the reference has, if that is another."""
    parameter = next(network.parameters())
    size, count = folder_size(folder, "*.safetensors"), _parameters(network, reference)
    return MeasuredModel(
        model=str(name),
        format=kind_of(folder) or "plain",
        perplexity=found,
        bytes=size,
        parameters=count,
        bits_per_weight=_bits_per_weight(folder, network),
        bits_per_parameter=8 * size / count,
        tokens_per_second=None if window is None else _speed(network, window.to(parameter.device)),
        device=gpu_name(parameter.device) or _processor(),
        dtype=str(parameter.dtype).removeprefix("torch."),
    )


def _processor() -> str:
    """What a model runs on without a GPU."""
    count = torch.get_num_threads()
    return f"CPU, {count} thread{'s' if count > 1 else ''}"


def _parameters(network: nn.Module, reference: int | None) -> int:
    """Number of a model's parameters; the reference's where it has as many, but for the norms' gains and a head that is
    apart from the embedding, since both may be what a rotation made of the same model."""
    if isinstance(network, Network):
        shape, embedding = network.decoder.config, network.embedding.numel()
        weights = shape.layers * sum(math.prod(shape.features(linear)) for linear in LINEARS)
        count = weights + (embedding if shape.tied else 2 * embedding)
    else:
        embedding = base_model(network).embed_tokens.weight.numel()
        count = sum(parameter.numel() for parameter in network.parameters())
    if reference is not None and any(abs(one / reference - 1) < 0.01 for one in (count, count - embedding)):
        return reference
    return count


def _bits_per_weight(folder: Path, network: nn.Module) -> float:
    """Stored bits of all that belongs to linear layers, over the number of their weights; see `MeasuredModel`."""
    if isinstance(network, Network):
        shape, pattern = network.decoder.config, _OF_DECODERS
        weights = shape.layers * sum(math.prod(shape.features(linear)) for linear in LINEARS)
    else:
        parameters, pattern = base_model(network).layers.parameters(), _OF_LAYERS
        weights = sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
    stored = 0
    for file in folder.glob("*.safetensors"):
        for name, tensor in read_safetensors_header(file).items():
            if pattern.search(name):
                start, end = tensor["data_offsets"]
                stored += end - start
    return 8 * stored / weights


@torch.no_grad()
def _speed(network: nn.Module, window: Tensor) -> float:
    """Tokens per second of a forward pass of one window, int64 [1, tokens]: median of a few after one that warms up."""
    seconds = []
    with task("timing", "pass", _PASSES + 1) as under_way, FasterKernels():
        for _ in range(_PASSES + 1):
            started = time.perf_counter()
            network(input_ids=window, use_cache=False).logits[0, -1, 0].item()  # which waits for a GPU
            seconds.append(time.perf_counter() - started)
            under_way.advance()
    return window.numel() / statistics.median(seconds[1:])
