"""The model card that is written beside a trained model."""

import textwrap
from typing import Any

from rotquant.training.recipe import TrainingConfig


def model_card(config: TrainingConfig, curve: dict[str, Any]) -> str:
    """What the model is, how it was made, and a marked place that `rotquant diagnose` fills with its figures."""
    shape = config.model
    stands_for = (
        f" It stands for {config.stands_for} where the real weights are not at hand." if config.stands_for else ""
    )
    family = {"llama": "Llama", "phi3": "Phi-3"}[shape.model_type]
    head = ", embeddings tied" if shape.tie_word_embeddings else ""
    purpose = (
        f"A {family} of {curve['parameters'] / 1e6:.1f} million parameters, trained from scratch by this project on "
        f"the documentation strings of Python packages.{stands_for} A test object for quantization, nothing else."
    )
    training = (
        f"{config.steps:,} steps of {config.batch_size} samples of {config.sequence_length} tokens: "
        f"{curve['tokens'] / 1e6:.0f} million tokens drawn from {curve['train_tokens_available'] / 1e6:.1f} million. "
        f"{config.bos_fraction:.0%} of the samples begin with BOS, the others in the middle of a text as the windows "
        f"of the perplexity protocol do. AdamW {config.adam_betas}, weight decay {config.weight_decay}, peak learning "
        f"rate {config.learning_rate}, cosine to {config.final_learning_rate_ratio:.0%} of it, {config.precision}, "
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
    """About eight points of the curve, the last one among them."""
    stride = max(1, len(points) // 8)
    shown = [point for i, point in enumerate(points) if (len(points) - 1 - i) % stride == 0]
    return "\n".join(f"| {step:,} | {perplexity:.2f} |" for step, perplexity in shown)
