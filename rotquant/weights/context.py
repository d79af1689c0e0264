"""Context that a method works in while weights are made: the model, calibration text on its way through it, what is
kept.

A method's `apply` gets a `QuantizationContext`. It changes the model's weights in place, and leaves here the integers
that they were rounded to and the tensors that it needs at run time. One decoder layer lies on the accelerator at a
time.

The budget of GPTQ at Llama-2-70B's shape, bfloat16, 128 samples of 2,048 tokens. GPU, in GiB: a layer 1.6, hidden
states of all samples 4, X^T X of down_proj's 28,672 inputs 3.1 and in float64 for its factor, its inverse and one in
between 6.1 each, 16,384 tokens in a layer 3: some 30 of 74. Two such layers on an H200 took 37.3 at most and 9 s each,
so 12 minutes for 80. Host: the model 129, and packed integers 33 (`HostWeights`), which are written as they are.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.foundation.progress import task
from rotquant.models.architectures import Architecture, Site, architecture_of, decoder_layers, linear_of
from rotquant.models.simulation.prefix import bos_of, without_bos
from rotquant.models.simulation.runtime import RuntimeQuantization, SiteKey, wrap
from rotquant.models.statistics import Statistic, collect_statistics
from rotquant.models.stream import LayerStream, capture_layer_inputs, on_device
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.quantization import ColumnSplit, QParams
from rotquant.training.state import Checkpoint, Record
from rotquant.weights.clipping import largest_of
from rotquant.weights.hessian import Hessian
from rotquant.weights.packing import HostWeights, Weight
from rotquant.weights.ranges import Ranges
from rotquant.weights.rtn import quantize_rtn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Splits = dict[SiteKey, ColumnSplit]
#: Rounds the weights of all linear layers that read one input, given X^T X of that and its outlier features.
Rounding = Callable[[Sequence[Tensor], Tensor, ColumnSplit | None], Sequence[Weight]]


class QuantizationContext:
    """State of one call of `build_weights`, which methods change.

    model: changed in place; it may lie on the host. architecture: of it.
    samples: calibration token ids, int64 [samples, tokens], or None.
    texts: those of methods' own texts, by the methods' names.
    device: where the work is done. seed: the run's.
    online: the online transforms with what they are made of, and a prefix once it is found, without quantizers.
    weights: integers by full name, on the host. splits: features that are kept in higher precision, by layer and site.
    tensors: what the method at work wants stored for the run time, by the names that its `tensors` gives.
    static: static scales of sites, and of `keys` and `values`, by (layer, name).
    kept_elsewhere: whether another process, of several that share a training, keeps the weights.
    checkpoint: where a method that trains continues if it was interrupted. history: the steps of such a training.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        recipe: Recipe,
        samples: Tensor | None,
        seed: int,
        device: torch.device,
        batch_size: int | None,
        checkpoint: Checkpoint | None = None,
        texts: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.architecture: Architecture = architecture_of(model)
        self.recipe = recipe
        self.samples = samples
        self.texts = texts
        self.seed = seed
        self.device = device
        self.batch_size = batch_size
        self.checkpoint = checkpoint
        self.online = RuntimeQuantization(transforms=recipe.transforms)
        self.weights = HostWeights()
        self.kept_elsewhere = False
        self.splits: Splits = {}
        self.tensors: dict[str, Tensor] = {}
        self.static: dict[SiteKey, QParams] = {}
        self.history: list[Record] = []
        self._few: list[int] = []  # tokens that experts see, of those that see fewer than they have inputs

    def capture(self, ids: Tensor | None = None, *, exact: bool = False) -> LayerStream:
        """The calibration samples, or others, at the entrance of the first layer; `exact`: layers compute in float64.

        Samples that begin with BOS lose it where the prefix that was found holds one.

        Raises:
            RecipeError: there are none.
        """
        dtype, ids = torch.float64 if exact else None, self.calibration_samples if ids is None else ids
        if self.online.prefix is not None and bos_of(self.model) in self.online.prefix.ids:
            ids = without_bos(ids, bos_of(self.model))
        return capture_layer_inputs(self.model, ids, self.device, self.batch_size, dtype)

    @property
    def calibration_samples(self) -> Tensor:
        """Calibration token ids, int64 [samples, tokens].

        Raises:
            RecipeError: there are none.
        """
        if self.samples is None:
            raise RecipeError("the recipe needs calibration text, but no samples were given.")
        return self.samples

    def statistics(self, statistic: Statistic) -> list[dict[str, Tensor]]:
        """A statistic of every site's features by layer, of the model as it is now, on the host."""
        with wrap(self.model, self.online):
            return collect_statistics(self.capture(), statistic)

    def round_to_nearest(self) -> None:
        """Round every weight; no calibration, no forward pass."""
        layers, settings = decoder_layers(self.model), self.recipe.rounded
        with task("rounding to nearest", "layer", len(layers)) as under_way:
            for index, layer in enumerate(layers):
                with on_device(layer, self.device):
                    for site in under_way.parts(self.architecture.sites):
                        split = self.splits.get((index, site.name))
                        weights = [linear_of(layer, name).weight.detach() for name in site.linears]
                        largest = largest_of(weights, settings.scheme)
                        rounded = [quantize_rtn(weight, settings, split, largest) for weight in weights]
                        self.store(index, layer, site, rounded)
                under_way.advance()

    def round_by_site(
        self, description: str, rounding: Rounding, *, quantized_inputs: bool = False, exact: bool = False
    ) -> None:
        """Round all weights site by site, by X^T X of inputs that come from layers and sites rounded already.

        Args:
            description: what progress calls it.
            quantized_inputs: whether inputs and KV cache are quantized meanwhile, as in the running network.
            exact: whether layers and X^T X are computed in float64.
        """
        seen = replace(self.online, outliers=self.splits, **self.recipe.quantizers)
        with wrap(self.model, seen if quantized_inputs else self.online):
            stream = self.capture(exact=exact)
            for index, layer, site in stream.sites_of_layers(description):
                self._round_site(stream, index, layer, site, rounding)
        if self._few:
            warnings.warn(
                f"{len(self._few)} weights of experts see fewer calibration tokens than they have inputs, the least "
                f"{min(self._few)}: they are rounded with more damping, and more samples would help.",
                stacklevel=2,
            )

    def cover_with_scales(self) -> None:
        """Take static scales from the smallest and largest value over the calibration text, outlier features aside."""
        with wrap(self.model, self.online):
            stream = self.capture()
            for index, _ in stream.layers("static scales"):
                with self.ranges(index) as ranges:
                    stream.advance(index)
                self.keep_scales(index, ranges.qparams())

    def ranges(self, index: int, *, averaged: bool = False) -> Ranges:
        """While it is open, what a layer that runs shows of the ranges that static scales are to cover."""
        splits = {
            site.name: self.splits[index, site.name]
            for site in self.architecture.sites
            if (index, site.name) in self.splits
        }
        return Ranges(self.model, index, self.recipe, self.online, splits, averaged)

    def scales_of(self, index: int) -> dict[str, QParams]:
        """A layer's static scales that are kept, by the names of sites, `keys` and `values`."""
        return {name: qparams for (layer, name), qparams in self.static.items() if layer == index}

    def quantized(self, scales: Mapping[str, QParams]) -> RuntimeQuantization:
        """How a layer runs in the end: all transforms and quantizers, and these static scales, in every layer."""
        static = {(layer, name): q for layer in range(self.architecture.num_layers) for name, q in scales.items()}
        return replace(self.online, outliers=self.splits, static=static, **self.recipe.quantizers)

    def keep_scales(self, index: int, scales: Mapping[str, QParams]) -> None:
        """Keep a layer's static scales, by the names of sites, `keys` and `values`."""
        self.static |= {(index, name): qparams.to("cpu") for name, qparams in scales.items()}

    @torch.no_grad()
    def store(self, index: int, layer: nn.Module, site: Site, quantized: Sequence[Weight]) -> None:
        """Put the dequantized weights of a site into the layer, and keep their integers."""
        for name, weight in zip(site.linears, quantized, strict=True):
            parameter = linear_of(layer, name).weight
            parameter.copy_(weight.dequantize(parameter.dtype))
        self._keep(index, dict(zip(site.linears, quantized, strict=True)))

    def keep_layers(self, layers: Iterable[Mapping[str, Weight]]) -> None:
        """Keep the integers of all layers, given one after the other by names within each; the layers hold their
        values already."""
        for index, quantized in enumerate(layers):
            self._keep(index, quantized)

    @property
    def linear_weights(self) -> list[str]:
        """Full names of the weights of all linear layers of all decoder layers, experts' too."""
        shape = self.architecture
        return [self._full_name(index, name) for index in range(shape.num_layers) for name in shape.linears]

    def _keep(self, index: int, quantized: Mapping[str, Weight]) -> None:
        self.weights.update({self._full_name(index, name): weight for name, weight in quantized.items()})

    def _full_name(self, index: int, linear: str) -> str:
        return f"{self.model.base_model_prefix}.layers.{index}.{linear}.weight"

    @torch.no_grad()
    def _round_site(self, stream: LayerStream, index: int, layer: nn.Module, site: Site, rounding: Rounding) -> None:
        if site.experts:
            self._round_experts(stream, index, layer, site, rounding)
            return
        dtype = torch.promote_types(stream.hidden.dtype, torch.float32)
        hessian = Hessian(site.features, self.device, dtype)
        stream.feed(index, site, hessian.add)
        self.store(index, layer, site, self._rounded(index, layer, site, site.linears, hessian.matrix, rounding))

    def _round_experts(self, stream: LayerStream, index: int, layer: nn.Module, site: Site, rounding: Rounding) -> None:
        """Round each expert by the tokens that are routed to it.

        X^T X of fewer tokens than features has no inverse, and what it knows of the inputs is an accident of the text:
        its diagonal gets the mean of the diagonal for the share of tokens that are missing (`Hessian.shrunk`). An
        expert without tokens is rounded to nearest.
        """
        dtype = torch.promote_types(stream.hidden.dtype, torch.float32)
        hessians = {name: Hessian(site.features, self.device, dtype) for name in site.linears}
        stream.feed_experts(index, site, lambda name, x: hessians[name].add(x))
        quantized = []
        for name, hessian in hessians.items():
            quantized += self._rounded(index, layer, site, [name], hessian.shrunk(), rounding)
        self._few += [hessian.tokens for hessian in hessians.values() if hessian.tokens < site.features]
        self.store(index, layer, site, quantized)

    def _rounded(
        self, index: int, layer: nn.Module, site: Site, names: Sequence[str], matrix: Tensor, rounding: Rounding
    ) -> Sequence[Weight]:
        """Weights of linear layers that read one input, rounded by its X^T X."""
        weights = [linear_of(layer, name).weight.to(self.model.dtype) for name in names]
        try:
            return rounding(weights, matrix, self.splits.get((index, site.name)))
        except RecipeError:
            raise
        except RotquantError as error:
            raise RotquantError(f"layer {index}, {site.name}: {error}") from None
