"""What a result is of: run and keys, code, and whether a record is of its name and current."""
