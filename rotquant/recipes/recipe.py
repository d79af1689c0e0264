"""Recipes: everything that happens to a model, as validated data; and what a method of one is. Nothing here computes.

A recipe names methods and holds their settings (`Recipe.methods`). A method is one class in one module, whose instance
is its settings and what follows from them; what it does to a model are functions of the module that the class names
(`Method.actions`), which alone imports torch. Everything else (the weights stage, keys, pages, the command line) works
through these and knows no method.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from rotquant.foundation.data import Frozen, first_problem, merge
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import canonical_json
from rotquant.recipes.registry import find_class
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization
from rotquant.recipes.traits import Trait
from rotquant.recipes.transforms import Transform, at

#: Fields that act while the model runs; all others decide the stored weights.
RUNTIME_FIELDS = ("activations", "attention_output", "keys", "values")
#: What a method does to a model, in the order in which recipes act. A recipe has at most one method for each.
Role = Literal["rotations", "prefix", "transformation", "selection", "rounding", "scales"]
ROLES: tuple[Role, ...] = get_args(Role)
#: What two methods of one role would both do.
DOING: dict[Role, str] = {
    "rotations": "learn the rotations",
    "prefix": "choose the tokens before a text",
    "transformation": "change the same weights",
    "selection": "choose the features that stay in higher precision",
    "rounding": "round the weights",
    "scales": "choose the static scales",
}


class Budget(NamedTuple):
    """Text, steps and learning rates that a method has in a recipe.

    tokens: of the text that it reads or writes. steps: of learning, for each block or for the model; 0 where it learns
        nothing. seen: tokens that a step sees. rates: learning rates at the first step by the names of their fields.
    """

    tokens: int
    steps: int = 0
    seen: int = 0
    rates: tuple[tuple[str, float], ...] = ()


class Method(Frozen):
    """A method's settings, as frozen data with defaults and a string below each field, and what follows from them.

    The first paragraph of a subclass's docstring says in one sentence what it is and where it comes from. A disputed
    detail is a field: default as the paper says, alternative as its authors' code does. Of the hooks below a method
    overrides what it needs.

    name: in recipes; that of its module (or entry point).
    actions: the module with what it does to a model (`rotquant.weights.actions`): this one, or one of the same package.
    title: in sentences and in records of what each method cost.
    source: the paper, with section or equations.
    roles: what it does: `rotations` are learned before everything else, in a stage of its own; `prefix` of
        tokens in the KV cache, which all that follows sees; `transformation` of features or weights; `selection` of
        features that are kept in higher precision; `rounding` of weights, where it takes the place of round-to-nearest;
        static `scales`, in place of those that cover the calibration text.
    excludes: roles that no other method may have in the same recipe.
    calibrates: whether it reads the recipe's calibration text.
    seeded: whether the run's seed changes what it does, in addition to the calibration sample, which it always draws.
    scaled: fields that are the paper's numbers for its widths, and the section of a slot that maps them.
    groups: the section of a slot that maps the paper's group size of the weights that the method rounds.
    stored_as: of a method that rounds, how weights are stored: `integers` with scales, codes of a `lattice`, or codes
        into a `codebook` for each group.
    rates: fields that are learning rates, where it has them; with `steps` and `batch_size` they say how it learns.
    acts_at_run_time: whether its module has `runtime` or `attach`.
    inverts: whether it inverts X^T X, the second moments of each site's inputs: to spread errors of rounding by it, or
        for matrices that it stores.
    mixes: the field with the number of features that each of its matrices mixes, which is a group of 4-bit floats.
    clipping: how it chooses clips of weights, where the settings do not change that: `clips_weights`.
    quantized_inputs: whether it always learns with the quantizers of activations and KV cache at work.
    fp4: settings that it needs where weights and inputs are 4-bit floats; None where it knows integers alone.
    short: what of a method that learns is set lower where there is little time: enough to try it, and not its result.
    reads: how it takes the text through a layer, which decides what a plan counts: to all of its `sites` one after the
        other, with inputs of o_proj and down_proj kept, or to the whole layer at once. None: sites where it rounds.
    """

    name: ClassVar[str]
    actions: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    roles: ClassVar[frozenset[Role]]
    excludes: ClassVar[frozenset[Role]] = frozenset()
    calibrates: ClassVar[bool] = False
    seeded: ClassVar[bool] = False
    scaled: ClassVar[Mapping[str, str]] = {}
    groups: ClassVar[str] = "group_sizes"
    stored_as: ClassVar[Literal["integers", "lattice", "codebook"]] = "integers"
    rates: ClassVar[tuple[str, ...]] = ("learning_rate",)
    acts_at_run_time: ClassVar[bool] = False
    quantized_inputs: ClassVar[bool] = False
    fp4: ClassVar[Mapping[str, Any] | None] = None
    short: ClassVar[Mapping[str, Any]] = {}
    reads: ClassVar[Literal["sites", "layers"] | None] = None
    inverts: ClassVar[bool] = False
    mixes: ClassVar[str | None] = None
    clipping: ClassVar[str | None] = None

    @classmethod
    def defect(cls) -> str | None:
        """Describe what a class lacks to be a method, as the end of a sentence; None where it is one."""
        missing = [name for name in ("name", "actions", "title", "source", "roles") if not hasattr(cls, name)]
        if missing:
            return f"does not say its {missing[0]}: set {cls.__name__}.{missing[0]}."
        if not cls.roles or not cls.roles <= set(ROLES):
            return f"has the roles {sorted(cls.roles)}: known are {', '.join(ROLES)}."
        return None

    @property
    def first_role(self) -> Role:
        """The first of its roles: when it acts."""
        return min(self.roles, key=ROLES.index)

    @classmethod
    def of(cls, recipe: "Recipe") -> Self:
        """Return the settings of this method in a recipe.

        Raises:
            RecipeError: it has no such method.
        """
        method = recipe.methods.get(cls.name)
        if not isinstance(method, cls):
            raise RecipeError(f"the recipe has no method {cls.name}: set methods.{cls.name}.")
        return method

    def check(self, recipe: "Recipe") -> None:
        """Raise ValueError, one sentence that names the field, where the method does not fit the rest of a recipe."""

    def refuse_clip_search(self, recipe: "Recipe") -> None:
        """Raise ValueError where clip search is on (called by `check`): the method clips weights itself."""
        if recipe.rounded.clip_search:
            raise ValueError(f"{self.name} rounds weights in its own way: set weights.clip_search to false")

    def refuse_rotated_inputs(self, recipe: "Recipe") -> None:
        """Raise ValueError where what norms give is transformed online (called by `check`): the method divides its
        features by the norms' gains, before the transform, and multiplies the weights' after it."""
        if at(recipe.transforms, "attention_input", "mlp_input", online=True):
            raise ValueError(f"{self.name} scales features that rotation.inputs mixes: set that to none")

    def refuse_static(self, recipe: "Recipe") -> None:
        """Raise ValueError where activations have static scales, which come after the method (called by `check`)."""
        if recipe.has_static_scales:
            raise ValueError(f"{self.name} needs dynamic activations: static scales come after it")

    def refuse_asymmetric_static(self, recipe: "Recipe") -> None:
        """Raise ValueError where static scales of activations are not symmetric (called by `check`)."""
        scheme = recipe.activations
        if scheme is not None and not (scheme.dynamic or scheme.symmetric):
            raise ValueError(f"{self.name} finds symmetric static scales: set activations.symmetric to true")

    def refuse_nothing_to_learn(self, recipe: "Recipe") -> None:
        """Raise ValueError where no rotation has a matrix (called by `check`): the method learns those."""
        if recipe.rotation is None or not any(one.tensors for one in recipe.rotation.transforms):
            raise ValueError(
                f"{self.name} needs rotation.residual or rotation.values, or random_hadamard or orthogonal "
                "rotation.inputs: there is no rotation to learn"
            )

    def refuse_ragged_groups(self, recipe: "Recipe", widths: Mapping[str, int]) -> None:
        """Raise RecipeError where groups do not divide the features of every site (called by `check_widths`): a
        codebook serves whole groups."""
        size = recipe.rounded.scheme.group_size
        for site, features in widths.items():
            if size is not None and features % size:
                raise RecipeError(
                    f"{self.name}: groups of {size} do not divide the {features} features of {site}: choose "
                    "weights.scheme.group_size among their divisors, or granularity channel."
                )

    @property
    def unsuited(self) -> Mapping[Trait, str]:
        """What a model's layers may have that makes the method senseless or impossible, each with the mathematical
        reason, the end of a sentence; a model whose layers have it is refused. What is refused for sizes or settings is
        `check_model`'s business."""
        return {}

    @property
    def prefix_tokens(self) -> int:
        """How many tokens it puts before every text at most, or as many as there is room for where it finds out; 0
        without the role `prefix`."""
        return 0

    @property
    def sees_quantizers(self) -> bool:
        """Whether what it stores depends on the quantizers of activations and KV cache."""
        return self.quantized_inputs

    def outlier_features(self, site: str, features: int) -> int:
        """How many of a site's input features the recipe's schemes leave to this method."""
        return 0

    @property
    def own_text(self) -> Calibration | None:
        """Text that it reads in addition to the recipe's calibration: its field `text`, if it has one."""
        return getattr(self, "text", None)

    def budget(self, recipe: "Recipe") -> Budget:
        """Text, steps and learning rates of the method in a recipe: its own text or the calibration text, and how it
        learns."""
        text = self.own_text or (recipe.calibration if self.calibrates else None)
        return Budget(0) if text is None else self._budget(text.samples, text.sequence_length)

    @property
    def written(self) -> tuple[int, int] | None:
        """Sequences that the model writes to train on, and the tokens of each; None where it writes none."""
        return None

    def _budget(self, samples: int, length: int) -> Budget:
        """Make the budget of a text of so many samples, each of so many tokens."""
        seen = getattr(self, "batch_size", 0) * length
        rates = tuple((name, getattr(self, name)) for name in self.rates if name in type(self).model_fields)
        return Budget(samples * length, getattr(self, "steps", 0), seen, rates)

    def describe(self, recipe: "Recipe") -> str:
        """All of its settings in words, for pages; by default the title and every field."""
        fields = [f"{name.replace('_', ' ')} {value}" for name, value in self.model_dump(mode="json").items()]
        return ", ".join([self.title, *fields])

    def clips_weights(self, recipe: "Recipe") -> str | None:
        """How the share of a weight's range that is kept is chosen, in a word; None where it does not."""
        return self.clipping

    def orders_columns(self, recipe: "Recipe", behind_norm: bool) -> bool:
        """Whether it stores an order of the columns with each weight, of those that read a norm or of the others."""
        return False

    def reorders(self, recipe: "Recipe") -> bool:
        """Whether it stores an order of the columns with any weight."""
        return any(self.orders_columns(recipe, behind_norm) for behind_norm in (True, False))

    def codebook_entries(self, recipe: "Recipe") -> int:
        """How many levels of a table are stored, from which the others follow: all, unless a method knows better."""
        return 2**recipe.rounded.scheme.bits

    @classmethod
    def presets(cls) -> "Mapping[str, Callable[[], Recipe]]":
        """Recipes that come with the method, by name: functions whose docstring says what they are."""
        return {}

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether the stored weights alone compute another function than with what acts at run time, quantizers apart.

        Such weights cannot be exported as an ordinary checkpoint.
        """
        return self.acts_at_run_time

    def check_widths(self, recipe: "Recipe", widths: Mapping[str, int]) -> None:
        """Raise RecipeError where it does not fit linear layers of these input features, by the name of their site."""

    def learns_from(self, recipe: "Recipe") -> dict[str, Any]:
        """Data that decide the learned rotations, other than the recipe's rotation, its quantizers of activations and
        KV cache and these settings."""
        return {}


class Recipe(Frozen):
    """Everything that is done to a model. A section left at null is not done; the empty recipe is the baseline.

    Weights see the effect of all that comes before: rotation, then the methods in the order of their roles
    (`ROLES`).
    """

    rotation: RotationScheme | None = None
    """Rotate the residual stream, with norms fused into the linear layers, and values, keys and the MLP's products."""
    methods: Mapping[str, SerializeAsAny[Method]] = Field(default_factory=dict)
    """Methods by their names, with the settings of each; at most one method for each role."""
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
        return dict(sorted(chosen.items(), key=lambda item: ROLES.index(item[1].first_role)))

    @model_validator(mode="after")
    def _schemes_fit_together(self) -> "Recipe":
        if self.weights and self.weights.scheme.granularity not in ("tensor", "channel", "group"):
            raise ValueError("weights take granularity tensor, channel or group")
        if self.activations and self.activations.granularity not in ("tensor", "token", "group"):
            raise ValueError("activations take granularity tensor, token or group")
        if self.attention_output and self.activations is None:
            raise ValueError("attention_output takes the place of activations at one site: it needs that section")
        if self.attention_output and not (
            self.attention_output.dynamic and self.attention_output.granularity == "head"
        ):
            raise ValueError("attention_output takes granularity head and dynamic scales")
        vllm = {name for name, scheme in self.quantizers.items() if scheme is not None and scheme.rule == "vllm"}
        if vllm - {"keys", "values"} or (self.weights and self.weights.scheme.rule == "vllm"):
            raise ValueError("rule vllm is for keys and values alone")
        if "keys" in vllm and self.rotation is not None and self.rotation.keys:
            raise ValueError("keys of rule vllm are turned by vLLM's own transform: set rotation.keys to false")
        self._check_kept()
        self._check_floats()
        return self

    def _check_kept(self) -> None:
        """Refuse tokens that stay in full precision where there is no cache, or one half of it has others."""
        kept = {
            name: scheme.kept for name, scheme in self.quantizers.items() if scheme is not None and any(scheme.kept)
        }
        if kept.keys() - {"keys", "values"} or (self.weights and any(self.weights.scheme.kept)):
            raise ValueError("kept_first and kept_recent are for keys and values alone")
        if kept and self.keys and self.values and self.keys.kept != self.values.kept:
            raise ValueError("keys and values keep the same tokens: give both kept_first and kept_recent")
        if kept and self.has_role("prefix"):
            raise ValueError("a prefix stays in full precision by itself: set kept_first and kept_recent to 0")

    def _check_floats(self) -> None:
        """Refuse codes that are floats where something knows integers alone."""
        floats = {name for name, scheme in self.quantizers.items() if scheme is not None and scheme.type == "float"}
        if floats - {"activations"}:
            raise ValueError(
                f"{min(floats - {'activations'})} take type int: type float is for weights and activations"
            )
        schemes = [scheme for scheme in (self.weights and self.weights.scheme, self.activations) if scheme]
        if len({(scheme.type, scheme.fp4) for scheme in schemes}) > 1:
            raise ValueError("weights and activations take one type, int or float, and of 4-bit floats one group_size")
        if self.attention_output and floats:
            raise ValueError("attention_output knows integers alone: leave it out, or set type to int")
        unable = [
            name for name, one in self.methods.items() if one.fp4 is None or not any(scheme.fp4 for scheme in schemes)
        ]
        if any(scheme.type == "float" for scheme in schemes) and unable:
            raise ValueError(f"{unable[0]} knows integers alone: leave it out, or set type to int")

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
        """Hash of the recipe's data: `methods`, a mapping, has no hash of its own."""
        return hash(canonical_json(self.model_dump(mode="json")))

    @property
    def learner(self) -> Method | None:
        """The method that learns the rotations in a stage of its own, None where they are as drawn."""
        return next((method for method in self.methods.values() if "rotations" in method.roles), None)

    @property
    def learned_by(self) -> tuple[Method, Calibration | None]:
        """The method that learns the rotations and the text that it reads, if any, in a recipe that has such a
        method."""
        if self.learner is None:
            raise ValueError("no method of the recipe learns rotations")
        return self.learner, self.learner.own_text

    @property
    def rounded(self) -> WeightQuantization:
        """The section of weights, for a method that rounds these and whose recipe therefore has one."""
        if self.weights is None:
            raise ValueError("the recipe has no weights section")
        return self.weights

    @property
    def runtime(self) -> dict[str, Any]:
        """What acts while the model runs, methods apart: transforms and quantizers, by the names of the fields here and
        in `RuntimeQuantization`."""
        return {"transforms": self.transforms, **self.quantizers}

    @property
    def quantizers(self) -> dict[str, Any]:
        """The quantizers that act while the model runs, by their names here and in `RuntimeQuantization`."""
        return {name: getattr(self, name) for name in RUNTIME_FIELDS}

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them: `RotationScheme.residual`."""
        return self.rotation is not None and self.rotation.fuses_norms

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The rotation's transforms. Those that methods add stand in `RuntimeQuantization.transforms`."""
        drawn = () if self.rotation is None else self.rotation.transforms
        learned = {"origin": "learned"} if self.learner else {}
        return tuple(one.model_copy(update=learned) if one.tensors else one for one in drawn)

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
        """Texts that methods read in addition to the calibration text while weights are made, by their names."""
        makers = (method for method in self.methods.values() if method is not self.learner)
        return {method.name: method.own_text for method in makers if method.own_text is not None}

    @property
    def reads_text(self) -> bool:
        """Whether applying the recipe reads any text."""
        return self.needs_calibration or any(method.own_text is not None for method in self.methods.values())

    @property
    def prefix_tokens(self) -> int:
        """How many tokens a method puts before every text, at most; 0 where none does."""
        return sum(method.prefix_tokens for method in self.methods.values())

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that is read while weights are made."""
        texts = [*self.own_texts.values(), *filter(None, [self.calibration])]
        return max((text.sequence_length for text in texts), default=1)

    def outlier_features(self, site: str, features: int) -> int:
        """How many of a site's input features the schemes of weights and activations leave to a method."""
        return sum(method.outlier_features(site, features) for method in self.methods.values())

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


