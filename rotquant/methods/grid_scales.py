"""Static scales by grid search (PrefixQuant Secs. 3 and 6.1): `weights.scale_search` on every decoder layer."""

from typing import TYPE_CHECKING, ClassVar

from rotquant.recipes.recipe import Budget, Method, Recipe, Role
from rotquant.weights.grids import ScaleGrid

if TYPE_CHECKING:
    from rotquant.weights.context import QuantizationContext


class GridScales(ScaleGrid, Method):
    """Static scales by grid search: each is a share of the range, the one that changes least what it is judged by.

    A scale of a whole tensor is judged by the outputs of its decoder layer, one of a head of keys or values by those of
    attention. Each is searched with all else in full precision, on inputs from layers that are quantized already.
    """

    name: ClassVar[str] = "grid_scales"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "grid search of static scales"
    source: ClassVar[str] = "PrefixQuant, Secs. 3 and 6.1"
    roles: ClassVar[frozenset[Role]] = frozenset({"scales"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"selection"})
    calibrates: ClassVar[bool] = True

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless something is static, and symmetric."""
        if not recipe.has_static_scales:
            raise ValueError("grid_scales searches static scales: set dynamic to false in activations, keys or values")
        self.refuse_asymmetric_static(recipe)

    def budget(self, recipe: Recipe) -> Budget:
        """Tokens of the calibration text that the search reads."""
        text = recipe.calibration
        return Budget(0) if text is None else self._budget(min(self.samples, text.samples), text.sequence_length)


def apply(settings: GridScales, context: "QuantizationContext") -> None:
    """Search layer by layer."""
    from rotquant.models.simulation.runtime import wrap
    from rotquant.weights.scale_search import ScaleSearch

    with wrap(context.model, context.online):
        stream = context.capture(context.calibration_samples[: settings.samples])
    search = ScaleSearch(context, stream, settings)
    for index, _ in stream.layers(settings.title):
        scales = search.of_layer(index)
        context.keep_scales(index, scales)
        with wrap(context.model, context.quantized(scales)):
            stream.advance(index)
