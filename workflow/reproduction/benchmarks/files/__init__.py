"""Benchmarks of files on disk."""
