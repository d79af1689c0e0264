"""QoQ as a method of a recipe: its settings and what they need.

`progressive` has its quantizer, `smoothing` its transformations, `reordering_and_clipping` its searches.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import ROTATION_FIELDS
from rotquant.recipes.transforms import at_site


class QoQ(Method):
    """QoQ (Lin et al. 2024, QServe): keys and block outputs are smoothed, then 4-bit weights rounded by way of INT8.

    Weights in groups have two levels of scales, so that a kernel's intermediate weights are INT8 (Eqs. 3-4); those per
    channel have one. Rotated block inputs, the paper's Sec. 4.3.1, are the recipe's `rotation`.
    """

    name: ClassVar[str] = "qoq"
    actions: ClassVar[str] = "rotquant.methods.qoq.reordering_and_clipping"
    title: ClassVar[str] = "QoQ"
    source: ClassVar[str] = "Lin et al. 2024 (QServe), Sec. 4, Eqs. 3-4"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    calibrates: ClassVar[bool] = True
    inverts: ClassVar[bool] = True
    reads = "layers"

    attention_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """SmoothAttention: keys are divided, and queries multiplied, by max|K|^alpha of each pair of dimensions that RoPE
    turns (Sec. 4.2); 0 leaves them. The authors' scripts search alpha for some models instead."""
    smoothed: tuple[Literal["attention_output", "mlp_output"], ...] = ("attention_output", "mlp_output")
    """Which inputs of output layers are smoothed (Sec. 4.3.2): o_proj's, in v_proj, and down_proj's, in up_proj. The
    authors' later code leaves o_proj's to a rotation of each head (`rotation.values: hadamard`)."""
    output_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Exponent of the divisor max|X|^alpha / max|W|^(1 - alpha) of smoothed inputs, near 0 (Sec. 4.3.2, which has no
    number). The authors' scripts have 0 to 0.2 for weights per channel and 0.1 to 0.35 in groups."""
    reorder: Literal["none", "outputs", "all"] = "outputs"
    """Which layers' input features are put in order of max|X|, before they are smoothed, so that those of like salience
    share a group (Sec. 4.3.3): `outputs`, as in the authors' code, those of down_proj and, within each head, of o_proj,
    whose order costs a runtime nothing; `all`; or `none`. Weights per channel have no groups and no order."""
    intermediate: Literal["integers", "real"] = "integers"
    """Numbers that groups are rounded from: INT8 codes, `integers` (Eq. 3), or as in the authors' code the `real`
    numbers that would become these, rounded once."""
    clip_search: bool = True
    """Whether each scale's share of its range is searched, for the least error of the layer's output; for q and k one
    share each, with the least error of the attention block's (Sec. 4.3.4). The authors' scripts do so per channel
    alone."""
    clip_grid: Annotated[int, Field(gt=0)] = 80
    """Number of shares that the search tries below 1, evenly to 1/5 (the authors' code; the paper has no number)."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """How weights become codes under their scales: to the `nearest`, as the paper's Sec. 4 has it, or by `gptq` in
    falling order of the Hessian's diagonal, as in the authors' code."""
    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Damping of `gptq`: share of the Hessian's mean diagonal that is added to its diagonal."""

    def check(self, recipe: Recipe) -> None:
        """Asymmetric 4-bit weights per channel or group, and no online transform where features are smoothed."""
        self.refuse_clip_search(recipe)
        scheme = recipe.rounded.scheme
        if scheme.bits != 4 or scheme.symmetric or scheme.granularity not in ("channel", "group"):
            raise ValueError("qoq takes asymmetric weights of 4 bits with granularity channel or group")
        if scheme.clip_ratio != 1.0:
            raise ValueError("qoq clips weights by methods.qoq.clip_search: leave weights.scheme.clip_ratio at 1")
        for site in self.smoothed:
            for one in at_site(recipe.transforms, site):
                field = ROTATION_FIELDS[one.name]
                raise ValueError(
                    f"qoq smooths the features of {site}, which rotation.{field} mixes: set that to false or leave "
                    f"{site} out of methods.qoq.smoothed"
                )

    def clips_weights(self, recipe: Recipe) -> str | None:
        """How clips of weights are chosen: by a search of each scale's range."""
        return "search" if self.clip_search else None

    def orders_columns(self, recipe: Recipe, behind_norm: bool) -> bool:
        """Groups of the weights that are reordered."""
        grouped = recipe.rounded.scheme.granularity == "group"
        return grouped and (self.reorder == "all" or (self.reorder == "outputs" and not behind_norm))

    def describe(self, recipe: Recipe) -> str:
        places = {"attention_output": "o_proj", "mlp_output": "down_proj"}
        outputs = " and ".join(places[site] for site in self.smoothed)
        parts = [f"keys smoothed by alpha {self.attention_alpha:g}"] if self.attention_alpha else []
        parts += [f"inputs of {outputs} by {self.output_alpha:g}"] if outputs else []
        if recipe.rounded.scheme.granularity == "group":
            real = ", not rounded" if self.intermediate == "real" else ""
            parts += [f"by way of INT8{real}"]
            parts += [f"{self.reorder} in order of salience"] if self.reorder != "none" else []
        parts += [f"clipped by {self.clip_grid} steps"] if self.clip_search else []
        parts += [f"GPTQ (damping {self.damping:.0%}, activation order)"] if self.rounding == "gptq" else []
        return f"QoQ ({', '.join(parts)})" if parts else "QoQ"
