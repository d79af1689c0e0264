"""Hadamard matrices by construction, the fast transform with them, and random orthogonal matrices.

Row-vector convention throughout: activations are rows, a rotation Q is applied as `x @ Q`, and undone as `x @ Q.T`.
"""

from rotquant.tensors.hadamard.constructions import HadamardSizeError, decompose, hadamard_matrix, is_supported
from rotquant.tensors.hadamard.random import random_hadamard_matrix, random_orthogonal_matrix, random_signs
from rotquant.tensors.hadamard.transform import hadamard_transform, head_hadamard_transform

__all__ = [
    "HadamardSizeError",
    "decompose",
    "hadamard_matrix",
    "hadamard_transform",
    "head_hadamard_transform",
    "is_supported",
    "random_hadamard_matrix",
    "random_orthogonal_matrix",
    "random_signs",
]
