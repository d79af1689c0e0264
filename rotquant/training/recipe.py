"""The training recipe as validated data, read from a YAML file in config/training/.

It says everything that decides the weights but the hardware; importing it loads no torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from rotquant.foundation.data import Frozen, first_problem
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.written import read_yaml
from rotquant.text import CorpusSpec


class ModelShape(Frozen):
    """The model configuration to train; names and defaults as in Hugging Face's `LlamaConfig`.

    Attributes:
        model_type: the architecture. "phi3" keeps q, k, v in one linear layer and gate, up in another; its
            configuration has no head size of its own, so its heads fill the hidden size.
        tie_word_embeddings: whether the language-model head is the token embedding.
    """

    model_config = ConfigDict(protected_namespaces=())

    model_type: Literal["llama", "phi3"] = "llama"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = Field(default=2048, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelShape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.model_type == "phi3" and self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError("num_attention_heads times head_dim must be the hidden_size of a phi3 model")
        return self


class TrainingConfig(Frozen):
    """A training recipe: what is trained, on what, for how long.

    Attributes:
        name: the model's name, and what it stands for in `stands_for`.
        sequence_length: tokens of one sample, BOS included.
        bos_fraction: share of samples that begin with BOS; the others begin in the middle of a text, as the windows of
            the perplexity protocol do.
        learning_rate: peak, reached in `warmup_steps` linearly, then lowered by a cosine to `final_learning_rate_ratio`
            of it.
        weight_decay: decoupled, on matrices (embeddings included); on norm scales too if `decay_norms`.
        precision: "bf16" computes in bf16 autocast over float32 weights; "fp32" in float32.
        validate_every: steps between two measurements of validation perplexity.
        checkpoint_minutes: minutes between two resume files.
    """

    name: str
    stands_for: str = ""
    model: ModelShape
    corpus: CorpusSpec = CorpusSpec()
    vocab_size: int = Field(default=4096, gt=258, le=65536)
    sequence_length: int = Field(default=512, ge=2)
    bos_fraction: float = Field(default=1.0, ge=0, le=1)
    batch_size: int = Field(default=16, gt=0)
    steps: int = Field(gt=0)
    learning_rate: float = Field(default=1.5e-3, gt=0)
    final_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=300, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_norms: bool = False
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    precision: Literal["bf16", "fp32"] = "bf16"
    seed: int = Field(default=0, ge=0)
    log_every: int = Field(default=50, gt=0)
    validate_every: int = Field(default=1000, gt=0)
    validation_windows: int = Field(default=256, gt=0)
    checkpoint_minutes: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _samples_fit_the_context(self) -> TrainingConfig:
        if self.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"sequence_length {self.sequence_length} exceeds model.max_position_embeddings "
                f"{self.model.max_position_embeddings}"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainingConfig:
        """Read a recipe; `ConfigError` names the file and the key that does not fit."""
        try:
            return cls.model_validate(read_yaml(path))
        except ValidationError as error:
            raise ConfigError(f"Training recipe {path}: {first_problem(error)}.") from None

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update number `step` (from 0): linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        floor = self.final_learning_rate_ratio
        return self.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
