"""Calibration text streamed through a model one decoder layer at a time (the order of GPTQ's and QuaRot's own code).

Hidden states of all samples are kept between layers, in place; only one layer needs to lie on the accelerator. What is
done with a layer's inputs is the caller's business: nothing here quantizes or changes a weight.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import ProgressTask, task
from rotquant.models.architectures import Architecture, Site, architecture_of, base_model, decoder_layers, epsilon_of
from rotquant.models.limits import ModelLimits
from rotquant.models.memory import RECORD_BYTES, SHARE_OF_HIDDEN, TOKENS_AT_ONCE, free_memory
from rotquant.tensors.devices import of_device
from rotquant.tensors.faster import FasterKernels

#: What an observer of a layer gives.
Observed = TypeVar("Observed")


class LayerStream:
    """Hidden states [samples, tokens, hidden] on their way through the decoder layers of one model.

    hidden: inputs of the current layer, on the accelerator or the host.
    kwargs: for each layer the keyword arguments of its forward for one sample (position embeddings, mask); they
        broadcast over a batch because samples are equally long and unpadded.
    batch_size: samples at once.
    dtype: of what layers compute, for as long as they lie on the device; None leaves it as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: Tensor,
        kwargs: list[dict[str, Any]],
        device: torch.device,
        batch_size: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self.architecture: Architecture = architecture_of(model)
        self.modules = decoder_layers(model)
        self.hidden = hidden
        self.kwargs = kwargs
        self.device = device
        self.batch_size = batch_size
        self.dtype = dtype
        self._recorded: dict[str, list[Tensor]] = {}
        self._task: ProgressTask

    def copy(self) -> "LayerStream":
        """A stream of its own at the same place."""
        return LayerStream(self._model, self.hidden.clone(), self.kwargs, self.device, self.batch_size, self.dtype)

    def layers(self, description: str) -> Iterator[tuple[int, nn.Module]]:
        """Yield index and layer, each on the device while the caller's loop body runs; the body advances the stream."""
        with task(description, "layer", len(self.modules)) as self._task:
            for index, layer in enumerate(self.modules):
                with on_device(layer, self.device), self._computing_exactly(layer):
                    yield index, layer
                self._recorded.clear()
                self._task.advance()

    @contextmanager
    def _computing_exactly(self, layer: nn.Module) -> Iterator[None]:
        """While open, the layer computes in `dtype`, its norms too, whose own forward is of float32."""
        if self.dtype is None:
            yield
            return
        home = next(layer.parameters()).dtype
        layer.to(self.dtype)
        exact = partial(exact_norm, self.architecture.norm_offset)
        norms = [layer.get_submodule(name) for name in self.architecture.norms]
        hooks = [norm.register_forward_hook(exact, prepend=True) for norm in norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            layer.to(home)

    def sites_of_layers(self, description: str) -> Iterator[tuple[int, nn.Module, Site]]:
        """Yield layers as `layers` does, with each layer's sites in execution order; a layer runs when its last site is
        done with.

        After the last layer there is nothing more to do with hidden states, so it does not run.
        """
        for index, layer in self.layers(description):
            for site in self._task.parts(self.architecture.sites):
                yield index, layer, site
            if index + 1 < len(self.modules):
                self.advance(index)

    def observed_layers(
        self, description: str, observe: Callable[[nn.Module], AbstractContextManager[Observed]]
    ) -> Iterator[tuple[int, nn.Module, Observed]]:
        """Yield each layer after it has run, observed by what `observe` opens, which is yielded too.

        So the loop body may change the layer: later ones read what it gave before.
        """
        for index, layer in self.layers(description):
            with observe(layer) as observed:
                self.advance(index)
            yield index, layer, observed

    @torch.no_grad()
    def feed(self, index: int, site: Site, receive: Callable[[Tensor], None]) -> None:
        """Give `receive` the site's input, [batch, tokens, features], batch by batch, as its linear layers read it.

        Hooks on the linear layers that exist by now act first. The layer runs only as far as this site. Ask for the
        sites of a layer in execution order, and change no linear layer of a site that came before: what those gave is
        remembered if it is not too large.
        """
        self._recorded.pop(site.name, None)
        inputs: list[Tensor] = []
        size = self.hidden[..., 0].numel() * site.features * self.hidden.element_size()
        keep = site.name.endswith("_output") and size <= of_device(RECORD_BYTES, self.device)

        def reached(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            receive(arguments[0])
            if keep:
                inputs.append(arguments[0])
            raise _Reached

        hook = self.modules[index].get_submodule(site.linears[0]).register_forward_pre_hook(reached)
        try:
            with self._shortcuts(index):
                for rows in self._batches():
                    with suppress(_Reached):
                        self._forward(index, rows)
        finally:
            hook.remove()
        if keep:
            self._recorded[site.name] = inputs

    @torch.no_grad()
    def feed_experts(self, index: int, site: Site, receive: Callable[[str, Tensor], None]) -> None:
        """`feed` for a site of experts: `receive` gets a linear layer's name and what it reads, [tokens, features].

        The whole layer runs. An expert that no token is routed to is never named.
        """
        with ExitStack() as stack, self._shortcuts(index):
            for name in site.linears:

                def give(_: nn.Module, arguments: tuple[Any, ...], name: str = name) -> None:
                    receive(name, arguments[0])

                linear = self.modules[index].get_submodule(name)
                stack.callback(linear.register_forward_pre_hook(give).remove)
            for rows in self._batches():
                self._forward(index, rows)

    @torch.no_grad()
    def outputs(self, index: int, samples: int | None = None) -> Iterator[Tensor]:
        """The layer's outputs of all or the first samples, batch by batch; the hidden states stay."""
        for rows in self._batches(samples):
            yield self._forward(index, rows)

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by the layer's outputs."""
        with self._shortcuts(index):
            for rows in self._batches():
                self.hidden[rows] = self._forward(index, rows).to(self.hidden.device)

    def _forward(self, index: int, rows: slice) -> Tensor:
        with FasterKernels():
            output = self.modules[index](self.hidden[rows].to(self.device), **self.kwargs[index])
        return output[0] if isinstance(output, tuple) else output

    def _batches(self, samples: int | None = None) -> Iterator[slice]:
        end = min(len(self.hidden), samples or len(self.hidden))
        for start in range(0, end, self.batch_size):
            yield slice(start, min(start + self.batch_size, end))

    @contextmanager
    def _shortcuts(self, index: int) -> Iterator[None]:
        """While open, the attention and MLP whose last linear layer's input is known compute that linear layer only."""
        layer, shape = self.modules[index], self.architecture
        places = {"attention_output": shape.attention_output, "mlp_output": shape.mlp_output}
        with ExitStack() as stack:
            for site, inputs in self._recorded.items():
                block = layer.get_submodule(places[site].rpartition(".")[0])
                linear = layer.get_submodule(places[site])
                stack.enter_context(_skip_to(block, linear, inputs, returns_tuple=site == "attention_output"))
            yield


def exact_norm(offset: float, norm: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    """A hook, once it has the family's `norm_offset`: what an RMSNorm gives, in the type of its input."""
    x, gain = inputs[0], cast(Any, norm).weight
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon_of(norm))
    return (gain + offset if offset else gain) * scaled


@contextmanager
def observed_inputs(
    layer: nn.Module, sites: Iterable[Site], receive: Callable[[str, Tensor], None], *, raw: bool = False
) -> Iterator[None]:
    """While open, a decoder layer that runs gives `receive` the name and the input of each site, [..., features].

    Of experts it gives the inputs of one after another, [tokens, features].

    Args:
        raw: whether before hooks that were there (online transforms, quantizers), and not as linear layers read it;
            what a norm gives is then given once, before any expert.
    """
    with ExitStack() as stack:
        for site in sites:

            def give(_: nn.Module, arguments: tuple[Any, ...], name: str = site.name) -> None:
                receive(name, arguments[0])

            if raw and site.norm is not None:
                norm = layer.get_submodule(site.norm)
                seen = norm.register_forward_hook(lambda _m, _i, x, give=give: give(_m, (x,)), prepend=True)
                stack.callback(seen.remove)
                continue
            for readers in site.sharing:
                linear = layer.get_submodule(readers[0])
                stack.callback(linear.register_forward_pre_hook(give, prepend=raw).remove)
        yield


def as_type(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors as `dtype`, also inside tuples and dicts; anything else, and all for None, as it is."""
    if isinstance(value, tuple):
        return tuple(as_type(item, dtype) for item in value)
    if isinstance(value, dict):
        return {name: as_type(item, dtype) for name, item in value.items()}
    return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward pass that has gone far enough
    """The site that was asked for has been seen."""


@contextmanager
def _skip_to(block: nn.Module, linear: nn.Module, inputs: list[Tensor], returns_tuple: bool) -> Iterator[None]:
    """Let `block` return linear(next recorded input). Hooks of `linear` have acted on the inputs already."""
    remaining = iter(inputs)

    def forward(*_: Any, **__: Any) -> Any:
        output = linear.forward(next(remaining))
        return (output, None) if returns_tuple else output

    block.forward = forward
    try:
        yield
    finally:
        del block.forward


@torch.no_grad()
def capture_layer_inputs(
    model: nn.Module,
    samples: Tensor,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> LayerStream:
    """Embed the samples and learn what each decoder layer is called with; no decoder layer runs.

    Args:
        model: a causal language model of a supported family; its layers may lie anywhere and are not moved.
        samples: token ids, int64 [samples, tokens].
        device: where layers will run.
        batch_size: samples at once; default by the number of tokens.
        dtype: in which layers will compute, for example float64 for a float32 model; default, the model's own.

    Raises:
        RecipeError, CheckpointError: the model cannot read the samples; see `rotquant.models.limits`.
    """
    ModelLimits.of(model.config).check(samples, "samples")
    device = torch.device(device)
    if batch_size is None:
        tokens = of_device(TOKENS_AT_ONCE, device) // (2 if dtype == torch.float64 else 1)
        batch_size = max(1, tokens // samples.shape[1])
    base = base_model(model)
    layers, home = base.layers, base.embed_tokens.weight.device
    recorders = nn.ModuleList(_Recorder(layer) for layer in layers)
    size = (*samples.shape, base.embed_tokens.embedding_dim)
    base.layers = recorders
    try:
        base.to(device)  # embedding, norm and rotary embedding: the layers are out of the way
        base(input_ids=samples[:1].to(device), use_cache=False)
        kwargs = [
            {name: as_type(value, dtype) for name, value in cast(_Recorder, recorder).kwargs.items()}
            for recorder in recorders
        ]
        hidden = _allocate(size, dtype or base.embed_tokens.weight.dtype, device)
        for start in range(0, len(samples), batch_size):
            base(input_ids=samples[start : start + batch_size].to(device), use_cache=False)
            hidden[start : start + batch_size] = cast(Any, recorders[0]).hidden.to(hidden.device)
    finally:
        base.to(home)
        base.layers = layers
    return LayerStream(model, hidden, kwargs, device, batch_size, dtype)


class _Recorder(nn.Module):
    """Stands in for a decoder layer: passes hidden states on and remembers what it was called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kwargs: dict[str, Any] = {}
        if hasattr(layer, "attention_type"):  # some models choose the mask by it
            self.attention_type = layer.attention_type

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        self.hidden = hidden
        # A cache is nobody's here: how keys and values are quantized, if at all, is for whoever runs the layer to say.
        self.kwargs = {name: value for name, value in kwargs.items() if name != "past_key_values"}
        return hidden


@contextmanager
def on_device(module: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Hold a module on `device` while the block runs, then return it to where it was."""
    home = next(module.parameters()).device
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def memory_peak(device: torch.device) -> int:
    """Largest number of bytes that torch had allocated on a CUDA device since `reset_memory_peak`; 0 elsewhere."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_memory_peak(device: torch.device) -> None:
    """Start measuring `memory_peak` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for the hidden states: on the accelerator unless they would take too much of its free memory."""
    hidden = torch.empty(size, dtype=dtype, device="meta")
    fits = device.type != "cuda" or hidden.nbytes <= SHARE_OF_HIDDEN * free_memory(device)
    return torch.empty(size, dtype=dtype, device=device if fits else "cpu")
