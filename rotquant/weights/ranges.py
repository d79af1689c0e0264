"""What static scales are to cover: the largest and smallest inputs of linear layers, keys and values of a text."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.simulation.kv_cache import KVQuantizer, static_qparams
from rotquant.models.simulation.prefix import Prefix
from rotquant.models.simulation.queries import observed_queries
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import ColumnSplit, QParams, choose_qparams


class Ranges:
    """While it is open, follows one decoder layer: the ranges of all that a recipe gives static scales.

    Args:
        layer: of the model; it runs without quantizers, behind the prefix if there is one.
        splits: outlier features by site, which scales leave out.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        recipe: Recipe,
        prefix: Prefix | None,
        splits: Mapping[str, ColumnSplit],
    ) -> None:
        self.model, self.layer, self.splits = model, layer, splits
        self.architecture = architecture_of(model)
        self.prefix = 0 if prefix is None else prefix.tokens
        self.cache = KVQuantizer(recipe.keys, recipe.values, recipe.rotation)
        self.schemes = static_schemes(recipe, self.architecture)
        self._found: dict[str, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for site in self.architecture.sites:
            if site.name in self.schemes:
                linear = self.layer.get_submodule(site.linears[0])
                hook = linear.register_forward_pre_hook(partial(self._input, site.name))
                self._open.callback(hook.remove)
        if self.schemes.keys() & {"keys", "values"}:
            self._open.enter_context(observed_queries(self.model, self._attention))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def qparams(self) -> dict[str, QParams]:
        """Scales that cover what was seen, by the names of sites, `keys` and `values`."""
        return {
            name: (static_qparams if name in ("keys", "values") else choose_qparams)(self._found[name], scheme)
            for name, scheme in self.schemes.items()
        }

    def _input(self, site: str, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x: Tensor = arguments[0].detach()
        if site in self.splits:
            x = x[..., self.splits[site].normal_columns.to(x.device)]
        low, high = x.aminmax()
        if site in self._found:
            low, high = torch.minimum(low, self._found[site][0]), torch.maximum(high, self._found[site][1])
        self._found[site] = torch.stack([low, high])

    def _attention(self, _query: Tensor, key: Tensor, value: Tensor) -> None:
        text = {"keys": self.cache.rotate_keys(key[:, :, self.prefix :]), "values": value[:, :, self.prefix :]}
        for name, x in text.items():
            largest = x.detach().abs().amax(dim=(0, 2, 3), keepdim=True)
            self._found[name] = torch.maximum(largest, self._found.get(name, largest))


def static_schemes(recipe: Recipe, architecture: Architecture) -> dict[str, QuantizationScheme]:
    """The schemes of all that a recipe gives static scales, by the names of sites, `keys` and `values`."""
    schemes = {site.name: recipe.activations for site in architecture.sites}
    schemes |= {"keys": recipe.keys, "values": recipe.values}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None and not scheme.dynamic}
