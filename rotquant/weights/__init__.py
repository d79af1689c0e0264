"""Quantized weights: clipping, rounding, GPTQ, storage and export."""
