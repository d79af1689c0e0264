"""Methods of one class of bits tried on one model within a time, and which of them to take.

Every method quantizes the same model with the same calibration text and seed, and is judged by KL divergence from full
precision on the same windows of held-out text. What cannot be told apart by these windows is said to be so. How much
text a short time allows follows from the time that the full-precision model takes for a window.
"""

import math
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rotquant import api
from rotquant.costs.ways import way_of
from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.foundation.progress import task
from rotquant.metrics.cost import FullPrecision
from rotquant.metrics.perplexity import mean_with_error
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint, local_folder
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity
from rotquant.weights.bits import UNQUANTIZED_BITS, bits_per_weight
from rotquant.weights.build import runtime_quantization

#: A class's name: bits of weights, inputs and KV cache. What is not quantized is left out: KV4 is the cache alone.
_NAME = re.compile(r"(?!$)(?:W(\d+)A(\d+))?(?:KV(\d+))?")
#: The class whose presets stand for a class that has few of its own, with its bits in place of theirs.
_USUAL = "W4A4KV4"
#: Classes of 4-bit floats, weights and inputs alike.
_FLOATS = ("MXFP4", "NVFP4")
#: Standard errors of a difference within which two methods are not told apart.
ERRORS = 2.0
#: How many times the fewest bits of a weight a method has that a sentence says so.
_MORE = 1.25
#: Methods that a budget should allow, and the fewest of which one is taken.
ENOUGH, FEWEST = 5, 3
#: Shares of the text that are tried until `ENOUGH` methods fit a budget, and the least calibration samples and windows.
_SHARES, _LEAST = (1.0, 0.5, 0.25, 0.125), (8, 4)
#: Work in windows that the full-precision model reads, as measured on a CPU: a window read by the quantized model, one
#: of text that a method reads, one that it learns from; making a model, GPTQ without its text, and what is searched.
_JUDGED, _READ, _LEARNED, _MADE, _SOLVED, _SEARCHED = 1.5, 1.5, 3.0, 10, 5, 40
#: Share of a budget by which the last method may exceed it.
_OVER = 0.1


@dataclass(frozen=True)
class Tried:
    """A method on the model, or why it was not tried.

    kl: nats by window. online: transforms that act while the model runs. seconds: of quantizing. late: whether the time
    was over before it could begin.
    """

    name: str
    kl: tuple[float, ...] = ()
    perplexity: float = math.nan
    bits: float = math.nan
    online: int = 0
    seconds: float = 0.0
    said: str = ""
    late: bool = False

    @property
    def mean(self) -> float:
        """KL divergence, nats."""
        return fmean(self.kl)

    @property
    def error(self) -> float:
        """Its standard error over windows; nan of one."""
        return mean_with_error(self.kl)[1]


