"""LLM-QAT as a method of a recipe: its settings and what they need; `data_free_distillation` has the mathematics."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Budget, Method, Recipe, Role


class LLMQAT(Method):
    """LLM-QAT (Liu et al. 2023, "Data-Free Quantization Aware Training"): weights trained on the model's own text."""

    name: ClassVar[str] = "llm_qat"
    actions: ClassVar[str] = "rotquant.methods.llm_qat.data_free_distillation"
    title: ClassVar[str] = "LLM-QAT"
    source: ClassVar[str] = "Liu et al. 2023, arXiv:2305.17888, Sec. 2"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation", "rounding"})
    short: ClassVar[Mapping[str, Any]] = {"samples": 64, "sequence_length": 256, "steps": 32}
    excludes: ClassVar[frozenset[Role]] = frozenset({"prefix", "selection"})
    seeded: ClassVar[bool] = True
    quantized_inputs: ClassVar[bool] = True

    samples: Annotated[int, Field(gt=0)] = 100_000
    """How much text the model generates, in sequences (the paper: 100k)."""
    sequence_length: Annotated[int, Field(gt=1)] = 1024
    """Tokens of a sequence (the paper: 1024)."""
    steps: Annotated[int, Field(gt=0)] = 12_500
    """Steps of AdamW (the paper: every sample once)."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Sequences in each step (the paper: one on each of 8 GPUs)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    """Learning rate at the first step; it decays to zero along a cosine."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Added to the run's seed it draws the text and its order."""

    def check(self, recipe: Recipe) -> None:
        """Weights without clip search, activations with dynamic scales."""
        self.refuse_clip_search(recipe)
        self.refuse_static(recipe)

    @property
    def written(self) -> tuple[int, int]:
        """All of its text."""
        return self.samples, self.sequence_length

    def budget(self, recipe: Recipe) -> Budget:
        """The text that the model generates."""
        return self._budget(self.samples, self.sequence_length)

    def describe(self, recipe: Recipe) -> str:
        text = f"{self.samples} generated samples of {self.sequence_length} tokens"
        return f"LLM-QAT {self.steps} steps of {self.batch_size}, learning rate {self.learning_rate:g}, on {text}"
