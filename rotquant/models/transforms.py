"""The factory of transforms: what applies the ones that `recipes.transforms` describes, to activations and weights.

A `Chain` is all of them at one location of one layer. Whoever runs a model, fuses rotations or learns them asks it and
knows no kind of transform.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, cast

import torch
from torch import Tensor

from rotquant.foundation.errors import RecipeError
from rotquant.kernels.hadamard.choice import hadamard_transform, head_hadamard_transform
from rotquant.models.architectures import Architecture
from rotquant.recipes.transforms import Location, SiteName, Transform
from rotquant.tensors.onednn import linear

#: What is done with M: x M, x M^-1, and W M^-T.
Use = Literal["apply", "undo", "dual"]
_Step = Callable[[Tensor, Use], Tensor]


class Chain:
    """Transforms one after another, M = M_1 M_2 ..., of tensors [..., features]; without any, the identity.

    Activations are widened to the type of the stored tensors, transformed, and rounded to their own type once. Tensors
    follow the activations from device to device, since layers stream. It is differentiable by both.

    Args:
        transforms: in the order in which they act.
        tensors: of one layer, by name; others are left alone.
        heads: of attention, for transforms across them.
        learned: whether the tensors are being trained: each time it runs, they are taken as they are then, in the
            activations' type, and multiplied by `onednn.linear`, as all that is trained.
    """

    def __init__(
        self,
        transforms: Iterable[Transform],
        tensors: Mapping[str, Tensor] | None = None,
        heads: int = 1,
        learned: bool = False,
    ) -> None:
        self.transforms, self._heads, self._learned = tuple(transforms), heads, learned
        names = {name for one in self.transforms for name in one.tensors}
        self._tensors = {name: tensor for name, tensor in (tensors or {}).items() if name in names}
        self._steps = self._made_of(self._tensors)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._steps)

    def __call__(self, x: Tensor) -> Tensor:
        """x M, of the type of x."""
        return self._run("apply", x)

    def inverse(self, x: Tensor) -> Tensor:
        """x M^-1, of the type of x."""
        return self._run("undo", x)

    def of_weight(self, weight: Tensor) -> Tensor:
        """W M^-T of a weight [..., features] that reads what the chain gives."""
        return self._run("dual", weight)

    def _run(self, use: Use, x: Tensor) -> Tensor:
        y, steps = x, self._steps
        if self._learned:
            steps = self._made_of({name: tensor.to(x) for name, tensor in self._tensors.items()})
        else:
            if any(tensor.device != x.device for tensor in self._tensors.values()):
                self._tensors = {name: tensor.to(x.device) for name, tensor in self._tensors.items()}
                steps = self._steps = self._made_of(self._tensors)
            stored = (tensor.dtype for tensor in self._tensors.values() if tensor.is_floating_point())
            y = x.to(reduce(torch.promote_types, stored, x.dtype))
        for step in reversed(steps) if use == "undo" else steps:
            y = step(y, use)
        return y.to(x.dtype)

    def _made_of(self, tensors: Mapping[str, Tensor]) -> list[_Step]:
        return [_step(one, tensors, self._heads, self._learned) for one in self.transforms]


def scaling(site: SiteName, scale: Tensor) -> Chain:
    """The division of a site's input by a scale [features], as smoothing does it."""
    return Chain([Transform(name="smoothing", kind="scaling", location=site, tensors=("scale",))], {"scale": scale})