@dataclass(frozen=True)
class Frontier:
    """What was tried, and what to take.

    tried: those with a result, the best first; left: the others, each with its reason in `said`.
    alike: names that cannot be told apart from the best, itself among them. taken: the simplest of those; empty where
        a budget allowed fewer than `FEWEST`. samples: of the calibration text. needed: seconds of a budget that allows
        `ENOUGH` methods.
    """

    tried: Sequence[Tried]
    left: Sequence[Tried]
    full_precision: float
    metric: Perplexity
    alike: Sequence[str] = field(default_factory=tuple)
    taken: str = ""
    samples: int = 0
    needed: float = math.nan

    @property
    def late(self) -> Sequence[str]:
        """Methods that the budget did not allow."""
        return [one.name for one in self.left if one.late]

    @property
    def reason(self) -> str:
        """Why it is taken, as a sentence, or why none is."""
        if self.late and not self.taken:
            tried, rows = len(self.tried), len(self.tried) + len(self.left)
            return (
                f"The budget allowed {tried or 'none'} of {rows} methods, too few to take one of: "
                f"--budget {math.ceil(self.needed / 60)}min allows about {min(ENOUGH, rows)}."
            )
        if not self.tried:
            return "Nothing could be tried."
        others = [name for name in self.alike if name != self.taken]
        if len(self.tried) == 1:
            why = "it alone was tried."
        elif others:
            why = (
                f"{', '.join(others)} cannot be told apart from it by {len(self.tried[0].kl)} windows, and it has the "
                "fewest transforms at run time, then the least time."
            )
        else:
            tried = " that was tried" if self.late else ""
            why = f"every other method{tried} is worse by more than {ERRORS:g} standard errors."
        bits = {one.name: one.bits for one in self.tried}
        least = min(bits, key=bits.__getitem__)
        if bits[self.taken] > _MORE * bits[least]:
            why += f" It has {bits[self.taken]:.2f} bits a weight, where {least} has {bits[least]:.2f}."
        return f"Take {self.taken}: {why}"


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
        kind: a class, such as W4A4KV4 (`recipes_of`).
        corpus: its train split calibrates; methods are judged on its validation split, or else its test split.
        budget: seconds; no method begins that would exceed them by a tenth. Learning then has few steps, and windows
            and samples are fewer where less than `ENOUGH` methods fit. None: all, with the presets' steps.
        samples, length: of the calibration text.
        windows: of `length` tokens, or as many as the model reads at once, on which they are judged.
        methods: names of the class, in place of all.

    Raises:
        RotquantError: bad input, in one sentence, before anything is quantized.
    """
    rows = _rows(kind, methods, budget is not None)
    metric = api.check_metric(checkpoint, corpus)
    if metric is None:
        raise RecipeError(f"the text {corpus.name} has neither a validation split nor a test split to judge on.")
    window = min(length, api.limits_of(checkpoint).context or length)
    metric = metric.model_copy(update={"sequence_length": window, "max_windows": windows})
    started, tried, left = time.monotonic(), [], []
    known, pace, samples = _full_precision(checkpoint, corpus, metric, rows.values(), samples, budget, device, dtype)
    extra: list[float] = []  # seconds that methods took beyond what was expected of them
    waiting: list[float] = []
    with task("methods", "method", len(rows)) as under_way:
        for name, recipe in rows.items():
            recipe, begun = _with_text(recipe, samples, length), time.monotonic()
            work = pace * _work(recipe, len(known.exact.windows), window)
            expected, spent = work + (fmean(extra) if extra else 0.0), begun - started
            if budget is not None and spent + expected > budget * (1 + _OVER):
                said = f"not begun: it takes about {expected:.0f} s, and {max(0.0, budget - spent):.0f} s are left"
                left.append(Tried(name, said=said, late=True))
                waiting.append(expected)
                continue
            try:
                tried.append(_tried(name, checkpoint, recipe, corpus, known, seed, device, dtype))
                extra.append(time.monotonic() - begun - work)
            except RotquantError as error:
                left.append(Tried(name, said=str(error)))
            under_way.advance()
    needed = time.monotonic() - started + sum(waiting[: max(0, ENOUGH - len(tried))])
    finite = sorted((one for one in tried if math.isfinite(one.mean)), key=lambda one: one.mean)
    left += [Tried(one.name, said="its KL divergence is no number") for one in tried if one not in finite]
    alike = [one for one in finite if not _worse(one, finite[0])]
    few = waiting and len(tried) < min(FEWEST, len(rows))
    taken = "" if few or not alike else min(alike, key=lambda one: (one.online, one.seconds)).name
    names = [one.name for one in alike]
    return Frontier(finite, left, math.exp(known.nll), known.metric, names, taken, samples, needed)


def class_of(recipe: Recipe) -> str:
    """The class of a recipe, such as W4A4KV4, W4A16, KV4 or MXFP4; empty where keys and values differ, or inputs alone
    have bits."""
    if (recipe.keys and recipe.keys.bits) != (recipe.values and recipe.values.bits):
        return ""
    cache = f"KV{recipe.keys.bits}" if recipe.keys else ""
    if recipe.weights is None:
        return "" if recipe.activations else cache
    if recipe.weights.scheme.fp4:
        return recipe.weights.scheme.fp4 + cache if recipe.activations else ""
    return f"W{recipe.weights.scheme.bits}A{recipe.activations.bits if recipe.activations else 16}{cache}"


def recipes_of(kind: str, short: bool = False) -> dict[str, Recipe]:
    """The presets of a class, plug-ins' among them, and those of W4A4KV4 with its bits, in the order in which they are
    tried: of fewer steps first, then without text, then rotated or with features of more bits, then of fewer methods,
    since a short time should go to what is often the best and is quick (docs/real_models.md).

    Equal ones are one row where the cache alone is left, or 4-bit floats. Of MXFP4 and NVFP4 the presets of either are
    rows. Presets that train the whole model are left out: `rotquant train-quantized` is for these.

    Args:
        short: methods that learn take as few steps as they have for that (`Method.short`).

    Raises:
        RecipeError: the class has no such name.
    """
    found = _NAME.fullmatch(kind)
    if found is None and kind not in _FLOATS:
        raise RecipeError(f"{kind!r} is no class of bits: write W4A16, W4A8KV4, {_USUAL}, KV4, {' or '.join(_FLOATS)}.")
    presets = {name: preset(name) for name in all_presets()}
    rows = {name: recipe for name, recipe in presets.items() if class_of(recipe) == kind}
    for name, recipe in presets.items():
        own = class_of(recipe)
        if name not in rows and (own == _USUAL or (found is None and own in _FLOATS and recipe.methods)):
            with suppress(RecipeError):  # a method of other bits
                made = override(recipe, _floats(recipe, kind) if found is None else _bits(found, recipe), name)
                if made not in rows.values():
                    rows[name] = made
    rows = {name: recipe for name, recipe in rows.items() if not _trains(recipe)}
    if short:
        for name, recipe in rows.items():
            less = {one.name: dict(one.short) for one in recipe.methods.values() if one.short}
            rows[name] = override(recipe, {"methods": less}, name) if less else recipe
    return dict(sorted(rows.items(), key=lambda row: _place(row[1])))


def _bits(found: re.Match[str], recipe: Recipe) -> dict[str, Any]:
    """The changes that give a recipe a class's bits; weights alone keep the rotations that go into them, and the cache
    alone its own."""
    weights, inputs, cache = (number and int(number) for number in found.groups())
    parts: dict[str, Any] = {"weights": {"scheme": {"bits": weights}}, "activations": {"bits": inputs}}
    parts |= dict.fromkeys(("keys", "values"), cache and {"bits": cache})
    without: dict[str, Any] = {} if cache else {"keys": False}
    if inputs in (None, UNQUANTIZED_BITS):
        parts |= {"activations": None, "attention_output": None}
        without |= {"heads": False, "mlp": False}
    if weights is None:
        parts |= {"weights": None, "calibration": None, "methods": dict.fromkeys(recipe.methods)}
        without |= {"residual": "none", "inputs": "none"}
    return parts | ({"rotation": without} if without and recipe.rotation else {})


def _floats(recipe: Recipe, kind: str) -> dict[str, Any]:
    """The changes that make a recipe's weights and inputs 4-bit floats as the class's own preset has them."""
    inputs = preset(kind.lower()).activations
    scheme = {} if inputs is None else inputs.model_dump(mode="json")
    parts: dict[str, Any] = {} if scheme["dynamic"] else {"calibration": {}}
    if recipe.rounded.scheme.fp4:  # whose scales have their own rule
        size = {"group_size": scheme["group_size"]}
        blocks = recipe.rotation.model_dump(mode="json") if recipe.rotation else {}
        blocks = {name: size["group_size"] for name, value in blocks.items() if type(value) is int}
        parts |= {"weights": {"scheme": size}, "activations": size | {"dynamic": scheme["dynamic"]}}
        mixing = {name: one.mixes for name, one in recipe.methods.items() if one.mixes}
        parts["methods"] = {name: {field: size["group_size"]} for name, field in mixing.items()}
        return parts | {"rotation": blocks or recipe.rotation}
    parts |= dict.fromkeys(("attention_output", "keys", "values"))
    parts["weights"] = {"scheme": scheme | {"scale": "paper", "dynamic": True}, "clip_search": False}
    parts["activations"] = scheme | {"scale": "paper"}
    parts["rotation"] = recipe.rotation and {"keys": False}
    parts["methods"] = {name: dict(one.fp4 or {}) for name, one in recipe.methods.items()}
    return parts


def _trains(recipe: Recipe) -> bool:
    return any(way_of(method, recipe) == "training" for method in recipe.methods.values())


def _place(recipe: Recipe) -> tuple[int, bool, bool, int]:
    """Steps of learning; whether text is read; whether nothing guards 4-bit inputs from outliers but a transformation,
    which takes long; methods beside that which rounds."""
    roles = {role for method in recipe.methods.values() for role in method.roles}
    steps = sum(method.budget(recipe).steps for method in recipe.methods.values())
    beside = sum(method.roles != {"rounding"} for method in recipe.methods.values())
    selected = "selection" in roles and recipe.activations is not None
    guarded = (recipe.rotation is not None or selected) and "transformation" not in roles
    return steps, recipe.reads_text, not guarded, beside


def _rows(kind: str, methods: Sequence[str], short: bool) -> dict[str, Recipe]:
    rows = recipes_of(kind, short)
    if unknown := [name for name in methods if name not in rows]:
        raise RecipeError(f"the class {kind} has no method {unknown[0]!r}: it has {', '.join(rows)}.")
    return {name: recipe for name, recipe in rows.items() if not methods or name in methods}


def _full_precision(
    checkpoint: str | Path,
    corpus: CorpusSpec,
    metric: Perplexity,
    recipes: Iterable[Recipe],
    samples: int,
    budget: float | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[FullPrecision, float, int]:
    """What the full-precision model says of the windows, the seconds that it takes for one, and calibration samples:
    as asked, or what a budget allows by that time."""
    network, tokenizer = load_checkpoint(local_folder(checkpoint), dtype, "cpu")

    def read(windows: int | None) -> FullPrecision:
        asked = metric.model_copy(update={"max_windows": windows})
        found = api.full_precision(network, tokenizer, corpus, asked, device)
        if found is None:
            raise RecipeError("there is no room for the model's logits, or no window of the text.")
        return found

    windows, started, pace = metric.max_windows or _LEAST[1], time.monotonic(), 0.0
    if budget is not None:
        read(1)  # a GPU starts here
        begun, length = time.monotonic(), metric.sequence_length
        read(2)
        pace = (time.monotonic() - begun) / 2
        left = budget - (time.monotonic() - started)
        samples, windows = _amounts(list(recipes), samples, windows, length, left / pace if pace else math.inf)
    return read(windows), pace, samples


def _amounts(recipes: Sequence[Recipe], samples: int, windows: int, length: int, room: float) -> tuple[int, int]:
    """Calibration samples and windows: the largest of `_SHARES` with which `ENOUGH` recipes fit, or else the least.

    Args:
        room: windows for which there is time.
    """
    fewest, least = min(samples, _LEAST[0]), min(windows, _LEAST[1])
    for share in _SHARES:
        some, read = max(fewest, int(samples * share)), max(least, int(windows * share))
        first = (_with_text(recipe, some, length) for recipe in recipes[:ENOUGH])
        if read + sum(_work(recipe, read, length) for recipe in first) <= room:
            return some, read
    return fewest, least


def _with_text(recipe: Recipe, samples: int, length: int) -> Recipe:
    """A recipe calibrated on these amounts of text, where it is calibrated."""
    if recipe.calibration is None:
        return recipe
    return override(recipe, {"calibration": {"samples": samples, "sequence_length": length}}, "the class's method")


def _work(recipe: Recipe, windows: int, length: int) -> float:
    """Roughly the work of making and judging a recipe's model, in windows of `length` tokens that the full-precision
    model reads."""
    work = _MADE + _JUDGED * windows
    for method in recipe.methods.values():
        budget = method.budget(recipe)
        tokens = budget.steps * budget.seen * _LEARNED if budget.seen else budget.tokens * _READ
        searched = not method.roles.isdisjoint(("transformation", "rotations"))
        work += tokens / length + _SOLVED * method.inverts + _SEARCHED * searched
    return work


def _tried(
    name: str,
    checkpoint: str | Path,
    recipe: Recipe,
    corpus: CorpusSpec,
    known: FullPrecision,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tried:
    """Quantize, as the model allows it, and judge."""
    started = time.monotonic()
    recipe = api.fit(checkpoint, api.limits_of(checkpoint).shorten(recipe))[0]
    model = api.quantize(
        checkpoint, recipe, corpus=corpus, seed=seed, device=device, dtype=dtype, placed=False, check=known
    )
    seconds = time.monotonic() - started
    cost = model.cost(device)
    if cost is None or model.stored is None:
        raise RecipeError("there is no room for the model's logits.")
    manifest = model.stored.manifest
    tensors = model.stored.state.tensors  # such as matrices and orders of features
    bits = bits_per_weight(recipe, architecture_of(model.network), manifest.quantized, stored=tensors)["total"]
    online = sum(one.online for one in runtime_quantization(recipe, model.stored.state).transforms)
    return Tried(name, cost.by_window, cost.quantized, bits, online, seconds)


def _worse(one: Tried, best: Tried) -> bool:
    """Whether a method is worse than the best by more than `ERRORS` standard errors of their paired difference."""
    mean, error = mean_with_error([a - b for a, b in zip(one.kl, best.kl, strict=True)])
    return mean > (0.0 if math.isnan(error) else ERRORS * error)
