"""What is planned: a recipe for a model of some shapes on some device."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast

from rotquant.models.architectures import Architecture
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import Method, Recipe
from rotquant.recipes.schemes import Calibration
from rotquant.tensors.devices import torch_dtype

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's parameters by their Hugging Face names; tied embeddings are one parameter.

    quantized: [out, in] of the weights that a recipe quantizes, each expert's apart.
    floats: shapes of all other parameters.
    vocabulary: number of token ids. tied: whether embedding and head are one parameter.
    stored: bytes of a number in the checkpoint's files, as its configuration says; 0 where it does not.
    model: the model itself in float32, on the meta device.
    """

    architecture: Architecture
    quantized: Mapping[str, tuple[int, int]]
    floats: Mapping[str, tuple[int, ...]]
    vocabulary: int
    tied: bool
    stored: int
    model: "nn.Module"

    @property
    def quantized_parameters(self) -> int:
        """Number of the weights that a recipe quantizes."""
        return sum(rows * columns for rows, columns in self.quantized.values())

    @property
    def embedding(self) -> int:
        """Number of the token embedding's parameters."""
        return self.vocabulary * self.architecture.hidden_size

    @property
    def parameters(self) -> int:
        """Number of all parameters, shared ones once."""
        return self.quantized_parameters + sum(map(prod, self.floats.values()))

    @property
    def untied(self) -> int:
        """Number of all parameters once embedding and head are apart, as R1 makes them."""
        return self.parameters + (self.embedding if self.tied else 0)

    @property
    def of_layer(self) -> int:
        """Number of the parameters of one decoder layer."""
        outside = ("embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        ends = sum(prod(shape) for name, shape in self.floats.items() if name.endswith(outside))
        return (self.parameters - ends) // self.architecture.num_layers

    def rows(self, linear: str) -> int:
        """Output features of a linear layer, by its name in a decoder layer."""
        return next(shape[0] for name, shape in self.quantized.items() if name.endswith(f".{linear}.weight"))

    @property
    def largest(self) -> int:
        """Number of the elements of the largest quantized weight."""
        return max(rows * columns for rows, columns in self.quantized.values())


def shapes_of(config: Any) -> ModelShapes:
    """The shapes of a transformers configuration, of a model that is built without memory.

    Raises:
        UnsupportedArchitectureError: no adapter knows its family.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from rotquant.models.architectures import architecture_of, base_model, decoder_layers, linear_of
    from rotquant.models.experts import stacked_names

    architecture = architecture_of(config)
    with torch.device("meta"):
        model: Any = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
    prefix = f"{model.base_model_prefix}.layers"
    quantized: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(decoder_layers(model)):
        for name in architecture.linears:
            rows, columns = linear_of(layer, name).weight.shape
            quantized[f"{prefix}.{index}.{name}.weight"] = (rows, columns)
    stacked = stacked_names(quantized)
    named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    floats = {name: shape for name, shape in named.items() if name not in stacked}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    stored = config.dtype.itemsize if isinstance(getattr(config, "dtype", None), torch.dtype) else 0
    return ModelShapes(architecture, quantized, floats, len(base_model(model).embed_tokens.weight), tied, stored, model)


@dataclass(frozen=True)
class Work:
    """Work that is planned.

    dtype: of the network, by its name. device: cpu or cuda. memory: bytes of the GPU.
    resident: whether the network lies on the GPU from the start, as in benchmarks; else its layers are streamed from
        the host.
    """

    shapes: ModelShapes
    recipe: Recipe
    dtype: str
    device: Literal["cpu", "cuda"]
    memory: int = 0
    resident: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the network."""
        return torch_dtype(self.dtype).itemsize

    @property
    def kept(self) -> int:
        """Bytes of a number that is not quantized in the folder: as in the checkpoint, where that has fewer."""
        return min(self.itemsize, self.shapes.stored or self.itemsize)

    @property
    def parameters(self) -> int:
        """Parameters of the quantized model: R1 takes embedding and head apart."""
        return self.shapes.untied if self.recipe.fuses_norms else self.shapes.parameters


def online_matrices(work: Work) -> dict[str, int]:
    """Bytes of the matrices of the rotation's online transforms, of all layers in float32 at least, by their sites."""
    shapes = tensor_shapes(work.shapes.architecture, work.recipe.transforms)
    return {site: max(4, work.itemsize) * prod(shape) for site, shape in shapes.items()}


def text_of(method: Method, recipe: Recipe) -> Calibration | None:
    """The text that a method reads: its own or the recipe's; None where it reads none."""
    return method.own_text or (recipe.calibration if method.calibrates else None)
