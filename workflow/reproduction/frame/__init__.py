"""The numbers of a table in one frame: ours, published, and where each is from."""
