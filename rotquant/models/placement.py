"""A model on one accelerator or, where it does not fit, on all GPUs (by accelerate), or with layers on the host.

For work that needs the whole model at once, as learning through all layers does; what goes layer by layer needs one
GPU only (`rotquant.models.stream`). Nothing here computes. Of layers on the host the matrices are copied to the device
before the forward pass, those of the next layer meanwhile, and leave once another layer runs. Values are the same, so
results equal to the last bit those of a model that lies on the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import decoder_layers
from rotquant.models.memory import ON_THEIR_WAY, USABLE, free_memory, size_in_bytes
from rotquant.models.stream import on_device
from rotquant.training.offload import host_tensors

#: Share of each GPU's free memory that weights may take; the rest is for activations and gradients.
_SHARE_OF_FREE_MEMORY = 0.7


@contextmanager
def placed(model: nn.Module, device: torch.device | str, working: int = 0, memory: int | None = None) -> Iterator[bool]:
    """Hold a model on a device, or on all GPUs, while the block runs; then return it to where it was.

    Spread over GPUs, inputs go to the embedding's device and each layer moves what it is given to its own. Where one
    GPU cannot hold the model and what works on it, and several are not there, or too few, layers stay on the host as
    far as needed and come to the GPU as they run (`offloaded`).

    Args:
        working: bytes of a device that work on the model needs at least in addition to its weights.
        memory: bytes of a GPU that may be used; default, those that are free. Given, one GPU is used.

    Yields:
        Whether layers stay on the host: then a gradient needs layers that are computed again, and frozen weights.

    Raises:
        RecipeError: what must lie on the GPU at one time does not fit it.
    """
    device = torch.device(device)
    if memory is None and device.type in ("cpu", next(model.parameters()).device.type):
        with on_device(model, device):
            yield False
        return
    free = {_index(device): memory} if memory is not None else _free_memory()
    own, size = free[_index(device)], size_in_bytes(model)
    if size <= _SHARE_OF_FREE_MEMORY * own and size + working <= USABLE * own:
        with on_device(model, device):
            yield False
        return
    shares = {index: int(_SHARE_OF_FREE_MEMORY * bytes_) for index, bytes_ in free.items()}
    if len(shares) > 1 and size <= sum(shares.values()):
        with _spread(model, shares):
            yield False
        return
    with offloaded(model, device, _resident(model, int(USABLE * own), working)):
        yield True


@contextmanager
def offloaded(model: nn.Module, device: torch.device | str, resident: int = 0) -> Iterator[None]:
    """Hold a model on a device while the block runs, but for matrices of decoder layers, which stay on the host.

    A gradient needs layers that are computed again in the backward pass (`training.loop.recomputed`), as a layer's
    matrices are only there while it runs. They must be frozen, and the model on the host.

    Args:
        resident: bytes of the device that layers may take and stay there, the first ones as far as they fit.
    """
    device, layers = torch.device(device), decoder_layers(model)
    stays, hosted = resident, []
    for layer in layers:
        stays -= sum(matrix.nbytes for matrix in matrices(layer))
        if stays < 0:
            hosted.append(layer)
    kept = {id(matrix) for layer in hosted for matrix in matrices(layer)}
    home = next(model.parameters()).device
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        module._buffers.update({name: None if b is None else b.to(device) for name, b in module._buffers.items()})
    fetching = _Fetching([matrices(layer) for layer in hosted], device)
    hooks = [layer.register_forward_pre_hook(partial(fetching, index)) for index, layer in enumerate(hosted)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        fetching.release()
        model.to(home)


def matrices(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer that take memory: all but vectors."""
    return [parameter for parameter in layer.parameters() if parameter.ndim > 1]


