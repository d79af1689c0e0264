"""Quantized models in the formats of other runtimes: plain checkpoints, compressed-tensors, GGUF; what each can say."""
