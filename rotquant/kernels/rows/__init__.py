"""Work on rows: norms, quantization of activations, gated products."""
