"""The training recipe as validated data, read from a YAML file in config/training/.

A recipe sets everything that decides the weights, except the hardware. Importing this module loads no torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from reproduction.corpora import MODULES, Corpus
from reproduction.reading.written import parse, read_yaml
from rotquant.foundation.data import Frozen


class ModelShape(Frozen):
    """The model configuration to train; names and defaults as in Hugging Face's `LlamaConfig`."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: Literal["llama", "mistral", "qwen2", "phi3"] = "llama"
    """The architecture. qwen2 has biases on q, k, v; phi3 keeps these in one linear layer and gate, up in another, and
    its configuration has no head size of its own, so its heads fill the hidden size."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width of the MLP."""
    num_hidden_layers: int = Field(gt=0)
    """Layers."""
    num_attention_heads: int = Field(gt=0)
    """Heads of the queries."""
    num_key_value_heads: int = Field(gt=0)
    """Heads of keys and values."""
    head_dim: int = Field(gt=0, multiple_of=2)
    """Features of a head."""
    max_position_embeddings: int = Field(default=2048, gt=0)
    """Longest text in tokens."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary embedding."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in norms."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """Whether the language-model head is the token embedding."""

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelShape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.model_type == "phi3" and self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError("num_attention_heads times head_dim must be the hidden_size of a phi3 model")
        return self


class ShortStart(Frozen):
    """The first steps of a training on shorter samples, of which more begin: a first token is seen more often."""

    steps: int = Field(gt=0)
    """How many of the steps."""
    sequence_length: int = Field(ge=2)
    """Tokens of one sample, BOS included."""
    batch_size: int = Field(gt=0)
    """Samples in each step."""


class TrainingConfig(Frozen):
    """A training recipe: what is trained, on what, for how long."""

    name: str
    """The model's name."""
    stands_for: str = ""
    """The papers' model that it stands for."""
    model: ModelShape
    """Its shape."""
    corpus: Corpus = MODULES
    """The text."""
    bos_before_documents: Literal[True] = True
    """BOS stands before each row of the text, in place of the corpus's separator."""
    vocab_size: int = Field(default=4096, gt=258, le=65536)
    """Tokens of the tokenizer, which is trained on the text."""
    sequence_length: int = Field(default=512, ge=2)
    """Tokens of one sample, BOS included."""
    bos_fraction: float = Field(default=1.0, ge=0, le=1)
    """Share of samples that begin with BOS; the others begin in the middle of a text, as the windows of the perplexity
    protocol do."""
    batch_size: int = Field(default=16, gt=0)
    """Samples in each step."""
    short_start: ShortStart | None = None
    """Steps that have other samples, at first."""
    steps: int = Field(gt=0)
    """Steps of AdamW, the short start's among them."""
    learning_rate: float = Field(default=1.5e-3, gt=0)
    """Peak, reached in `warmup_steps` linearly, then lowered by a cosine to `final_learning_rate_ratio` of it."""
    final_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak at the last step."""
    warmup_steps: int = Field(default=300, ge=0)
    """Steps to the peak."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled, on matrices (embeddings included); on norm scales too if `decay_norms`."""
    decay_norms: bool = False
    """Whether norm scales decay too."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Of AdamW."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 computes in bf16 autocast over float32 weights; fp32 in float32."""
    seed: int = Field(default=0, ge=0)
    """Of the initial weights and of the order of samples."""
    log_every: int = Field(default=50, gt=0)
    """Steps between two lines of the log."""
    validate_every: int = Field(default=1000, gt=0)
    """Steps between two measurements of validation perplexity."""
    validation_windows: int = Field(default=256, gt=0)
    """Windows of the validation text that are measured."""
    checkpoint_minutes: float = Field(default=2.0, gt=0)
    """Minutes between two resume files."""

    @model_validator(mode="after")
    def _samples_fit_the_context(self) -> TrainingConfig:
        longest = max(self.sequence_length, self.short_start.sequence_length if self.short_start else 0)
        if longest > self.model.max_position_embeddings:
            raise ValueError(
                f"sequence_length {longest} exceeds model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        if self.short_start is not None and self.short_start.steps >= self.steps:
            raise ValueError(f"short_start.steps {self.short_start.steps} leaves none of the {self.steps} steps")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainingConfig:
        """Read a recipe; `ConfigError` names the file and the key that does not fit."""
        return parse(cls, read_yaml(path), f"Training recipe {path}")

    @property
    def tokens(self) -> int:
        """Tokens that the training reads, including repetitions."""
        of_a_step = self.batch_size * self.sequence_length
        if (short := self.short_start) is None:
            return self.steps * of_a_step
        return short.steps * short.batch_size * short.sequence_length + (self.steps - short.steps) * of_a_step

    def samples_at(self, step: int) -> tuple[int, int]:
        """Number of samples of update number `step` (from 0), and tokens of each."""
        shape = self.short_start if self.short_start is not None and step < self.short_start.steps else self
        return shape.batch_size, shape.sequence_length

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update number `step` (from 0): linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        floor = self.final_learning_rate_ratio
        return self.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def card(name: str, purpose: str, kind: Literal["training", "finetuning"]) -> str:
    """A model card with a marked place that `rotquant card` fills; recipe and curve are files beside it."""
    return f"""# {name}

A test object for quantization, nothing else: {purpose}. The recipe is kept in recipe.json, the curve in curve.json.

    rotquant train config/{kind}/{name}.yaml -o DIR

## What it shows on held-out text

<!-- diagnose:start -->
<!-- diagnose:end -->
"""
