"""QFeP and QFeM as a method of a recipe: its settings and what they need; `activation_spikes` has the mathematics."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.method import Method, Role
from rotquant.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from rotquant.models.architectures import Architecture
    from rotquant.models.limits import Limits
    from rotquant.models.simulation.wrapping import Wrapping
    from rotquant.weights.stage import Stage

#: BOS, a context and the token with the spike.
TOKENS = 3


class QFeP(Method):
    """Quantization-free prefix of three tokens, and quantization-free modules (Yang et al. 2024): spikes set apart.

    A token whose activations spike stands behind BOS and a context token in the KV cache, in full precision, so that it
    spikes no more in the text. Its keys and values are those of the network before its weights are rounded.
    """

    name: ClassVar[str] = "qfep"
    title: ClassVar[str] = "quantization-free prefix"
    source: ClassVar[str] = "Yang et al. 2024, arXiv:2405.14428, Sec. 4"
    roles: ClassVar[frozenset[Role]] = frozenset({"prefix"})
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
        """It does something, and modules are left out of something."""
        if not self.prefix and self.ratio is None:
            raise ValueError("qfep does nothing without prefix and ratio: set one of them, or leave the method out")
        if self.ratio is not None and recipe.activations is None:
            raise ValueError("qfep.ratio says which inputs are not quantized: it needs an activations section")

    def check_model(self, recipe: Recipe, architecture: "Architecture", limits: "Limits") -> None:
        """Every text can stand behind the prefix."""
        if self.prefix:
            limits.check_prefix(1)
        if self.prefix and limits.context is not None and limits.context <= 2 * TOKENS - 1:
            raise RecipeError(
                f"qfep tries texts of {2 * TOKENS - 1} tokens, which leave no room in the model's context."
            )

    def words(self, recipe: Recipe) -> str:
        """As on the pages."""
        tried = f"spikes of {self.candidates} tokens behind {self.contexts} contexts"
        prefix = [f"BOS, a context and a spike in front of every text, of {tried}"] if self.prefix else []
        modules = [] if self.ratio is None else [f"inputs above {self.ratio:g} times their median token unquantized"]
        return ", ".join([*prefix, *modules])

    def apply(self, stage: "Stage") -> None:
        """Find the prefix and the modules, and have all that follows see the text behind the prefix."""
        import torch

        from rotquant.methods.qfep.activation_spikes import find_prefix, measure, spiking
        from rotquant.models.simulation.prefix import compute_prefix, empty_prefix, stored_tensors
        from rotquant.models.simulation.wrapping import wrap

        model = stage.model
        with wrap(model, stage.online):
            found = measure(model, stage.calibration_samples, stage.device)
            ids = find_prefix(model, found, self.candidates, self.contexts, stage.device) if self.prefix else ()
            kept = compute_prefix(model, ids, stage.device) if ids else empty_prefix(stage.architecture, model.dtype)
        exact = [] if self.ratio is None else spiking(found, self.ratio)
        stage.tensors |= stored_tensors(ids, kept) | {"exact": torch.tensor(exact, dtype=torch.int64).reshape(-1, 2)}
        stage.online = self.runtime(stage.online, stage.tensors)

    def tensors(self, architecture: "Architecture") -> Mapping[str, tuple[int, ...]]:
        """The prefix, and layer and number of each site whose input is not quantized."""
        from rotquant.models.simulation.prefix import stored_shapes

        return {**stored_shapes(architecture), "exact": (-1, 2)}

    @property
    def acts_beyond_quantizers(self) -> bool:
        """A prefix does; which inputs are not quantized is the quantizers' matter."""
        return self.prefix

    def runtime(self, wrapping: "Wrapping", tensors: "Mapping[str, Tensor]") -> "Wrapping":
        """The text stands behind the prefix; modules with spikes read it as it is."""
        from rotquant.methods.qfep.activation_spikes import SITES
        from rotquant.models.simulation.prefix import stored_prefix

        exact = frozenset((layer, SITES[site]) for layer, site in tensors["exact"].tolist())
        return replace(wrapping, prefix=stored_prefix(tensors), exact=exact)
