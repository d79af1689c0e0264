"""Whether a table's recipe fits the model of a slot: adapted to its sizes as presets are, or why it cannot run there.

The rules are the library's (`rotquant.models.fitting`, `rotquant.weights.build.check_recipe_for`), so that tables and
commands agree. They need a checkpoint's config.json alone; torch is imported only where a model is asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction.metrics.settings import Metric
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.hub import UNRESOLVED, settings_of
from rotquant.models.deltas import base_folder
from rotquant.models.folders import DELTA_CONFIG, is_delta
from rotquant.models.gguf.header import is_gguf
from rotquant.models.gguf.importing import described
from rotquant.recipes.recipe import Recipe

if TYPE_CHECKING:
    from rotquant.models.architectures import Architecture
    from rotquant.models.limits import ModelLimits


class Fitting(Frozen):
    """A recipe as it runs on a model.

    recipe: None where it cannot run there. sentence: what it became, or why it cannot; empty where it fits as it is.
    """

    recipe: Recipe | None
    sentence: str = ""


@dataclass(frozen=True)
class Known:
    """What earlier projects found out.

    fits: how recipes fit models, by the name that `Project.fitted` gives; None where they do as they are.
    models: layers and limits of checkpoints by their digests.
    """

    fits: Mapping[str, Fitting | None] = field(default_factory=dict)
    models: Mapping[str, tuple[Architecture, ModelLimits]] = field(default_factory=dict)


@functools.cache
def settings_folder(place: str, digest: str) -> Path | None:
    """The folder with a checkpoint's config.json; None where it is not here.

    Args:
        place: a folder, or a hub id. digest: the checkpoint's, which has the commit of a hub id.

    Raises:
        CheckpointError: low-rank deltas, or a GGUF file, are damaged.
    """
    local = is_gguf(place) or any((Path(place) / name).is_file() for name in ("config.json", DELTA_CONFIG))
    if digest.endswith(f"@{UNRESOLVED}") or not (local or "@" in digest):
        return None
    if local:
        base = base_folder(place)
        return None if base is None and is_delta(Path(place)) else described(base or place)
    file = settings_of(*digest.rsplit("@", 1))
    return file and file.parent


@functools.cache
def model_of(place: str, digest: str) -> tuple[Architecture, ModelLimits] | None:
    """Layers and limits of a checkpoint; None where it is not here, whose jobs then say what does not fit.

    Args:
        place, digest: see `settings_folder`.

    Raises:
        CheckpointError, UnsupportedArchitectureError: its config.json is damaged, or no adapter knows its family.
    """
    folder = settings_folder(place, digest)
    if folder is None:
        return None
    from rotquant.models.architectures import architecture_of
    from rotquant.models.checkpoints import load_config
    from rotquant.models.limits import ModelLimits

    config = load_config(folder)
    return architecture_of(config), ModelLimits.of(config)


def fit(
    recipe: Recipe, metric: Metric, model: tuple[Architecture, ModelLimits] | None, fixed: Collection[str]
) -> Fitting:
    """A recipe as it runs on a model and is measured there.

    Args:
        model: see `model_of`. fixed: fields of the rotation that the table's row says, which stay as they are.
    """
    if model is None:
        return Fitting(recipe=recipe)
    from rotquant.models.fitting import fitted
    from rotquant.models.limits import check_kept
    from rotquant.weights.build import check_recipe_for

    architecture, limits = model
    sentence = ""
    try:
        if not recipe.is_baseline:
            if "post_norms" in architecture.traits:  # what takes the place of a row's R1 is of the same kind
                fixed = {*fixed} - {"residual"}
            recipe, sentence = fitted(recipe, architecture, fixed)
            check_recipe_for(recipe, architecture, limits)
        for length, what in _lengths(recipe):
            limits.check_length(length, what)
        if (length := getattr(metric, "sequence_length", None)) is not None:  # tasks have none
            limits.check_length(length, "windows")
            check_kept(recipe, length)
    except RecipeError as error:
        return Fitting(recipe=None, sentence=_reason(str(error)))
    return Fitting(recipe=recipe, sentence=sentence)


def _reason(sentence: str) -> str:
    """A recipe's error without the options of a command, in whose place a slot has sizes of its own."""
    reason, _, options = sentence.partition(": take another method")[0].partition("; change the recipe, ")
    return (
        f"{reason.rstrip('.')}{'; set group_sizes or outlier_features of the slot' if 'group_size' in options else ''}."
    )


def _lengths(recipe: Recipe) -> Iterator[tuple[int, str]]:
    """Lengths in tokens of the texts that weights and rotations are made with, and what they are."""
    if recipe.needs_calibration and recipe.calibration is not None:
        yield recipe.calibration.sequence_length, "calibration samples"
    for name, method in recipe.methods.items():
        if method.own_text is not None:
            yield method.own_text.sequence_length, f"samples of {name}"
