"""Outlier tokens in front of every text, in the KV cache: what makes static scales win (PrefixQuant Sec. 5.1)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import Calibration

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.models.architectures import Architecture
    from rotquant.models.limits import ModelLimits
    from rotquant.models.simulation.runtime import RuntimeQuantization
    from rotquant.weights.context import QuantizationContext


class PrefixedOutliers(Method):
    """A model's outlier tokens, found by calibration and kept in its KV cache in front of every text (PrefixQuant).

    Keys and values of the prefix are those of the network before its weights are rounded, and stay in full precision.
    All that follows, static scales and the rounding of weights, sees the text after it.
    """

    name: ClassVar[str] = "prefixed_outliers"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "prefixed outlier tokens"
    source: ClassVar[str] = "PrefixQuant, Sec. 5.1, Eq. 3"
    roles: ClassVar[frozenset[Role]] = frozenset({"prefix"})
    acts_at_run_time: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True

    threshold: Annotated[float, Field(gt=1.0)] = 64.0
    """How many times the median of a window's tokens the largest |input of down_proj| of an outlier token is (eta)."""
    number: Literal["beside_bos", "with_bos"] = "beside_bos"
    """Where a window has o outlier tokens: `beside_bos`, the o most frequent ones and BOS (Sec. 5.1, and the authors'
    code); `with_bos`, the o - 1 most frequent ones and BOS, to which the counts of Table 1 fit."""
    rare: Literal["kept", "once", "one_type"] = "kept"
    """Outlier tokens that do not count: `kept`, all do, as the paper speaks of no exception; `once`, those that stand
    out once in all text; `one_type`, a lone type of token in less than a tenth of the samples (the authors' code)."""
    each_layer: bool = False
    """Whether a token counts in each layer in which it stands out, as in the authors' code, or once."""
    text: Calibration | None = None
    """The text on which tokens are found; null takes the calibration text, as the paper names no other. The authors'
    code has 64 samples of 512 tokens."""
    ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Tokens of the prefix, in this order, in place of those that are found."""
    tokens: Annotated[int, Field(gt=0)] | None = None
    """Number of the tokens found that are used, the first ones (PrefixQuant Table 14); null takes all."""
    content: Literal["frequent", "highest", "random"] = "frequent"
    """Tokens that replace those that are found (PrefixQuant Table 15): `frequent`, these tokens; `highest`, the first
    of them everywhere; `random`, tokens that the run's seed draws."""

    def check(self, recipe: Recipe) -> None:
        """Tokens that are given are at least one, and all."""
        if self.ids == ():
            raise ValueError("prefixed_outliers.ids has no token: name one, or leave the method out")
        if self.ids is not None and (self.tokens, self.content, self.text) != (None, "frequent", None):
            raise ValueError(
                "prefixed_outliers.ids are the prefix: tokens, content and text are about those that are found"
            )

    def describe(self, recipe: Recipe) -> str:
        if self.ids is not None:
            return f"the tokens {', '.join(map(str, self.ids))} in front of every text"
        which = {"frequent": "outlier tokens", "highest": "the first outlier token", "random": "random tokens"}
        number = f", {self.tokens} of them" if self.tokens is not None else ""
        many = "" if self.content == "frequent" else ", as many as there are outlier tokens"
        text = self.text
        found = "" if text is None else f", found on {text.samples} samples of {text.sequence_length} tokens"
        bos = ", BOS one of them" if self.number == "with_bos" else ""
        rare = {"kept": "", "once": ", none that stands out once", "one_type": ", no lone rare one"}[self.rare]
        layers = ", counted in each layer" if self.each_layer else ""
        return (
            f"{which[self.content]}, above {self.threshold:g} times the median, in front of every text"
            f"{number}{many}{bos}{rare}{layers}{found}"
        )

    @property
    def prefix_tokens(self) -> int:
        """Those that are given, or room for more than are found on any model of the paper (its Table 1)."""
        return self.tokens or 8 if self.ids is None else len(self.ids)

    @property
    def rule(self) -> dict[str, Any]:
        """How tokens are chosen, by the arguments of `rotquant.models.outlier_tokens.detect_prefix`."""
        return {name: getattr(self, name) for name in ("number", "rare", "each_layer")}


def check_model(
    settings: PrefixedOutliers, recipe: Recipe, architecture: "Architecture", limits: "ModelLimits"
) -> None:
    """Raise RotquantError unless given tokens lie in the vocabulary."""
    if settings.ids is not None:
        limits.check_ids(max(settings.ids))


def apply(settings: PrefixedOutliers, context: "QuantizationContext") -> None:
    """Find the tokens, and have all that follows see them."""
    from rotquant.models.outlier_tokens import detect_prefix, token_maxima
    from rotquant.models.simulation.prefix import compute_prefix, stored_tensors
    from rotquant.models.simulation.runtime import wrap

    model, ids = context.model, settings.ids
    with wrap(model, context.online):
        if ids is None:
            samples = context.calibration_samples if settings.text is None else context.texts[settings.name]
            ratios, rule = token_maxima(model, samples, device=context.device).ratios, settings.rule
            ids = detect_prefix(ratios, samples, model.config.bos_token_id, settings.threshold, **rule)
            ids = _chosen(settings, ids[: settings.tokens], model.config.vocab_size, context.seed)
        found = compute_prefix(model, ids, context.device)
    context.tensors |= stored_tensors(ids, found)
    context.online = runtime(settings, context.online, context.tensors)


def _chosen(settings: PrefixedOutliers, found: tuple[int, ...], vocabulary: int, seed: int) -> tuple[int, ...]:
    """Tokens that replace those that were found."""
    import torch

    if settings.content == "highest":
        return found[:1] * len(found)
    if settings.content == "random":
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(vocabulary, (len(found),), generator=generator).tolist())
    return found


def tensors(settings: PrefixedOutliers, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
    """The tokens, and the keys and values of every layer."""
    from rotquant.models.simulation.prefix import stored_shapes

    return stored_shapes(architecture)


def runtime(
    settings: PrefixedOutliers, quantization: "RuntimeQuantization", tensors: "Mapping[str, Tensor]"
) -> "RuntimeQuantization":
    """Put the text after the prefix, if any token was found."""
    from rotquant.models.simulation.prefix import stored_prefix

    return replace(quantization, prefix=stored_prefix(tensors))
