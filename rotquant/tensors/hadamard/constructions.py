"""Hadamard matrices of order n = K * 2^k, built from published constructions (QuaRot Sec. 3.1: H_n = H_K (x) H_2^k).

Powers of two are Sylvester's; the block H_K comes from Paley's two constructions over GF(p) and GF(p^2) or, for two
orders, from Williamson's. No matrix is stored, and an order without a construction is refused, never approximated.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from math import isqrt
from operator import index

import numpy as np
import torch
from torch import Tensor

from rotquant.foundation.errors import RotquantError

MAX_CORE_ORDER = 4096
"""Largest K: its K x K table is held in memory, and the transform's n * K multiplications stop being fast beyond it."""

# Williamson's four symmetric circulant blocks A, B, C, D of order m (J. Williamson, Duke Math. J. 11, 1944, gives the
# array): entries 0..(m-1)/2 of each first row, the rest mirrored. Their power spectra add to 4m at every frequency.
_WILLIAMSON_HALF_ROWS = {
    39: ("+++--+-+-----+--++--", "++++---+--++----+-+-", "+++--++-+---+-+--+--", "+---++-+-+-----+++-+"),
    43: ("+---++--++++-+-+++-++-", "++-++++++----+-+--++-+", "+++-+-++--+-+-++++-+--", "++---++++-+--+--++----"),
}


class HadamardSizeError(RotquantError, ValueError):
    """No Hadamard matrix of the requested order can be built here."""


