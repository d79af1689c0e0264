"""compressed-tensors, INT8 inputs with dynamic scales by token: a padding token changes what a model predicts.

Needs torch, transformers and compressed-tensors (seen with 0.17.0 and 0.19.0). Exit status 1 while the fault exists.

A token's scale is max|x| / 127.5, so that its largest value divided by the scale is 127.5, a tie of rounding. If that
value is negative, its code is -128 or -127 by the last bit of a float32. Last bits depend on the shape of a batch. A
scale of max|x| / 127 has no such tie. FP8 has none either, its scale being max|x| / 448.
"""

import sys

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import LlamaConfig, LlamaForCausalLM

INPUTS = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
TEXT = torch.randint(3, 128, (1, 64), generator=torch.Generator().manual_seed(0))


def model(quantized: bool) -> LlamaForCausalLM:
    """A small random Llama, its linear layers with quantized inputs or not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    made = LlamaForCausalLM(config).eval()
    if quantized:
        scheme = QuantizationScheme(targets=["Linear"], input_activations=INPUTS)
        apply_quantization_config(made, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    return made


@torch.no_grad()
def moved_by_padding(made: LlamaForCausalLM) -> float:
    """The largest change of a logit that padding on the left, masked, makes."""
    alone = made(TEXT, use_cache=False).logits
    padding = torch.ones(1, 1, dtype=torch.long)
    mask = torch.cat([0 * padding, torch.ones_like(TEXT)], dim=1)
    padded = made(torch.cat([padding, TEXT], dim=1), attention_mask=mask, use_cache=False).logits
    return (padded[:, 1:] - alone).abs().max().item()


def codes(x: torch.Tensor) -> torch.Tensor:
    """The codes of tokens."""
    scale, zero_point = compute_dynamic_scales_and_zp(x, INPUTS, torch.nn.Linear(x.shape[-1], 1))
    return quantize(x, scale, zero_point, INPUTS)


if __name__ == "__main__":
    x = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    ties = (codes(x)[largest & (x < 0)] == -128).double().mean().item()
    print(f"Tokens whose largest value is negative: {ties:.0%} have its code at -128, the others at -127.")
    plain, quantized = moved_by_padding(model(False)), moved_by_padding(model(True))
    print(f"One masked padding token moves logits by {plain:.1e} at most in floating point.")
    print(f"With inputs quantized by token it moves them by {quantized:.1e}.")
    sys.exit(1 if quantized > 100 * plain else 0)
