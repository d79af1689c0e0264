"""Quantization-aware training that methods share: trainable quantizers of weights, where they start, loss, training."""
