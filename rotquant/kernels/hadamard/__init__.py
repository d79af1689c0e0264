"""The Hadamard transform on a GPU: operator, launches, cuts of a row, and the choice among backends."""
