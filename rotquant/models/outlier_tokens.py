"""Outlier tokens: which tokens of a text have inputs far above the others', and which of them to put in front of it.

PrefixQuant Sec. 5.1: a token is an outlier token when its largest |down_proj input|, taken before any online transform,
exceeds a multiple of the median over the tokens of its window (Eq. 3). They are attention sinks, and a few of them in
front of a text keep others from becoming one. Nothing here changes a model.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from rotquant.models.experts import ExpertLinear
from rotquant.models.limits import ModelLimits
from rotquant.models.stream import LayerStream, capture_layer_inputs, observed_inputs
from rotquant.recipes.transforms import SiteName

#: PrefixQuant Sec. 5.1, its threshold eta.
OUTLIER_RATIO = 64.0
#: Of how many tokens a prefix is, and which of them are dropped: see `detect_prefix`.
Number = Literal["beside_bos", "with_bos"]
Rare = Literal["kept", "once", "one_type"]
#: The authors' code drops one lone type of token that occurs in less than this share of the windows.
_FEW = 0.1


@dataclass(frozen=True)
class TokenMaxima:
    """Largest magnitudes of tokens in each decoder layer, float32 [layers, windows, tokens] on the host.

    down_proj: the largest |input of down_proj|.
    residual: the largest |value| of the residual stream after the layer; residual_median: the median of these.
    prefix: how many tokens, the first ones, stand in front of each window of text.
    """

    down_proj: Tensor
    residual: Tensor
    residual_median: Tensor
    prefix: int = 0

    @property
    def ratios(self) -> Tensor:
        """Eq. 3: each token's maximum over the median of those of its window's text, [layers, windows, tokens]."""
        return self.down_proj / self.down_proj[..., self.prefix :].median(dim=-1, keepdim=True).values

    @property
    def residual_ratios(self) -> Tensor:
        """Ratios of the residual stream, over the median of all values of the text (the median of its tokens')."""
        return self.residual / self.residual_median[..., self.prefix :].median(dim=-1, keepdim=True).values


@torch.no_grad()
def token_maxima(
    model: nn.Module, windows: Tensor, prefix: Sequence[int] = (), device: torch.device | str = "cpu"
) -> TokenMaxima:
    """Run windows of text through a model, one decoder layer at a time on `device`, and look at each token.

    Args:
        windows: token ids, int64 [windows, tokens].
        prefix: tokens in front of each window, as they would lie in the KV cache; where the model's context has no room
            for both, the windows lose their last tokens.

    Raises:
        RecipeError, CheckpointError: the model cannot read them, see `rotquant.models.limits`.
    """
    limits = ModelLimits.of(model.config)
    limits.check(windows, "windows")
    ids = torch.cat([windows.new_tensor(prefix).expand(len(windows), -1), windows], dim=1)[:, : limits.context]
    stream = capture_layer_inputs(model, ids, device)
    found = [_layer_maxima(stream, index, layer) for index, layer in stream.layers("outlier tokens")]
    return TokenMaxima(*(torch.stack(part) for part in zip(*found, strict=True)), prefix=len(prefix))


def _layer_maxima(stream: LayerStream, index: int, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's fields of `TokenMaxima`, each [windows, tokens]; afterwards the stream is after the layer."""
    (inputs,) = token_magnitudes(stream, index, layer, ["mlp_output"])
    largest, median = [], []
    for rows in stream.hidden.split(stream.batch_size):
        values = rows.abs().float()
        largest.append(values.amax(dim=-1).cpu())
        median.append(values.median(dim=-1).values.cpu())
    return inputs, torch.cat(largest), torch.cat(median)


def token_magnitudes(stream: LayerStream, index: int, layer: nn.Module, names: Sequence[SiteName]) -> list[Tensor]:
    """The largest |value| of each token at some sites of a layer, before online transforms, by the stream's advance.

    Of experts a token has the largest of those that it is routed to.

    Returns:
        For each name float32 [windows, tokens] on the host.
    """
    found = {name: _Magnitudes() for name in names}
    with ExitStack() as stack:
        for name, magnitudes in found.items():
            site = stream.architecture.site(name)
            if not site.experts or site.norm is not None:
                stack.enter_context(observed_inputs(layer, [site], magnitudes.of_site, raw=True))
                continue
            experts = layer.get_submodule(site.linears[0].rsplit(".", 2)[0])
            stack.callback(experts.register_forward_pre_hook(magnitudes.begin).remove)
            for linear in site.linears:
                hook = layer.get_submodule(linear).register_forward_pre_hook(magnitudes.of_expert, prepend=True)
                stack.callback(hook.remove)
        stream.advance(index)
    return [torch.cat(one.parts).reshape(stream.hidden.shape[:2]) for one in found.values()]


class _Magnitudes:
    """The largest |value| of each token that passes a site, batch by batch."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def of_site(self, _: str, x: Tensor) -> None:
        """All tokens of a batch, [batch, tokens, features]."""
        self.parts.append(x.abs().amax(dim=-1).float().flatten().cpu())

    def begin(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A batch whose tokens will go to experts."""
        self.parts.append(torch.zeros(len(inputs[0])))

    def of_expert(self, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Those of the last batch that an expert reads."""
        tokens, own = cast(ExpertLinear, linear).routed.cpu(), inputs[0].abs().amax(dim=-1).float().cpu()
        self.parts[-1][tokens] = torch.maximum(self.parts[-1][tokens], own)


def detect_prefix(
    ratios: Tensor,
    windows: Tensor,
    bos: int | None,
    threshold: float = OUTLIER_RATIO,
    *,
    number: Number = "beside_bos",
    rare: Rare = "kept",
    each_layer: bool = False,
) -> tuple[int, ...]:
    """The tokens to put in front of a text (PrefixQuant Sec. 5.1): the most frequent outlier tokens, then BOS.

    o is the number of outlier tokens of a window: the mean over windows, rounded up, in the layer that has most. The
    first position counts in o and not among the tokens (the paper's footnote 1).

    Args:
        ratios: Eq. 3 [layers, windows, tokens], of windows without a prefix.
        windows: their token ids, int64 [windows, tokens].
        bos: the last token of the prefix; None where the tokenizer has none.
        number: `beside_bos`, the top o and BOS (Sec. 5.1 and the authors' code); `with_bos`, o with BOS among them, as
            the counts of Table 1 are.
        rare: which tokens do not count: `kept`, all do; `once`, those that stand out once in all windows; `one_type`, a
            lone type of token in less than a tenth of the windows (the authors' code).
        each_layer: whether a token counts in each layer in which it stands out (the authors' code), or once.
    """
    outliers = ratios > threshold
    most = math.ceil(outliers.sum(dim=-1).float().mean(dim=-1).max().item())
    others = Counter(windows[:, 1:][outliers[:, :, 1:].any(dim=0)].tolist())
    if each_layer:
        others = Counter(windows[:, 1:].expand(len(ratios), -1, -1)[outliers[:, :, 1:]].tolist())
    if rare == "one_type" and len(others) == 1 and others.total() < _FEW * len(windows):
        others.clear()
    least = 2 if rare == "once" else 1
    frequent = [token for token, count in others.most_common() if count >= least and token != bos]
    return (*frequent[: max(0, most - (number == "with_bos"))], *(() if bos is None else (bos,)))
