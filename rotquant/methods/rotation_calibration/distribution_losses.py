"""Rotations that spread vectors evenly: losses of a rotated vector's distribution, minimized by SGD.

No vector passes a quantizer: a distribution without tails is what a uniform grid covers best, and the loss says how far
one is from that. So a step costs products with one matrix, where SpinQuant's runs the network forth and back.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from rotquant.foundation.files import canonical_json, short_hash
from rotquant.foundation.progress import silenced
from rotquant.methods.rotation_calibration import RotationCalibration
from rotquant.methods.rotation_calibration.sampled_vectors import Vectors, sampled_activations, weight_vectors
from rotquant.models.architectures import architecture_of
from rotquant.models.fitting import check_transforms
from rotquant.models.limits import ModelLimits
from rotquant.models.rotation.matrices import LearnedRotations, initial_rotations
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.tensors.hadamard import random_orthogonal_matrix
from rotquant.tensors.quantization import fake_quantize
from rotquant.tensors.stiefel import CayleySGD, orthonormality_error
from rotquant.training.loop import GradientStep, train
from rotquant.training.state import Checkpoint, Record

#: Kurtosis of a uniform distribution.
UNIFORM = 1.8
#: Elements of vectors that pass a loss at once.
_AT_ONCE = 2**24
#: Vectors up to this share of what is free on a GPU lie there: one core that gathers a step's takes most of the time.
_ON_GPU = 0.5
#: Largest share of a massive token's length that is lost by rounding it unrotated: 8.5 of sqrt(4096) (DFRot's code).
_MASSIVE = 8.5 / 64


def whip(y: Tensor) -> Tensor:
    """The sum over features of exp(-|y|) (DartQuant Eq. 5), [...] of y [..., features]."""
    return y.abs().neg().exp().sum(dim=-1)


def kurtosis(y: Tensor) -> Tensor:
    """The distance of each vector's kurtosis from a uniform distribution's (KurTail), [...] of y [..., features]."""
    centred = y - y.mean(dim=-1, keepdim=True)
    square = centred.square()
    spread = square.mean(dim=-1).square().clamp_min(torch.finfo(y.dtype).tiny)
    return (square.square().mean(dim=-1) / spread - UNIFORM).abs()


def fourth_powers(y: Tensor) -> Tensor:
    """The sum over features of y^4 (OptRot), [...] of y [..., features]."""
    return y.square().square().sum(dim=-1)


def rounding(y: Tensor, scheme: QuantizationScheme) -> Tensor:
    """The squared error of a quantizer, its codes taken as constant (DFRot), [...] of y [..., features]."""
    return (y - fake_quantize(y.detach(), scheme)).square().sum(dim=-1)


def emphasized(x: Tensor, scheme: QuantizationScheme, factor: float, device: torch.device | None = None) -> Tensor:
    """Vectors x [n, features], of which those of massive tokens are `factor` times as long (DFRot).

    A quantizer of rows multiplies its codes' values likewise, and their squared error by the factor's square.

    Args:
        device: where they are rounded; default, where they lie.
    """
    parts = (part.to(device or x.device, torch.float32) for part in _parts(x))
    lost = torch.cat([rounding(part, scheme) / part.square().sum(dim=-1) for part in parts])
    return torch.where((lost < _MASSIVE**2).to(x.device)[:, None], factor * x, x)


def learn_rotations(
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    samples: Tensor | None,
    *,
    device: torch.device | str | None = None,
    checkpoint: Path | None = None,
    progress: bool = True,
    checkpoint_every: int = 10,
    callback: Callable[[Record], None] | None = None,
) -> LearnedRotations:
    """Learn the rotations of a recipe on sampled vectors.

    Args:
        model: a causal language model of a supported family in its original basis; unchanged afterwards.
        recipe: its `methods.rotation_calibration` says how.
        seed: of the rotations to start from, of the tokens that are kept and of the order of the vectors.
        samples: token ids, int64 [samples, tokens], of the method's text; None where weights alone count.
        device: where to work; None where the model lies.
        checkpoint: file that keeps the state every `checkpoint_every` steps, and from which an interrupted learning
            continues with the same result. The caller deletes it.
        progress: say how far it is (`rotquant.foundation.progress`).
        callback: called with every new record, after the checkpoint is written.

    Raises:
        RecipeError: the recipe does not fit; before anything is computed.
        ResultError: the checkpoint belongs to another learning or is damaged.
        RotquantError: the loss is not finite.
    """
    settings, architecture = RotationCalibration.of(recipe), architecture_of(model)
    check_transforms(architecture, recipe.transforms)
    if samples is not None:
        ModelLimits.of(model.config).check(samples, "samples that rotations are learned on")
    place = next(model.parameters()).device if device is None else torch.device(device)
    drawn = initial_rotations(architecture, cast(RotationScheme, recipe.rotation), seed)
    with silenced(not progress):
        vectors = {} if samples is None else sampled_activations(model, recipe, drawn, samples, seed, place)
        weights = weight_vectors(model, recipe, drawn) if settings.weights else {}
        vectors, weights = _near(place, vectors, weights)
        start = {name: matrix.to(place) for name, matrix in drawn.tensors().items()}
        inputs = [name for name in start if not _of_values(name)]
        if settings.start == "principal":
            start |= {name: _behind_principal(start[name], vectors[name]) for name in inputs}
        if settings.start == "eigenvectors":
            generator = torch.Generator().manual_seed(seed)
            for name in inputs:
                site = "attention_input" if name == "residual" else name.rpartition(".")[0]
                largest = recipe.outlier_features(site, len(start[name]))
                start[name] = _of_eigenvectors(start[name], vectors[name], largest, generator)
        if settings.massive > 1:
            scheme = _quantizer(recipe, "residual")
            vectors |= {
                name: emphasized(x, scheme, settings.massive, place)
                for name, x in vectors.items()
                if not _of_values(name)
            }
        sharing = architecture.num_heads // architecture.num_kv_heads
        learned = {
            name: _Learned(matrix, recipe, name, vectors.get(name), weights.get(name), seed, sharing)
            for name, matrix in start.items()
        }
        identity = _identity(recipe, seed, place, samples, vectors, weights)
        history = train(
            partial(_step, learned),
            settings.steps,
            "learning rotations",
            parts={f"{name}.{part}": state for name, one in learned.items() for part, state in one.parts.items()},
            checkpoint=checkpoint and Checkpoint(checkpoint, identity, checkpoint_every),
            on_step=callback,
        )
    return LearnedRotations.of_float32({name: one.rotation for name, one in learned.items()}, history)


def _step(learned: Mapping[str, "_Learned"], step: int) -> Record:
    """One step of every rotation that has one left; the loss is the mean over rotations of R1's kind, or of all."""
    losses = {name: one.step(step)["loss"] for name, one in learned.items() if step < one.steps}
    outer = [loss for name, loss in losses.items() if not _of_values(name)] or list(losses.values())
    errors = [orthonormality_error(learned[name].rotation) for name in losses]
    return {
        "loss": sum(outer) / len(outer),
        "learning_rate": next(iter(learned.values())).rate(step),
        "orthonormality": torch.stack(errors).max().item(),
    }


