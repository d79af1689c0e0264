"""Benchmarks of kernels, layers and whole models on a GPU, with their peers and ceilings."""
