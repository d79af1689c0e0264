"""Whether a recipe fits a model's sizes, and what stands in for a Hadamard matrix that none of them has.

Not every size has a Hadamard matrix here: no odd number of heads has one, nor 6, 10 or 14. A recipe then takes
what its rotation allows instead (`fitted`), but for fields that somebody chose for the model (`check_fits`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.models.transforms import features_at
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import ROTATION_FIELDS, RotationScheme
from rotquant.recipes.traits import TRAITS
from rotquant.recipes.transforms import Location, Transform, at
from rotquant.tensors.hadamard import is_supported

#: Where a recipe has the scheme of what has groups.
_GROUPS = {"weights": "weights.scheme", "activations": "activations"}
#: What the number of features at a location of a rotation is of the model.
_SIZES: dict[Location, str] = {
    "residual": "hidden size",
    "attention_input": "hidden size",
    "mlp_input": "hidden size",
    "values": "head dimension",
    "across_heads": "number of attention heads",
    "attention_output": "width of attention's output",
    "queries_keys": "head dimension",
    "mlp_output": "intermediate size",
}


@dataclass(frozen=True)
class Substitute:
    """Replacement of a field of `RotationScheme`, since a size of the model has no Hadamard matrix or its layers let
    no rotation pass.

    words: the size and what it is, such as "14 (number of attention heads)"; empty where it is the layers.
    """

    field: str
    value: Any
    words: str = ""


def substitutes(architecture: Architecture, transforms: Iterable[Transform]) -> tuple[Substitute, ...]:
    """Find replacements of the Hadamard matrices that a rotation needs and the model's sizes do not have.

    R1 and R2 become random orthogonal matrices (QuaRot Table 8), online transforms of the last axis block-diagonal. The
    transform across heads goes: R2 still turns each head, as in SpinQuant. So does R3, of a head dimension that no
    known model has.

    R1 becomes online transforms of what the linear layers read where a norm stands between a block's output and the
    residual stream. The norm's gain does not commute with a rotation, and no weight comes after it that could take the
    gain. They are Hadamard transforms, and matrices where R1 is learned or random orthogonal.
    """
    found = []
    for one in transforms:
        size = features_at(architecture, one.location)
        if one.location == "residual" and "post_norms" in architecture.traits:
            dense = one.kind == "orthogonal" or one.origin == "learned"
            scheme = RotationScheme.model_validate({"residual": "none", "inputs": one.kind if dense else "hadamard"})
            inputs = Substitute("inputs", scheme.inputs)
            found += [Substitute(ROTATION_FIELDS["R1"], "none"), inputs]
            found += substitutes(architecture, at(scheme.transforms, "attention_input"))
        elif one.name in ROTATION_FIELDS and "hadamard" in one.kind and one.size is None and not is_supported(size):
            value = _substitute(one, size)
            found.append(Substitute(ROTATION_FIELDS[one.name], value, f"{size} ({_SIZES[one.location]})"))
    return tuple({one.field: one for one in found}.values())


def _substitute(transform: Transform, size: int) -> Any:
    """The value of the field of a transform whose Hadamard matrix is missing."""
    if transform.name == "R4":
        return _largest_block(size)
    if transform.location in ("attention_input", "mlp_input"):
        return "orthogonal" if transform.tensors else _largest_block(size) or "orthogonal"
    return False if transform.online else "orthogonal"


def check_transforms(architecture: Architecture, transforms: Iterable[Transform]) -> None:
    """Raise `RecipeError` where a transform does not fit the model's sizes; call it before touching a weight."""
    transforms = tuple(transforms)
    found = substitutes(architecture, transforms)
    if found:
        changes = {f"rotation.{one.field}": one.value for one in found}
        raise RecipeError(f"{_missing(architecture, found)}; change the recipe, {options(changes)}.")
    for one in transforms:
        features = features_at(architecture, one.location)
        size = one.size or features
        if features % size or ("hadamard" in one.kind and not is_supported(size)):
            field = ROTATION_FIELDS.get(one.name)
            whole = {"mlp": True, "keys": True, "heads": features}.get(str(field), "hadamard")
            fitting = options({f"rotation.{field}": whole if is_supported(features) else _largest_block(features)})
            way = (
                f"change the recipe, {fitting}"
                if field in ("mlp", "inputs", "keys", "heads")
                else "choose a size that divides them"
            )
            raise RecipeError(f"{one.name} cannot have blocks of {size} of {features} features: {way}.")


