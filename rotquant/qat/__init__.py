"""Quantization-aware training that methods share: trainable quantizers of weights, and where they start."""
