"""A model in simulated low precision: online transforms, quantizers of inputs, and a quantized KV cache."""
