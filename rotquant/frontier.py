"""Methods of one class of bits tried on one model within a time, and which of them to take.

Every method quantizes the same model with the same calibration text and seed, and is judged by KL divergence from full
precision on the same windows of held-out text. What cannot be told apart by these windows is said to be so.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from rotquant import api
from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.foundation.progress import task
from rotquant.models.architectures import architecture_of
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity
from rotquant.weights.bits import bits_per_weight
from rotquant.weights.build import runtime_quantization

#: Changes that leave weights alone quantized, with rotations that go into them.
_WEIGHTS = {
    "rotation": {"heads": False, "keys": False, "mlp": False},
    **dict.fromkeys(("activations", "keys", "values")),
}
#: Inputs in 8 bits.
_INPUTS = {"activations": {"bits": 8}}
#: By class and name of a row: the preset, and what is changed in it. Those that take less time come first.
CLASSES: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "W4A16": {
        "gptq-w4a16": ("gptq-w4a16", {}),
        "quarot-w4a16": ("quarot-w4a16", {}),
        "awq-128g": ("awq-128g", {}),
        "awq": ("awq", {}),
        "optrot": ("optrot", _WEIGHTS),
    },
    "W4A8KV4": {
        "quarot-rtn": ("quarot-rtn", _INPUTS),
        "quarot": ("quarot", _INPUTS),
        "qoq-channel": ("qoq-channel", {}),
        "offq": ("offq", _INPUTS),
        "optrot": ("optrot", _INPUTS),
        "flatquant-gptq": ("flatquant-gptq", _INPUTS),
    },
    "W4A4KV4": {
        "rtn": ("rtn", {}),
        "smoothquant": ("smoothquant", {}),
        "quarot-rtn": ("quarot-rtn", {}),
        "quarot": ("quarot", {}),
        "quarot, inputs rotated": ("quarot", {"rotation": {"residual": "none", "inputs": "hadamard"}}),
        "offq": ("offq", {}),
        "prefixquant": ("prefixquant", {}),
        "dartquant": ("dartquant", {}),
        "optrot": ("optrot", {}),
        "kurtail": ("kurtail", {}),
        "duquant": ("duquant", {}),
        "flatquant": ("flatquant", {}),
        "flatquant-gptq": ("flatquant-gptq", {}),
        "spinquant-hard": ("spinquant-hard", {}),
    },
    "W2A4KV4": {
        "quarot-128g, asymmetric": ("quarot-128g", {"weights": {"scheme": {"bits": 2, "symmetric": False}}}),
        "qift": ("qift", {}),
    },
}
#: Amounts of methods that learn, within a time: far below their authors', which a recipe without a time has.
_SHORT: Mapping[str, Mapping[str, Any]] = {
    "rotation_calibration": {"vectors": 16384, "share": 0.5},
    "spinquant": {"steps": 32},
    "flatquant": {"steps": 48, "batch_size": 2},
}
#: Standard errors of a difference within which two methods are not told apart.
ERRORS = 2.0


@dataclass(frozen=True)
class Tried:
    """A method on the model, or why it was not tried.

    kl: nats by window. online: transforms that act while the model runs. seconds: of quantizing.
    """

    name: str
    kl: tuple[float, ...] = ()
    perplexity: float = math.nan
    bits: float = math.nan
    online: int = 0
    seconds: float = 0.0
    said: str = ""

    @property
    def mean(self) -> float:
        """KL divergence, nats."""
        return fmean(self.kl)

    @property
    def error(self) -> float:
        """Its standard error over windows; nan of one."""
        return stdev(self.kl) / math.sqrt(len(self.kl)) if len(self.kl) > 1 else math.nan


@dataclass(frozen=True)
class Frontier:
    """What was tried, and what to take.

    tried: those with a result, the best first; left: the others, each with its reason in `said`.
    alike: names that cannot be told apart from the best, itself among them. taken: the simplest of those.
    """

    tried: Sequence[Tried]
    left: Sequence[Tried]
    full_precision: float
    metric: Perplexity
    alike: Sequence[str] = field(default_factory=tuple)
    taken: str = ""

    @property
    def reason(self) -> str:
        """Why it is taken, as a sentence."""
        if not self.tried:
            return "Nothing could be tried."
        if len(self.tried) == 1:
            return f"Take {self.taken}: it alone was tried."
        others = [name for name in self.alike if name != self.taken]
        if not others:
            return f"Take {self.taken}: every other method is worse by more than {ERRORS:g} standard errors."
        return (
            f"Take {self.taken}: {', '.join(others)} cannot be told apart from it by {len(self.tried[0].kl)} windows, "
            "and it has the fewest transforms at run time, then the least time."
        )


def frontier(
    checkpoint: str | Path,
    kind: str,
    corpus: CorpusSpec,
    *,
    budget: float | None = None,
    samples: int = 32,
    length: int = 512,
    windows: int = 16,
    methods: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Frontier:
    """Try the methods of a class one after another.

    Args:
        kind: a class of `CLASSES`.
        corpus: its train split calibrates; methods are judged on its validation split, or else its test split.
        budget: seconds after which no method begins; learning then has few steps. None: all, with the presets' steps.
        samples, length: of the calibration text, and of what methods that learn read.
        windows: of `length` tokens, on which they are judged.
        methods: names of the class, in place of all.

    Raises:
        RotquantError: bad input, in one sentence, before anything is quantized.
    """
    rows = _rows(kind, methods)
    metric = api.check_metric(checkpoint, corpus)
    if metric is None:
        raise RecipeError(f"the text {corpus.name} has neither a validation split nor a test split to judge on.")
    metric = metric.model_copy(update={"sequence_length": length, "max_windows": windows})
    started, tried, left, full = time.monotonic(), [], [], math.nan
    with task("methods", "method", len(rows)) as under_way:
        for name, (base, changes) in rows.items():
            spent = time.monotonic() - started
            if budget is not None and spent > budget:
                left.append(Tried(name, said=f"not begun: {spent:.0f} s are spent"))
                continue
            try:
                recipe = _recipe(checkpoint, base, changes, samples, length, budget is not None)
                found, full = _tried(name, checkpoint, recipe, corpus, metric, seed, device, dtype)
                tried.append(found)
            except RotquantError as error:
                left.append(Tried(name, said=str(error)))
            under_way.advance()
    finite = sorted((one for one in tried if math.isfinite(one.mean)), key=lambda one: one.mean)
    left += [Tried(one.name, said="its KL divergence is no number") for one in tried if one not in finite]
    alike = [one for one in finite if not _worse(one, finite[0])]
    taken = min(alike, key=lambda one: (one.online, one.seconds)).name if alike else ""
    return Frontier(finite, left, full, metric, [one.name for one in alike], taken)


def _rows(kind: str, methods: Sequence[str]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    if kind not in CLASSES:
        raise RecipeError(f"unknown class {kind!r}: known are {', '.join(CLASSES)}.")
    if unknown := [name for name in methods if name not in CLASSES[kind]]:
        raise RecipeError(f"the class {kind} has no method {unknown[0]!r}: it has {', '.join(CLASSES[kind])}.")
    return {name: row for name, row in CLASSES[kind].items() if not methods or name in methods}


def _recipe(
    checkpoint: str | Path, base: str, changes: Mapping[str, Any], samples: int, length: int, short: bool
) -> Recipe:
    """A row's recipe as the model allows it, with these amounts of text."""
    recipe, amounts = preset(base), {"samples": samples, "sequence_length": length}
    recipe = override(recipe, changes, base) if changes else recipe
    methods: dict[str, Any] = {name: {"text": amounts} for name, one in recipe.methods.items() if one.own_text}
    if short:
        for name in recipe.methods:
            methods[name] = {**methods.get(name, {}), **_SHORT.get(name, {})}
    whole: dict[str, Any] = {"methods": {name: one for name, one in methods.items() if one}}
    if recipe.calibration is not None:
        whole["calibration"] = amounts
    fixed = list(changes.get("rotation", {}))
    return api.fit(checkpoint, api.limits_of(checkpoint).shorten(override(recipe, whole, base)), fixed)[0]


