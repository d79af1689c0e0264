"""Outlier tokens in front of every text, in the KV cache: what makes static scales win (PrefixQuant Sec. 5.1)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.method import Method, Role
from rotquant.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.models.architectures import Architecture
    from rotquant.models.limits import Limits
    from rotquant.models.simulation.wrapping import Wrapping
    from rotquant.weights.stage import Stage


class PrefixedOutliers(Method):
    """A model's outlier tokens, found by calibration and kept in its KV cache in front of every text (PrefixQuant).

    Keys and values of the prefix are those of the network before its weights are rounded, and stay in full precision.
    All that follows, static scales and the rounding of weights, sees the text behind it.
    """

    name: ClassVar[str] = "prefixed_outliers"
    title: ClassVar[str] = "prefixed outlier tokens"
    source: ClassVar[str] = "PrefixQuant, Sec. 5.1, Eq. 3"
    roles: ClassVar[frozenset[Role]] = frozenset({"prefix"})
    calibrates: ClassVar[bool] = True

    threshold: Annotated[float, Field(gt=1.0)] = 64.0
    """How many times the median of a window's tokens the largest |input of down_proj| of an outlier token is (eta)."""
    ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """These tokens, in this order, in place of those that are found."""
    tokens: Annotated[int, Field(gt=0)] | None = None
    """So many of the tokens that are found, the first ones (PrefixQuant Table 14); null takes all."""
    content: Literal["frequent", "highest", "random"] = "frequent"
    """What stands in the places of the tokens that are found (PrefixQuant Table 15): `frequent`, these tokens;
    `highest`, the first of them everywhere; `random`, tokens that the run's seed draws."""

    def check(self, recipe: Recipe) -> None:
        """Tokens that are given are at least one, and all."""
        if self.ids == ():
            raise ValueError("prefixed_outliers.ids has no token: name one, or leave the method out")
        if self.ids is not None and (self.tokens, self.content) != (None, "frequent"):
            raise ValueError("prefixed_outliers.ids are the prefix: tokens and content are about those that are found")

    def check_model(self, recipe: Recipe, architecture: "Architecture", limits: "Limits") -> None:
        """Every text can stand behind a prefix, and tokens that are given lie in the vocabulary."""
        limits.check_prefix(1 if self.ids is None else len(self.ids))
        if self.ids is not None:
            limits.check_ids(max(self.ids))

    def words(self, recipe: Recipe) -> str:
        """As on the pages."""
        if self.ids is not None:
            return f"the tokens {', '.join(map(str, self.ids))} in front of every text"
        which = {"frequent": "outlier tokens", "highest": "the first outlier token", "random": "random tokens"}
        number = f", {self.tokens} of them" if self.tokens is not None else ""
        many = "" if self.content == "frequent" else ", as many as there are outlier tokens"
        return f"{which[self.content]}, above {self.threshold:g} times the median, in front of every text{number}{many}"

    def apply(self, stage: "Stage") -> None:
        """Find the tokens, and have all that follows see them."""
        from rotquant.models.outlier_tokens import detect_prefix, token_maxima
        from rotquant.models.simulation.prefix import compute_prefix, empty_prefix, stored_tensors
        from rotquant.models.simulation.wrapping import wrap

        model, ids = stage.model, self.ids
        with wrap(model, stage.online):
            if ids is None:
                samples = stage.calibration_samples
                ratios = token_maxima(model, samples, device=stage.device).ratios
                ids = detect_prefix(ratios, samples, model.config.bos_token_id, self.threshold)
                ids = self._chosen(ids[: self.tokens], model.config.vocab_size, stage.seed)
            found = compute_prefix(model, ids, stage.device) if ids else empty_prefix(stage.architecture, model.dtype)
        stage.tensors |= stored_tensors(ids, found)
        stage.online = self.runtime(stage.online, stage.tensors)

    def _chosen(self, found: tuple[int, ...], vocabulary: int, seed: int) -> tuple[int, ...]:
        """What stands in the places of the tokens that were found."""
        import torch

        if self.content == "highest":
            return found[:1] * len(found)
        if self.content == "random":
            generator = torch.Generator().manual_seed(seed)
            return tuple(torch.randint(vocabulary, (len(found),), generator=generator).tolist())
        return found

    def tensors(self, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
        """The tokens, and the keys and values of every layer."""
        from rotquant.models.simulation.prefix import stored_shapes

        return stored_shapes(architecture)

    def runtime(self, wrapping: "Wrapping", tensors: "Mapping[str, Tensor]") -> "Wrapping":
        """The text stands behind the prefix, if any token was found."""
        from rotquant.models.simulation.prefix import stored_prefix

        return replace(wrapping, prefix=stored_prefix(tensors))