def _of_values(name: str) -> bool:
    """Whether a rotation is an R2."""
    return name.startswith("values.")


def _quantizer(recipe: Recipe, name: str) -> QuantizationScheme:
    """The quantizer, without its clip, of what a rotation gives: inputs, or values where the recipe has one of them."""
    scheme = recipe.values if _of_values(name) and recipe.values else recipe.activations
    return cast(QuantizationScheme, scheme).model_copy(update={"clip_ratio": 1.0})


class _Learned:
    """One rotation while it is learned.

    sharing: query heads of a value head. DartQuant sums its loss over them, so a R2 takes steps as many times as long.
    """

    def __init__(
        self,
        start: Tensor,
        recipe: Recipe,
        name: str,
        activations: Tensor | None,
        weights: Tensor | None,
        seed: int,
        sharing: int = 1,
    ) -> None:
        self.settings = settings = RotationCalibration.of(recipe)
        self.steps = min(settings.value_steps, settings.steps) if _of_values(name) else settings.steps
        if activations is None and weights is None:
            self.steps = 0
        self._parameter = nn.Parameter(start.float().contiguous())
        losses = {"whip": whip, "kurtosis": kurtosis}
        if settings.loss == "rounding":
            self._scheme = _quantizer(recipe, name)
            losses["rounding"] = partial(rounding, scheme=self._scheme)
        self._pools = [
            _Pool(vectors, loss, share, int(short_hash(f"{seed} {name} {kind}"), 16) % 2**63)
            for kind, vectors, loss, share in (
                ("activations", activations, losses[settings.loss], 1 - settings.weights),
                ("weights", weights, fourth_powers, settings.weights),
            )
            if vectors is not None and share > 0
        ]
        if _of_values(name) and settings.parametrization == "qr" and settings.weights < 1 and self._pools:
            self._pools[0].unit = float(sharing)
        if self.steps and settings.weights > 0:
            self._units()
        if settings.parametrization == "cayley":
            self._optimizer: torch.optim.Optimizer = CayleySGD(
                [self._parameter], settings.learning_rate, settings.momentum
            )
        else:
            self._optimizer = torch.optim.SGD([self._parameter], settings.learning_rate, settings.momentum)
        self._gradient = GradientStep(self._batch, self._loss, [self._optimizer])

    @property
    def rotation(self) -> Tensor:
        """The orthogonal matrix as it is now, without gradient."""
        return self._orthogonal().detach()

    @property
    def parts(self) -> dict[str, Tensor | torch.optim.Optimizer]:
        """What changes, for a checkpoint."""
        return {"matrix": self._parameter, "optimizer": self._optimizer}

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from zero."""
        left = 1 - step / self.steps if self.settings.schedule == "linear" and self.steps else 1.0
        return self.settings.learning_rate * left

    def step(self, step: int) -> Record:
        """Take a step of this rotation."""
        if self.settings.parametrization == "procrustes":
            return self._assign(step)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(step)
        return self._gradient(step)

    @torch.no_grad()
    def _assign(self, step: int) -> Record:
        """Round a step's rotated vectors, and turn them as near to what they became as a rotation can.

        That is the orthogonal factor of X^T Q(X R) (orthogonal Procrustes, by its singular vectors).
        """
        products, loss = torch.zeros_like(self._parameter), 0.0
        for pool, part in self._batch(step):
            x = part.to(products.device, torch.float32)
            y = x @ self._parameter
            rounded = fake_quantize(y, self._scheme)
            products.addmm_(x.T, rounded)
            loss += (y - rounded).square().sum().item() / pool.size(self.settings.vectors)
        left, _, right = torch.linalg.svd(products)
        self._parameter.copy_(left @ right)
        return {"loss": loss}

    def _orthogonal(self) -> Tensor:
        if self.settings.parametrization != "qr":
            return self._parameter
        q, r = torch.linalg.qr(self._parameter)
        return (
            q * r.diagonal().sign()
        )  # the factorization with a positive diagonal, so that Q of an orthogonal is itself

    def _batch(self, step: int) -> list[tuple["_Pool", Tensor]]:
        return [(pool, part) for pool in self._pools for part in _parts(pool.draw(step, self.settings.vectors))]

    def _loss(self, part: tuple["_Pool", Tensor]) -> Tensor:
        pool, vectors = part
        y = vectors.to(self._parameter.device, torch.float32) @ self._orthogonal()
        return pool.share * pool.unit * pool.loss(y).sum() / pool.size(self.settings.vectors)

    @torch.no_grad()
    def _units(self) -> None:
        """Give the weights' loss the unit of the activations' at the start, or its own where it stands alone."""
        values = []
        for pool in self._pools:
            parts = [part for part in self._batch(0) if part[0] is pool]
            values.append(sum(float(self._loss(part)) for part in parts) / pool.share)
        self._pools[-1].unit = values[0] / values[-1] if len(values) == 2 else 1 / values[0]


@dataclass
class _Pool:
    """Vectors [n, features] that count in a rotation's loss, with a share, in some unit; anywhere."""

    vectors: Tensor
    loss: Callable[[Tensor], Tensor]
    share: float
    seed: int
    unit: float = 1.0
    _order: tuple[int, Tensor] | None = None

    def size(self, wanted: int) -> int:
        """Vectors of a step."""
        return min(wanted, len(self.vectors))

    def draw(self, step: int, wanted: int) -> Tensor:
        """Those of a step: every vector comes once before any comes again."""
        size = self.size(wanted)
        turn, place = divmod(step, len(self.vectors) // size)
        if self._order is None or self._order[0] != turn:
            generator = torch.Generator().manual_seed((self.seed + turn) % 2**63)
            order = torch.randperm(len(self.vectors), generator=generator)
            self._order = turn, order.to(self.vectors.device)
        return self.vectors[self._order[1][place * size : (place + 1) * size]]


def _behind_principal(rotation: Tensor, vectors: Tensor) -> Tensor:
    """A rotation behind the reflection that turns the vectors' principal direction to the first axis (OffQ).

    Its first row is made positive by the signs of the columns, which for a Hadamard matrix makes it constant.
    """
    direction = _eigenvectors(rotation, vectors)[:, -1]
    normal = direction.clone()
    normal[0] += torch.where(direction[0] < 0, -1.0, 1.0)  # the reflection that loses no digits
    reflection = torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    reflection -= 2 * normal.outer(normal) / normal.dot(normal)
    signs = rotation[0].sign()
    return reflection @ (rotation * torch.where(signs == 0, 1.0, signs))


def _of_eigenvectors(like: Tensor, vectors: Tensor, largest: int, generator: torch.Generator) -> Tensor:
    """The vectors' eigenvectors, the `largest` and the others each turned by a Haar-random rotation (ResQ)."""
    parts = (len(like) - largest, largest)
    turned = torch.block_diag(*(random_orthogonal_matrix(size, generator) for size in parts))
    return _eigenvectors(like, vectors) @ turned.to(like)


def _eigenvectors(like: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors of the vectors' second moments in columns, the largest eigenvalue's last, of a matrix's type."""
    moments = torch.zeros_like(like)
    for rows in _parts(vectors):
        part = rows.to(like)
        moments += part.T @ part
    return torch.linalg.eigh(moments).eigenvectors


def _parts(vectors: Tensor) -> tuple[Tensor, ...]:
    """Vectors [n, features] in parts that pass a loss at once."""
    return vectors.split(max(1, _AT_ONCE // vectors.shape[-1]))


def _near(device: torch.device, *vectors: Vectors) -> Iterator[Vectors]:
    """Vectors on a GPU where it has room for all of them, else where they are: no result depends on it."""
    size = sum(x.numel() * x.element_size() for one in vectors for x in one.values())
    fit = device.type == "cuda" and size <= _ON_GPU * torch.cuda.mem_get_info(device)[0]
    return ({name: x.to(device) for name, x in one.items()} if fit else one for one in vectors)


def _identity(recipe: Recipe, seed: int, device: torch.device, samples: Tensor | None, *vectors: Vectors) -> str:
    """A digest of what decides the result, the vectors among it, which are summed on a device."""
    digest = hashlib.sha256()
    for tensors in ({} if samples is None else {"samples": samples}, *vectors):
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            sums = [part.to(device).double().sum(dim=0) for part in _parts(tensor)]  # not a copy of all in float64
            digest.update(torch.stack(sums).sum(dim=0).cpu().numpy().tobytes())
    return short_hash(canonical_json({"recipe": recipe.learned(), "seed": seed, "vectors": digest.hexdigest()}))
