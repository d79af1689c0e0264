"""QFeP and QFeM as a method of a recipe: its settings and what they need; `activation_spikes` has the mathematics."""

from typing import Annotated, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe, Role


class QFeP(Method):
    """Quantization-free prefix of three tokens, and quantization-free modules (Yang et al. 2024): spikes set apart.

    A token whose activations spike stands after BOS and a context token in the KV cache, in full precision, so that it
    spikes no more in the text. Its keys and values are those of the network before its weights are rounded.
    """

    name: ClassVar[str] = "qfep"
    actions: ClassVar[str] = "rotquant.methods.qfep.activation_spikes"
    title: ClassVar[str] = "quantization-free prefix"
    source: ClassVar[str] = "Yang et al. 2024, arXiv:2405.14428, Sec. 4"
    roles: ClassVar[frozenset[Role]] = frozenset({"prefix"})
    acts_at_run_time: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True

    prefix: bool = True
    """Whether there is a prefix (QFeP); without it, quantization-free modules alone (QFeM)."""
    candidates: Annotated[int, Field(gt=0)] = 3
    """How many tokens of the largest spikes are tried, and in how many tokens of a sample these are looked for."""
    contexts: Annotated[int, Field(gt=0)] = 200
    """How many tokens, the most frequent of the calibration text, are tried between BOS and the spike."""
    ratio: Annotated[float, Field(gt=1.0)] | None = None
    """QFeM: inputs of linear layers stay unquantized where the largest token is more than so many times the median one
    (alpha), mean over the calibration samples. The paper chooses it for each model, 6.68 for Llama-2-7B; null quantizes
    all inputs. As in the authors' code weights are rounded all the same."""

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless a prefix is sought or modules are left out."""
        if not self.prefix and self.ratio is None:
            raise ValueError("qfep does nothing without prefix and ratio: set one of them, or leave the method out")
        if self.ratio is not None and recipe.activations is None:
            raise ValueError("qfep.ratio says which inputs are not quantized: it needs an activations section")

    def describe(self, recipe: Recipe) -> str:
        tried = f"spikes of {self.candidates} tokens after {self.contexts} contexts"
        prefix = [f"BOS, a context and a spike in front of every text, of {tried}"] if self.prefix else []
        modules = [] if self.ratio is None else [f"inputs above {self.ratio:g} times their median token unquantized"]
        return ", ".join([*prefix, *modules])

    @property
    def prefix_tokens(self) -> int:
        """BOS, a context and the token with the spike."""
        return 3 if self.prefix else 0

    @property
    def acts_beyond_quantizers(self) -> bool:
        """A prefix does; which inputs are not quantized is the quantizers' matter."""
        return self.prefix
