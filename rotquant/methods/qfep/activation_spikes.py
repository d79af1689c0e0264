"""Activation spikes (Yang et al. 2024): where they are, and which three tokens hold them off a text.

The scale of a token at a site, a linear layer's input, is its largest |value|. Where the largest token of a sample is
furthest above the median one, spikes are looked for; a spike that another of the same token before it prevents is what
the prefix is made of. Nothing here changes a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.methods.qfep import QFeP
from rotquant.models.architectures import Architecture, config_of
from rotquant.models.limits import ModelLimits
from rotquant.models.outlier_tokens import token_magnitudes
from rotquant.models.simulation.prefix import compute_prefix, stored_prefix, stored_shapes, stored_tensors
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.transforms import SiteName
from rotquant.weights.context import QuantizationContext

#: Of a prefix: BOS, a context and the token with the spike.
TOKENS = 3
#: The sites of a decoder layer, in execution order: their places are what is stored.
SITES: tuple[SiteName, ...] = ("attention_input", "attention_output", "mlp_input", "mlp_output")


@dataclass(frozen=True)
class Spikes:
    """Activation spikes that calibration found.

    windows: token ids, int64 [windows, tokens], each after the first token of every text.
    scales: of each token at each site of each layer, float32 [layers, sites, windows, tokens].
    """

    windows: Tensor
    scales: Tensor

    @property
    def ratios(self) -> Tensor:
        """Ratio of the largest token's scale to the median one, the mean over windows: [layers, sites]."""
        return (self.scales.amax(dim=-1) / self.scales.median(dim=-1).values).mean(dim=-1)


def measure(model: nn.Module, samples: Tensor, device: torch.device | str = "cpu") -> Spikes:
    """Scales of calibration samples, int64 [samples, tokens], whose last token makes room for BOS at their head, unless
    they begin with it.

    Raises:
        RecipeError, CheckpointError: the model has no BOS and no end of text, or cannot read the samples.
    """
    headed = torch.cat([samples.new_full((len(samples), 1), first_token(model)), samples[:, :-1]], dim=1)
    windows = torch.where(samples[:, :1] == first_token(model), samples, headed)
    return Spikes(windows, token_scales(model, windows, device))


def first_token(model: nn.Module) -> int:
    """BOS, or where a model has none the end of a text, as the authors' code has it."""
    config = config_of(model)
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return token[0] if isinstance(token, list) else token
    raise RecipeError("the model's configuration names no BOS and no end of text, with which a prefix begins.")


@torch.no_grad()
def token_scales(
    model: nn.Module, windows: Tensor, device: torch.device | str = "cpu", last: int | None = None
) -> Tensor:
    """The largest |value| of each token at each site, before online transforms, one decoder layer at a time.

    Args:
        windows: token ids, int64 [windows, tokens].
        last: the layer to stop after; default, the last one.

    Returns:
        float32 [layers, sites, windows, tokens] on the host.

    Raises:
        RecipeError, CheckpointError: the model cannot read them.
    """
    ModelLimits.of(config_of(model)).check(windows, "windows")
    stream = capture_layer_inputs(model, windows, device)
    found = []
    for index, layer in stream.layers("activation spikes"):
        found.append(torch.stack(token_magnitudes(stream, index, layer, SITES)))
        if index == last:
            break
    return torch.stack(found)


def spiking(found: Spikes, ratio: float) -> list[tuple[int, int]]:
    """Layer and place in `SITES` of the inputs whose ratio lies above a threshold (QFeM)."""
    return [(layer, site) for layer, site in (found.ratios > ratio).nonzero().tolist()]


def find_prefix(
    model: nn.Module, found: Spikes, candidates: int, contexts: int, device: torch.device | str = "cpu"
) -> tuple[int, int, int]:
    """BOS, a context and the token with a spike: those of which a second spike is smallest relative to the first.

    Each of the tokens with the largest spikes is put twice into a text, `BOS context token context token`, with each
    of the most frequent tokens as the context.
    """
    layer, site = divmod(int(found.ratios.argmax()), len(SITES))
    first = first_token(model)
    tokens = spike_tokens(found.windows, found.scales[layer, site], first, candidates)
    between = frequent_tokens(found.windows[:, 1:], contexts)
    texts = torch.tensor([[first, context, token, context, token] for token in tokens for context in between])
    scales = token_scales(model, texts, device, last=layer)[layer, site]
    return tuple(texts[int((scales[:, 2] / scales[:, 4]).argmax()), :3].tolist())


def spike_tokens(windows: Tensor, scales: Tensor, first: int, number: int) -> Sequence[int]:
    """The tokens of the largest scales [windows, tokens], so many at most, the largest first.

    Of each window so many positions count; of a token its largest scale, and `first` is none.

    Raises:
        RecipeError: in every window the largest are those of `first`.
    """
    values, places = scales.topk(min(number, scales.shape[1]), dim=-1)
    largest: dict[int, float] = {}
    for token, value in zip(windows.gather(1, places).flatten().tolist(), values.flatten().tolist(), strict=True):
        if token != first:
            largest[token] = max(value, largest.get(token, 0.0))
    if not largest:
        raise RecipeError("no token of the calibration text but BOS has a spike: raise qfep.candidates.")
    return sorted(largest, key=lambda token: -largest[token])[:number]


def frequent_tokens(text: Tensor, number: int) -> list[int]:
    """The most frequent tokens of a text, so many at most; of equally frequent ones the lower ids."""
    tokens, counts = text.unique(return_counts=True)
    return tokens[counts.argsort(descending=True, stable=True)[:number]].tolist()


def check_model(settings: QFeP, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """Raise RotquantError unless the texts that are tried fit the context."""
    if settings.prefix and limits.context is not None and limits.context <= 2 * TOKENS - 1:
        raise RecipeError(f"qfep tries texts of {2 * TOKENS - 1} tokens, which leave no room in the model's context.")


def apply(settings: QFeP, context: QuantizationContext) -> None:
    """Find the prefix and the modules, and have all that follows see the text after the prefix."""
    model = context.model
    with wrap(model, context.online):
        found = measure(model, context.calibration_samples, context.device)
        ids = ()
        if settings.prefix:
            ids = find_prefix(model, found, settings.candidates, settings.contexts, context.device)
        kept = compute_prefix(model, ids, context.device)
    exact = [] if settings.ratio is None else spiking(found, settings.ratio)
    context.tensors |= stored_tensors(ids, kept) | {"exact": torch.tensor(exact, dtype=torch.int64).reshape(-1, 2)}
    context.online = runtime(settings, context.online, context.tensors)


def tensors(settings: QFeP, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The prefix, and layer and number of each site whose input is not quantized."""
    return {**stored_shapes(architecture), "exact": (-1, 2)}


def runtime(settings: QFeP, quantization: RuntimeQuantization, tensors: Mapping[str, Tensor]) -> RuntimeQuantization:
    """Put the text after the prefix; modules with spikes read it as it is."""
    exact = frozenset((layer, SITES[site]) for layer, site in tensors["exact"].tolist())
    return replace(quantization, prefix=stored_prefix(tensors), exact=exact)
