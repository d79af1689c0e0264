"""Rotations fused into a model's weights (QuaRot Sec. 4 stages 1a-1d; SpinQuant's R1, R2 and the weight side of R4).

Row-vector convention throughout: an activation x becomes x Q, so a weight W [out, in] that reads it becomes W Q and one
that writes it Q^T W. Each weight is computed once in float64 and stored in its own type. The online half of the
transforms lives in `simulation.runtime`; a rotated model without it computes nonsense unless `inputs`, `heads` and
`mlp` are off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import track
from rotquant.models.architectures import (
    Architecture,
    Projection,
    Site,
    architecture_of,
    config_of,
    decoder_layers,
    embedding,
    final_norm,
    linear_of,
    lm_head,
    norm_of,
)
from rotquant.models.fitting import check_transforms
from rotquant.models.memory import BLOCK_ELEMENTS
from rotquant.models.rotation.matrices import Rotations, check_rotations, initial_rotations
from rotquant.models.rotation.scales import divide_inside, divide_norms
from rotquant.models.transforms import Chain
from rotquant.recipes.schemes import RotationScheme
from rotquant.recipes.transforms import Location, Transform, at

if TYPE_CHECKING:
    from rotquant.models.architectures import RMSNorm

#: No transform.
NOTHING = Chain(())


@torch.no_grad()
def fuse_inverse(layer: nn.Module, site: Site, chain: Chain) -> None:
    """Give the weights that read a site the inverse of what transforms its input, in place; products are float64.

    A router reads what a norm gives too, and is no expert's input.
    """
    for name in site.readers:
        weight = linear_of(layer, name).weight
        weight.copy_(chain.of_weight(weight.double()))


def fuse_norms(model: nn.Module) -> None:
    """Multiply each RMSNorm weight into the linear layers that read it and set it to one; unties the embeddings.

    The function of the model does not change. `rotate` does it where R1 comes between the two: diag(g) does not
    commute with Q.
    """
    _fuse(model, Rotations(None, None), _Fusion(architecture_of(model), (), NOTHING, None, gains=True))


@torch.no_grad()
def rotate(
    model: nn.Module,
    scheme: RotationScheme,
    seed: int = 0,
    device: torch.device | str | None = None,
    *,
    rotations: Rotations | None = None,
) -> None:
    """Fuse rotations into the weights of `model`, in place, one weight at a time, and norms where there is an R1.

    R1 goes into everything that reads or writes the residual stream; R2 into v_proj and o_proj; the inverses of the
    online transforms (`inputs`, heads, R4) into what reads them: q, k, v, gate, up, a router, o_proj, down_proj.
    Together with these (`RuntimeQuantization.transforms`) the logits are those of the original model. With R1
    embeddings are untied: their two roles need different weights from now on. A scheme without R1 leaves norms and
    embeddings as they are, and one with nothing at all the whole model.

    Args:
        model: a supported transformers causal language model, on any device, in any floating-point type.
        scheme: which rotations.
        seed: of the random rotations, where none are given.
        device: where the float64 products are computed; default, where each weight lies.
        rotations: all matrices, for example learned ones; default, those that the scheme draws with the seed.

    Raises:
        RecipeError: some Hadamard matrix is not known, or the rotations do not fit. No weight has been touched then.
        UnsupportedArchitectureError: unknown model family.
    """
    architecture = architecture_of(model)
    check_transforms(architecture, scheme.transforms)
    if rotations is not None:
        check_rotations(architecture, scheme, rotations)
    else:
        rotations = initial_rotations(architecture, scheme, seed)
    residual = rotations.residual
    tensors = {} if residual is None else {"residual": residual if device is None else residual.to(device)}
    chain = Chain(at(scheme.transforms, "residual"), tensors)
    fusion = _Fusion(architecture, scheme.transforms, chain, device, residual is not None, scheme.center_embeddings)
    _fuse(model, rotations, fusion)


@torch.no_grad()
def _fuse(model: nn.Module, rotations: Rotations, fusion: "_Fusion") -> None:
    """Put rotations with their scales, and gains of norms if `fusion` says so, into every weight of the model."""
    if fusion.gains:
        _untie_embeddings(model)
    fusion.rotate_embedding(embedding(model).weight)
    for index, layer in enumerate(track(decoder_layers(model), "rotating", "layer")):
        scales = rotations.scales_of(index)
        divide_inside(layer, fusion.architecture, scales)
        fusion.rotate_layer(layer, rotations.of_layer(index))
        divide_norms(layer, fusion.architecture, scales)
    fusion.rotate_readers(final_norm(model), [lm_head(model).weight])


@dataclass(frozen=True)
class _Fusion:
    """State of one call of `rotate` or `fuse_norms`: what is fused, and where it is computed.

    residual: x -> x Q, R1.
    gains: whether norms give their gains to what reads them; else both stay.
    centred: whether each embedding row loses its mean first.
    """

    architecture: Architecture
    transforms: tuple[Transform, ...]
    residual: Chain
    device: torch.device | str | None
    gains: bool
    centred: bool = False

    def rotate_embedding(self, weight: Tensor) -> None:
        """E Q, of the centred E if the scheme says so."""

        def change(rows: Tensor) -> Tensor:
            if self.centred:
                rows = rows - rows.mean(dim=-1, keepdim=True)
            return self.residual(rows)

        if self.centred or self.residual:
            self._update_rows(weight, change)

    def rotate_layer(self, layer: nn.Module, matrices: Mapping[str, Tensor]) -> None:
        """All weights of one decoder layer; matrices: its own, by the names of their locations."""
        shape = self.architecture
        chain = partial(self._chain, matrices)
        attention_norm, mlp_norm = (self._norm(layer, name) for name in ("attention_input", "mlp_input"))
        inputs, readers = chain("attention_input"), (shape.query, shape.key, shape.value)
        if "values" in matrices:
            self._rotate_values(layer, attention_norm, chain("values"), inputs)
            readers = (shape.query, shape.key)
        self.rotate_readers(attention_norm, [_rows(layer, reader).weight for reader in readers], inputs)
        rows = [_rows(layer, reader).weight for reader in shape.mlp_readers]
        self.rotate_readers(mlp_norm, rows, chain("mlp_input"))
        read = chain("values", "across_heads", "attention_output")
        self._rotate_writer(linear_of(layer, shape.attention_output), read)
        for name in shape.site("mlp_output").linears:
            self._rotate_writer(linear_of(layer, name), chain("mlp_output"))

    def _chain(self, matrices: Mapping[str, Tensor], *locations: Location) -> Chain:
        """The layer's transforms at some locations."""
        return Chain(at(self.transforms, *locations), matrices, self.architecture.num_heads)

    def _norm(self, layer: nn.Module, name: str) -> "RMSNorm | None":
        """The norm before a site, None where its linear layers read the residual stream."""
        site = self.architecture.site(name)
        return None if site.norm is None else norm_of(layer, site)

    def rotate_readers(self, norm: "RMSNorm | None", weights: Sequence[Tensor], inputs: Chain = NOTHING) -> None:
        """W diag(g) Q M^-T of all that read a norm of gain g, which becomes one, and what is transformed by M."""
        change = self._reading(norm, inputs)
        if change is None:
            return
        for weight in weights:
            self._update_rows(weight, change)
        if self.gains and norm is not None:
            norm.weight.fill_(1.0 - self.architecture.norm_offset)

    def _reading(self, norm: "RMSNorm | None", inputs: Chain) -> Callable[[Tensor], Tensor] | None:
        """Change of the rows of a weight that reads a norm and then `inputs`; None of none."""
        if not self.gains or norm is None:
            return inputs.of_weight if inputs else None
        gain = self._gain(norm)
        return lambda rows: inputs.of_weight(self.residual(rows * gain.to(rows.device)))

    def _gain(self, norm: "RMSNorm") -> Tensor:
        """g of a norm, float64 [hidden]."""
        weight, offset = norm.weight.to(torch.float64), self.architecture.norm_offset
        return weight + offset if offset else weight

    def _rotate_values(self, layer: nn.Module, norm: "RMSNorm | None", values: Chain, inputs: Chain) -> None:
        """R2 at the output of v_proj, and `rotate_readers` at its input: (I x R2)^T W diag(g) Q and b (I x R2)."""
        value, read = _rows(layer, self.architecture.value), self._reading(norm, inputs) or (lambda rows: rows)
        self._update(value.weight, lambda weight: read(values(weight.T).T))
        if value.bias is not None:
            self._update(value.bias, values)

    def _rotate_writer(self, linear: nn.Linear, read: Chain) -> None:
        """Q^T W of a layer that writes the residual stream, whose input arrives transformed; its bias becomes b Q."""
        self._update(linear.weight, lambda weight: self.residual(read.of_weight(weight).T).T)
        if linear.bias is not None:
            self._update(linear.bias, self.residual)

    def _update_rows(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """`_update` for a change that acts on each row alone, in blocks: bounds the memory of large vocabularies."""
        for rows in weight.split(max(1, BLOCK_ELEMENTS // weight.shape[-1])):
            self._update(rows, change)

    def _update(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """weight := change(weight), computed in float64 on the chosen device.

        Types are converted on that device: converting on the host would be slow and move four times the bytes.
        """
        changed = change(weight.to(self.device or weight.device).to(torch.float64))
        weight.copy_(changed.to(weight.dtype))


@dataclass(frozen=True)
class _Rows:
    """Views of a projection's rows: weight [rows, in], bias [rows] or None."""

    weight: Tensor
    bias: Tensor | None


def _rows(layer: nn.Module, projection: Projection) -> _Rows:
    linear = linear_of(layer, projection.name)
    bias, rows = getattr(linear, "bias", None), slice(*(projection.rows or (None,)))  # a router knows of no bias
    return _Rows(linear.weight[rows], None if bias is None else bias[rows])


def _untie_embeddings(model: nn.Module) -> None:
    """Give lm_head its own copy of a shared weight and say so in the configuration, so that it is saved and loaded."""
    head, tokens = lm_head(model), embedding(model)
    if head.weight is tokens.weight or head.weight.data_ptr() == tokens.weight.data_ptr():
        head.weight = nn.Parameter(tokens.weight.detach().clone(), requires_grad=tokens.weight.requires_grad)
    config_of(model).tie_word_embeddings = False
    # transformers lists tied names when a model is built, for its own re-tying, device maps and saving.
    model.all_tied_weights_keys = {}  # pyright: ignore[reportArgumentType]  # to torch an attribute is tensor or module
