"""What is measured on a model: perplexity, accuracy, signal-to-noise ratio, and what figures show."""
