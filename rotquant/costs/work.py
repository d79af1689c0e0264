"""What is planned: a recipe for a model of some shapes on some device, and how each of its methods works."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from rotquant.costs.shapes import ModelShapes
from rotquant.models.transforms import tensor_shapes
from rotquant.recipes.recipe import Method, Recipe
from rotquant.recipes.schemes import Calibration
from rotquant.tensors.devices import torch_dtype

#: How a method works, which decides what it holds in memory. `network`: runs the whole network on the device, and
#: learns through it. `training`: trains all parameters of a copy in float32, with the model as its teacher. `blocks`:
#: trains one decoder layer at a time on two streams of hidden states. `sites`: rounds one layer at a time by X^T X of
#: its inputs, site by site, and `layers` by those of all of its sites at once. `stream`: passes the text through one
#: layer at a time.
Way = Literal["network", "training", "blocks", "sites", "layers", "stream"]


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


def way_of(method: Method, recipe: Recipe) -> Way:
    """How a method works, by its roles and by whether it learns: one with learning rates and steps does."""
    budget = method.budget(recipe)
    learns = bool(budget.steps and budget.rates)
    if "rotations" in method.roles or (learns and "prefix" in method.roles):
        return "network"
    if learns and not method.calibrates and "transformation" in method.roles:
        return "training"
    if learns:
        return "blocks"
    return (method.reads or "sites") if "rounding" in method.roles else "stream"


def text_of(method: Method, recipe: Recipe) -> Calibration | None:
    """The text that a method reads: its own or the recipe's; None where it reads none."""
    return method.own_text or (recipe.calibration if method.calibrates else None)
