"""Optimizers on the Stiefel manifold: Cayley SGD (Li et al. 2020, Algorithm 1), SpinQuant's, Sec. 3.2, Eqs. 3 and 4;
and Riemannian Adam, OSTQuant's.

Ordinary torch optimizers whose parameters are matrices with orthonormal columns and stay so. They know nothing of
models or quantization.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

#: How far from orthonormal a parameter may start: rounding of a float32 matrix stays two orders below.
_START_TOLERANCE = 1e-3
#: Matrices [n, n] of float32: what a step makes of one, and of each rotation itself and its gradient.
_OF_STEP, _OF_ROTATION = 6, 2


class CayleySGD(torch.optim.Optimizer):
    """R' = (I - a/2 Y)^-1 (I + a/2 Y) R, with Y skew-symmetric from the momentum of the gradients (Eqs. 3, 4).

    With M := momentum * M - G, G the gradient, Y = P - P^T where P = M R^T - R (R^T M R^T) / 2, and M := Y R, which
    lies in the tangent space at R. (Eq. 4 prints G for M; Li et al.'s sign is the one that descends.) R' solves
    R' = R + a/2 Y (R + R') and is found by iterating that from R + a Y R. The step a = min(lr, 1 / |Y|_1), the largest
    column sum bounding the spectral norm, makes each iteration at least halve the error. What remains, and rounding,
    would add up over many steps: one Newton-Schulz step, R := R (3 I - R^T R) / 2, squares the distance from the
    manifold. The paper has no such step; its authors' code now and then takes a QR decomposition.

    Args:
        params: real matrices [n, p], n >= p, with orthonormal columns, float32 or float64.
        lr: largest step; schedulers of torch change it as usual.
        momentum: in [0, 1).
        iterations: of the fixed point.
        reorthogonalize: take a Newton-Schulz step after every so many steps; None, as in the paper, never does.

    Raises:
        ValueError: a setting out of range, or a parameter that is none of the above.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.5,
        momentum: float = 0.0,
        iterations: int = 5,
        reorthogonalize: int | None = 1,
    ) -> None:
        for good, message in (
            (lr >= 0, f"lr must not be negative, and is {lr}"),
            (0 <= momentum < 1, f"momentum must lie in [0, 1), and is {momentum}"),
            (iterations >= 1, f"iterations must be at least 1, and are {iterations}"),
            (
                reorthogonalize is None or reorthogonalize >= 1,
                f"reorthogonalize must be positive or None, and is {reorthogonalize}",
            ),
        ):
            if not good:
                raise ValueError(message)
        defaults = {"lr": lr, "momentum": momentum, "iterations": iterations, "reorthogonalize": reorthogonalize}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has floats for losses
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Do one step for every parameter that has a gradient; returns what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, rotation: Tensor, group: dict[str, Any]) -> None:
        state = self.state[rotation]
        descent = cast(Tensor, rotation.grad).neg()
        if "momentum" in state:
            descent.add_(state["momentum"], alpha=group["momentum"])
        skew = tangent(rotation, descent)
        if group["momentum"]:
            state["momentum"] = skew @ rotation
        alpha = torch.clamp(1 / torch.linalg.matrix_norm(skew, ord=1), max=group["lr"])
        rotation.copy_(cayley(rotation, skew * alpha, group["iterations"]))
        state["step"] = state.get("step", 0) + 1
        if group["reorthogonalize"] and state["step"] % group["reorthogonalize"] == 0:
            rotation.copy_(newton_schulz(rotation))


