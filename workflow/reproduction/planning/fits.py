"""How recipes fit models, remembered from one plan to the next.

To find it out, torch, transformers and all methods are imported, which takes half of the time of a plan. It follows
from the recipe, the metric and the model, whose digest is its name, and from the code of the library.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from reproduction.identity.code import code_digest
from reproduction.run.plan import PLANS
from reproduction.tables.fitting import Fitting
from rotquant.foundation.environment import versions
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text
from rotquant.foundation.parsing import parse_json
from rotquant.recipes.recipe import find_method
from rotquant.recipes.registry import method_names


def read_fits(file: Path) -> dict[str, Fitting | None]:
    """What a file has, by name; nothing where it is missing or damaged, since it is only found out anew."""
    with suppress(OSError, ValueError, AttributeError, RotquantError):
        check_regular(file)
        data = parse_json(file.read_bytes())
        return {name: None if one is None else Fitting.model_validate(one) for name, one in data.items()}
    return {}


class KnownFits:
    """What is known of how recipes fit models, in a file named by the code that decides it."""

    def __init__(self, root: Path) -> None:
        methods = [find_method(name) for name in method_names()]
        modules = {module for method in methods for module in (method.__module__, method.actions)}
        code = code_digest("reproduction.tables.fitting", *sorted(modules))
        self._file = root / PLANS / f"{short_hash(canonical_json([code, versions()]))}.fits"
        self.found = read_fits(self._file)

    def write(self, found: Mapping[str, Fitting | None]) -> None:
        """Write what is known and what was found, where that is more."""
        if not found.keys() <= self.found.keys():
            every = {**self.found, **found}
            data = {name: None if one is None else one.model_dump(mode="json") for name, one in every.items()}
            write_text(self._file, json.dumps(data))
