"""Timing of a case on a GPU and on a CPU."""
