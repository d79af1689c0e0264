"""Effects of outliers on a model: the cost of 4 bits before and after rotation, and where the outliers are.

Outlier *channels* ruin per-token quantization, and rotation removes them (QuaRot Sec. 1, Figure 1). Outlier *tokens*
ruin static per-tensor quantization even after rotation, and a prefix removes them (PrefixQuant Sec. 4, 5.1). Weights
are rounded to nearest, so that nothing here is a method's merit.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rotquant.metrics.perplexity import PerplexityResult, mean_with_error, paired_ratio, perplexity
from rotquant.models.outlier_tokens import TokenMaxima, detect_prefix, token_maxima
from rotquant.models.simulation.runtime import Handle
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Calibration, Perplexity, QuantizationScheme, RotationScheme
from rotquant.text import Tokens
from rotquant.weights.build import build_weights, check_recipe, quantized_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: A token above so many times the median is counted: after a prefix none should be.
LARGE = 8.0

_INPUTS = QuantizationScheme(bits=4, clip_ratio=0.9)
_STATIC = QuantizationScheme(bits=4, clip_ratio=0.9, granularity="tensor", dynamic=False)
_CACHE3 = QuantizationScheme(bits=3, symmetric=False, granularity="head", clip_ratio=0.95)
_R1 = RotationScheme(values="none", heads=False, keys=False, mlp=False)
_R12 = RotationScheme(heads=False, keys=False, mlp=False)
#: In place of R1, online rotations of what the linear layers read, which come after the norms' gains.
INPUTS_ROTATED = {"residual": "none", "inputs": "hadamard"}


@dataclass(frozen=True)
class Variant:
    """A way to run the model: `recipe`, or the unquantized model for the empty one; `words` say what it is."""

    words: str
    recipe: Recipe


_PLAIN = Recipe(weights=preset("rtn").weights, activations=_INPUTS)


def _rotated(rotation: RotationScheme) -> Recipe:
    return _PLAIN.model_copy(update={"rotation": rotation})


def variants(calibration: Calibration, fit: Callable[[Recipe], Recipe] = lambda recipe: recipe) -> dict[str, Variant]:
    """Quantized variants that are measured, by the names that results have: RTN weights, and inputs per token with clip
    0.9 in W4A4.

    Args:
        calibration: the text of static scales.
        fit: what a recipe becomes for a model (`rotquant.models.fitting.fitted`); words say which rotations remain.
    """
    static = {"activations": _STATIC, "calibration": calibration}
    found = {
        "unquantized": Variant("unquantized", Recipe()),
        "w4a4": Variant("W4A4", _PLAIN),
        "r1": Variant("W4A4", _rotated(_R1)),
        "r12": Variant("W4A4", _rotated(_R12)),
        "r124": Variant("W4A4", _rotated(RotationScheme())),
        "static": Variant("the same, inputs static per tensor", _rotated(RotationScheme()).model_copy(update=static)),
        "rtn": Variant("preset rtn (W4A4KV4)", preset("rtn")),
        "quarot-rtn": Variant("preset quarot-rtn (W4A4KV4)", preset("quarot-rtn")),
        "kv3": Variant("KV3", Recipe(rotation=RotationScheme(), keys=_CACHE3, values=_CACHE3)),
        "inputs": Variant("W4A4", _rotated(RotationScheme.model_validate(INPUTS_ROTATED))),
    }
    fitting = {name: replace(variant, recipe=fit(variant.recipe)) for name, variant in found.items()}
    return {name: replace(variant, words=_with_rotations(variant)) for name, variant in fitting.items()}


def _with_rotations(variant: Variant) -> str:
    """The words of a variant and, of those that are told apart by them, its rotations: the transform across heads
    completes R2, and R3 matters to a cache alone."""
    if variant.words not in ("W4A4", "KV3"):
        return variant.words
    acting = {one.name for one in variant.recipe.transforms}
    shown = ["R1 online"] if any(name.startswith("R1_") for name in acting) else []
    known = ("R1", "R2", "R3", "R4") if variant.recipe.keys else ("R1", "R2", "R4")
    return ", ".join(filter(None, (variant.words, " ".join([*shown, *(name for name in known if name in acting)]))))


def doubles(known: Mapping[str, Variant]) -> dict[str, str]:
    """Variants whose network is that of an earlier one, and of which: a model may let R1 or R4 not be.

    R3 counts where keys are quantized: elsewhere it changes nothing.
    """
    found, seen = dict[str, str](), list[tuple[str, Recipe]]()
    for name, variant in known.items():
        recipe, keys = variant.recipe, variant.recipe.keys is not None
        acting = [one for one in recipe.transforms if keys or one.location != "queries_keys"]
        rotation = recipe.rotation and recipe.rotation.model_copy(update={} if keys else {"keys": False})
        network = recipe.model_copy(update={"rotation": rotation if acting else None})
        same = next((earlier for earlier, other in seen if other == network), None)
        if same is None:
            seen.append((name, network))
        else:
            found[name] = same
    return found


#: For each copy of the model the sets of weights that are made of it, one after the other, and the variants that run on
#: each: the first says how it is made.
_COPIES = (
    (("unquantized",), ("w4a4", "rtn")),
    (("r1",),),
    (("r12",),),
    (("static", "r124", "quarot-rtn"),),
    (("kv3",),),
    (("inputs",),),
)
#: Variants that are asked (`measure_costs`).
ASKED = ("unquantized", "w4a4", "r124")


@dataclass(frozen=True)
class Costs:
    """Costs of quantization: by the name of a variant its perplexity and, for some, what else was asked of them.

    words: what each variant is on this model. same: variants that were left out, by the name of the earlier one whose
        network is theirs.
    """

    perplexity: dict[str, PerplexityResult]
    answers: dict[str, Any] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=lambda: _words(variants(Calibration())))
    same: dict[str, str] = field(default_factory=dict)

    def result(self, name: str) -> PerplexityResult:
        """The perplexity of a variant, or of the one whose network is its own."""
        return self.perplexity[self.same.get(name, name)]

    def factor(self, name: str, over: str = "unquantized") -> tuple[float, float]:
        """`paired_ratio` of a variant's perplexity and another's."""
        return paired_ratio(self.result(name), self.result(over))

    def rise(self, name: str, over: str = "unquantized") -> tuple[float, float]:
        """Nats a token that a variant loses against another, and the standard error over paired windows."""
        losses = (self.result(name).by_window, self.result(over).by_window)
        return mean_with_error([a - b for a, b in zip(*losses, strict=True)])


def measure_costs(
    load: "Callable[[], PreTrainedModel]",
    text: Tokens,
    metric: Perplexity,
    samples: Tensor,
    *,
    ask: "Callable[[PreTrainedModel], Any] | None" = None,
    look: "Callable[[PreTrainedModel], None] | None" = None,
    fit: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    seed: int = 0,
) -> Costs:
    """Measure every variant. One copy of the model is in memory at a time, and it is loaded anew for each rotation.

    Args:
        load: gives the unquantized model where it is to run.
        text, metric: for `rotquant.metrics.perplexity.perplexity`.
        samples: int64 [samples, tokens], text for static scales.
        ask: is shown the variants of `ASKED` while they run; what it returns is in `Costs.answers`.
        look: is shown the unquantized model first.
        fit: what a variant's recipe becomes for this model (`rotquant.models.fitting.fitted`).
        seed: of the rotation.

    Raises:
        RecipeError, CheckpointError: a variant or the text does not fit the model.
    """
    known = variants(Calibration(samples=len(samples), sequence_length=samples.shape[1]), fit)
    costs = Costs({}, words=_words(known), same=doubles(known))

    def measure(model: "PreTrainedModel", builds: list[tuple[str, ...]], first: bool) -> None:
        if first:
            for variant in known.values():
                check_recipe(model, variant.recipe, samples)
            if look is not None:
                look(model)
        for names in builds:
            for name, running in _running(model, [(name, known[name].recipe) for name in names], samples, seed):
                with running:
                    if ask is not None and name in ASKED:
                        costs.answers[name] = ask(model)
                    words = f"perplexity, {known[name].words}"
                    costs.perplexity[name] = perplexity(model, text, metric, description=words)

    for copy in _COPIES:
        different = [tuple(name for name in names if name not in costs.same) for names in copy]
        if any(different):
            measure(load(), list(filter(None, different)), copy is _COPIES[0])  # nothing keeps the copy when it is done
    return costs


def _words(known: Mapping[str, Variant]) -> dict[str, str]:
    return {name: variant.words for name, variant in known.items()}


def _running(
    model: "PreTrainedModel", recipes: list[tuple[str, Recipe]], samples: Tensor, seed: int
) -> Iterator[tuple[str, Handle]]:
    """Make the first recipe's weights, in place, and install one recipe after the other on them, each by its name."""
    device = next(model.parameters()).device
    first = recipes[0][1]
    state = None if first.is_baseline else build_weights(model, None, first, seed, samples, device=device).state
    for name, recipe in recipes:
        its = state and replace(state, manifest=state.manifest.model_copy(update={"recipe": recipe}))
        yield name, quantized_forward(model, recipe, its)


