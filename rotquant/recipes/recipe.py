"""Recipes: everything that happens to a model, as validated data. Nothing here computes."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from rotquant.foundation.data import Frozen, first_problem, merge
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import canonical_json
from rotquant.recipes.method import DOING, ROLES, Method, Role
from rotquant.recipes.registry import settings_by_name
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization

#: Fields that act while the model runs; all others decide the stored weights.
RUNTIME_FIELDS = ("activations", "attention_output", "keys", "values")


class Recipe(Frozen):
    """Everything that is done to a model. A section left at null is not done; the empty recipe is the baseline.

    Weights see the effect of all that comes before: rotation, then the methods in the order of their roles
    (`rotquant.recipes.method`).
    """

    rotation: RotationScheme | None = None
    """Rotate the residual stream, with norms fused into the linear layers, and values, keys and the MLP's products."""
    methods: Mapping[str, SerializeAsAny[Method]] = Field(default_factory=dict)
    """What else is done, by the names of methods and with the settings of each; at most one method for each role."""
    weights: WeightQuantization | None = None
    """Quantize the weights of all linear layers but lm_head, to nearest where no method rounds them."""
    activations: QuantizationScheme | None = None
    """Quantize the input of every linear layer but lm_head."""
    attention_output: QuantizationScheme | None = None
    """Quantize the input of o_proj so, in place of `activations`."""
    keys: QuantizationScheme | None = None
    """Quantize the keys of the KV cache, after RoPE and R3."""
    values: QuantizationScheme | None = None
    """Quantize the values of the KV cache, at v_proj's output."""
    calibration: Calibration | None = None
    """The text that methods which calibrate read."""

    @field_validator("methods", mode="before")
    @classmethod
    def _methods_are_known(cls, data: Any) -> Any:
        """Settings become their methods', in the order in which these act; null leaves a method out."""
        chosen = settings_by_name(data, lambda method: method)
        if not isinstance(chosen, dict):
            return chosen
        return dict(sorted(chosen.items(), key=lambda item: ROLES.index(item[1].turn)))

    @model_validator(mode="after")
    def _schemes_fit_together(self) -> "Recipe":
        if self.weights and self.weights.scheme.granularity not in ("tensor", "channel", "group"):
            raise ValueError("weights take granularity tensor, channel or group")
        if self.weights and self.weights.scheme.zero_point != "whole":
            raise ValueError("weights take zero_point whole, which is how they are stored")
        if self.activations and self.activations.granularity not in ("tensor", "token", "group"):
            raise ValueError("activations take granularity tensor, token or group")
        if self.attention_output and self.activations is None:
            raise ValueError("attention_output takes the place of activations at one site: it needs that section")
        if self.attention_output and not (
            self.attention_output.dynamic and self.attention_output.granularity == "head"
        ):
            raise ValueError("attention_output takes granularity head and dynamic scales")
        return self

    @model_validator(mode="after")
    def _methods_fit_together(self) -> "Recipe":
        for role in ROLES:
            first, *others = [name for name, method in self.methods.items() if role in method.roles] or [""]
            if others:
                raise ValueError(f"{first} and {others[0]} both {DOING[role]}: choose one")
        for name, method in self.methods.items():
            for other in self.methods.values():
                if other is not method and other.roles & method.excludes:
                    raise ValueError(f"{name} cannot be combined with {other.name}: leave one of them out")
            if "rounding" in method.roles and self.weights is None:
                raise ValueError(f"{name} rounds weights: it needs a weights section, or leave methods.{name} out too")
            method.check(self)
        if self.calibration is None and self.needs_calibration:
            readers = (name for name, method in self.methods.items() if method.calibrates)
            raise ValueError(f"{next(readers, 'static activations')} needs a calibration section")
        return self

    def __hash__(self) -> int:
        """Of the data: `methods`, a mapping, has no hash of its own."""
        return hash(canonical_json(self.model_dump(mode="json")))

    @property
    def learner(self) -> Method | None:
        """The method that learns the rotations in a stage of its own, None where they are as drawn."""
        return next((method for method in self.methods.values() if "rotations" in method.roles), None)

    @property
    def learned_by(self) -> tuple[Method, Calibration]:
        """The method that learns the rotations and the text that it reads, in a recipe that has such a method."""
        if self.learner is None or self.learner.own_text is None:
            raise ValueError("no method of the recipe learns rotations from a text")
        return self.learner, self.learner.own_text

    @property
    def rounded(self) -> WeightQuantization:
        """The section of weights, for a method that rounds these and whose recipe therefore has one."""
        if self.weights is None:
            raise ValueError("the recipe has no weights section")
        return self.weights

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them: `RotationScheme.residual`."""
        return self.rotation is not None and self.rotation.fuses_norms

    @property
    def has_static_scales(self) -> bool:
        """Whether activations or KV cache have scales that are stored with the weights."""
        schemes = (self.activations, self.keys, self.values)
        return any(scheme is not None and not scheme.dynamic for scheme in schemes)

    def has_role(self, role: Role) -> bool:
        """Whether a method of the recipe has a role."""
        return any(role in method.roles for method in self.methods.values())

    @property
    def needs_calibration(self) -> bool:
        """Whether building the weights reads calibration text."""
        covered = self.has_static_scales and not self.has_role("scales")
        return covered or any(method.calibrates for method in self.methods.values())

    @property
    def own_texts(self) -> dict[str, Calibration]:
        """Texts that methods read beside the calibration text while weights are made, by their names."""
        makers = (method for method in self.methods.values() if method is not self.learner)
        return {method.name: method.own_text for method in makers if method.own_text is not None}

    @property
    def held_out(self) -> int:
        """How many input features of every linear layer the schemes of weights and activations leave to a method."""
        return sum(method.held_out for method in self.methods.values())

    @property
    def is_baseline(self) -> bool:
        """Whether the model is left as it is."""
        return self == Recipe()

    @property
    def is_random(self) -> bool:
        """Whether the run's seed changes the result.

        It draws the rotation, the calibration sample, and what methods draw: their text and its order, signs.
        """
        drawn = self.rotation is not None and self.rotation.is_random
        return drawn or self.needs_calibration or any(method.seeded for method in self.methods.values())

    def stored(self) -> dict[str, Any]:
        """The part that decides the stored weights, as plain data.

        What acts at run time counts where scales of it are stored, or a method sees it (`Method.sees_quantizers`).
        """
        seen = self.has_static_scales or any(method.sees_quantizers for method in self.methods.values())
        return self.model_dump(mode="json", exclude=set() if seen else set(RUNTIME_FIELDS))

    def learned(self) -> dict[str, Any]:
        """The part that decides learned rotations, as plain data: every quantizer of the network they are learned on.

        How weights are quantized counts only where the learning method says so (`Method.learns_from`), so that
        weights of several methods and widths share rotations.
        """
        part = self.model_dump(mode="json", include={"rotation", *RUNTIME_FIELDS})
        if self.learner is None:
            return part
        settings = {self.learner.name: self.learner.model_dump(mode="json")}
        return part | {"methods": settings} | self.learner.learns_from(self)


def parse_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Validate recipe data, turning pydantic's report into one sentence that names the first offending field."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error)}.") from None


def override(recipe: Recipe, changes: dict[str, Any], where: str) -> Recipe:
    """A recipe with nested changes, e.g. {"weights": {"scheme": {"bits": 3}}, "rotation": None}.

    A mapping changes the named fields of a section and creates the section where the recipe has none; None removes it.

    Raises:
        RecipeError: an unknown field or an impossible value; the sentence starts with `where`.
    """
    return override_all(recipe, [changes], where)


def override_all(recipe: Recipe, changes: Iterable[dict[str, Any]], where: str) -> Recipe:
    """A recipe with several changes, one after the other; only the last has to leave a valid recipe. See `override`."""
    return parse_recipe(reduce(merge, changes, recipe.model_dump(mode="json")), where)


def check_widths(recipe: Recipe, widths: Mapping[str, int]) -> None:
    """Refuse, before any work, settings that leave no normal features, or groups of more features than there are.

    Args:
        widths: input features of the linear layers by the name of their site.

    Raises:
        RecipeError: naming the site, its features and what would fit.
    """
    for method in recipe.methods.values():
        method.check_widths(recipe, widths)
    beside = f" that remain beside {recipe.held_out} outliers" if recipe.held_out else ""
    schemes = {"weights": recipe.weights and recipe.weights.scheme, "activations": recipe.activations}
    for site, features in widths.items():
        for name, scheme in schemes.items():
            normal = features - recipe.held_out
            if scheme and scheme.group_size and scheme.group_size > normal:
                raise RecipeError(
                    f"the group size {scheme.group_size} of {name} exceeds the {normal} "
                    f"features of {site}{beside}: choose {normal} or fewer."
                )
