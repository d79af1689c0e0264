"""Benchmarks at the papers' real layer shapes: time and memory of a method, independent of the weights."""
