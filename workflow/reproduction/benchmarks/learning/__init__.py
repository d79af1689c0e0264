"""Benchmarks of learning rotations and quantizing weights."""
