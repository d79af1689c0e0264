"""Identity of results: runs and keys, code digests, and whether a record fits its name and is current."""