def _tried(
    name: str,
    checkpoint: str | Path,
    recipe: Recipe,
    corpus: CorpusSpec,
    metric: Perplexity,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[Tried, float]:
    """Quantize and judge; also the perplexity of full precision."""
    started = time.monotonic()
    model = api.quantize(
        checkpoint, recipe, corpus=corpus, seed=seed, device=device, dtype=dtype, placed=False, check=metric
    )
    seconds = time.monotonic() - started
    cost = model.cost(device)
    if cost is None or model.stored is None:
        raise RecipeError("there is no room for the model's logits, or no window of the text.")
    manifest = model.stored.manifest
    bits = bits_per_weight(recipe, architecture_of(model.network), manifest.quantized)["total"]
    online = sum(one.online for one in runtime_quantization(recipe, model.stored.state).transforms)
    return Tried(name, cost.by_window, cost.quantized, bits, online, seconds), cost.full_precision


def _worse(one: Tried, best: Tried) -> bool:
    """Whether a method is worse than the best by more than `ERRORS` standard errors of their paired difference."""
    differences = [a - b for a, b in zip(one.kl, best.kl, strict=True)]
    if len(differences) < 2:
        return one.mean > best.mean
    return fmean(differences) > ERRORS * stdev(differences) / math.sqrt(len(differences))
