"""CushionCache as a method of a recipe: its settings.

`activation_errors`, `greedy_prefix_search` and `prefix_tuning` have the mathematics.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.traits import Trait


class CushionCache(Method):
    """A prefix found by greedy search and tuned for small quantization errors of activations (Son et al. 2024).

    Tokens are searched one by one; then their keys and values are trained by themselves. All weights are those before
    rounding and stay as they are, and the prefix stays in full precision.
    """

    name: ClassVar[str] = "cushioncache"
    actions: ClassVar[str] = "rotquant.methods.cushioncache.prefix_tuning"
    title: ClassVar[str] = "CushionCache"
    source: ClassVar[str] = "Son et al. 2024, arXiv:2406.12016, Sec. 4, Eqs. 6-11, Algorithm 1"
    roles: ClassVar[frozenset[Role]] = frozenset({"prefix"})
    short: ClassVar[Mapping[str, Any]] = {"candidates": 64, "max_tokens": 3, "sequence_length": 256, "steps": 16}
    acts_at_run_time: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    quantized_inputs: ClassVar[bool] = True

    start: Literal["nothing", "bos"] = "nothing"
    """The prompt that the search begins with: `nothing` as in Algorithm 1, or `bos`, which the paper finds useful to
    speed the search up (Sec. 4.1)."""
    max_tokens: Annotated[int, Field(gt=0)] = 10
    """Longest prompt (m), of which the paper gives no number; ten tokens are the prefix of Li and Liang 2021, whose
    set-up it follows."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """A token is added while it brings the error below this share of what it is without (tau, Eq. 10)."""
    candidates: Annotated[int, Field(gt=0)] | None = None
    """Number of tokens tried at each place: the most frequent of the calibration text, and BOS; null, as the paper,
    tries the whole vocabulary."""
    search_samples: Annotated[int, Field(gt=0)] = 1
    """Texts drawn for each place, whose errors are added up (the paper: one)."""
    sequence_length: Annotated[int, Field(gt=1)] = 512
    """Tokens of these texts, the first ones of calibration samples (n)."""
    measured: Literal["inputs", "blocks"] = "inputs"
    """The activations whose quantization errors are summed over all blocks: `inputs` of linear layers, which are what
    the network quantizes, or outputs of `blocks`. The paper says "activation of a transformer block" (Eq. 6)."""
    steps: Annotated[int, Field(ge=0)] = 52
    """Steps of AdamW on keys and values (the paper: 2 epochs, here of 128 samples);
    none leaves the prompt as it is found."""
    batch_size: Annotated[int, Field(gt=0)] = 5
    """Calibration samples in each step (Li and Liang 2021)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-5
    """Learning rate at the first step; it decays linearly to zero (Li and Liang 2021)."""
    error_weight: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of a sample's summed quantization error relative to the cross entropy of its tokens (lambda, Eq. 11)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Added to the run's seed it draws the texts of the search and the order of the samples."""

    @property
    def prefix_tokens(self) -> int:
        """The longest prompt."""
        return self.max_tokens

    @property
    def unsuited(self) -> Mapping[Trait, str]:
        """Experts, unless errors are those of blocks."""
        if self.measured == "blocks":
            return {}
        return {
            "experts": "sums errors of inputs by text, while an expert's input has single tokens of all texts: set "
            "methods.cushioncache.measured to blocks"
        }

    def check(self, recipe: Recipe) -> None:
        """Activations are quantized."""
        if recipe.activations is None:
            raise ValueError(
                "cushioncache lowers the quantization error of activations: it needs an activations section"
            )

    def describe(self, recipe: Recipe) -> str:
        tried = "all tokens" if self.candidates is None else f"{self.candidates} candidates"
        texts = f"{self.search_samples} x {self.sequence_length} tokens"
        search = f"greedy search among {tried} on {texts} (from {self.start}, tau {self.threshold:g})"
        search += f", up to {self.max_tokens}, errors of {self.measured}"
        rate = f"learning rate {self.learning_rate:g}, lambda {self.error_weight:g}"
        tuned = f"tuned {self.steps} steps of {self.batch_size}, {rate}" if self.steps else "not tuned"
        return f"CushionCache: {search}; {tuned}"
