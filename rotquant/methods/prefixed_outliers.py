"""Outlier tokens in front of every text, in the KV cache: what makes static scales win (PrefixQuant Sec. 5.1)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from rotquant.foundation.errors import RecipeError
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

    def check(self, recipe: Recipe) -> None:
        """Tokens that are given are at least one."""
        if self.ids == ():
            raise ValueError("prefixed_outliers.ids has no token: name one, or leave the method out")

    def check_model(self, recipe: Recipe, architecture: "Architecture", limits: "Limits") -> None:
        """Tokens that are given lie in the vocabulary, and the context has room behind them."""
        if self.ids is not None:
            limits.check_ids(max(self.ids))
            if limits.context is not None and len(self.ids) >= limits.context:
                raise RecipeError(
                    f"prefixed_outliers.ids names {len(self.ids)} tokens, which leave no room in the model's context "
                    f"of {limits.context} tokens."
                )

    def words(self, recipe: Recipe) -> str:
        """As on the pages."""
        if self.ids is not None:
            return f"the tokens {', '.join(map(str, self.ids))} in front of every text"
        return f"outlier tokens, above {self.threshold:g} times the median, in front of every text"

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
            found = compute_prefix(model, ids, stage.device) if ids else empty_prefix(stage.architecture, model.dtype)
        stage.tensors |= stored_tensors(ids, found)
        stage.online = self.runtime(stage.online, stage.tensors)

    def tensors(self, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
        """The tokens, and the keys and values of every layer."""
        from rotquant.models.simulation.prefix import stored_shapes

        return stored_shapes(architecture)

    def runtime(self, wrapping: "Wrapping", tensors: "Mapping[str, Tensor]") -> "Wrapping":
        """The text stands behind the prefix, if any token was found."""
        from rotquant.models.simulation.prefix import stored_prefix

        return replace(wrapping, prefix=stored_prefix(tensors))