class _Fetching:
    """Copies of layers' matrices on a device: of the layer that runs, and of the one that is expected next.

    layers: the matrices of each; their data lies on the host while the layer does not run.
    """

    def __init__(self, layers: Sequence[list[nn.Parameter]], device: torch.device) -> None:
        self.layers, self.device = layers, device
        every = [matrix for layer in layers for matrix in layer]
        for matrix, host in zip(every, host_tensors(every, device), strict=True):
            host.copy_(matrix.data)
            matrix.data = host
        self._hosts = [[matrix.data for matrix in layer] for layer in layers]
        self._copies: dict[int, list[Tensor]] = {}
        self._ready: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last, self._step = -1, 1

    def __call__(self, index: int, *_: Any) -> None:
        """Bring a layer, take away those that have run, and begin to copy the one that comes next.

        Passes go forward and then backward, so the direction turns at either end.
        """
        if index != self._last:
            self._step = 1 if index > self._last else -1
        if not 0 <= index + self._step < len(self.layers):
            self._step = -self._step
        following = index + self._step
        self._copy(index)
        self.release(but=(index, following))
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready[index])
            for copy in self._copies[index]:
                copy.record_stream(current)
        for matrix, copy in zip(self.layers[index], self._copies[index], strict=True):
            matrix.data = copy
        self._last = index
        if 0 <= following < len(self.layers):
            self._copy(following)

    def release(self, but: tuple[int, ...] = ()) -> None:
        """Forget all copies but those of some layers."""
        for index in self._copies.keys() - set(but):
            for matrix, host in zip(self.layers[index], self._hosts[index], strict=True):
                matrix.data = host
            del self._copies[index]

    def _copy(self, index: int) -> None:
        """Begin to copy a layer's matrices, unless they are there."""
        if index in self._copies:
            return
        hosts = self._hosts[index]
        if self._stream is None:
            self._copies[index] = [host.to(self.device, copy=True) for host in hosts]
            return
        with torch.cuda.stream(self._stream):
            self._copies[index] = [host.to(self.device, non_blocking=True) for host in hosts]
            self._ready[index] = torch.cuda.Event()
            self._ready[index].record(self._stream)


@contextmanager
def current_gpu(device: torch.device | str) -> Iterator[None]:
    """While open, a GPU is torch's current one, and the one on which CUDA graphs are captured.

    torch captures on the GPU of its first capture, on which the graph of another one's kernels is empty.
    """
    if not str(device).startswith("cuda"):
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.graph.default_capture_stream = None
        yield


def fits(model: nn.Module, device: torch.device | str) -> bool:
    """Whether a device has room for a model's weights and for running it; a CPU always has."""
    device = torch.device(device)
    return device.type != "cuda" or size_in_bytes(model) <= USABLE * free_memory(device)


def bytes_without_layers(model: nn.Module) -> int:
    """Bytes of a GPU that a model takes whose layers stay on the host, with those that are on their way."""
    layers = [sum(matrix.nbytes for matrix in matrices(layer)) for layer in decoder_layers(model)]
    return size_in_bytes(model) - sum(layers) + ON_THEIR_WAY * max(layers)


def _resident(model: nn.Module, free: int, working: int) -> int:
    """Bytes that decoder layers may take on a GPU for as long as the model is used.

    Raises:
        RecipeError: nothing is left once the rest of the model, layers on their way and the work have theirs.
    """
    needed = bytes_without_layers(model) + working
    if needed > free:
        raise RecipeError(
            f"work on the model takes {needed / 2**30:.1f} GiB even with layers on the host, and {free / 2**30:.1f} "
            "GiB are free: take a GPU with more memory, or shorter texts."
        )
    return free - needed


@contextmanager
def _spread(model: nn.Module, memory: Mapping[int, int]) -> Iterator[None]:
    """Hold a model on several GPUs."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    home = next(model.parameters()).device
    dispatch_model(model, cast("dict[str, str | int | torch.device]", device_map(model, memory)))
    try:
        yield
    finally:
        remove_hook_from_submodules(model)
        model.to(home)


def device_map(model: nn.Module, memory: Mapping[int, int]) -> dict[str, int]:
    """Assign each part of a model to a GPU, decoder layers whole, in the order of the layers.

    Args:
        memory: bytes that weights may take on each GPU.

    Raises:
        RecipeError: the weights do not fit.
    """
    from accelerate import infer_auto_device_map

    places = infer_auto_device_map(
        model,
        cast("dict[int | str, int | str]", dict(memory)),
        no_split_module_classes=list(cast("list[str]", model._no_split_modules)),
    )
    if not set(places.values()) <= set(memory):
        needed, found = size_in_bytes(model) / 2**30, sum(memory.values()) / 2**30
        raise RecipeError(
            f"the model's weights take {needed:.0f} GiB, and {len(memory)} GPUs have {found:.0f} GiB for them: "
            "take more GPUs or a smaller dtype."
        )
    return cast("dict[str, int]", places)


def _index(device: torch.device) -> int:
    """The number of a GPU."""
    return device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()


def _free_memory() -> dict[int, int]:
    """Bytes that are free on each GPU."""
    return {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}