class RiemannianAdam(torch.optim.Optimizer):
    """Adam with one second moment for each matrix, in the canonical metric (Becigneul and Ganea 2019; OSTQuant's).

    X = G - R G^T R is the gradient in the tangent space at R and |X|^2 = tr(X^T (I - R R^T / 2) X) its square. The
    moments are Adam's: M of X, and the number v of |X|^2, both freed of their bias. With D = -lr M / (sqrt(v) + eps)
    and the skew-symmetric A = D R^T - R D^T, the Cayley transform (I - A/2)^-1 (I + A/2) moves R, and M with it to the
    tangent space there. A R is 2 D for a square matrix: it goes twice as far as D, as in geoopt, which OSTQuant's code
    uses. A Newton-Schulz step takes the rounding away. geoopt takes singular vectors every ten steps there, and its
    projection then doubles M of a square matrix, which is left out.

    Args:
        params: real matrices [n, p], n >= p, with orthonormal columns, float32 or float64.
        lr: learning rate; schedulers of torch change it as usual.
        betas, eps: as Adam's.

    Raises:
        ValueError: a parameter that is none of the above.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do one step for every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, rotation: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[rotation], group["betas"]
        gradient = cast(Tensor, rotation.grad)
        gradient = gradient - rotation @ (gradient.mT @ rotation)
        square = gradient.square().sum() - (rotation.mT @ gradient).square().sum() / 2
        state.setdefault("momentum", torch.zeros_like(rotation)).lerp_(gradient, 1 - first)
        state.setdefault("square", torch.zeros_like(square)).lerp_(square, 1 - second)
        state["step"] = step = state.get("step", 0) + 1
        direction = state["momentum"] / (1 - first**step)
        direction *= -group["lr"] / ((state["square"] / (1 - second**step)).sqrt() + group["eps"])
        skew = direction @ rotation.mT
        skew = skew - skew.mT
        moved = torch.cat([rotation, state["momentum"]], dim=-1)
        one = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
        moved = torch.linalg.solve(one - skew / 2, moved + skew @ moved / 2)
        rotation.copy_(newton_schulz(moved[:, : rotation.shape[1]]))
        state["momentum"].copy_(moved[:, rotation.shape[1] :])


def tangent(rotation: Tensor, direction: Tensor) -> Tensor:
    """The skew-symmetric Y [n, n] for which Y R is `direction` projected to the tangent space at R (Eq. 4).

    Args:
        rotation: R [n, p], orthonormal columns.
        direction: [n, p].
    """
    product = direction @ rotation.mT
    product = product - rotation @ (rotation.mT @ product) / 2
    return product - product.mT


def cayley(rotation: Tensor, skew: Tensor, iterations: int) -> Tensor:
    """The Cayley transform of `skew` [n, n] applied to R [n, p], (I - Y/2)^-1 (I + Y/2) R (Eq. 3), by iteration.

    Each iteration multiplies the error by |Y|/2 in any operator norm.
    """
    result = rotation + skew @ rotation
    for _ in range(iterations):
        result = rotation + skew @ (rotation + result) / 2
    return result


def newton_schulz(rotation: Tensor) -> Tensor:
    """R (3 I - R^T R) / 2: for columns orthonormal up to an error e, orthonormal up to about 3 e^2 / 4."""
    return 1.5 * rotation - 0.5 * rotation @ (rotation.mT @ rotation)


def orthonormality_error(rotation: Tensor) -> Tensor:
    """max |R^T R - I| of R [n, p], a scalar of its type."""
    gram = rotation.mT @ rotation
    return (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max()


def learning_bytes(size: int, rotations: int) -> int:
    """Bytes that learning so many rotations [size, size] takes, float32."""
    return 4 * (_OF_STEP + _OF_ROTATION * rotations) * size**2


def _check(parameter: Tensor) -> None:
    """Raise `ValueError` for a parameter that cannot lie on the Stiefel manifold as it is."""
    shape = tuple(parameter.shape)
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rotations are learned as float32 or float64 matrices, and one is of {parameter.dtype}")
    if len(shape) != 2 or shape[0] < shape[1]:
        raise ValueError(f"rotations are matrices [n, p] with n >= p, and one is of shape {shape}")
    error = orthonormality_error(parameter.detach()).item()
    if not error <= _START_TOLERANCE:
        raise ValueError(
            f"rotations have orthonormal columns: a matrix of shape {shape} has max |R^T R - I| = {error:.2g}"
        )
