"""A checkpoint whose process ends in the middle of a training."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

from rotquant.training.state import Checkpoint


class Interrupted(Exception):  # noqa: N818 - not an error of ours
    """Stands for the end of the process."""


@dataclass(frozen=True)
class MortalCheckpoint(Checkpoint):
    """Each use takes one of its lives, in whichever part of the training; with none left the process ends.

    Uses are the question after a step whether its state is due, which is not asked after the last, and each writing.
    """

    lives: Iterator[object] = field(default_factory=lambda: repeat(None))

    def due(self, step: int, waited: float) -> bool:
        """As a checkpoint's, if it is alive."""
        self._live()
        return super().due(step, waited)

    def save(self, *arguments: object) -> None:
        """As a checkpoint's, if it is alive."""
        self._live()
        super().save(*arguments)  # pyright: ignore[reportArgumentType]

    def _live(self) -> None:
        if next(self.lives, self) is self:
            raise Interrupted
