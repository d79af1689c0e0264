"""Benchmarks of SpinQuant's Table 6 on a CPU."""
