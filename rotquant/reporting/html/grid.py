"""Tables of numbers as the page's template prints them, of accuracy or of speed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cell:
    """A number as printed, and whose it is."""

    text: str
    origin: Literal["ours", "published", "chance"]


@dataclass(frozen=True)
class Grid:
    """A table of numbers: groups of columns (name, remark, width), a head per column, and lines (names, cells)."""

    caption: str
    stub: tuple[str, ...]
    groups: tuple[tuple[str, str, int], ...]
    heads: tuple[str, ...]
    lines: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
