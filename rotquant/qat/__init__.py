"""Quantization-aware training that methods share: quantizers with parameters, where they begin, the loss, the training."""