@dataclass(frozen=True)
class Sinks:
    """Ratios by which tokens stand out, layer by layer, with some tokens in front of each window of text.

    A ratio is a token's largest |down_proj input|, or |value of the residual stream|, over the window's median.

    prefix: token ids. tokens: of text; without a prefix but for the first of each window.
    first: the largest ratio in the prefix, or without one that of the window's first token, mean over windows.
    elsewhere: the largest ratio of the other tokens. above: how many of these are above `LARGE`.
    residual_first, residual_elsewhere: the same of the residual stream, means over windows.
    common: what stands out elsewhere in any layer, by the threshold of prefixes: token id and count.
    """

    prefix: tuple[int, ...]
    tokens: int
    first: tuple[float, ...]
    elsewhere: tuple[float, ...]
    above: tuple[int, ...]
    residual_first: tuple[float, ...]
    residual_elsewhere: tuple[float, ...]
    common: tuple[tuple[int, int], ...]


def find_sinks(
    model: nn.Module, windows: Tensor, bos: int | None, threshold: float, device: torch.device | str = "cpu"
) -> list[Sinks]:
    """Outlier tokens of windows of text without a prefix, with BOS in front, and with the prefix that is detected.

    What would repeat one before is left out: BOS where the tokenizer has none, a detected prefix that is BOS alone.

    Args:
        windows: int64 [windows, tokens], of text without BOS.
        threshold: of `rotquant.models.outlier_tokens.detect_prefix`.

    Raises:
        RecipeError, CheckpointError: the model cannot read the windows; see `rotquant.models.limits`.
    """
    maxima = token_maxima(model, windows, device=device)
    detected = detect_prefix(maxima.ratios, windows, bos, threshold)
    prefixes = dict.fromkeys([(bos,), detected] if bos is not None else [detected])
    with_prefix = [_sinks(token_maxima(model, windows, p, device), windows, p, threshold) for p in prefixes if p]
    return [_sinks(maxima, windows, (), threshold), *with_prefix]


def _sinks(maxima: TokenMaxima, windows: Tensor, prefix: tuple[int, ...], threshold: float) -> Sinks:
    first = max(1, len(prefix))
    ratios, residual = maxima.ratios, maxima.residual_ratios
    others, others_residual = ratios[..., first:], residual[..., first:]
    text = windows if prefix else windows[:, 1:]
    outliers = text[:, : others.shape[-1]][(others > threshold).any(dim=0)]
    return Sinks(
        prefix=prefix,
        tokens=others[0].numel(),
        first=_floats(ratios[..., :first].amax(dim=-1).mean(dim=-1)),
        elsewhere=_floats(others.amax(dim=(-1, -2))),
        above=tuple((others > LARGE).sum(dim=(-1, -2)).tolist()),
        residual_first=_floats(residual[..., :first].amax(dim=-1).mean(dim=-1)),
        residual_elsewhere=_floats(others_residual.amax(dim=-1).mean(dim=-1)),
        common=tuple(Counter(outliers.tolist()).most_common(8)),
    )


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
