"""The largest magnitude of each token, layer by layer, and the spread over tokens (PrefixQuant Sec. 4).

The paper's Figures 2, 3 and 8 to 17 show the three largest, the median and the smallest of M, each token's largest
|value|. A static scale serves all tokens, so it fits badly where a token is far from the median. Nothing here changes
the model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reproduction.metrics.settings import MaximaByToken
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of, config_of, decoder_layers
from rotquant.models.limits import metric_windows
from rotquant.models.stream import capture_layer_inputs
from rotquant.models.transforms import Chain
from rotquant.recipes.transforms import Transform, at
from rotquant.text import Tokens

#: The tensors of each kind: sites whose inputs are read, and the tensors of attention.
TENSORS = {
    "inputs": ("attention_input", "attention_output", "mlp_input", "mlp_output"),
    "attention": ("query", "key", "value"),
}
#: Statistics kept for each tensor in each layer, from the largest to the smallest.
STATISTICS = ("top_1", "top_2", "top_3", "median", "min_1")

#: The attention function's name in transformers, and the attention module's attribute for the reader.
_NAME, _READER = "rotquant_read_attention", "_rotquant_reader"

Read = dict[str, list[Tensor]]
"""Largest magnitudes [batch, tokens] of a layer by tensor, batch by batch, float32 on the host."""


def token_maxima(
    model: nn.Module, tokens: Tokens, metric: MaximaByToken, transforms: tuple[Transform, ...] = ()
) -> tuple[dict[str, float], dict[str, Any]]:
    """Statistics of the tokens' largest magnitudes, over all tokens of the metric's windows together.

    The model runs one decoder layer at a time; one number per token and tensor of a layer is kept while it runs.

    Args:
        model: a supported causal language model, rotated or not, with a prefix or not, without quantizers.
        tokens: of a text (`rotquant.text.tokenize`).
        transforms: the model's. With R3, queries and keys are read after it, as the cache stores them.

    Returns:
        Metrics: for each of the metric's tensors `<tensor>_top`, top-1 over median, and `<tensor>_bottom`, median over
        min-1, each in the layer where it is largest; inf or nan where the network's numbers are. Arrays: `maxima`, by
        tensor and statistic (`STATISTICS`) a list over the layers.

    Raises:
        CorpusError: the text is shorter than a window.
        RecipeError, CheckpointError: the model cannot read the windows (`rotquant.models.limits`), or computes
            attention by another function than torch's scaled dot product.
    """
    windows = metric_windows(model, tokens, metric)
    layers: dict[str, list[list[float]]] = {name: [] for name in TENSORS[metric.tensors]}
    with _reading(model, metric.tensors, transforms) as read:
        stream = capture_layer_inputs(model, windows, next(model.parameters()).device)
        for index, _ in stream.layers("token maxima"):
            stream.advance(index)
            for name, found in layers.items():
                found.append(summary(torch.cat(read.pop(name))))
    metrics: dict[str, float] = {}
    for name, found in layers.items():
        numbers = torch.tensor(found, dtype=torch.float64)
        top, median, least = (numbers[:, STATISTICS.index(statistic)] for statistic in ("top_1", "median", "min_1"))
        metrics |= {f"{name}_top": (top / median).max().item(), f"{name}_bottom": (median / least).max().item()}
    maxima = {name: dict(zip(STATISTICS, zip(*found, strict=True), strict=True)) for name, found in layers.items()}
    return metrics, {"maxima": maxima}


def summary(maxima: Tensor) -> list[float]:
    """The `STATISTICS` of tokens' largest magnitudes, a tensor of three at least; each nan where one of them is."""
    flat = maxima.flatten()
    if flat.isnan().any():
        return [float("nan")] * len(STATISTICS)
    return [*flat.topk(3).values.tolist(), flat.median().item(), flat.min().item()]


@contextmanager
def _reading(
    model: nn.Module, tensors: Literal["inputs", "attention"], transforms: tuple[Transform, ...]
) -> Iterator[Read]:
    """Collect the tokens' largest magnitudes of every decoder layer that runs while the context is open."""
    read: Read = defaultdict(list)
    with _reading_inputs(model, read) if tensors == "inputs" else _reading_attention(model, read, transforms):
        yield read


@contextmanager
def _reading_inputs(model: nn.Module, read: Read) -> Iterator[None]:
    """Read sites at their first linear layer, after all hooks before it."""

    def reader(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: read[name].append(_largest(inputs[0], (-1,)))

    hooks = [
        layer.get_submodule(site.linears[0]).register_forward_pre_hook(reader(site.name))
        for layer in decoder_layers(model)
        for site in architecture_of(model).sites
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _reading_attention(model: nn.Module, read: Read, transforms: tuple[Transform, ...]) -> Iterator[None]:
    """Read queries, keys and values [batch, heads, tokens, head_dim] where attention receives them, after the cache."""
    config = cast(Any, config_of(model))
    if config._attn_implementation != "sdpa":
        raise RecipeError("Q, K and V are read in models with sdpa attention: load the model with it.")

    turned = Chain(at(transforms, "queries_keys"))

    def reader(query: Tensor, key: Tensor, value: Tensor) -> None:
        text = query.shape[2]  # a prefix precedes it in the cache
        for name, x in (("query", turned(query)), ("key", turned(key[:, :, -text:])), ("value", value[:, :, -text:])):
            read[name].append(_largest(x, (1, 3)))

    modules = [layer.get_submodule(architecture_of(model).attention) for layer in decoder_layers(model)]
    for module in modules:
        object.__setattr__(module, _READER, reader)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
        for module in modules:
            object.__delattr__(module, _READER)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention with a reader, by transformers' calling convention."""
    getattr(module, _READER)(query, key, value)
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def _largest(x: Tensor, features: tuple[int, ...]) -> Tensor:
    """Each token's largest magnitude over the dimensions of its features."""
    return x.detach().abs().amax(dim=features).float().cpu()
