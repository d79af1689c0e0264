"""What a method is: one class in one module, whose instance is its settings and knows all that the project asks of it.

A recipe names methods and holds their settings (`Recipe.methods`); `rotquant.recipes.registry` finds a method by its
name. Everything else (the weights stage, keys, pages, the command line) works through this class and knows no method.
A method's module imports torch inside of functions only, since tables are expanded without it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, get_args

from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import RecipeError
from rotquant.recipes.schemes import Calibration

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rotquant.models.architectures import Architecture
    from rotquant.models.limits import Limits
    from rotquant.models.rotation.matrices import Learned
    from rotquant.models.simulation.wrapping import Handle, Wrapping
    from rotquant.recipes.recipe import Recipe
    from rotquant.weights.stage import Stage

#: What a method does to a model, in the order in which recipes act. A recipe has at most one method for each.
Role = Literal["rotations", "prefix", "transformation", "selection", "rounding", "scales"]
ROLES: tuple[Role, ...] = get_args(Role)
#: What two methods of one role would both do.
DOING: dict[Role, str] = {
    "rotations": "learn the rotations",
    "prefix": "choose the tokens before a text",
    "transformation": "change the same weights",
    "selection": "choose the features that are kept",
    "rounding": "round the weights",
    "scales": "choose the static scales",
}


class Effort(NamedTuple):
    """What a method is given in a recipe.

    tokens: of the text that it reads or writes. steps: of learning, for each block or for the model; 0 where it learns
        nothing. seen: tokens that a step sees. rates: learning rates at the first step by the names of their fields.
    """

    tokens: int
    steps: int = 0
    seen: int = 0
    rates: tuple[tuple[str, float], ...] = ()


class Method(Frozen):
    """A method's settings, as frozen data with defaults and a string below each field, and what it does with them.

    The first paragraph of a subclass's docstring says in one sentence what it is and where it comes from. A disputed
    detail is a field: default as the paper says, alternative as its authors' code does. Of the hooks below a method
    overrides what it needs.

    name: in recipes; that of its module (or entry point).
    title: in sentences and in records of what each method cost.
    source: the paper, with section or equations.
    roles: what it does: `rotations` are learned before everything else, in a stage of its own (`learn`); `prefix` of
        tokens in the KV cache, which all that follows sees; `transformation` of features or weights; `selection` of
        features that are kept in higher precision; `rounding` of weights, where it takes the place of round-to-nearest;
        static `scales`, in place of those that cover the calibration text.
    excludes: roles that no other method may have beside it.
    calibrates: whether it reads the recipe's calibration text.
    seeded: whether the run's seed changes what it does, beside the calibration sample, which it always draws.
    scaled: fields that are the paper's numbers for its widths, and the section of a slot that maps them.
    groups: the section of a slot that maps the paper's group size of the weights that the method rounds.
    stored_as: of a method that rounds, how weights are stored: `integers` with scales, codes of a `lattice`, or codes
        into tables of `levels`.
    rates: fields that are learning rates, where it has them; with `steps` and `batch_size` they say how it learns.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    roles: ClassVar[frozenset[Role]]
    excludes: ClassVar[frozenset[Role]] = frozenset()
    calibrates: ClassVar[bool] = False
    seeded: ClassVar[bool] = False
    scaled: ClassVar[Mapping[str, str]] = {}
    groups: ClassVar[str] = "group_sizes"
    stored_as: ClassVar[Literal["integers", "lattice", "levels"]] = "integers"
    rates: ClassVar[tuple[str, ...]] = ("learning_rate",)

    @classmethod
    def entry(cls) -> str:
        """Where its code begins, `module:class`: by it a result's digest of code covers the method."""
        return f"{cls.__module__}:{cls.__name__}"

    # In a recipe

    @property
    def turn(self) -> Role:
        """The first of its roles: when it acts."""
        return min(self.roles, key=ROLES.index)

    @classmethod
    def of(cls, recipe: "Recipe") -> Self:
        """These settings in a recipe.

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
        """For `check`: raise ValueError where clip search is on: the method clips weights itself."""
        if recipe.rounded.clip_search:
            raise ValueError(f"{self.name} rounds weights in its own way: set weights.clip_search to false")

    def refuse_static(self, recipe: "Recipe") -> None:
        """For `check`: raise ValueError where activations have static scales, which come after the method."""
        if recipe.has_static_scales:
            raise ValueError(f"{self.name} needs dynamic activations: static scales come after it")

    def refuse_asymmetric_static(self, recipe: "Recipe") -> None:
        """For `check`: raise ValueError where static scales of activations are not symmetric."""
        scheme = recipe.activations
        if scheme is not None and not (scheme.dynamic or scheme.symmetric):
            raise ValueError(f"{self.name} finds symmetric static scales: set activations.symmetric to true")

    @property
    def sees_quantizers(self) -> bool:
        """Whether what it stores depends on the quantizers of activations and KV cache."""
        return False

    @property
    def held_out(self) -> int:
        """How many input features of every linear layer the recipe's schemes leave to this method."""
        return 0

    @property
    def own_text(self) -> Calibration | None:
        """Text that it reads beside the recipe's calibration: its field `text`, if it has one."""
        return getattr(self, "text", None)

    def effort(self, recipe: "Recipe") -> Effort:
        """What it is given: its own text or the calibration text, and how it learns."""
        text = self.own_text or (recipe.calibration if self.calibrates else None)
        return Effort(0) if text is None else self.given(text.samples, text.sequence_length)

    def given(self, samples: int, length: int) -> Effort:
        """For `effort`: with a text of this many samples of this length in tokens."""
        seen = getattr(self, "batch_size", 0) * length
        rates = tuple((name, getattr(self, name)) for name in self.rates if name in type(self).model_fields)
        return Effort(samples * length, getattr(self, "steps", 0), seen, rates)

    def words(self, recipe: "Recipe") -> str:
        """All of its settings in words, for pages; by default the title and every field."""
        fields = [f"{name.replace('_', ' ')} {value}" for name, value in self.model_dump(mode="json").items()]
        return ", ".join([self.title, *fields])

    def clips_weights(self, recipe: "Recipe") -> str | None:
        """By what it chooses the share of a weight's range that is kept, in a word; None where it does not."""
        return None

    def orders_columns(self, recipe: "Recipe", behind_norm: bool) -> bool:
        """Whether it stores an order of the columns with each weight, of those that read a norm or of the others."""
        return False

    def levels_kept(self, recipe: "Recipe") -> int:
        """How many levels of a table are stored, from which the others follow: all, unless a method knows better."""
        return 2**recipe.rounded.scheme.bits

    @classmethod
    def presets(cls) -> "Mapping[str, Callable[[], Recipe]]":
        """Recipes that come with the method, by name: functions whose docstring says what they are."""
        return {}

    # On a model

    def check_widths(self, recipe: "Recipe", widths: Mapping[str, int]) -> None:
        """Raise RecipeError where it does not fit linear layers of these input features, by the name of their site."""

    def check_model(self, recipe: "Recipe", architecture: "Architecture", limits: "Limits") -> None:
        """Raise RecipeError, before expensive work, where it does not fit a model."""

    def apply(self, stage: "Stage") -> None:
        """Do to the stage's model what the method does, when its first role's turn has come (but for `rotations`)."""

    def tensors(self, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
        """The shapes of what `apply` leaves in `stage.tensors` to be stored beside the weights, by name; -1 stands for
        any number."""
        return {}

    def runtime(self, wrapping: "Wrapping", tensors: "Mapping[str, Tensor]") -> "Wrapping":
        """What acts while the model runs, with this method's part added; it reads the stored tensors."""
        return wrapping

    def attach(self, model: "nn.Module", recipe: "Recipe", handle: "Handle") -> None:
        """Put into a model what acts while it runs and no wrapping has; the handle takes it out again."""

    @classmethod
    def acts_at_run_time(cls) -> bool:
        """Whether the method adds to what acts while the model runs."""
        return cls.runtime is not Method.runtime or cls.attach is not Method.attach

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether the stored weights alone compute another function than with what acts at run time, quantizers apart.

        Such weights cannot be exported as an ordinary checkpoint.
        """
        return self.acts_at_run_time()

    # Methods with the role `rotations`

    def learns_from(self, recipe: "Recipe") -> dict[str, Any]:
        """What of a recipe decides the learned rotations, beside its rotation, its quantizers of activations and KV
        cache and these settings, as plain data."""
        return {}

    def learn(
        self,
        model: "nn.Module",
        recipe: "Recipe",
        seed: int,
        samples: "Tensor",
        *,
        device: "torch.device | str | None" = None,
        checkpoint: Path | None = None,
    ) -> "Learned":
        """Learn the recipe's rotations.

        Args:
            model: in its original basis; unchanged afterwards.
            seed: of the rotations to start from, and of the order of the samples.
            samples: token ids, int64 [samples, tokens], of `own_text`.
            checkpoint: file from which an interrupted learning continues with the same result. The caller deletes it.
        """
        raise NotImplementedError(f"{self.name} learns no rotations")
