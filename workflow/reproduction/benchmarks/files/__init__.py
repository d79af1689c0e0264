"""Benchmarks of what lies on disk."""