def decompose(n: int) -> tuple[int, int]:
    """Return (K, k), the factorization n = K * 2**k of `hadamard_matrix(n)` and the fast transform.

    K is 1 for powers of two, otherwise the smallest order with a construction of its own (at most `MAX_CORE_ORDER`).

    Raises:
        HadamardSizeError: no such K exists, or n is not positive.
    """
    n = index(n)
    if n < 1:
        raise HadamardSizeError(f"a Hadamard matrix has a positive order, not {n}; the smallest supported size is 1")
    odd_part = n // (n & -n)
    if odd_part == 1:
        return 1, n.bit_length() - 1
    core = 4 * odd_part
    while core <= min(n, MAX_CORE_ORDER):
        if _construction(core) is not None:
            return core, (n // core).bit_length() - 1
        core *= 2
    below, above = _nearest_supported(n)
    raise HadamardSizeError(
        f"no construction of a Hadamard matrix of order {n} is known here; nearest supported sizes: {below} and {above}"
    )


def is_supported(n: int) -> bool:
    """Whether `hadamard_matrix(n)` and the transform exist for this order."""
    try:
        decompose(n)
    except HadamardSizeError:
        return False
    return True


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """Return H_n = H_K (x) H_2^k, shape [n, n], entries +1 and -1, with H @ H.T == n * I exactly.

    H is not symmetric for most K, so its inverse is H.T / n. The tensor is the caller's own, free to be written to; a
    signed integer dtype works too.

    Raises:
        HadamardSizeError: no construction for this order.
    """
    core, doublings = decompose(n)
    device = torch.device("cpu") if device is None else torch.device(device)
    sylvester = torch.ones(1, 1, dtype=dtype, device=device)
    for _ in range(doublings):
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    if core == 1:
        return sylvester
    return torch.kron(torch.tensor(core_matrix(core), dtype=dtype, device=device), sylvester)


@lru_cache(maxsize=32)
def core_matrix(order: int) -> np.ndarray:
    """Return the table H_K of an order that `decompose` can return: int8 [K, K], read-only because it is cached."""
    if order == 1:
        matrix = np.ones((1, 1), dtype=np.int8)
    else:
        builders: dict[str | None, Callable[[int], np.ndarray]] = {
            "paley1": _paley1,
            "paley2": _paley2,
            "williamson": _williamson,
        }
        matrix = builders[_construction(order)](order)
    matrix.setflags(write=False)
    return matrix


@cache
def _construction(order: int) -> str | None:
    """Name the construction of an order divisible by 4, or None. Preference only decides between valid matrices."""
    if _prime_power(order - 1) == 1:  # order - 1 is 3 mod 4, hence never an even power of a prime
        return "paley1"
    half = order // 2 - 1
    if half % 4 == 1 and _prime_power(half) is not None:
        return "paley2"
    if order % 4 == 0 and order // 4 in _WILLIAMSON_HALF_ROWS:
        return "williamson"
    return None


@cache
def _supported_cores() -> tuple[int, ...]:
    return (1, *(order for order in range(4, MAX_CORE_ORDER + 1, 4) if _construction(order) is not None))


def _nearest_supported(n: int) -> tuple[int, int]:
    """Largest supported size below and smallest above an unsupported n >= 3."""
    below, above = [], []
    for core in _supported_cores():
        doublings = (n // core).bit_length()  # core * 2**doublings is the first multiple above n
        above.append(core << doublings)
        if doublings:
            below.append(core << (doublings - 1))
    return max(below), min(above)


def _paley1(order: int) -> np.ndarray:
    """Paley I (R. E. A. C. Paley, J. Math. Phys. 12, 1933): order q + 1, q = 3 mod 4; H = I + S, S skew-symmetric."""
    skew = np.ones((order, order), dtype=np.int8)
    skew[1:, 0] = -1
    skew[0, 0] = 0
    skew[1:, 1:] = _jacobsthal(order - 1)
    return skew + np.eye(order, dtype=np.int8)


def _paley2(order: int) -> np.ndarray:
    """Paley II: order 2 (q + 1) with q = 1 mod 4, from the symmetric conference matrix C; H is symmetric."""
    size = order // 2
    conference = np.ones((size, size), dtype=np.int8)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(size - 1)
    off_diagonal = np.array([[1, 1], [1, -1]], dtype=np.int8)
    diagonal = np.array([[1, -1], [-1, -1]], dtype=np.int8)
    return np.kron(conference, off_diagonal) + np.kron(np.eye(size, dtype=np.int8), diagonal)


def _williamson(order: int) -> np.ndarray:
    """Williamson's array of four commuting symmetric circulants of order m, giving order 4 m."""
    a, b, c, d = (_symmetric_circulant(half_row) for half_row in _WILLIAMSON_HALF_ROWS[order // 4])
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def _symmetric_circulant(half_row: str) -> np.ndarray:
    half = np.array([1 if sign == "+" else -1 for sign in half_row], dtype=np.int8)
    row = np.concatenate([half, half[:0:-1]])
    positions = np.arange(row.size)
    return row[(positions[None, :] - positions[:, None]) % row.size]


def _jacobsthal(q: int) -> np.ndarray:
    """Q[x, y] = chi(x - y) over GF(q), chi the quadratic character (0 at 0), for q an odd prime or its square."""
    p = q if _prime_power(q) == 1 else isqrt(q)
    residues = np.arange(p)
    legendre = np.full(p, -1, dtype=np.int8)
    legendre[residues**2 % p] = 1
    legendre[0] = 0
    difference = (residues[:, None] - residues[None, :]) % p
    if p == q:
        return legendre[difference]
    # GF(p^2) = {a + b t : t^2 = r} for a non-residue r. An element is a square exactly when its norm a^2 - r b^2 is one
    # in GF(p), because z^((p^2-1)/2) = norm(z)^((p-1)/2).
    non_residue = int(np.argmin(legendre))
    character = legendre[(residues[:, None] ** 2 - non_residue * residues[None, :] ** 2) % p]
    return character[difference[:, None, :, None], difference[None, :, None, :]].reshape(q, q)


def _prime_power(q: int) -> int | None:
    """1 when q is prime, 2 when it is the square of a prime, else None (higher powers are not needed)."""
    if _is_prime(q):
        return 1
    root = isqrt(max(q, 0))
    return 2 if root * root == q and _is_prime(root) else None


def _is_prime(q: int) -> bool:
    return q >= 2 and all(q % divisor for divisor in range(2, isqrt(q) + 1))
