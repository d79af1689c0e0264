"""How recipes fit models, and the layers of models, remembered from one plan to the next.

To find it out, torch, transformers and all methods are imported, which takes half of the time of a plan. It follows
from the recipe, the metric and the model, whose digest is its name, and from the code of the library.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from reproduction.identity.code import code_digest
from reproduction.run.plan import PLANS
from reproduction.tables.fitting import Fitting, Known
from rotquant.foundation.environment import versions
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import canonical_json, check_regular, short_hash, write_text
from rotquant.foundation.parsing import parse_json
from rotquant.models.architectures import Architecture
from rotquant.models.limits import ModelLimits
from rotquant.recipes.recipe import find_method
from rotquant.recipes.registry import method_names

_MODELS = TypeAdapter(dict[str, tuple[Architecture, ModelLimits]])


def read_fits(file: Path) -> Known:
    """What a file has; nothing where it is missing or damaged, since it is only found out anew."""
    with suppress(OSError, ValueError, AttributeError, LookupError, TypeError, RotquantError):
        check_regular(file)
        data = parse_json(file.read_bytes())
        fits = {name: None if one is None else Fitting.model_validate(one) for name, one in data["fits"].items()}
        return Known(fits, _MODELS.validate_python(data["models"]))
    return Known()


class KnownFits:
    """What is known of how recipes fit models, in a file named by the code that decides it."""

    def __init__(self, root: Path) -> None:
        methods = [find_method(name) for name in method_names()]
        modules = {module for method in methods for module in (method.__module__, method.actions)}
        code = code_digest("reproduction.tables.fitting", *sorted(modules))
        self._file = root / PLANS / f"{short_hash(canonical_json([code, versions()]))}.fits"
        self.known = read_fits(self._file)

    def write(self, fits: Mapping[str, Fitting | None], models: Mapping[str, tuple[Architecture, ModelLimits]]) -> None:
        """Write what is known and what was found, where that is more."""
        if not fits.keys() <= self.known.fits.keys():
            every = {**self.known.fits, **fits}
            data = {name: None if one is None else one.model_dump(mode="json") for name, one in every.items()}
            shapes = _MODELS.dump_python({**self.known.models, **models}, mode="json")
            write_text(self._file, json.dumps({"fits": data, "models": shapes}))
