"""The Hadamard matrices are what they claim, the fast transform is the product with them, and its gradient is right."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotquant.foundation.errors import RotquantError
from rotquant.tensors import hadamard
from rotquant.tensors.hadamard import (
    decompose,
    hadamard_matrix,
    hadamard_transform,
    head_hadamard_transform,
    is_supported,
)
from rotquant.tensors.hadamard.constructions import core_matrix

# The blocks H_K that real models need, and the widths of those models with the K each must get.
CORES = [1, 4, 12, 20, 28, 36, 52, 60, 68, 76, 84, 100, 108, 140, 148, 156, 172, 244, 924]
MODEL_SIZES = {
    3072: 12, 4096: 1, 5120: 20, 6656: 52, 8192: 1, 11008: 172, 12288: 12, 13824: 108, 14336: 28, 17920: 140,
    18944: 148, 25600: 100, 28672: 28, 29568: 924,
}  # fmt: skip
# Every path through the factors: one dense block, merged doublings, K alone, K and one or two Sylvester blocks, no K.
TRANSFORM_SIZES = [1, 2, 4, 12, 40, 96, 128, 156, 160, 256, 320, 344, 688, 864, 896, 924, 1024, 1376, 2496, 4096, 5120]
UNSYMMETRIC = 20  # Paley I


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


# --- matrices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", CORES)
def test_core_tables_are_hadamard_matrices_in_integers(order):
    table = torch.tensor(core_matrix(order), dtype=torch.int64)
    assert table.shape == (order, order)
    assert torch.equal(table.abs(), torch.ones_like(table))
    assert torch.equal(table @ table.T, order * torch.eye(order, dtype=torch.int64))


@pytest.mark.parametrize(("n", "core"), MODEL_SIZES.items())
def test_model_widths_use_the_smallest_core(n, core):
    assert decompose(n) == (core, int(math.log2(n // core)))


@pytest.mark.parametrize("n", MODEL_SIZES)
def test_transform_matrix_is_hadamard_at_model_widths(n):
    """Sampled rows of H_n, made by the fast transform of unit vectors, are +-1 and orthogonal, in exact integers.

    Unnormalized float64 sums of +-1 are exact, so every comparison is an equality.
    """
    indices = torch.cat(
        [torch.tensor([0, 1, n // 2, n - 1]), torch.randint(0, n, (12,), generator=generator())]
    ).unique()
    units = torch.zeros(len(indices), n, dtype=torch.float64)
    units[torch.arange(len(indices)), indices] = 1
    rows = hadamard_transform(units, normalize=False)
    assert torch.equal(rows.abs(), torch.ones_like(rows))
    assert torch.equal(rows @ rows.T, n * torch.eye(len(indices), dtype=torch.float64))
    assert torch.equal(hadamard_transform(rows, inverse=True, normalize=False), n * units)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 40, 56, 160, 312, 344, 688, 1024])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
def test_whole_matrices_are_exact_in_every_dtype(n, dtype):
    matrix = hadamard_matrix(n, dtype)
    assert matrix.dtype == dtype
    exact = matrix.double()
    assert torch.equal(exact @ exact.T, n * torch.eye(n, dtype=torch.float64))


def test_matrices_are_kronecker_products_of_core_and_sylvester():
    assert torch.equal(hadamard_matrix(160), torch.kron(hadamard_matrix(20), hadamard_matrix(8)))
    assert torch.equal(hadamard_matrix(8), torch.kron(hadamard_matrix(2), hadamard_matrix(4)))
    assert hadamard_matrix(2).tolist() == [[1, 1], [1, -1]]


def test_a_caller_cannot_corrupt_later_results():
    x, before = normal(3, 172), hadamard_transform(normal(3, 172))
    hadamard_matrix(172).zero_()
    with pytest.raises(ValueError, match="read-only"):
        core_matrix(172)[0, 0] = 0
    assert torch.equal(hadamard_transform(x), before)


@given(st.integers(1, 3000))
def test_decomposition_is_the_smallest_core_or_a_refusal(n):
    if not is_supported(n):
        assert n > 2
        return
    core, doublings = decompose(n)
    assert core * 2**doublings == n
    if core > 1:
        assert core % 4 == 0
        assert n & (n - 1)  # powers of two never need a core
        smaller = [n >> shift for shift in range(doublings + 1, n.bit_length()) if n % (1 << shift) == 0]
        assert not any(is_supported(order) for order in smaller)


@pytest.mark.parametrize(("n", "nearest"), [(3, (2, 4)), (92, (88, 96)), (130, (128, 132)), (13696, (13680, 13728))])
def test_unsupported_sizes_are_refused_with_the_nearest_ones(n, nearest):
    assert not is_supported(n)
    with pytest.raises(hadamard.HadamardSizeError, match=f"order {n} .*: {nearest[0]} and {nearest[1]}$") as caught:
        hadamard_matrix(n)
    assert isinstance(caught.value, RotquantError)
    assert all(is_supported(size) for size in nearest)
    assert not any(is_supported(size) for size in range(nearest[0] + 1, nearest[1]))


@pytest.mark.parametrize("n", [0, -4])
def test_orders_are_positive(n):
    with pytest.raises(hadamard.HadamardSizeError, match="positive order"):
        decompose(n)


# --- transform ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n", TRANSFORM_SIZES)
def test_transform_is_the_dense_product(n, inverse):
    """1e-12 relative: float64 rounding over at most 5120 terms stays two orders below it."""
    x, matrix = normal(3, n), hadamard_matrix(n)
    expected = x @ (matrix.T if inverse else matrix) / math.sqrt(n)
    actual = hadamard_transform(x, inverse=inverse)
    assert (actual - expected).norm() <= 1e-12 * expected.norm()


@settings(max_examples=60)
@given(
    n=st.sampled_from([1, 2, 8, 12, 24, 40, 160, 320, 688, 1376]),
    batch=st.lists(st.integers(0, 4), max_size=3),
    inverse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_transform_over_any_leading_shape(n, batch, inverse, seed):
    """The dense product, the norm of every row and the round trip, for any leading axes, empty ones included."""
    x, matrix = normal(*batch, n, seed=seed), hadamard_matrix(n)
    y = hadamard_transform(x, inverse=inverse)
    torch.testing.assert_close(y, x @ (matrix.T if inverse else matrix) / math.sqrt(n), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard_transform(y, inverse=not inverse), x, rtol=1e-12, atol=1e-12)


def test_inverse_is_not_the_forward_transform_when_the_core_is_not_symmetric():
    x = normal(2, 172 * 16)
    twice = hadamard_transform(hadamard_transform(x))
    assert (twice - x).norm() > 0.5 * x.norm()


@pytest.mark.parametrize("shape", [(700, 1024), (300, 1376), (2, 3, 300, 896)])
def test_blocks_of_rows_do_not_change_a_row(shape):
    """Inputs larger than one CPU block: each row equals the row transformed alone (float64, rounding only)."""
    x = normal(*shape)
    y = hadamard_transform(x).reshape(-1, shape[-1])
    rows = [0, 255, 256, 299, len(y) - 1]
    alone = torch.stack([hadamard_transform(x.reshape(-1, shape[-1])[row]) for row in rows])
    torch.testing.assert_close(y[rows], alone, rtol=1e-12, atol=1e-12)


def test_strided_and_expanded_inputs():
    x = normal(160, 6).T  # columns of a row-major tensor
    assert not x.is_contiguous()
    torch.testing.assert_close(hadamard_transform(x), hadamard_transform(x.contiguous()), rtol=0, atol=0)
    row = normal(160)
    torch.testing.assert_close(
        hadamard_transform(row.expand(4, 160))[2], hadamard_transform(row), rtol=1e-12, atol=1e-12
    )


def test_the_input_is_left_alone():
    x = normal(4, 1376)
    before = x.clone()
    hadamard_transform(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n", [UNSYMMETRIC, 160])
def test_gradient_matches_finite_differences(n, inverse, normalize):
    assert not torch.equal(hadamard_matrix(UNSYMMETRIC), hadamard_matrix(UNSYMMETRIC).T)
    x = normal(2, n).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x, inverse=inverse, normalize=normalize), x)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n", [UNSYMMETRIC, 160])
def test_gradient_of_the_gradient_matches_finite_differences(n, inverse):
    x = normal(2, n).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: hadamard_transform(x, inverse=inverse).square(), x)


def test_backward_is_the_opposite_transform():
    x, upstream = normal(3, UNSYMMETRIC * 8).requires_grad_(), normal(3, UNSYMMETRIC * 8, seed=1)
    hadamard_transform(x).backward(upstream)
    assert torch.equal(x.grad, hadamard_transform(upstream, inverse=True))
    assert not torch.allclose(x.grad, hadamard_transform(upstream))


def test_head_transform_gradient():
    x = normal(2, UNSYMMETRIC * 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: head_hadamard_transform(x, UNSYMMETRIC), x)


# Half the spacing of floats at 1 is 2^-11 (float16) and 2^-8 (bfloat16) of a value; two factors round twice. Three
# times that, relative to the whole tensor's norm, is ample.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 3 * 2**-11), (torch.bfloat16, 3 * 2**-8)]
)
def test_dtype_is_preserved_and_accurate(dtype, tolerance):
    x = normal(64, 1376, dtype=dtype)
    y = hadamard_transform(x)
    expected = hadamard_transform(x.double())
    assert y.dtype == dtype
    assert (y.double() - expected).norm() <= tolerance * expected.norm()


def test_float16_does_not_overflow_on_the_way():
    """All 4096 values of a row are 1000: their sum, 4.1e6, is far beyond float16, the normalized 64,000 is not."""
    y = hadamard_transform(torch.full((1, 4096), 1000.0, dtype=torch.float16))
    assert y[0, 0] == 64_000
    assert torch.count_nonzero(y) == 1


def test_compute_dtype_changes_the_arithmetic_and_not_the_result_type():
    x = normal(64, 1024, dtype=torch.float16)
    in_float32 = hadamard_transform(x, compute_dtype=torch.float32)
    assert in_float32.dtype == torch.float16
    assert torch.equal(in_float32, hadamard_transform(x.float()).half())
    assert not torch.equal(in_float32, hadamard_transform(x))
    heads = head_hadamard_transform(x, 8, compute_dtype=torch.float32)
    assert torch.equal(heads, head_hadamard_transform(x.float(), 8).half())


def test_autocast_and_inference_mode_do_not_change_the_result():
    x = normal(8, 896, dtype=torch.float32)
    plain = hadamard_transform(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hadamard_transform(x), plain)
    with torch.inference_mode():
        assert torch.equal(hadamard_transform(x), plain)
        hadamard_transform(normal(8, 60))
    y = normal(8, 60).requires_grad_()
    hadamard_transform(y).sum().backward()  # with a table first made in inference mode
    assert y.grad is not None


def test_wrong_inputs_are_refused_in_one_sentence():
    with pytest.raises(TypeError, match=r"needs its input in float64.*not torch\.int64"):
        hadamard_transform(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"needs compute_dtype in float64.*not torch\.int32"):
        hadamard_transform(torch.ones(2, 8), compute_dtype=torch.int32)
    with pytest.raises(TypeError, match="scalar"):
        hadamard_transform(torch.tensor(1.0))
    with pytest.raises(hadamard.HadamardSizeError, match="order 10 "):
        hadamard_transform(torch.ones(2, 10))
    with pytest.raises(hadamard.HadamardSizeError, match="order 6 "):
        head_hadamard_transform(torch.ones(2, 24), 6)
    with pytest.raises(ValueError, match="no last axis of 5 equally sized heads"):
        head_hadamard_transform(torch.ones(2, 24), 5)


# --- across heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(1, 8), (8, 4), (12, 5), (20, 16), (24, 8), (40, 3), (160, 2), (1376, 1)]
)
def test_head_transform_is_the_kronecker_product_with_identity(num_heads, head_dim, inverse):
    """Any head_dim, and head counts that are no powers of two, as 12, 20, 24 and 40 in real models."""
    x, matrix = normal(2, 3, num_heads * head_dim), hadamard_matrix(num_heads)
    across = torch.kron(matrix, torch.eye(head_dim, dtype=torch.float64)) / math.sqrt(num_heads)
    expected = x @ (across.T if inverse else across)
    torch.testing.assert_close(head_hadamard_transform(x, num_heads, inverse=inverse), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(8, 16), (12, 64), (20, 16), (24, 64), (40, 128)])
def test_head_transform_completes_the_per_head_transform(num_heads, head_dim):
    """(I (x) H_head_dim)(H_num_heads (x) I) = H_(num_heads * head_dim): QuaRot fuses one and runs the other online."""
    x = normal(3, num_heads * head_dim)
    per_head = hadamard_transform(x.unflatten(-1, (num_heads, head_dim))).flatten(-2)
    completed = head_hadamard_transform(per_head, num_heads)
    torch.testing.assert_close(completed, hadamard_transform(x), rtol=1e-12, atol=1e-12)


# --- random rotations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [hadamard.random_hadamard_matrix, hadamard.random_orthogonal_matrix])
def test_random_rotations_are_orthogonal_and_follow_their_generator(make):
    q = make(160, generator(1))
    torch.testing.assert_close(q @ q.T, torch.eye(160, dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.equal(q, make(160, generator(1)))
    assert not torch.equal(q, make(160, generator(2)))
    assert torch.equal(make(160, generator(1), torch.float32), q.float())
    state = torch.get_rng_state()
    make(8, generator(3))
    assert torch.equal(torch.get_rng_state(), state)  # global random state is not touched


def test_randomized_hadamard_sides():
    """As rows: signs on the input meet the data before it is mixed; signs on the output only flip rotated features."""
    n, x = 40, normal(5, 40)
    s = hadamard.random_signs(n, generator(7))
    assert set(s.tolist()) == {1.0, -1.0}
    q_input = hadamard.random_hadamard_matrix(n, generator(7))
    torch.testing.assert_close(x @ q_input, hadamard_transform(x * s), rtol=1e-12, atol=1e-12)
    q_output = hadamard.random_hadamard_matrix(n, generator(7), signs="output")
    torch.testing.assert_close(x @ q_output, hadamard_transform(x) * s, rtol=1e-12, atol=1e-12)
    largest = [(x @ hadamard.random_hadamard_matrix(n, generator(i), signs="output")).abs().max() for i in range(3)]
    torch.testing.assert_close(torch.stack(largest), largest[0].expand(3), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="'input' or 'output'"):
        hadamard.random_hadamard_matrix(n, generator(), signs="left")


def test_random_orthogonal_matrices_have_the_moments_of_the_haar_measure():
    """E q_ij = 0, E q_ij^2 = 1/n, E q_ij^4 = 3/(n(n+2)), E tr(Q) = 0, E tr(Q)^2 = 1, det of both signs.

    2000 draws, n = 4. Standard errors: 0.011 for the mean of an entry, 0.022 for tr, 0.03 for tr^2; the bounds are
    about five of them. Without the correction of R's diagonal the means of q_00 and of tr fail by far.
    """
    shared, draws, n = generator(5), 2000, 4
    q = torch.stack([hadamard.random_orthogonal_matrix(n, shared) for _ in range(draws)])
    trace = q.diagonal(dim1=1, dim2=2).sum(1)
    assert q.mean(0).abs().max() < 0.055
    assert (q.square().mean(0) - 1 / n).abs().max() < 0.03
    assert (q.pow(4).mean(0) - 3 / (n * (n + 2))).abs().max() < 0.03
    assert trace.mean().abs() < 0.11
    assert (trace.square().mean() - 1).abs() < 0.16
    assert 0.44 < (torch.linalg.det(q) > 0).double().mean() < 0.56
