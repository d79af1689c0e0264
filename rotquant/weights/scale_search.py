"""Grid search of one decoder layer's static scales (PrefixQuant Secs. 3 and 6.1).

Every search is of factors f of scales that cover the calibration text: f times the scale clips what lies beyond a share
f of the range. It runs from a coarse grid to a fine one around the best factor, for all scales of a tensor at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rotquant.models.simulation.queries import ScoreRule, observed_queries
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import LayerStream
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import QParams, fake_quantize, share_of_all_steps
from rotquant.weights.context import QuantizationContext
from rotquant.weights.grids import ScaleGrid
from rotquant.weights.search import search_grid


@torch.no_grad()
def best_factors(cost: Callable[[Tensor], Tensor], like: Tensor, settings: ScaleGrid) -> Tensor:
    """The factors of least cost, each by itself.

    Args:
        cost: of factors, in their shape; one factor does not touch the cost of another.
        like: of the shape, type and device of the factors.
        settings: the grid; of equally good factors the one nearer to 1 wins, and of fine ones the coarse.
    """
    step = (1 - settings.smallest) / (settings.coarse - 1)
    coarse = (torch.full_like(like, 1 - number * step) for number in range(settings.coarse))
    centre, least = search_grid(coarse, cost)
    shifts = (step * ((number + 0.5) / settings.fine - 0.5) for number in range(settings.fine))
    return search_grid(((centre + shift).clamp(max=1) for shift in shifts), cost, (centre, least))[0]


def attention_weights(queries: Tensor, keys: Tensor, before: int, causal: bool, rule: ScoreRule) -> Tensor:
    """softmax of one sequence's scores, [kv heads, queries of one, tokens, before + tokens], float32.

    Args:
        queries: [heads, tokens, head_dim]. keys: [kv heads, before + tokens, head_dim].
        before: how many keys, the first ones, every query sees.
        causal: whether a query sees of the others only those up to its own, and in the layer's window.
        rule: what the layer makes of q k^T.
    """
    scores = queries.unflatten(0, (len(keys), -1)).float() @ keys.unsqueeze(1).transpose(-1, -2).float()
    scores = scores * rule.scaling
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if causal:
        everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        unseen = everything.triu(before + 1)
        if rule.window is not None:
            unseen |= everything.tril(before - rule.window)
        scores = scores.masked_fill_(unseen, -torch.inf)
    return scores.softmax(-1)


class ScaleSearch:
    """Searches the scales of the layers that a stream runs through.

    Args:
        stream: at the entrance of the layer that is asked for; it is not advanced here.
        samples: how many of the stream's samples are looked at, the first ones; default, the settings'.
    """

    def __init__(self, context: QuantizationContext, stream: LayerStream, settings: ScaleGrid) -> None:
        self.context, self.stream, self.settings = context, stream, settings
        recipe = context.recipe
        self.cache = context.online.cache(keys=recipe.keys, values=recipe.values)

    @torch.no_grad()
    def of_layer(self, index: int) -> dict[str, QParams]:
        """A layer's scales by the names of sites, `keys` and `values`; the layer lies on the stream's device."""
        attention: list[tuple[Tensor, Tensor, Tensor, ScoreRule]] = []
        averaged = self.settings.ranges == "average"
        with (
            wrap(self.context.model, self.context.online),
            self.context.ranges(index, averaged=averaged) as ranges,
        ):
            targets = list(self.stream.outputs(index, self.settings.samples))
        if any(ranges.schemes[name].granularity == "head" for name in ranges.schemes):
            seen = observed_queries(self.context.model, lambda *parts: attention.append(parts))
            with wrap(self.context.model, self.context.online), seen:
                for _ in self.stream.outputs(index, self.settings.samples):
                    pass
        found = {}
        for name, scheme in ranges.schemes.items():
            covering = ranges.qparams()[name]
            if self.settings.covering == "all_steps":
                covering = QParams(covering.scale * share_of_all_steps(scheme))
            cost = (
                partial(self._cost_of_heads, index, name, scheme, covering, attention)
                if scheme.granularity == "head"
                else self._cost_of_outputs(index, name, scheme, covering, targets)
            )
            found[name] = QParams(covering.scale * best_factors(cost, covering.scale, self.settings))
        return found

    def _cost_of_outputs(
        self, index: int, name: str, scheme: QuantizationScheme, covering: QParams, targets: Sequence[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Change of the layer's outputs, in summed squares, by a factor [] of one tensor's scale."""

        def cost(factor: Tensor) -> Tensor:
            with wrap(self.context.model, self._alone(index, name, scheme, QParams(covering.scale * factor))):
                outputs = self.stream.outputs(index, self.settings.samples)
                errors = [
                    (output - target).float().square().sum() for output, target in zip(outputs, targets, strict=True)
                ]
            return torch.stack(errors).sum().to(factor)

        return cost

    def _alone(self, index: int, name: str, scheme: QuantizationScheme, qparams: QParams) -> RuntimeQuantization:
        """The online transforms and one quantizer."""
        architecture, online = self.context.architecture, self.context.online
        layers = range(architecture.num_layers)
        if name in ("keys", "values"):
            return replace(online, static={(layer, name): qparams for layer in layers}, **{name: scheme})
        others = {(layer, site.name) for layer in layers for site in architecture.sites} - {(index, name)}
        return replace(online, activations=scheme, static={(index, name): qparams}, exact=frozenset(others))

    def _cost_of_heads(
        self,
        index: int,
        name: str,
        scheme: QuantizationScheme,
        covering: QParams,
        attention: Sequence[tuple[Tensor, Tensor, Tensor, ScoreRule]],
        factors: Tensor,
    ) -> Tensor:
        """Cost, in summed squares, of factors [kv heads, 1, 1, 1] of the scales of keys or values, in the factors'
        shape."""
        qparams = QParams(covering.scale * factors)
        before = 0 if self.context.online.prefix is None else self.context.online.prefix.tokens
        total = torch.zeros(len(factors), dtype=torch.float32, device=factors.device)
        judged, chain = getattr(self.settings, name), self.cache.chain(index, name)
        for queries, keys, values, rule in attention:
            x = chain((keys if name == "keys" else values)[:, :, before:])
            rounded = fake_quantize(x, scheme, qparams)
            if judged == "own":
                total += (rounded - x).float().square().sum(dim=(0, 2, 3))
                continue
            for row in range(len(keys)):
                weights = attention_weights(queries[row], keys[row], before, self.settings.causal, rule)
                if name == "values":
                    change = weights[..., before:] @ chain.inverse(rounded - x)[row].unsqueeze(1).float()
                else:
                    text = chain.inverse(rounded[row])
                    seen = torch.cat([keys[row, :, :before], text], dim=1)
                    change = attention_weights(queries[row], seen, before, self.settings.causal, rule) - weights
                    if judged == "outputs":
                        change = change @ values[row].unsqueeze(1).float()
                total += change.square().sum(dim=(1, 2, 3))
        return total.view_as(factors).to(factors)
