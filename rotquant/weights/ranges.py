"""Ranges that static scales are to cover: the largest and smallest inputs of linear layers, keys and values of a
text."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, architecture_of, decoder_layers
from rotquant.models.simulation.kv_cache import static_qparams
from rotquant.models.simulation.queries import ScoreRule, observed_queries
from rotquant.models.simulation.runtime import RuntimeQuantization
from rotquant.models.stream import observed_inputs
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.fp4 import global_scale
from rotquant.tensors.quantization import ColumnSplit, QParams, choose_qparams

#: The weight of what was before in PrefixQuant's authors' moving average of ranges (`get_act_stat`).
_BEFORE = 0.99


class Ranges:
    """While it is open, follows one decoder layer: the ranges of all that a recipe gives static scales.

    Args:
        index: of the decoder layer in the model; it runs without quantizers.
        online: the transforms and the prefix with which it runs.
        splits: outlier features by site, which scales leave out.
        averaged: whether ranges are moving averages, over the samples, of each feature's largest |value|, as in
            PrefixQuant's authors' code, in place of the smallest and largest value; of symmetric schemes.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        recipe: Recipe,
        online: RuntimeQuantization,
        splits: Mapping[str, ColumnSplit],
        averaged: bool = False,
    ) -> None:
        self.model, self.layer, self.splits, self.averaged = model, decoder_layers(model)[index], splits, averaged
        self.architecture = architecture_of(model)
        self.prefix = 0 if online.prefix is None else online.prefix.tokens
        cache = online.cache(keys=recipe.keys, values=recipe.values)
        self.chains = {what: cache.chain(index, what) for what in ("keys", "values")}
        self.schemes = static_schemes(recipe, self.architecture)
        self._found: dict[str, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        sites = [site for site in self.architecture.sites if site.name in self.schemes]
        self._open.enter_context(observed_inputs(self.layer, sites, self._input))
        if self.schemes.keys() & {"keys", "values"}:
            self._open.enter_context(observed_queries(self.model, self._attention))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def qparams(self) -> dict[str, QParams]:
        """Scales that cover what was seen, by the names of sites, `keys` and `values`."""
        found = {name: self._found[name] for name in self.schemes}
        return {
            name: QParams(global_scale(found[name].abs().amax().float()))
            if scheme.fp4
            else (static_qparams if name in ("keys", "values") else choose_qparams)(found[name], scheme)
            for name, scheme in self.schemes.items()
        }

    def _input(self, site: str, x: Tensor) -> None:
        x = x.detach()
        if site in self.splits:
            x = x[..., self.splits[site].normal_columns.to(x.device)]
        if self.averaged:
            self._average(site, x.abs().flatten(1, -2).amax(dim=1) if x.ndim > 2 else x.abs().amax(dim=0)[None])
            return
        low, high = x.aminmax()
        if site in self._found:
            low, high = torch.minimum(low, self._found[site][0]), torch.maximum(high, self._found[site][1])
        self._found[site] = torch.stack([low, high])

    def _attention(self, _query: Tensor, key: Tensor, value: Tensor, _scores: ScoreRule) -> None:
        text = {"keys": key[:, :, self.prefix :], "values": value[:, :, self.prefix :]}
        for name, x in ((name, self.chains[name](x)) for name, x in text.items()):
            if self.averaged:
                self._average(name, x.detach().abs().amax(dim=2, keepdim=True))
                continue
            largest = x.detach().abs().amax(dim=(0, 2, 3), keepdim=True)
            self._found[name] = torch.maximum(largest, self._found.get(name, largest))

    def _average(self, name: str, largest: Tensor) -> None:
        """Go on with the average over samples of each feature's largest |value|, [samples, ...]."""
        for sample in largest.split(1):
            before = self._found.get(name)
            self._found[name] = sample if before is None else _BEFORE * before + (1 - _BEFORE) * sample


def static_schemes(recipe: Recipe, architecture: Architecture) -> dict[str, QuantizationScheme]:
    """The schemes of all that a recipe gives static scales, by the names of sites, `keys` and `values`."""
    schemes = {site.name: recipe.activations for site in architecture.sites}
    schemes |= {"keys": recipe.keys, "values": recipe.values}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None and not scheme.dynamic}
