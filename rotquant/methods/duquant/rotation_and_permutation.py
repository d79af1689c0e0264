"""DuQuant's transform of what a linear layer reads (Lin et al. 2024, Sec. 3.2): rotation, permutation, rotation.

Blocks of neighbouring features are rotated, each by a product of matrices that a greedy search chooses (Eqs. 2-3). A
zigzag permutation then spreads the largest features over all blocks, and blocks are rotated again (Eq. 5). Everything
is orthogonal, so the same transform of a weight's rows undoes it. What is found here is float64.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from rotquant.foundation.errors import RotquantError
from rotquant.methods.duquant import DuQuant
from rotquant.models.simulation.runtime import SiteKey
from rotquant.tensors.hadamard.random import random_orthogonal_matrix


@dataclass(frozen=True)
class Transform:
    """Transform of a site's input: x / s, rotated, permuted, rotated, permuted and so on.

    rotations: [permutations + 1, blocks, size, size], orthogonal, for row vectors; one block stands for all.
    permutations: where each feature of the result comes from, int64 [permutations, features]; None for none.
    scale: s where no layer before the site absorbed it, positive, [features].
    """

    rotations: Tensor
    permutations: Tensor | None = None
    scale: Tensor | None = None

    def rotate(self, x: Tensor) -> Tensor:
        """The orthogonal part, of inputs or of the rows of a weight, [..., features], in their own arithmetic."""
        return turn(x, self.rotations.to(x.dtype), () if self.permutations is None else self.permutations)

    def __call__(self, x: Tensor) -> Tensor:
        """An input [..., features] as the linear layers are to read it, computed in float32 or more."""
        exact = x.to(torch.promote_types(x.dtype, self.rotations.dtype))
        return self.rotate(exact if self.scale is None else exact / self.scale.to(exact.dtype)).to(x.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Transform":
        """Move the transform to a device, with rotations of a type."""
        permutations = None if self.permutations is None else self.permutations.to(device)
        scale = None if self.scale is None else self.scale.to(device)
        return Transform(self.rotations.to(device, dtype), permutations, scale)


class Following:
    """A transform as a hook calls it: its tensors follow the activations from device to device (layers stream)."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, x: Tensor) -> Tensor:
        if self.transform.rotations.device != x.device:
            self.transform = self.transform.to(x.device)
        return self.transform(x)


def stored_transforms(tensors: Mapping[str, Tensor]) -> dict[SiteKey, Following]:
    """The transforms of all sites from the tensors that are stored, `<site>.<part>`, stacked over layers."""
    sites: dict[str, dict[str, Tensor]] = {}
    for name, stacked in tensors.items():
        site, part = name.split(".")
        sites.setdefault(site, {})[part] = stacked
    return {
        (index, site): Following(Transform(**{part: stacked[index] for part, stacked in parts.items()}))
        for site, parts in sites.items()
        for index in range(len(parts["rotations"]))
    }


def turn(x: Tensor, rotations: Iterable[Tensor], permutations: Iterable[Tensor]) -> Tensor:
    """x R_1 P_1 R_2 P_2 and so on: x [..., features], rotations of blocks, and as many permutations or one fewer."""
    for rotation, order in zip_longest(rotations, permutations):
        x = rotate_blocks(x, rotation)
        if order is not None:
            x = x[..., order]
    return x


def rotate_blocks(x: Tensor, rotation: Tensor) -> Tensor:
    """x [..., features] whose blocks of neighbouring features are multiplied by matrices [blocks or 1, size, size]."""
    size = rotation.shape[-1]
    if len(rotation) == 1:
        return (x.reshape(-1, size) @ rotation[0]).reshape(x.shape)
    rows = x.reshape(-1, len(rotation), size).transpose(0, 1)
    return (rows @ rotation).transpose(0, 1).reshape(x.shape)


def uniform_rotation(size: int) -> Tensor:
    """R~ of Eq. 2: an orthogonal matrix whose first row is uniform, 1 / sqrt(size), float64 [size, size].

    Helmert's contrasts are its other rows, the last of which alone holds the first feature. The paper asks for no more
    than the first row; the authors' code has the same numbers in the first column, all that Q leaves of the others.
    """
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for row in range(1, size - 1):
        matrix[row, 1 : row + 1], matrix[row, row + 1] = 1, -row
    matrix[0], matrix[-1], matrix[-1, 0] = 1, 1, 1 - size
    return matrix / matrix.norm(dim=1, keepdim=True)


def draw_rotation(size: int, generator: torch.Generator) -> Tensor:
    """R~ Q of Eq. 2: Q keeps the first column and turns the others by a random orthogonal matrix, [size, size]."""
    matrix = uniform_rotation(size)
    matrix[:, 1:] = matrix[:, 1:] @ random_orthogonal_matrix(size - 1, generator)
    return matrix


def switched(matrix: Tensor, dimensions: Tensor) -> Tensor:
    """E_d M E_d for every d of `dimensions` [blocks]: rows and columns 0 and d of M switched, [blocks, size, size]."""
    order = torch.arange(len(matrix), device=matrix.device).repeat(len(dimensions), 1)
    order[:, 0] = dimensions
    order.scatter_(1, dimensions.unsqueeze(1), 0)
    return matrix[order.unsqueeze(2), order.unsqueeze(1)]


