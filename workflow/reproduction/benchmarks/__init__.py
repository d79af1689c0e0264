"""Benchmarks at the papers' real layer shapes: the time and memory a method costs, whatever the weights."""
