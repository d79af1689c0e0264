"""Benchmarks at the papers' real layer shapes: what a method costs in time and memory, independent of trained weights."""
