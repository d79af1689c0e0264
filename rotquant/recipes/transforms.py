"""Transforms of activations as data: which matrix, at which location, in the weights or while the model runs.

A transform replaces x by x M, for row vectors. What reads x takes it back: a weight W [out, in] becomes W M^-T, since
(x M)(W M^-T)^T = x W^T. Nothing here computes or imports torch: `rotquant.models.transforms` makes what applies them.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rotquant.foundation.data import Frozen

SiteName = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]
Location = Literal["residual", "values", "across_heads", "queries_keys", SiteName]
Kind = Literal["hadamard", "random_hadamard", "orthogonal", "matrix", "factorized", "permutation", "scaling"]

#: How many tensors a kind names, at least and at most.
_TENSORS: dict[Kind, tuple[int, int]] = {"hadamard": (0, 1), "factorized": (2, 2)}


class Transform(Frozen):
    """One transform x M at one location of every decoder layer, or of the residual stream between them.

    M is `hadamard`, the library's H / sqrt(n); `random_hadamard`, diag(signs) H / sqrt(n); `orthogonal`; any invertible
    `matrix`; `factorized`, the Kronecker product of two invertible matrices; or `permutation` and `scaling` by a vector
    of the features: x[..., order] and x / s.

    compressed-tensors calls `kind` a type and `size` head_dim. Its locations are `input` of o_proj and down_proj for
    `across_heads` and `mlp_output`, `q_attn` and `k_cache` for `queries_keys`; what is fused needs no entry there.
    """

    name: str
    """Name in sentences and on pages: R1 to R4, `heads`, or that of a method."""
    kind: Kind
    """The form of M."""
    location: Location
    """`residual` stream; `values` of each head (online: in the KV cache alone); `across_heads`, the same feature of all
    heads in attention's output; `queries_keys` after RoPE (online: keys in the KV cache, scores being the same); or the
    input of the linear layers of a site."""
    size: Annotated[int, Field(gt=0)] | None = None
    """Neighbouring features that M mixes: it is block-diagonal. Null is all of the location."""
    online: bool = False
    """Whether it acts while the model runs, and weights hold its inverse alone; else both are in the weights."""
    origin: Literal["fixed", "drawn", "learned"] = "fixed"
    """Whether M follows from kind and size, from a seed, or from calibration text."""
    dtype: Literal["float32", "float16"] = "float32"
    """Arithmetic of an online Hadamard transform. Tensors have that of their own type, or of the activations if that is
    wider; float64 activations are transformed in float64."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors that M is made of: a matrix [size, size] for all blocks or [blocks, size, size] for each;
    the left and the right factor; where each feature comes from, int64 [features]; or s, [features]."""
    part: Annotated[int, Field(ge=0)] | None = None
    """Index of M in tensors that hold several, one after another."""

    @model_validator(mode="after")
    def _kind_has_its_tensors(self) -> "Transform":
        least, most = _TENSORS.get(self.kind, (1, 1))
        if not least <= len(self.tensors) <= most:
            raise ValueError(f"a transform of kind {self.kind} names {least} tensors, not {len(self.tensors)}")
        return self

    @model_validator(mode="after")
    def _location_has_such_transforms(self) -> "Transform":
        by_feature = self.kind in ("permutation", "scaling")
        if self.online and self.location == "residual":
            raise ValueError("a transform of the residual stream is fused into the weights: it cannot be online")
        if by_feature and self.size is not None:
            raise ValueError(f"size has no meaning for a {self.kind} of all features")
        if self.location == "across_heads" and (by_feature or self.kind == "factorized" or self.size is not None):
            raise ValueError("a transform across heads is one matrix of all heads: take another kind, and no size")
        return self


def at(transforms: Iterable[Transform], *locations: Location, online: bool | None = None) -> tuple[Transform, ...]:
    """The transforms at some locations, in their order; all, those online or those fused."""
    return tuple(one for one in transforms if one.location in locations and online in (None, one.online))


def at_site(transforms: Iterable[Transform], site: SiteName) -> tuple[Transform, ...]:
    """The online transforms of what the linear layers of a site read, in their order."""
    return at(transforms, site, *(("across_heads",) if site == "attention_output" else ()), online=True)
