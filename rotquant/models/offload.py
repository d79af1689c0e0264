"""Models larger than an accelerator's memory: decoder layers that stay on the host and come to it as they run.

`offloaded` serves what runs a whole model forward or backward, `models.stream` what goes layer by layer. A layer's
matrices are copied to the device before its forward pass, those of the next layer meanwhile, and leave once another
layer runs. Values are the same, so results equal to the last bit those of a model that lies on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.models.architectures import decoder_layers
from rotquant.training.offload import host_tensors


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
