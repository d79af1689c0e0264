"""Grid search of clip ratios, smoothing scales and static scales: of candidates, the one of least error."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Candidate = TypeVar("Candidate", float, Tensor)


@torch.no_grad()
def search_grid(
    candidates: Iterable[Candidate],
    error: Callable[[Candidate], Tensor],
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The candidates of least error and these errors, each element by itself.

    Args:
        candidates: numbers, or tensors that broadcast with the errors; of equally good ones the first wins.
        error: of a candidate, of any shape.
        start: what another search found, which wins unless a candidate is better; else there is a candidate.

    Raises:
        ValueError: there is neither.
    """
    best, least = start or (None, None)
    for candidate in candidates:
        found = error(candidate)
        if best is None or least is None:
            best, least = torch.zeros_like(found) + candidate, torch.full_like(found, torch.inf)
        best, least = torch.where(found < least, candidate, best), torch.minimum(found, least)
    if best is None or least is None:
        raise ValueError("a search needs at least one candidate")
    return best, least
