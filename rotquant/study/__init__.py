"""Tables as data, their expansion into runs, keys and digests, results, and the stages of the workflow."""
