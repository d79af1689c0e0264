"""Magnitudes of the activations that one site of one layer reads, token by feature (QuaRot Figure 1).

The figure shows the input X of a feed-forward block before rotation and X Q after it. Before, X is the output of the
RMSNorm with its learned scale; rotating a model first moves that scale into the weights, so after it the reading is
(x / rms(x)) Q for the residual stream's x. Both are what the linear layers read. Nothing here changes the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rotquant.architectures import Architecture, architecture_of, base_model, decoder_layers
from rotquant.corpora import evaluation_windows
from rotquant.errors import RecipeError
from rotquant.schemes import Magnitudes


def magnitudes(model: nn.Module, tokens: Tensor, metric: Magnitudes) -> tuple[dict[str, float], dict[str, Any]]:
    """Absolute values that the metric's site reads in its layer, over the first `metric.tokens` tokens of a text.

    They are read at the site's first linear layer, after whatever `rotquant.wrapping.wrap` has put before it: an online
    transform, and a quantizer where the recipe quantizes activations.

    Args:
        model: a supported causal language model, rotated or not, wrapped or not.
        tokens: int64 [n], the text with one leading BOS (`rotquant.corpora.tokenize`).

    Returns:
        Metrics: `largest` and `median` over all tokens and features, and `peak_ratio`, the first over the second; inf
        or nan where the network's numbers are. Arrays: `magnitudes`, nested lists [tokens][features] of four
        significant digits, and `layer`, the index of the layer.

    Raises:
        RecipeError: the model has no such site or layer.
        CorpusError: the text is shorter than the window.
    """
    architecture = architecture_of(model)
    layer = _layer_index(architecture, metric)
    window = evaluation_windows(tokens, metric.tokens)[:1]
    values = _site_input(model, architecture, layer, metric.site, window).abs()
    largest, median = values.max(), values.median()
    metrics = {
        "peak_ratio": (largest / median).item(),
        "largest": largest.item(),
        "median": median.item(),
    }
    return metrics, {"magnitudes": _rounded(values), "layer": layer}


def _layer_index(architecture: Architecture, metric: Magnitudes) -> int:
    """The layer to look at: the metric's, or the middle one. Raises `RecipeError` for an unknown site or layer."""
    sites = [site.name for site in architecture.sites]
    if metric.site not in sites:
        raise RecipeError(f"metric magnitudes: no site {metric.site!r}; known: {', '.join(sites)}.")
    layers = architecture.num_layers
    if metric.layer is not None and metric.layer >= layers:
        raise RecipeError(f"metric magnitudes: no layer {metric.layer}; the model's {layers} are 0 to {layers - 1}.")
    return layers // 2 if metric.layer is None else metric.layer


@torch.no_grad()
def _site_input(model: nn.Module, architecture: Architecture, layer: int, site: str, window: Tensor) -> Tensor:
    """What a site reads when the model sees `window` [1, tokens]: float32 [tokens, features] on the CPU."""
    read: list[Tensor] = []
    linear = decoder_layers(model)[layer].get_submodule(architecture.site(site).linears[0])
    hook = linear.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].detach()))
    training = model.training
    model.eval()
    try:
        base_model(model)(input_ids=window.to(next(model.parameters()).device), use_cache=False)
    finally:
        hook.remove()
        model.train(training)
    return read[0][0].float().cpu()


def _rounded(values: Tensor) -> list[list[float]]:
    """A matrix as nested lists of four significant digits: enough for a figure, and a tenth of the file."""
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]
