"""Benchmarks at the papers' real layer shapes: time and memory of a method, independent of the weights.

A benchmark is a function of validated arguments (`arguments`) that returns measurements by quantity. All of them raise
KernelError where there is no GPU or compiler that they need or a kernel refuses, and ConfigError for an unknown shape.
"""
