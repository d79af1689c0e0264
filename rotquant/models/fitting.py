"""Whether a recipe fits a model's sizes, and what stands in for a Hadamard matrix that none of them has.

Not every size has a Hadamard matrix here: no odd number of heads has one, nor 6, 10 or 14. A preset then takes what its
rotation allows instead (`fitted`); a recipe that somebody wrote is refused with all that would have to change.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.hadamard import is_supported

#: Where a recipe has the scheme of what has groups.
_GROUPS = {"weights": "weights.scheme", "activations": "activations"}


@dataclass(frozen=True)
class Substitute:
    """Replacement of a field of `RotationScheme`, since a size of the model has no Hadamard matrix.

    words: the size and what it is, such as "14 (number of attention heads)".
    """

    field: str
    value: Any
    words: str


def substitutes(architecture: Architecture, scheme: RotationScheme) -> tuple[Substitute, ...]:
    """Find replacements of the Hadamard matrices that `scheme` needs and the model's sizes do not have.

    R1 and R2 become random orthogonal matrices (QuaRot Table 8), R4 block-diagonal. The transform across heads goes:
    R2 still turns each head, as in SpinQuant. So does R3, of a head dimension that no known model has.
    """
    hidden, head, heads, mlp = (
        architecture.hidden_size,
        architecture.head_dim,
        architecture.num_heads,
        architecture.intermediate_size,
    )
    needed = (
        (scheme.residual == "hadamard", hidden, "hidden size", "residual", "orthogonal"),
        ("hadamard" in scheme.values, head, "head dimension", "values", "orthogonal"),
        (scheme.keys, head, "head dimension", "keys", False),
        (scheme.heads, heads, "number of attention heads", "heads", False),
        (scheme.mlp is True, mlp, "intermediate size", "mlp", _largest_block(mlp)),
    )
    return tuple(
        Substitute(field, value, f"{size} ({what})")
        for wanted, size, what, field, value in needed
        if wanted and not is_supported(size)
    )


def check_rotation(architecture: Architecture, scheme: RotationScheme) -> None:
    """Raise `RecipeError` where no Hadamard matrix is known that `scheme` needs; call it before touching a weight."""
    found = substitutes(architecture, scheme)
    if found:
        changes = {f"rotation.{one.field}": one.value for one in found}
        raise RecipeError(f"{_missing(architecture, found)}; change the recipe, {options(changes)}.")
    size, block = architecture.intermediate_size, scheme.mlp
    if not isinstance(block, bool) and (size % block or not is_supported(block)):
        fitting = options({"rotation.mlp": is_supported(size) or _largest_block(size)})
        raise RecipeError(f"R4 cannot have blocks of {block} of {size} features: change the recipe, {fitting}.")


def check_fits(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse a recipe whose rotations or groups do not fit a model's sizes, with all that has to change in one line.

    Raises:
        RecipeError: the sentence ends with the options to add to the command.
    """
    missing = substitutes(architecture, recipe.rotation) if recipe.rotation else ()
    groups = tuple(_groups(recipe, architecture))
    if not groups:
        if recipe.rotation is not None:
            check_rotation(architecture, recipe.rotation)
        return
    problems = [_missing(architecture, missing)] if missing else []
    widths = ", ".join(f"{site.features} of {site.name}" for site in architecture.sites)
    outliers = f", less {recipe.outlier_features} outliers" if recipe.outlier_features else ""
    given = " and ".join(f"{size} of {what}" for what, size, _ in groups)
    problems.append(f"the group size {given} exceeds the inputs of some layers ({widths}{outliers})")
    changes = {f"rotation.{one.field}": one.value for one in missing}
    changes |= {f"{_GROUPS[what]}.group_size": fitting for what, _, fitting in groups}
    raise RecipeError(f"{', and '.join(problems)}; change the recipe, {options(changes)}.")


def fitted(recipe: Recipe, architecture: Architecture, fixed: Collection[str] = ()) -> tuple[Recipe, str]:
    """A recipe with substitutes for the Hadamard matrices that a model's sizes do not have, and a sentence on them.

    Args:
        recipe: a preset, perhaps with changes.
        fixed: fields of its rotation that somebody chose: they stay, and `check_fits` refuses what does not fit.

    Returns:
        The recipe, and what it became in one sentence; the empty one where it fits as it is.
    """
    chosen = substitutes(architecture, recipe.rotation) if recipe.rotation else ()
    found = tuple(one for one in chosen if one.field not in fixed)
    if not found:
        return recipe, ""
    changes = {one.field: one.value for one in found}
    named = options({f"rotation.{field}": value for field, value in changes.items()})
    sentence = f"{_missing(architecture, found)}, so the recipe runs as with {named}."
    return override(recipe, {"rotation": changes}, "the recipe that fits the model"), sentence


def options(changes: Mapping[str, Any]) -> str:
    """Changes of a recipe as options of the command line: `--set rotation.heads=false --set rotation.mlp=128`."""
    words = {True: "true", False: "false", None: "null"}
    return " ".join(
        f"--set {path}={words[value] if value is None or isinstance(value, bool) else value}"
        for path, value in changes.items()
    )


def _missing(architecture: Architecture, found: Collection[Substitute]) -> str:
    sizes = ", ".join(dict.fromkeys(one.words for one in found))
    return f"this {architecture.family} model has no Hadamard matrix of size {sizes}"


def _largest_block(size: int) -> int | bool:
    """The largest divisor that has a Hadamard matrix; False where that is 1."""
    return next((size // count for count in range(1, size) if not size % count and is_supported(size // count)), False)


def _groups(recipe: Recipe, architecture: Architecture) -> Iterator[tuple[str, int, int]]:
    """Yield schemes with groups of more features than some input has: name, group size, least number of features."""
    widths = [site.features - recipe.outlier_features for site in architecture.sites]
    if min(widths) <= 0:
        return  # the method that holds features out says so
    schemes = {"weights": recipe.weights and recipe.weights.scheme, "activations": recipe.activations}
    for what, scheme in schemes.items():
        if scheme and scheme.group_size and scheme.group_size > min(widths):
            yield what, scheme.group_size, min(widths)
