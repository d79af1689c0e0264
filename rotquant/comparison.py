"""Two models on one text: what B loses against A, in perplexity, KL divergence and first choices, and what it saves.

Each model is anything that `rotquant.api.load` reads. One of them is in memory at a time: A's last hidden states are
kept, from which its head makes the distributions that B's are compared with (`rotquant.metrics.divergence`).
"""

import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotquant import api
from rotquant.decoder.config import LINEARS
from rotquant.decoder.network import Network
from rotquant.decoder.storage import is_decoder_folder
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import folder_size
from rotquant.foundation.progress import task
from rotquant.metrics.divergence import FloatStates, float_states
from rotquant.metrics.perplexity import PerplexityResult, mean_with_error, paired_ratio, perplexity
from rotquant.models.architectures import base_model
from rotquant.models.checkpoints import load_tokenizer, local_folder
from rotquant.models.folders import read_safetensors_header
from rotquant.models.limits import metric_windows
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import gpu_name
from rotquant.tensors.onednn import OneDNNLinear
from rotquant.text import MODULES, CorpusSpec, Tokens, load_text, tokenize
from rotquant.weights.reading import quantization_of
from rotquant.weights.storage import is_quantized_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Forward passes that are timed, after one that is not.
_PASSES = 3
#: Tensors of linear layers, by their names in files: of checkpoints and quantized folders, and of decoders.
_OF_LAYERS = re.compile(r"(^|\.)layers\.\d+\.(?!.*(norm|bias))")
_OF_DECODERS = re.compile(rf"layers\.\d+\.({'|'.join(LINEARS)})\.(?!bias)")


@dataclass(frozen=True)
class Side:
    """One of two compared models.

    format: plain, quantized (a folder of `rotquant quantize`), compressed-tensors, or decoder.
    bytes: of its safetensors files. bits_per_weight: stored bits of the decoder layers' linear layers with scales, zero
        points, tables and what else belongs to them, over the number of their weights.
    tokens_per_second: of a forward pass of one window on `device` in the type `dtype`: median of three. What is
        quantized runs as a simulation there, so only a decoder's is the speed of integers.
    """

    model: str
    format: str
    perplexity: PerplexityResult
    bytes: int
    bits_per_weight: float
    tokens_per_second: float
    device: str
    dtype: str


@dataclass(frozen=True)
class ModelComparison:
    """Model B measured against model A on the same windows; each pair is a mean and its standard error over windows.

    ratio: B's perplexity over A's. kl: KL(A || B) of the next token, nats. flips: share of positions at which the
    likeliest next token is another one, percent.
    """

    a: Side
    b: Side
    ratio: tuple[float, float]
    kl: tuple[float, float]
    flips: tuple[float, float]

    def as_data(self) -> dict[str, Any]:
        """Plain data, each window's numbers included."""
        return asdict(self)


def compare(
    a: str | Path,
    b: str | Path,
    corpus: CorpusSpec = MODULES,
    *,
    metric: Perplexity | None = None,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> ModelComparison:
    """Measure two models on the same windows of a text.

    Args:
        a, b: folders or hub ids; b's predictions are compared with a's.
        metric: windows and split; default: the test split in windows as long as both models allow, at most 2048.
        dtype: as in `rotquant.api.load`.

    Raises:
        CheckpointError: the models' tokenizers or vocabularies differ, before weights are read.
        RotquantError: other bad input, in one sentence.
    """
    folders = [local_folder(a), local_folder(b)]
    tokenizer = _shared_tokenizer(folders, (a, b))
    metric = metric or Perplexity(corpus=corpus.name, sequence_length=window_length(folders))
    tokens = tokenize(load_text(corpus, metric.split), tokenizer)
    first = api.load(folders[0], device=device, dtype=dtype)
    exact = float_states(first.network, metric_windows(first.network, tokens, metric), batch_size)
    side = _side(str(a), folders[0], first.network, tokens, metric, batch_size)
    del first  # but for its head, which `exact` holds
    second = api.load(folders[1], device=device, dtype=dtype)
    other = _side(str(b), folders[1], second.network, tokens, metric, batch_size, exact)
    found = other.perplexity
    ratio = paired_ratio(found, side.perplexity)
    return ModelComparison(
        side, other, ratio, mean_with_error(found.kl), mean_with_error([100 * one for one in found.flips])
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


def _side(
    name: str,
    folder: Path,
    network: nn.Module,
    tokens: Tokens,
    metric: Perplexity,
    batch_size: int,
    exact: FloatStates | None = None,
) -> Side:
    found = perplexity(network, tokens, metric, batch_size=batch_size, description=f"perplexity of {name}", exact=exact)
    parameter = next(network.parameters())
    return Side(
        model=name,
        format=_format(folder),
        perplexity=found,
        bytes=folder_size(folder, "*.safetensors"),
        bits_per_weight=_bits_per_weight(folder, network),
        tokens_per_second=_speed(network, metric_windows(network, tokens, metric)[:1].to(parameter.device)),
        device=gpu_name(parameter.device) or f"CPU, {torch.get_num_threads()} threads",
        dtype=str(parameter.dtype).removeprefix("torch."),
    )


def _format(folder: Path) -> str:
    if is_decoder_folder(folder):
        return "decoder"
    if is_quantized_folder(folder):
        return "quantized"
    return "plain" if quantization_of(folder) is None else "compressed-tensors"


def _bits_per_weight(folder: Path, network: nn.Module) -> float:
    """Stored bits of all that belongs to linear layers, over the number of their weights; see `Side`."""
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
    with task("timing", "pass", _PASSES + 1) as under_way, OneDNNLinear():
        for _ in range(_PASSES + 1):
            started = time.perf_counter()
            network(input_ids=window, use_cache=False).logits[0, -1, 0].item()  # which waits for a GPU
            seconds.append(time.perf_counter() - started)
            under_way.advance()
    return window.numel() / statistics.median(seconds[1:])
