"""GPTQ as a method of a recipe: its settings and what they need; `columns` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import QuantizationScheme


class GPTQ(Method):
    """GPTQ (Frantar et al. 2022). Defaults as in QuaRot: natural order, block 128, 1 % damping."""

    name: ClassVar[str] = "gptq"
    actions: ClassVar[str] = "rotquant.methods.gptq.columns"
    title: ClassVar[str] = "GPTQ"
    source: ClassVar[str] = "Frantar et al. 2022, Eqs. 2-3"
    roles: ClassVar[frozenset[Role]] = frozenset({"rounding"})
    calibrates: ClassVar[bool] = True
    inverts: ClassVar[bool] = True
    fp4: ClassVar[Mapping[str, Any] | None] = {"group_scales": "static"}

    block_size: Annotated[int, Field(gt=0)] = 128
    """Columns that are corrected together before the others are."""
    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the Hessian's mean diagonal that is added to its diagonal."""
    act_order: bool = False
    """Whether columns are rounded by falling diagonal of the Hessian instead of in their natural order."""
    group_scales: Literal["updated", "block_start", "static"] = "updated"
    """`updated` takes a group's scale from weights already corrected for all earlier columns (the algorithm as
    published); `block_start` from weights corrected only up to the current block, as QuaRot's code does; `static` from
    the unchanged weights. Static groups are of neighbouring columns in any order of rounding, so that exports hold them
    (GPTQ's authors' `--static-groups`, llm-compressor's `actorder: static`)."""
    hessian_inputs: Literal["float", "quantized"] = "float"
    """`float` calibrates on rotated inputs that are not quantized, as QuaRot's code does (the paper is silent);
    `quantized` on inputs and KV cache quantized as the recipe says, those of the running network. Weights of layers
    that came before are quantized either way."""

    arithmetic: Literal["model", "float64"] = "model"
    """`float64` calibrates and spreads errors in float64 whatever the model's type: a float32 model then gets the same
    integers on every machine, where float32's last bits move one weight in thousands to one in thirty, for some 1.7
    times the time; `model` does so in the model's type, at least float32."""

    @property
    def sees_quantizers(self) -> bool:
        """Whether calibration runs on quantized inputs."""
        return self.hessian_inputs == "quantized"

    def check(self, recipe: Recipe) -> None:
        """Something is quantized where it calibrates on quantized inputs, and by then; scales have the right time."""
        if recipe.rounded.scheme.fp4 and self.group_scales != "static":
            raise ValueError("gptq finds scales of 4-bit floats once: set methods.gptq.group_scales to static")
        if self.sees_quantizers and not (recipe.activations or recipe.keys or recipe.values):
            raise ValueError("gptq.hessian_inputs 'quantized' needs an activations, keys or values section")
        if self.sees_quantizers and recipe.activations and not recipe.activations.dynamic:
            raise ValueError("gptq.hessian_inputs 'quantized' needs dynamic activations: static scales come after GPTQ")

    def orders_columns(self, recipe: Recipe, behind_norm: bool) -> bool:
        """Groups that follow the order of processing."""
        return self.act_order and self.forms_groups(recipe.rounded.scheme)

    def forms_groups(self, scheme: QuantizationScheme) -> bool:
        """Whether groups of columns are formed while these are rounded."""
        return scheme.granularity == "group" and self.group_scales != "static"

    def describe(self, recipe: Recipe) -> str:
        order = ", activation order" if self.act_order else ""
        grouped = recipe.rounded.scheme.granularity == "group"
        groups = f", group scales {self.group_scales}" if grouped else ""
        inputs = ", on quantized inputs" if self.sees_quantizers else ""
        exact = ", in float64" if self.arithmetic == "float64" else ""
        return f"GPTQ (block {self.block_size}, damping {self.damping:.0%}{order}{groups}{inputs}{exact})"
