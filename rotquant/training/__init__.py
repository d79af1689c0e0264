"""Training: the loop with its checkpoints that all methods share, and low-rank adapters."""
