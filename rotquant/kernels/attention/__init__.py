"""Attention of one token over a quantized KV cache: operator, reference, and the cache that it reads."""
