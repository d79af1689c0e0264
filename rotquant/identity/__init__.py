"""What a result is of: weights, texts, tasks, recipe and code, each by its content (the table in CONTRIBUTING.md)."""
