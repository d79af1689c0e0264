"""Cayley SGD stays on the Stiefel manifold, descends, and takes the Cayley transform's step (SpinQuant Sec. 3.2)."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from rotquant.tensors.hadamard import random_orthogonal_matrix
from rotquant.tensors.stiefel import CayleySGD, cayley, newton_schulz, orthonormality_error, tangent


def rotation(n: int, p: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Parameter:
    """A random matrix with orthonormal columns [n, p]."""
    matrix = random_orthogonal_matrix(n, torch.Generator().manual_seed(seed))[:, : p or n]
    return torch.nn.Parameter(matrix.contiguous().to(dtype))


def noise(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def exact_step(start: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Eq. 3 by solving the linear system, with the bounded step, written out for square matrices and no momentum."""
    skew = (start @ gradient.T - gradient @ start.T) / 2
    alpha = min(lr, 1 / skew.abs().sum(dim=0).max().item())
    eye = torch.eye(len(start), dtype=start.dtype)
    return torch.linalg.solve(eye - alpha / 2 * skew, (eye + alpha / 2 * skew) @ start)


@pytest.mark.parametrize("size", [(16, 16), (64, 64), (48, 12)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_columns_stay_orthonormal_to_1e_6_over_200_steps_in_float32(size: tuple[int, int], momentum: float) -> None:
    """Gradients that never agree, as large as they can be: every step is the longest that the bound allows."""
    matrix = rotation(*size, dtype=torch.float32)
    optimizer = CayleySGD([matrix], lr=1.5, momentum=momentum)
    for step in range(200):
        matrix.grad = 100 * noise(*size, seed=step, dtype=torch.float32)
        optimizer.step()
        assert orthonormality_error(matrix.detach().double()) <= 1e-6


def test_without_reorthogonalization_the_error_is_that_of_the_truncated_series() -> None:
    """s iterations give the Neumann series up to the power s + 1 of aY/2, whose remainder is its next power."""
    start = rotation(32)
    skew = tangent(start.detach(), noise(32, 32))
    skew = skew / torch.linalg.matrix_norm(skew, ord=2)
    for iterations in (1, 3, 5, 9):
        error = orthonormality_error(cayley(start.detach(), skew, iterations))
        assert 0 < error <= 4 * 0.5 ** (iterations + 2)


@pytest.mark.parametrize("lr", [1e-3, 0.1, 1.5])
def test_a_step_is_that_of_the_exact_cayley_transform(lr: float) -> None:
    """The iteration at least halves the error, so 40 of them reach float64's rounding."""
    matrix, gradient = rotation(24), noise(24, 24)
    expected = exact_step(matrix.detach(), gradient, lr)
    matrix.grad = gradient
    CayleySGD([matrix], lr=lr, iterations=40, reorthogonalize=None).step()
    assert (matrix - expected).abs().max() <= 1e-9


def test_five_iterations_and_a_newton_schulz_step_come_close_to_it() -> None:
    """The 1-norm exceeds the spectral norm of a random matrix several times over, so five iterations go far."""
    matrix, gradient = rotation(64), noise(64, 64)
    expected = exact_step(matrix.detach(), gradient, 1.5)
    matrix.grad = gradient
    CayleySGD([matrix]).step()
    assert (matrix - expected).abs().max() <= 1e-5


def test_the_step_is_bounded_by_the_norm_of_the_skew_matrix() -> None:
    """However large the gradient, a rotation by at most about one radian; small gradients move in proportion to lr."""
    moves = []
    for size in (1.0, 1e6, 1e-6):
        matrix = rotation(16)
        before = matrix.detach().clone()
        matrix.grad = size * noise(16, 16)
        CayleySGD([matrix], lr=0.5).step()
        moves.append((matrix.detach() - before).norm().item())
    assert moves[0] == pytest.approx(moves[1])
    assert moves[2] < 1e-4


def test_it_finds_the_orthogonal_procrustes_solution() -> None:
    """min |A R - B| over rotations has the solution U V^T of A^T B = U S V^T, here near the start, B being near A R."""
    data = noise(100, 8)
    target = data @ rotation(8, seed=3).detach() + 0.05 * noise(100, 8, seed=2)
    u, _, vh = torch.linalg.svd(data.T @ target)
    skew = tangent(u @ vh, noise(8, 8, seed=7))
    matrix = torch.nn.Parameter(cayley(u @ vh, skew / skew.norm(), 40))
    optimizer = CayleySGD([matrix], lr=0.1)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (data @ matrix - target).square().sum() / 100
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(losses))
    assert (matrix - u @ vh).abs().max() <= 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_finds_axes_that_spread_outliers(momentum: float) -> None:
    """Fourth powers of a vector with one outlier are least when every entry has the same size."""
    outlier = torch.zeros(16, dtype=torch.float64)
    outlier[3] = 4.0
    matrix = rotation(16)
    optimizer = CayleySGD([matrix], lr=1e-3, momentum=momentum)
    for _ in range(400):
        optimizer.zero_grad()
        (outlier @ matrix).pow(4).sum().backward()
        optimizer.step()
    assert (outlier @ matrix).pow(4).sum().item() == pytest.approx(4.0**4 / 16, rel=1e-3)


@pytest.mark.parametrize("size", [(16, 16), (16, 5)])
def test_momentum_lies_in_the_tangent_space(size: tuple[int, int]) -> None:
    """R^T M is skew-symmetric at the R where the gradient was taken, for momentum that was tangent elsewhere before."""
    matrix = rotation(*size)
    optimizer = CayleySGD([matrix], lr=0.3, momentum=0.9)
    for step in range(3):
        before = matrix.detach().clone()
        matrix.grad = noise(*size, seed=step)
        optimizer.step()
        product = before.T @ optimizer.state[matrix]["momentum"]
        assert (product + product.T).abs().max() <= 1e-12


def test_the_tangent_projection_keeps_tangent_directions_and_removes_normal_ones() -> None:
    for size in ((12, 12), (12, 4)):
        matrix = rotation(*size).detach()
        a = noise(12, 12)
        tangential = (a - a.T) @ matrix
        symmetric = noise(size[1], size[1])
        normal = matrix @ (symmetric + symmetric.T)
        assert torch.allclose(tangent(matrix, tangential) @ matrix, tangential, atol=1e-12)
        assert tangent(matrix, normal).abs().max() <= 1e-12


def test_a_newton_schulz_step_squares_the_error() -> None:
    near = rotation(20).detach() + 1e-4 * noise(20, 20)
    error = orthonormality_error(near)
    assert orthonormality_error(newton_schulz(near)) <= 20 * error**2


def test_state_dict_round_trip_continues_exactly() -> None:
    def steps(matrix: torch.nn.Parameter, optimizer: CayleySGD, which: range) -> None:
        for step in which:
            matrix.grad = noise(16, 16, seed=step)
            optimizer.step()

    settings = {"lr": 0.2, "momentum": 0.9, "reorthogonalize": 3}
    straight = rotation(16)
    optimizer = CayleySGD([straight], **settings)
    steps(straight, optimizer, range(4))
    resumed = torch.nn.Parameter(straight.detach().clone())
    state = copy.deepcopy(optimizer.state_dict())
    steps(straight, optimizer, range(4, 9))
    again = CayleySGD([resumed])
    again.load_state_dict(state)
    steps(resumed, again, range(4, 9))
    assert torch.equal(straight, resumed)


def test_parameters_without_gradient_stay_and_closures_are_called() -> None:
    still, moving = rotation(8), rotation(8, seed=1)
    before = still.detach().clone()

    def closure() -> Tensor:
        loss = (moving - torch.eye(8, dtype=torch.float64)).square().sum()
        loss.backward()
        return loss

    assert CayleySGD([still, moving]).step(closure) > 0
    assert torch.equal(still, before)


def test_a_zero_gradient_changes_nothing() -> None:
    matrix = rotation(8)
    before = matrix.detach().clone()
    matrix.grad = torch.zeros_like(before)
    CayleySGD([matrix], reorthogonalize=None).step()
    assert torch.equal(matrix, before)


def test_schedulers_of_torch_set_the_step() -> None:
    matrix = rotation(8)
    optimizer = CayleySGD([matrix], lr=1.0, reorthogonalize=None)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=2)
    matrix.grad = noise(8, 8)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    before = matrix.detach().clone()
    optimizer.step()
    assert (matrix - before).abs().max() <= 1e-15


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.eye(4, 6), r"n >= p.*\(4, 6\)"),
        (torch.ones(5), r"n >= p.*\(5,\)"),
        (2 * torch.eye(4), r"orthonormal columns.*= 3"),
        (torch.full((4, 4), float("nan")), "orthonormal columns"),
        (torch.eye(4, dtype=torch.complex64), "complex64"),
        (torch.eye(4, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_matrices_off_the_manifold_are_refused(matrix: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CayleySGD([torch.nn.Parameter(matrix)])


@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"iterations": 0}, {"reorthogonalize": 0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        CayleySGD([rotation(4)], **setting)