def check_fits(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse a recipe whose rotations or groups do not fit a model's sizes, with all that has to change in one line.

    Raises:
        RecipeError: the sentence ends with the options to add to the command.
    """
    _check_traits(recipe, architecture)
    missing = substitutes(architecture, recipe.transforms)
    groups = tuple(_groups(recipe, architecture))
    if not groups:
        check_transforms(architecture, recipe.transforms)
        return
    problems = [_missing(architecture, missing)] if missing else []
    kept = {site.name: recipe.outlier_features(site.name, site.features) for site in architecture.sites}
    less = {name: f", less {number} outliers" if number else "" for name, number in kept.items()}
    widths = ", ".join(f"{site.features} of {site.name}{less[site.name]}" for site in architecture.sites)
    given = " and ".join(f"{size} of {what}" for what, size, _ in groups)
    problems.append(f"the group size {given} exceeds the inputs of some layers ({widths})")
    changes = {f"rotation.{one.field}": one.value for one in missing}
    changes |= {f"{_GROUPS[what]}.group_size": fitting for what, _, fitting in groups}
    raise RecipeError(f"{', and '.join(problems)}; change the recipe, {options(changes)}.")


def _check_traits(recipe: Recipe, architecture: Architecture) -> None:
    """Raise `RecipeError` where what the model's layers have is nothing for a method, with its reason."""
    for method in recipe.methods.values():
        for trait, reason in method.unsuited.items():
            if trait in architecture.traits:
                raise RecipeError(
                    f"the layers of this {architecture.family} model have {TRAITS[trait]}, and {method.title} {reason}."
                )


def fitted(recipe: Recipe, architecture: Architecture, fixed: Collection[str] = ()) -> tuple[Recipe, str]:
    """A recipe with substitutes for the Hadamard matrices that a model's sizes do not have, and a sentence on them.

    Args:
        recipe: a preset, perhaps with changes.
        fixed: fields of its rotation that somebody chose: they stay, and `check_fits` refuses what does not fit.

    Returns:
        The recipe, and what it became in one sentence; the empty one where it fits as it is.
    """
    found = tuple(one for one in substitutes(architecture, recipe.transforms) if one.field not in fixed)
    if "residual" in fixed and recipe.rotation is not None and recipe.rotation.residual != "none":
        found = tuple(one for one in found if one.field != "inputs")  # which would stand in for R1
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
    sizes = ", ".join(dict.fromkeys(one.words for one in found if one.words))
    problems = [f"has no Hadamard matrix of size {sizes}"] if sizes else []
    if any(not one.words for one in found):
        problems.insert(
            0,
            f"has {TRAITS['post_norms']}, whose gains let no rotation of the residual stream (R1) pass (online "
            "rotations of what q, k, v and gate, up read take its place)",
        )
    return f"this {architecture.family} model {', and '.join(problems)}"


def _largest_block(size: int) -> int | bool:
    """The largest divisor that has a Hadamard matrix; False where that is 1."""
    return next((size // count for count in range(1, size) if not size % count and is_supported(size // count)), False)


def _groups(recipe: Recipe, architecture: Architecture) -> Iterator[tuple[str, int, int]]:
    """Yield schemes with groups of more features than some input has: name, group size, least number of features."""
    widths = [site.features - recipe.outlier_features(site.name, site.features) for site in architecture.sites]
    if min(widths) <= 0:
        return  # the method that holds features out says so
    schemes = {"weights": recipe.weights and recipe.weights.scheme, "activations": recipe.activations}
    for what, scheme in schemes.items():
        if scheme and scheme.group_size and scheme.group_size > min(widths):
            yield what, scheme.group_size, min(widths)
