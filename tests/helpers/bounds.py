"""Bounds of rounding errors."""

FLOAT64_BOUND = 1e-9