def search_rotation(
    x: Tensor,
    matrix: Tensor,
    steps: int,
    outlier: Literal["feature", "row"] = "feature",
    peak: Literal["magnitude", "range"] = "magnitude",
) -> Tensor:
    """The greedy search of R^ = R^1 R^2 ... R^n (Eq. 2), for all blocks at once; never with a higher peak than x has.

    R^k = E_d M E_d for the dimension d of the largest outlier of x R^1 ... R^(k-1), and n, from 0 to `steps`, is where
    the peak of x R^1 ... R^n is least. M = R~ Q is drawn once for a search, as in the authors' code (the paper is
    silent).

    Args:
        x: inputs, float64 [blocks, tokens, size].
        matrix: M, orthogonal, float64 [size, size], on the device of x.
        steps: how many matrices are tried.
        outlier, peak: as in the settings.

    Returns:
        R^ of each block, orthogonal, [blocks, size, size].
    """
    blocks, rows, size = x.shape
    best = torch.eye(size, dtype=x.dtype, device=x.device).repeat(blocks, 1, 1)
    least = x.new_full((blocks,), torch.inf)
    state = torch.cat([x, best], dim=1)  # x R^1 ... R^k above, R^1 ... R^k below
    for step in range(steps + 1):
        turned = state[:, :rows]
        magnitude, dimension = torch.linalg.vector_norm(turned, torch.inf, dim=1).max(dim=1)
        height = magnitude if peak == "magnitude" else turned.amax(dim=(1, 2)) - turned.amin(dim=(1, 2))
        better = height < least
        least, best = torch.where(better, height, least), torch.where(better[:, None, None], state[:, rows:], best)
        if step < steps:
            if outlier == "row":
                dimension = turned.abs().amax(dim=2).argmax(dim=1) % size
            state = state @ switched(matrix, dimension)
    return best


def search_rotation_reference(x: Tensor, matrix: Tensor, steps: int) -> Tensor:
    """Reference of the rotation search for one block, step by step as the paper writes it: x [tokens, size] gives R^
    [size, size]."""
    size = x.shape[1]
    product = torch.eye(size, dtype=x.dtype)
    products = [product]
    for _ in range(steps):
        dimension = int(((x @ product).abs().max(dim=0).values).argmax())
        switch = torch.eye(size, dtype=x.dtype)
        switch[[0, dimension]] = switch[[dimension, 0]]
        product = product @ (switch @ matrix @ switch)
        products.append(product)
    peaks = [float((x @ product).abs().max()) for product in products]
    return products[peaks.index(min(peaks))]


def zigzag(maxima: Tensor, blocks: int) -> Tensor:
    """The zigzag permutation of features by their largest outliers O_j (Sec. 3.2, Theorem 2).

    The largest go to the blocks 1, 2, ..., K, the next ones to K, ..., 2, 1, and so on. So the blocks' means of O_j are
    no further apart than a block size-th of the difference between the largest and the least O_j.

    Args:
        maxima: O_j, [features]. blocks: K, a divisor of the features.

    Returns:
        Where each feature of the result comes from, int64 [features]. Equal outliers stay in their order.
    """
    rounds = maxima.argsort(descending=True, stable=True).view(-1, blocks)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.flatten()


def largest_rows(pieces: Iterable[Tensor], size: int, tokens: int, shared: bool = False) -> Tensor:
    """Select the inputs of a search: of each block the tokens of the largest norm, in their order.

    A rotation keeps norms. So where the peak that a search leaves is above the norm of all other tokens, it has the
    same as on all of them.

    Args:
        pieces: [tokens, features] each.
        size: of a block.
        tokens: how many of each block.
        shared: all blocks of all tokens are rows of one block, of which so many times the blocks are kept.

    Returns:
        [blocks or 1, tokens or fewer, size].
    """
    kept = None
    for piece in pieces:
        rows = piece.unflatten(-1, (-1, size))
        count = tokens * rows.shape[1] if shared else tokens
        rows = rows.reshape(1, -1, size) if shared else rows.transpose(0, 1)
        kept = rows if kept is None else torch.cat([kept, rows], dim=1)
        if kept.shape[1] > count:
            chosen = kept.norm(dim=2).topk(count, dim=1).indices.sort(dim=1).values
            kept = kept.gather(1, chosen.unsqueeze(2).expand(-1, -1, size))
    if kept is None:
        raise ValueError("a search needs inputs")
    return kept


@torch.no_grad()
def find_transform(
    inputs: Sequence[Tensor], settings: DuQuant, generator: torch.Generator, device: torch.device
) -> Transform:
    """The transform of a site: rotation, permutation, rotation and so on, each found on what those before it leave.

    Args:
        inputs: pieces of what the site reads, smoothed, [tokens, features] each, on any device, of any type.
        settings: how it is searched.
        generator: draws Q, on the host.
        device: where the work is done.

    Returns:
        A transform without scale, float64, on the device.

    Raises:
        RotquantError: the inputs are not finite.
    """
    rotations: list[Tensor] = []
    orders: list[Tensor] = []
    size = settings.block(inputs[0].shape[-1])

    def turned() -> Iterator[Tensor]:
        return (turn(piece.to(device, torch.float64), rotations, orders) for piece in inputs)

    for step in range(settings.permutations + 1):
        if step:
            maxima = torch.stack([piece.abs().amax(dim=0) for piece in turned()]).amax(dim=0)
            orders.append(zigzag(maxima, len(maxima) // size))
        seen = largest_rows(turned(), size, settings.tokens, settings.rotations == "shared")
        if not torch.isfinite(seen).all():
            raise RotquantError("calibration activations are not finite.")
        matrix = draw_rotation(size, generator).to(device)
        rotations.append(search_rotation(seen, matrix, settings.search_steps, settings.outlier, settings.peak))
    return Transform(torch.stack(rotations), torch.stack(orders) if orders else None)
