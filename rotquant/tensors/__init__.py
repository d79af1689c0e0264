"""Pure mathematics on tensors: Hadamard matrices, quantizers, orthonormal matrices, lattices."""