def of_layer(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """One layer's tensors of those of all, which are stacked."""
    return {name: stacked[index] for name, stacked in tensors.items()}


def features_at(architecture: Architecture, location: Location) -> int:
    """How many features a transform at a location may mix."""
    shape = architecture
    inner = {
        "residual": shape.hidden_size,
        "values": shape.head_dim,
        "across_heads": shape.num_heads,
        "queries_keys": shape.head_dim,
    }
    return inner[location] if location in inner else shape.site(location).features


def tensor_shapes(architecture: Architecture, transforms: Iterable[Transform]) -> dict[str, tuple[int, int, int]]:
    """Shapes of the matrices of a rotation's online transforms by name, stacked over layers."""
    sizes = {
        one.tensors[0]: features_at(architecture, one.location) for one in transforms if one.online and one.tensors
    }
    return {name: (architecture.num_layers, size, size) for name, size in sizes.items()}


def check_tensors(architecture: Architecture, transforms: Iterable[Transform], tensors: Mapping[str, Tensor]) -> None:
    """Raise `RecipeError` where a tensor of online transforms is missing or does not fit the model.

    tensors: by name, stacked over layers.
    """
    for one in transforms:
        if not one.online or not one.tensors:
            continue
        parts = () if one.part is None else (one.part + 1,)
        for name in one.tensors:
            sizes = tuple(tensors[name].shape[: 1 + len(parts)]) if name in tensors else ()
            if sizes[:1] != (architecture.num_layers,) or sizes[1:] < parts:
                raise RecipeError(f"the transform {one.name} needs a tensor {name} of each layer: build the weights.")
        features = features_at(architecture, one.location)
        shapes = [tuple(tensors[name].shape[1 + len(parts) :]) for name in one.tensors]
        if not _fits(one, features, shapes):
            found = ", ".join(f"{name} {shape}" for name, shape in zip(one.tensors, shapes, strict=True))
            raise RecipeError(
                f"tensors of the transform {one.name} do not fit the {features} features of {one.location}: {found}."
            )


def _fits(transform: Transform, features: int, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a layer's tensors are of the shapes that `Transform.tensors` says."""
    if transform.kind in ("permutation", "scaling"):
        return shapes == [(features,)]
    size = transform.size or features
    one_matrix = transform.kind == "factorized" or transform.location == "across_heads"
    blocks = ((),) if one_matrix else ((), (1,), (features // size,))
    square = all(len(shape) > 1 and shape[-1] == shape[-2] and shape[:-2] in blocks for shape in shapes)
    return square and math.prod(shape[-1] for shape in shapes) == size


def _step(transform: Transform, tensors: Mapping[str, Tensor], heads: int, learned: bool) -> _Step:
    """What applies one transform, made of a layer's tensors."""
    found = [tensors[name] if transform.part is None else tensors[name][transform.part] for name in transform.tensors]
    if transform.kind == "hadamard" and not found:
        return _Hadamard(transform, heads)
    if transform.kind == "permutation":
        return _Permutation(*found)
    if transform.kind == "scaling":
        return _Scaling(*found)
    factors = [_Matrix(one, transform.kind not in ("matrix", "factorized"), learned) for one in found]
    if transform.kind == "factorized" or transform.location == "across_heads":
        return _Factorized(*factors)
    return factors[0]


@dataclass(frozen=True)
class _Hadamard:
    """H / sqrt(n) of the whole axis, of its blocks, or across heads, by the fast transform."""

    transform: Transform
    heads: int

    def __call__(self, x: Tensor, use: Use) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else cast(torch.dtype, getattr(torch, self.transform.dtype))
        inverse, size = use == "undo", self.transform.size
        if self.transform.location == "across_heads":
            return head_hadamard_transform(x, self.heads, inverse=inverse, compute_dtype=dtype)
        if size is None:
            return hadamard_transform(x, inverse=inverse, compute_dtype=dtype)
        return hadamard_transform(x.unflatten(-1, (-1, size)), inverse=inverse, compute_dtype=dtype).flatten(-2)


@dataclass(frozen=True)
class _Matrix:
    """A matrix [size, size] for all blocks of neighbouring features, or [blocks, size, size] for each."""

    matrix: Tensor
    orthogonal: bool
    learned: bool = False

    def __call__(self, x: Tensor, use: Use) -> Tensor:
        matrix = self.matrix if use == "apply" else self._inverse if use == "undo" else self._inverse.mT
        matrix, size = matrix.to(x.dtype), matrix.shape[-1]
        if matrix.dim() == 3 and len(matrix) > 1:
            rows = x.reshape(-1, len(matrix), size).transpose(0, 1)
            return (rows @ matrix).transpose(0, 1).reshape(x.shape)
        matrix = matrix.reshape(size, size)
        rows = x if x.shape[-1] == size else x.unflatten(-1, (-1, size))
        return (linear(rows, matrix.mT) if self.learned else rows @ matrix).reshape(x.shape)

    @cached_property
    def _inverse(self) -> Tensor:
        if self.orthogonal:
            return self.matrix.mT
        # Whether there is an inverse is not asked in training: that waits for the GPU, and the loss shows it.
        found = torch.linalg.inv_ex(self.matrix.double(), check_errors=not self.matrix.requires_grad)
        return found.inverse.to(self.matrix.dtype)


@dataclass(frozen=True)
class _Factorized:
    """A (x) B: for the features as [..., a, b], A^T X B. Without B, one for all b: across heads."""

    left: _Matrix
    right: _Matrix | None = None

    def __call__(self, x: Tensor, use: Use) -> Tensor:
        inner = -1 if self.right is None else self.right.matrix.shape[-1]
        outer = self.left.matrix.shape[-1]
        y = x.unflatten(-1, (1 if self.right is None else -1, outer, inner))
        y = y if self.right is None else self.right(y, use)
        return self.left(y.mT, use).mT.flatten(-3)


@dataclass(frozen=True)
class _Permutation:
    """x[..., order]."""

    order: Tensor

    def __call__(self, x: Tensor, use: Use) -> Tensor:
        return x[..., self.order if use != "undo" else self.order.argsort()]


@dataclass(frozen=True)
class _Scaling:
    """x / s, and W s."""

    scale: Tensor

    def __call__(self, x: Tensor, use: Use) -> Tensor:
        return x / self.scale.to(x.dtype) if use == "apply" else x * self.scale.to(x.dtype)
