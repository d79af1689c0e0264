"""A model with quantized weights that is being trained, and its teacher: what they are together, and what they cost.

Every linear layer of the student has its weight's quantizer as a part, named `quantizer`, and multiplies by what that
makes of the weight each time it runs, so that quantized weights exist for one layer at a time where layers are computed
again in the backward pass. Parameters keep their names.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import (
    architecture_of,
    base_model,
    decoder_layers,
    embedding,
    linear_of,
    lm_head,
    logit_cap,
)
from rotquant.qat.loss import Divergence, cakld
from rotquant.qat.quantizers import TrainableQuantizer
from rotquant.tensors.devices import learning_dtype
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.onednn import linear

#: Where a linear layer has its quantizer.
QUANTIZER = "quantizer"


def linears_of(model: nn.Module) -> Iterator[tuple[int, str, nn.Linear]]:
    """The linear layers of all decoder layers, first to last: index of the decoder layer, name in it, itself."""
    names = architecture_of(model).linears
    for index, layer in enumerate(decoder_layers(model)):
        for name in names:
            yield index, name, linear_of(layer, name)


class Factorized:
    """R1 as an operator next to weights that are not rotated (RCP Table 12).

    While a model is trained so, its embedding, head and linear layers hold V with W = V Q where they read the residual
    stream and W = Q^T V where they write it, W being what a model with R1 fused into it holds. Norms' gains are in V.
    """

    def __init__(self, model: nn.Module, residual: Tensor) -> None:
        self.model, self.residual = model, residual
        architecture = architecture_of(model)
        self.writers = {architecture.attention_output, *architecture.site("mlp_output").linears}

    def turned(self, name: str, weight: Tensor) -> Tensor:
        """W of a linear layer's V, [out, in]."""
        return self._turn(name, weight, self.residual)

    @torch.no_grad()
    def turn_back(self) -> None:
        """Put V in the place of W everywhere."""
        self._replace(self.residual.T)

    @torch.no_grad()
    def turn(self) -> None:
        """Put W in the place of V everywhere."""
        self._replace(self.residual)

    def _replace(self, matrix: Tensor) -> None:
        for weight in {id(w): w for w in (embedding(self.model).weight, lm_head(self.model).weight)}.values():
            weight.copy_(weight.double() @ matrix.to(weight.device))
        for _, name, layer in linears_of(self.model):
            layer.weight.copy_(self._turn(name, layer.weight.double(), matrix))

    def _turn(self, name: str, weight: Tensor, matrix: Tensor) -> Tensor:
        """A linear layer's weight in another basis of the residual stream, which it reads or writes."""
        matrix = matrix.to(weight)
        return matrix.T @ weight if name in self.writers else weight @ matrix


class Distillation(nn.Module):
    """Student and teacher in one module, whose forward pass is the loss of a batch (RCP Eq. 3).

    student: whose linear layers have quantizers. teacher: frozen. confidence: a of the loss.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, confidence: float, factorized: Factorized | None = None
    ) -> None:
        super().__init__()
        sizes = len(lm_head(student).weight), len(lm_head(teacher).weight)
        if sizes[0] != sizes[1]:
            raise RecipeError(
                f"the teacher's vocabulary has {sizes[1]} tokens and the student's {sizes[0]}: they need the same."
            )
        self.student = student
        self._teacher = [teacher]  # no part: its states are neither trained, nor spread with the student's
        self.confidence = confidence
        self.factorized = factorized

    @property
    def teacher(self) -> nn.Module:
        """The frozen model."""
        return self._teacher[0]

    def forward(self, ids: Tensor, states: Tensor | None = None) -> Divergence:
        """Loss of the student on texts [n, tokens], mean over tokens.

        Args:
            states: the teacher's last hidden states [n, tokens, hidden], where they are known.
        """
        with FasterKernels():
            target = teacher_states(self.teacher, ids) if states is None else states
            hidden = self._hidden(ids)
            head, cap = lm_head(self.teacher).weight, logit_cap(self.teacher)
            return cakld(hidden, self._head(), target, head, self.confidence, cap=cap)

    def _hidden(self, ids: Tensor) -> Tensor:
        narrow = self.narrow(ids.device)
        with torch.autocast(ids.device.type, narrow, enabled=narrow is not None):
            hidden = base_model(self.student)(input_ids=ids, use_cache=False).last_hidden_state
        return hidden if narrow is None else hidden.to(narrow)

    def _head(self) -> Tensor:
        weight = lm_head(self.student).weight
        return weight if self.factorized is None else weight @ self.factorized.residual.to(weight)

    def narrow(self, device: torch.device) -> torch.dtype | None:
        """The 16-bit type of matrix products on a GPU, for a teacher of 16 bits; None where products are as wide as
        the student's parameters."""
        dtype = learning_dtype(cast(torch.dtype, lm_head(self.teacher).weight.dtype))
        return dtype if device.type == "cuda" and dtype.itemsize == 2 else None


@torch.no_grad()
def teacher_states(teacher: nn.Module, ids: Tensor) -> Tensor:
    """A model's last hidden states of texts [n, tokens], [n, tokens, hidden]."""
    with FasterKernels():
        return base_model(teacher)(input_ids=ids, use_cache=False).last_hidden_state


@contextmanager
def quantized_linears(
    model: nn.Module, quantizers: Mapping[tuple[int, str], TrainableQuantizer], factorized: Factorized | None = None
) -> Iterator[None]:
    """While open, every linear layer multiplies by its quantized weight, and has the quantizer as a part."""
    turned = None if factorized is None else factorized.turned
    hook = None
    if factorized is not None:
        residual = factorized.residual
        hook = embedding(model).register_forward_hook(lambda _module, _ids, output: output @ residual.to(output))
    for index, name, layer in linears_of(model):
        layer.add_module(QUANTIZER, quantizers[index, name])
        layer.forward = _Forward(layer, name, turned)
    try:
        yield
    finally:
        for _, _, layer in linears_of(model):
            del layer.forward
            delattr(layer, QUANTIZER)
        if hook is not None:
            hook.remove()


class _Forward:
    """The forward pass of a linear layer with a quantizer."""

    def __init__(self, layer: nn.Linear, name: str, turned: Callable[[str, Tensor], Tensor] | None) -> None:
        self.layer, self.name, self.turned = layer, name, turned

    def __call__(self, input: Tensor) -> Tensor:
        weight: Tensor = self.layer.weight
        if self.turned is not None:
            weight = self.turned(self.name, weight)
        quantizer: Any = getattr(self.layer, QUANTIZER)
        return linear(input, quantizer(weight), self.layer.bias)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of a student that are trained: those of the model, and those of its quantizers."""
    marked = [(f".{QUANTIZER}." in name, parameter) for name, parameter in model.named_parameters()]
    learned = [p for quantizer, p in marked if quantizer and p.requires_grad]
    return [p for quantizer, p in marked if not quantizer], learned
