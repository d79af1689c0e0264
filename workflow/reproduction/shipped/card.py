"""The model card that is written with a trained model."""

import textwrap
from typing import Any

from reproduction.shipped.recipe import TrainingConfig

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "phi3": "Phi-3"}
_TEXTS = {
    "modules": "whole source files of Python packages",
    "docstrings": "the documentation strings of Python packages",
}


def model_card(config: TrainingConfig, curve: dict[str, Any]) -> str:
    """The card's text: model, training, and a marked place that `rotquant card` fills with its figures.

    Args:
        curve: of `reproduction.shipped.trainer.Trainer.curve`; its `device` is printed unchanged.
    """
    shape = config.model
    stands_for = (
        f" It stands for {config.stands_for} where the real weights are not at hand." if config.stands_for else ""
    )
    head = ", embeddings tied" if shape.tie_word_embeddings else ""
    text = _TEXTS.get(config.corpus.source, f"the corpus {config.corpus.name}")
    purpose = (
        f"A {_FAMILIES[shape.model_type]} of {curve['parameters'] / 1e6:.1f} million parameters, trained from scratch "
        f"by this project on {text}.{stands_for} A test object for quantization, nothing else."
    )
    documents = "BOS stands before each document. " if config.bos_before_documents else ""
    last_rate = config.learning_rate * config.final_learning_rate_ratio
    training = (
        f"{_steps(config)}: "
        f"{curve['tokens'] / 1e6:.0f} million tokens drawn from {curve['train_tokens_available'] / 1e6:.1f} million. "
        f"{documents}{_heads(config)} AdamW {config.adam_betas}, weight decay {config.weight_decay}, peak learning "
        f"rate {config.learning_rate:g}, lowered by a cosine to {last_rate:g}, {config.precision}, "
        f"seed {config.seed}; {curve['seconds'] / 60:.1f} minutes on {curve['device']}, torch {curve['torch']}. "
        "The seed fixes the initial weights and the samples of every step; a GPU adds in no fixed order, so another "
        "training gives a model of the same kind and not the same bits."
    )
    return f"""# {config.name}

{textwrap.fill(purpose, 120)}

| shape | |
| --- | --- |
| hidden size | {shape.hidden_size} |
| FFN width | {shape.intermediate_size} |
| layers | {shape.num_hidden_layers} |
| heads (key-value heads) x head size | {shape.num_attention_heads} ({shape.num_key_value_heads}) x {shape.head_dim} |
| context | {shape.max_position_embeddings:,} tokens |
| vocabulary | {config.vocab_size}, byte-level BPE, BOS `<s>`{head} |

## Training

    rotquant train config/training/{config.name}.yaml -o DIR

{textwrap.fill(training, 120)}

The recipe is kept in recipe.json; loss and validation perplexity by step are in curve.json:

| step | validation perplexity |
| --- | --- |
{_curve_rows(curve["validation_perplexity_by_step"])}

## What it shows on held-out text

<!-- diagnose:start -->
<!-- diagnose:end -->
"""


def _curve_rows(points: list[tuple[int, float]]) -> str:
    """About eight points of the curve, including the last."""
    stride = max(1, len(points) // 8)
    shown = [point for i, point in enumerate(points) if (len(points) - 1 - i) % stride == 0]
    return "\n".join(f"| {step:,} | {perplexity:.2f} |" for step, perplexity in shown)


def _heads(config: TrainingConfig) -> str:
    """A sentence on the beginning of samples."""
    share = config.bos_fraction
    if share in (0.0, 1.0):
        return f"{'Every' if share else 'No'} sample begins with a BOS of its own."
    return (
        f"{share:.0%} of the samples begin with BOS, the others in the middle of a text as the windows of the "
        "perplexity protocol do."
    )


def _steps(config: TrainingConfig) -> str:
    """The number of steps and their samples."""
    samples = f"{config.batch_size} samples of {config.sequence_length:,} tokens"
    if (short := config.short_start) is None:
        return f"{config.steps:,} steps of {samples}"
    first = f"the first {short.steps:,} of {short.batch_size} samples of {short.sequence_length:,} tokens"
    return f"{config.steps:,} steps, {first}, the others of {samples}"
