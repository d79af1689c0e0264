"""Magnitudes of the inputs of linear layers, or of their weights (QuaRot Figure 1, SpinQuant Figures 2 and 8 to 11).

The figures show the input X of linear layers before rotation and X Q after it. Before rotation, X is the output of the
RMSNorm with its learned scale. Rotation first moves that scale into the weights, so the input becomes (x / rms(x)) Q
for the residual stream's x. Weights are shown with that scale on both sides, so that rotation is all that differs.
Nothing here changes the model.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from reproduction.metrics.settings import Magnitudes
from rotquant.models.architectures import architecture_of, base_model, decoder_layers, linear_of, norm_of
from rotquant.models.limits import model_windows
from rotquant.text import Tokens

#: Larger matrices are reduced to the largest of neighbouring elements, so no outlier is lost.
LARGEST_SIDE = 512

Place = tuple[int, str]
"""A layer's index and the name of one of its sites."""

Found = TypeVar("Found")


def magnitudes(model: nn.Module, tokens: Tokens, metric: Magnitudes) -> tuple[dict[str, float], dict[str, Any]]:
    """Absolute values at the metric's sites and depths.

    Activations are read at a site's first linear layer over the first `metric.tokens` tokens of a text, after the hooks
    of `rotquant.models.simulation`: an online transform, and a quantizer where the recipe quantizes.

    Args:
        model: a supported causal language model, rotated or not, wrapped or not.
        tokens: of a text (`rotquant.text.tokenize`).

    Returns:
        Metrics: `peak_ratio`, the largest value over the median, at the place where this ratio is largest (with
        `metric.within` "row", the largest ratio of any row); `largest` and `median` over all places; inf or nan where
        the network's numbers are. Arrays: `panels`, a list of places in the metric's order, with `layer`, name of the
        `linear` layer and its own `peak_ratio`; `matrix` of at most 512 by 512 values (tokens or output features by
        input features, of which there are `shape`), and per feature, as wide as the matrix, the `mean` and the
        `largest`; all of four significant digits.

    Raises:
        CorpusError: the text is shorter than the window.
        RecipeError, CheckpointError: the model cannot read the window; see `rotquant.models.limits`.
    """
    layers = architecture_of(model).num_layers
    places = list(dict.fromkeys((int(depth * layers), site) for depth in metric.depths for site in metric.sites))
    found = {place: tensor.abs() for place, tensor in _tensors(model, tokens, metric, places).items()}
    everything = torch.cat([values.flatten() for values in found.values()])
    ratios = torch.stack([_peak_ratio(values, metric.within) for values in found.values()])
    metrics = {
        "peak_ratio": ratios.max().item(),
        "largest": everything.max().item(),
        "median": everything.median().item(),
    }
    names = [(place[0], _first_linear(model, place)) for place in places]
    panels = zip(names, ratios.tolist(), found.values(), strict=True)
    return metrics, {"panels": [_panel(layer, name, ratio, values) for (layer, name), ratio, values in panels]}


def read_inputs(
    model: nn.Module, window: Tensor, places: Iterable[Place], function: Callable[[Tensor], Found]
) -> dict[Place, Found]:
    """Apply `function` to the input [tokens, features] of each place's linear layers, float32 on the CPU.

    Args:
        window: token ids, int64 [1, tokens], for one forward pass.
    """
    found: dict[Place, Found] = {}

    def reader(place: Place) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[place] = function(inputs[0][0].detach().float().cpu())

        return read

    places = list(places)
    training = model.training
    hooks = [_module(model, place).register_forward_pre_hook(reader(place)) for place in places]
    model.eval()
    try:
        with torch.no_grad():
            base_model(model)(input_ids=window.to(next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    return {place: found[place] for place in places}


def _first_linear(model: nn.Module, place: Place) -> str:
    """Name of a site's first linear layer, relative to its decoder layer."""
    return architecture_of(model).site(place[1]).linears[0]


def _module(model: nn.Module, place: Place) -> nn.Linear:
    return linear_of(decoder_layers(model)[place[0]], _first_linear(model, place))


def _weight(model: nn.Module, place: Place) -> Tensor:
    """A site's first weight times the gain of the norm before it, [out, in]; the gain is one where it was fused."""
    architecture, weight = architecture_of(model), _module(model, place).weight.detach().float()
    site = architecture.site(place[1])
    if site.norm is not None:
        gain = norm_of(decoder_layers(model)[place[0]], site).weight.detach().float() + architecture.norm_offset
        weight = weight * gain.to(weight.device)
    return weight.cpu()


def _tensors(model: nn.Module, tokens: Tokens, metric: Magnitudes, places: list[Place]) -> dict[Place, Tensor]:
    """The activations or weights that the metric asks for, float32 on the CPU."""
    if metric.tensor == "weights":
        return {place: _weight(model, place) for place in places}
    return read_inputs(model, model_windows(model, tokens, metric.tokens, metric.bos)[:1], places, lambda x: x)


def _peak_ratio(values: Tensor, within: Literal["matrix", "row"]) -> Tensor:
    parts = values if within == "row" else values.flatten()[None]
    return (parts.amax(1) / parts.median(1).values).max()


def _panel(layer: int, linear: str, peak_ratio: float, values: Tensor) -> dict[str, Any]:
    mean, largest = values.mean(0, keepdim=True), values.amax(0, keepdim=True)
    return {
        "layer": layer,
        "linear": linear,
        "peak_ratio": peak_ratio,
        "shape": list(values.shape),
        "matrix": _rounded(_narrowed(_narrowed(values).T).T),
        "mean": _rounded(_narrowed(mean))[0],
        "largest": _rounded(_narrowed(largest))[0],
    }


def _narrowed(values: Tensor) -> Tensor:
    """[rows, columns] with at most `LARGEST_SIDE` columns, each the largest of equally many neighbours."""
    width = -(-values.shape[1] // LARGEST_SIDE)
    return torch.stack([part.amax(1) for part in values.split(width, dim=1)], dim=1)


def _rounded(values: Tensor) -> list[list[float]]:
    """A matrix as nested lists of four significant digits: enough for a figure, and a tenth of the file."""
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]
