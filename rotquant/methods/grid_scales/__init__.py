"""Grid search of static scales as a method of a recipe: its settings; `search` has the mathematics."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.method import Effort, Method, Role
from rotquant.recipes.recipe import Recipe

if TYPE_CHECKING:
    from rotquant.weights.stage import Stage


class GridScales(Method):
    """Static scales by grid search: each is a share of the range, the one that changes least what it is judged by.

    A scale of a whole tensor is judged by the outputs of its decoder layer, a scale of a head of values by these, and
    one of a head of keys by attention's weights. Each is searched with all else in full precision, on inputs that come
    from layers which are quantized already.
    """

    name: ClassVar[str] = "grid_scales"
    title: ClassVar[str] = "grid search of static scales"
    source: ClassVar[str] = "PrefixQuant, Secs. 3 and 6.1"
    roles: ClassVar[frozenset[Role]] = frozenset({"scales"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    calibrates: ClassVar[bool] = True

    samples: Annotated[int, Field(gt=0)] = 8
    """So many of the calibration samples, the first ones."""
    smallest: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The least share of a range that is tried. The paper has no number; its authors' code has 0.25 for inputs and 0.55
    for heads."""
    coarse: Annotated[int, Field(gt=1)] = 10
    """How many shares are tried first, evenly from 1 down to the least; the authors' code tries 8 from 0.95."""
    fine: Annotated[int, Field(ge=0)] = 10
    """How many are tried then, around the best one, within half a step to both sides."""
    keys: Literal["attention", "own"] = "attention"
    """By what a head of keys is judged: the weights softmax(Q K^T) of attention, or its own squared error."""
    causal: bool = True
    """Whether these weights are those of a causal model; the authors' code lets every query see every key."""

    def check(self, recipe: Recipe) -> None:
        """There is something static, and symmetric."""
        if not recipe.has_static_scales:
            raise ValueError("grid_scales searches static scales: set dynamic to false in activations, keys or values")
        self.refuse_asymmetric_static(recipe)

    def effort(self, recipe: Recipe) -> Effort:
        """What it reads of the calibration text."""
        text = recipe.calibration
        return Effort(0) if text is None else self.given(min(self.samples, text.samples), text.sequence_length)

    def words(self, recipe: Recipe) -> str:
        """As on the pages."""
        keys = f", keys by {'attention' if self.keys == 'attention' else 'their own error'}"
        grid = f"{self.coarse} shares from 1 to {self.smallest:g}, then {self.fine} around the best"
        return f"static scales by grid search on {self.samples} samples ({grid}{keys if recipe.keys else ''})"

    def apply(self, stage: "Stage") -> None:
        """Search layer by layer."""
        from rotquant.methods.grid_scales.search import ScaleSearch
        from rotquant.models.simulation.wrapping import wrap

        with wrap(stage.model, stage.online):
            stream = stage.capture(stage.calibration_samples[: self.samples])
        search = ScaleSearch(stage, stream, self)
        for index, layer in stream.layers(self.title):
            scales = search.of_layer(index, layer)
            stage.keep_scales(index, scales)
            with wrap(stage.model, stage.quantized(scales)):
                stream.advance(index)
