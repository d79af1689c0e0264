"""Rotations R1 to R4: as matrices, and fused into a model's weights."""
