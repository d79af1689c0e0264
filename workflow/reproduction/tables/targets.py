"""Targets: every table and figure of the papers that this project aims to reproduce."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from reproduction.reading.written import Many, Written, parse, read_yaml
from rotquant.foundation.errors import lookup

TARGETS = Path("config/targets.yaml")


class Target(Written):
    """A table or figure of a paper that this project sets out to reproduce."""

    id: str
    """As in the file that defines it."""
    paper: str
    """The short name of its paper."""
    kind: str
    """A letter of `kinds`."""
    title: str
    """As shown, in our words."""


class Targets(Written):
    """Every table and figure of the papers that this project sets out to reproduce, in the papers' order."""

    papers: dict[str, str]
    """Titles of the papers by their short names."""
    kinds: dict[str, str]
    """What a target measures, by letter."""
    targets: Many[Target]
    """The targets."""

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        seen = set()
        for target in self.targets:
            lookup(self.papers, target.paper, f"targets.{target.id}.paper: unknown paper")
            lookup(self.kinds, target.kind, f"targets.{target.id}.kind: unknown kind")
            if target.id in seen:
                raise ValueError(f"targets.{target.id} occurs twice")
            seen.add(target.id)
        return self


def load_targets(root: Path) -> Targets:
    """Load config/targets.yaml, the list of the papers' tables and figures."""
    return parse(Targets, read_yaml(root / TARGETS), str(TARGETS))