@functools.cache
def find_method(name: str) -> type[Method]:
    """The method of a name.

    Raises:
        RecipeError: there is none (the sentence lists the nearest), or the package that registers it has a defect.
    """
    return find_class(name, Method)


_adapter = functools.cache(TypeAdapter)


def settings_by_name(data: Any, kind: Callable[[type[Method]], Any]) -> Any:
    """Validate methods that are given by their names, each as its `kind`; null leaves a method out.

    Args:
        data: settings by name; those that are a method already stay. What is no mapping is left to pydantic.
        kind: the type that a method's settings are validated as.

    Raises:
        RecipeError: an unknown method.
        ValidationError: a setting is unknown or impossible; its place begins with the method's name.
    """
    if not isinstance(data, Mapping):
        return data
    found, problems = {}, []
    for name, settings in data.items():
        try:
            if settings is not None:
                method = kind(find_method(name))
                found[name] = settings if isinstance(settings, Method) else _adapter(method).validate_python(settings)
        except ValidationError as error:
            problems += [_placed(name, problem) for problem in error.errors()]
    if problems:
        raise ValidationError.from_exception_data("methods", problems)
    return found


def _placed(name: str, problem: ErrorDetails) -> InitErrorDetails:
    """A problem in pydantic's words, with a name before its place."""
    context = {**problem.get("ctx", {}), "message": problem["msg"]}
    error = PydanticCustomError(problem["type"], "{message}", context)  # pyright: ignore[reportArgumentType]  # a literal
    return InitErrorDetails(type=error, loc=(name, *problem["loc"]), input=problem["input"])


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
    return parse_recipe(functools.reduce(merge, changes, recipe.model_dump(mode="json")), where)


def check_widths(recipe: Recipe, widths: Mapping[str, int]) -> None:
    """Refuse, before any work, settings that leave no normal features, or groups of more features than there are.

    Args:
        widths: input features of the linear layers by the name of their site.

    Raises:
        RecipeError: naming the site, its features and what would fit.
    """
    for method in recipe.methods.values():
        method.check_widths(recipe, widths)
    schemes = {"weights": recipe.weights and recipe.weights.scheme, "activations": recipe.activations}
    for site, features in widths.items():
        outliers = recipe.outlier_features(site, features)
        remaining = f" that remain next to {outliers} outliers" if outliers else ""
        for name, scheme in schemes.items():
            normal = features - outliers
            if scheme and scheme.group_size and scheme.group_size > normal:
                raise RecipeError(
                    f"the group size {scheme.group_size} of {name} exceeds the {normal} "
                    f"features of {site}{remaining}: choose {normal} or fewer."
                )
