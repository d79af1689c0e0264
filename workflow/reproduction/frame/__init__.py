"""A table's numbers in one frame: ours and published, each with its origin."""
