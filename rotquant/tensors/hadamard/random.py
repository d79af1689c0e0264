"""Random rotations: randomized Hadamard (QuaRot Sec. 3.1) and Haar-random orthogonal (QuaRot Table 8) matrices.

Both come from an explicit `torch.Generator`; global random state is never read.
"""

from typing import Literal

import torch
from torch import Tensor

from rotquant.tensors.hadamard.constructions import hadamard_matrix


def random_signs(n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return n independent fair signs, +1 or -1, shape [n], on the generator's device; the same in every dtype."""
    bits = torch.randint(0, 2, (n,), generator=generator, device=generator.device)
    return (2 * bits - 1).to(dtype)


def random_hadamard_matrix(
    n: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    *,
    signs: Literal["input", "output"] = "input",
) -> Tensor:
    """Return a randomized Hadamard matrix Q, orthogonal, shape [n, n], to be applied to rows as `x @ Q`.

    signs="input": Q = diag(s) H / sqrt(n), so x @ Q = hadamard_transform(x * s). QuaRot Sec. 3.1 writes H diag(s),
        which acts on columns: there too the signs meet the data before H mixes it. Its authors' code does the same.
    signs="output": Q = H diag(s) / sqrt(n), the paper's formula taken literally for rows, hence
        x @ Q = hadamard_transform(x) * s. The signs then only flip rotated features, which changes no error of a
        quantizer that is symmetric about zero: seeds would hardly matter.

    Raises:
        HadamardSizeError: no construction for n.
        ValueError: an unknown `signs`.
    """
    if signs not in ("input", "output"):
        raise ValueError(f"signs must be 'input' or 'output', not {signs!r}")
    matrix = hadamard_matrix(n, dtype, generator.device).mul_(n**-0.5)
    s = random_signs(n, generator, dtype)
    return matrix.mul_(s[:, None] if signs == "input" else s)


def random_orthogonal_matrix(n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return an orthogonal matrix [n, n] drawn from the Haar (uniform) measure, on the generator's device.

    QR of a Gaussian matrix, in float64 whatever `dtype`, with R's diagonal made positive: without that correction the
    distribution depends on the QR routine's sign habits (F. Mezzadri, Notices of the AMS 54, 2007).
    """
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64, device=generator.device)
    q, r = torch.linalg.qr(gaussian)
    diagonal = r.diagonal()
    return (q * torch.where(diagonal < 0, -1.0, 1.0)).to(dtype)
