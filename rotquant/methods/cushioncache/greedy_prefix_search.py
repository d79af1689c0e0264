"""The greedy search of a prompt (Son et al. 2024, Sec. 4.1, Eqs. 9-10, Algorithm 1).

One token after the other: the one after which a text's activations have the smallest quantization error, as long as
that is a share of what it is without. Candidates pass the model in batches, after the cached keys and values of the
prompt found so far. What is drawn is drawn by the seed before the search begins, and a search that was killed goes on
where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.foundation.progress import heard_by
from rotquant.methods.cushioncache import CushionCache
from rotquant.methods.cushioncache.activation_errors import measured
from rotquant.models.architectures import base_model, config_of
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.prefix import (
    Prefix,
    bos_of,
    check_prefix,
    compute_prefix,
    empty_prefix,
    without_bos,
)
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import on_device
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.devices import of_device
from rotquant.tensors.faster import FasterKernels
from rotquant.training import loop
from rotquant.training.state import Record
from rotquant.weights.context import QuantizationContext

#: Tokens of candidates and their texts that pass the model at once.
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}


@dataclass
class SearchState:
    """Where a search is: the prompt, errors of the candidates tried at its next place, and whether it is at its end."""

    ids: list[int] = field(default_factory=list)
    errors: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    ended: bool = False

    def state_dict(self) -> dict[str, Any]:
        """State of the search for a checkpoint."""
        return {"ids": self.ids, "errors": self.errors, "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the search from a checkpoint."""
        self.ids, self.errors, self.ended = state["ids"], state["errors"], state["ended"]


def search(context: QuantizationContext) -> tuple[tuple[int, ...], Prefix]:
    """The prompt for the context's model and its keys and values, on the host.

    Raises:
        RecipeError: the model has no BOS to begin with, or its attention a window.
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
    """
    check_prefix(context.model, empty_prefix(context.architecture, context.model.dtype))
    with on_device(context.model, context.device):
        searching = _Search(context)
        checkpoint = context.checkpoint
        if checkpoint is not None:  # next to that of the tuning, by a name that those who delete the one delete too
            checkpoint = replace(checkpoint, path=checkpoint.path.with_name(f"{checkpoint.path.name}-search"))
        noted = {"token": "d", "error": ".4g", "before": ".4g"}
        parts = {"found": searching.found}
        with heard_by(None):  # the history is the tuning's
            loop.train(searching, searching.steps, "prefix search", parts=parts, checkpoint=checkpoint, noted=noted)
        return tuple(searching.found.ids), searching.prompt().prefix


class _Search:
    """The search as steps, each of one batch of candidates for one place; after its end they do nothing."""

    def __init__(self, context: QuantizationContext) -> None:
        self.context, self.settings = context, CushionCache.of(context.recipe)
        samples = context.calibration_samples
        if self.settings.start == "bos":
            samples = without_bos(samples, bos_of(context.model))
        self.found = SearchState(_start(context.model, self.settings))
        self.texts = search_texts(context.model, self.settings, samples, context.seed)
        self.tried = candidate_tokens(context.model, self.settings, samples)
        texts, tokens = self.texts.shape[1:]
        at_once = of_device(_TOKENS_AT_ONCE, context.device)
        self.batches = self.tried.split(max(1, at_once // (texts * (1 + tokens))))
        self.steps = (len(self.texts) - len(self.found.ids)) * len(self.batches)
        self._prompt: Prompt | None = None

    def prompt(self) -> "Prompt":
        """The prompt found so far."""
        if self._prompt is None or self._prompt.ids != self.found.ids:
            self._prompt = Prompt(self.context.model, self.context.online, self.found.ids, self.context.device)
        return self._prompt

    def __call__(self, step: int) -> Record:
        """Try a batch of candidates, and choose after the last."""
        if self.found.ended:
            return {}
        place, batch = divmod(step, len(self.batches))
        errors = self.prompt().errors(self.context.recipe, self.texts[place], self.batches[batch])
        self.found.errors = torch.cat([self.found.errors, errors])
        if batch + 1 < len(self.batches):
            return {}
        before = self.prompt().errors(self.context.recipe, self.texts[place]).item()
        return _settle(self.found, self.tried, before, self.settings.threshold)


def _start(model: nn.Module, settings: CushionCache) -> list[int]:
    bos = bos_of(model)
    if settings.start == "nothing":
        return []
    if bos is None:
        raise RecipeError("the model's configuration names no BOS: set cushioncache.start to nothing.")
    return [bos]


def search_texts(model: nn.Module, settings: CushionCache, samples: Tensor, seed: int) -> Tensor:
    """Draw from the samples the texts that decide each place of the prompt, int64 [places, texts, tokens].

    Texts are no longer than the model's context leaves after the longest prompt.
    """
    context = ModelLimits.of(config_of(model)).context
    room = settings.sequence_length if context is None else context - settings.max_tokens
    generator = torch.Generator().manual_seed(settings.seed + seed)
    drawn = torch.randint(len(samples), (settings.max_tokens, settings.search_samples), generator=generator)
    return samples[drawn][..., : min(settings.sequence_length, room)]


def candidate_tokens(model: nn.Module, settings: CushionCache, samples: Tensor) -> Tensor:
    """The tokens that are tried at each place, int64: the vocabulary, or the most frequent of the samples and BOS."""
    config = config_of(model)
    if settings.candidates is None or settings.candidates >= config.vocab_size:
        return torch.arange(config.vocab_size)
    tokens, counts = samples.unique(return_counts=True)
    frequent = tokens[counts.argsort(descending=True, stable=True)[: settings.candidates]].tolist()
    if config.bos_token_id is not None and config.bos_token_id not in frequent:
        frequent = [config.bos_token_id, *frequent][: settings.candidates]
    return torch.tensor(frequent)


def _settle(found: SearchState, tried: Tensor, before: float, threshold: float) -> Record:
    """Append the best candidate to the prompt or end the search (Eq. 10); what was found, for the history."""
    best = int(found.errors.argmin())
    token, error = int(tried[best]), found.errors[best].item()
    found.errors = found.errors[:0]
    if error < threshold * before:
        found.ids = [*found.ids, token]
    else:
        found.ended = True
    return {"token": token, "error": error, "before": before}


class Prompt:
    """A prompt in front of texts: its keys and values, computed once."""

    def __init__(self, model: nn.Module, online: RuntimeQuantization, ids: Sequence[int], device: torch.device) -> None:
        self.model, self.online, self.ids, self.device = model, online, list(ids), device
        with wrap(model, online):
            self.prefix = compute_prefix(model, ids, device)

    @torch.no_grad()
    def errors(self, recipe: Recipe, texts: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Errors of texts [texts, tokens], added up, after the prompt alone or with each candidate after it.

        Returns:
            float64 [candidates], or [1], on the host.
        """
        tokens = texts[None]
        if candidates is not None:
            first = candidates[:, None, None].expand(-1, len(texts), 1)
            tokens = torch.cat([first, tokens.expand(len(candidates), -1, -1)], dim=2)
        quantization = replace(self.online, prefix=self.prefix if self.prefix.tokens else None)
        skipped = tokens.shape[-1] - texts.shape[-1]
        with measured(self.model, quantization, recipe, skipped) as errors, FasterKernels():
            base_model(self.model)(input_ids=tokens.flatten(0, 1).to(self.device), use_cache=False)
            found = errors.total().double().cpu().view(tokens.shape[:2]).sum(dim=1)
        return found.nan_to_num(nan=torch.finfo(found.dtype).max)  # what overflows is the worst
