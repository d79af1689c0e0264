"""Grid search of static scales as a method of a recipe: its settings; `static_scale_search` has the mathematics."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Budget, Method, Recipe, Role


class GridScales(Method):
    """Static scales by grid search: each is a share of the range, the one that changes least what it is judged by.

    A scale of a whole tensor is judged by the outputs of its decoder layer, one of a head of keys or values by those of
    attention. Each is searched with all else in full precision, on inputs from layers that are quantized already.
    """

    name: ClassVar[str] = "grid_scales"
    actions: ClassVar[str] = "rotquant.methods.grid_scales.static_scale_search"
    title: ClassVar[str] = "grid search of static scales"
    source: ClassVar[str] = "PrefixQuant, Secs. 3 and 6.1"
    roles: ClassVar[frozenset[Role]] = frozenset({"scales"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    calibrates: ClassVar[bool] = True

    samples: Annotated[int, Field(gt=0)] = 8
    """Number of calibration samples, the first ones."""
    smallest: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The least share of a range that is tried. The paper has no number; its authors' code has 0.25 for inputs and 0.55
    for heads."""
    coarse: Annotated[int, Field(gt=1)] = 10
    """How many shares are tried first, evenly from 1 down to the least; the authors' code tries 8 from 0.95."""
    fine: Annotated[int, Field(ge=0)] = 10
    """How many are tried then, around the best one, within half a step to both sides."""
    keys: Literal["outputs", "attention", "own"] = "outputs"
    """Error by which scales of a head of keys are chosen: `outputs`, softmax(Q K^T) V, since scales of heads minimise
    what a layer gives (Sec. 6.1); `attention`, the weights softmax(Q K^T), as the authors' code; or its `own` squared
    error."""
    values: Literal["outputs", "own"] = "outputs"
    """Error by which scales of a head of values are chosen: `outputs`, as above, or its `own` squared error, as the
    authors' code."""
    ranges: Literal["largest", "average"] = "largest"
    """Range whose shares are tried: `largest`, the largest value of all samples; `average`, as in the authors' code,
    the largest feature of a moving average of each feature's maximum, 0.99 times what was before plus 0.01 times the
    next sample's, from the first sample on. The paper does not say."""
    covering: Literal["largest_code", "all_steps"] = "largest_code"
    """The scale of share 1: `largest_code`, max|x| / (2^(b-1) - 1); `all_steps`, 2 max|x| / (2^b - 1), as the authors'
    code has it, where the largest value lies on the tie above the largest code. The paper does not say."""
    causal: bool = True
    """Whether these weights are those of a causal model; the authors' code lets every query see every key."""

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless something is static, and symmetric."""
        if not recipe.has_static_scales:
            raise ValueError("grid_scales searches static scales: set dynamic to false in activations, keys or values")
        self.refuse_asymmetric_static(recipe)

    def budget(self, recipe: Recipe) -> Budget:
        """Tokens of the calibration text that the search reads."""
        text = recipe.calibration
        return Budget(0) if text is None else self._budget(min(self.samples, text.samples), text.sequence_length)

    def describe(self, recipe: Recipe) -> str:
        by = {"outputs": "attention's outputs", "attention": "its weights", "own": "their own error"}
        keys = f", keys by {by[self.keys]}" if recipe.keys else ""
        values = f", values by {by[self.values]}" if recipe.values else ""
        ranges = "" if self.ranges == "largest" else " of averaged ranges"
        steps = "" if self.covering == "largest_code" else " of 2 max / (2^b - 1)"
        grid = f"{self.coarse} shares{ranges}{steps} from 1 to {self.smallest:g}, then {self.fine} around the best"
        return f"static scales by grid search on {self.samples} samples ({grid}{keys}{values})"
