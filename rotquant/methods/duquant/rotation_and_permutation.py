"""DuQuant's transform of what a linear layer reads (Lin et al. 2024, Sec. 3.2): rotation, permutation, rotation.

Blocks of neighbouring features are rotated, each by a product of matrices that a greedy search chooses (Eqs. 2-3). A
zigzag permutation then spreads the largest features over all blocks, and blocks are rotated again (Eq. 5). Everything
is orthogonal, so the same transform of a weight's rows undoes it. What is found here is float64.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from rotquant.foundation.errors import RotquantError
from rotquant.methods.duquant import DuQuant
from rotquant.models.transforms import Chain
from rotquant.recipes.transforms import SiteName
from rotquant.tensors.hadamard.random import random_orthogonal_matrix


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
    site: SiteName, inputs: Sequence[Tensor], settings: DuQuant, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """The transform of a site: rotation, permutation, rotation and so on, each found on what those before it leave.

    Args:
        inputs: pieces of what the site reads, smoothed, [tokens, features] each, on any device, of any type.
        settings: how it is searched.
        generator: draws Q, on the host.
        device: where the work is done.

    Returns:
        Tensors of `settings.transforms_at`, on the device: rotations [permutations + 1, blocks, size, size],
        orthogonal, float64, where one block stands for all; permutations, if any, int64 [permutations, features].

    Raises:
        RotquantError: the inputs are not finite.
    """
    found: dict[str, Tensor] = {}
    size = settings.block(inputs[0].shape[-1])
    transforms = settings.transforms_at(site, size)

    def turned(steps: int) -> Iterator[Tensor]:
        chain = Chain(transforms[:steps], found)
        return (chain(piece.to(device, torch.float64)) for piece in inputs)

    for step, transform in enumerate(transforms):
        (name,) = transform.tensors
        if transform.kind == "permutation":
            maxima = torch.stack([piece.abs().amax(dim=0) for piece in turned(step)]).amax(dim=0)
            tensor = zigzag(maxima, len(maxima) // size)
        else:
            seen = largest_rows(turned(step), size, settings.tokens, settings.rotations == "shared")
            if not torch.isfinite(seen).all():
                raise RotquantError("calibration activations are not finite.")
            matrix = draw_rotation(size, generator).to(device)
            tensor = search_rotation(seen, matrix, settings.search_steps, settings.outlier, settings.peak)
        found[name] = torch.cat([found[name], tensor[None]]) if name in found else tensor[None]
    return found
