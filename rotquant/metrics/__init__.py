"""Metrics of a model: perplexity, accuracy, signal-to-noise ratio, and what figures show."""
