"""Memory on the device, phase by phase: what lies there at the same time while a recipe is applied to a model.

Each part is a number of elements times their size, from the shapes and from the bounds of the code that holds it. Bytes
that torch allocates are counted; its context and the fragments between tensors are not (`LIBRARIES`). Recorded peaks
(`results/bench`) are met within 5 % (`tests/reproduction/test_costs.py`). A self-distillation has the estimate by which
it chooses its way (`qat.estimate`): the context is in it, and it exceeds recorded peaks by 7 to 25 %.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from rotquant.costs.ways import Way, way_of
from rotquant.costs.work import Work, online_matrices, text_of
from rotquant.models.memory import (
    BLOCK_ELEMENTS,
    CANDIDATES_AT_ONCE,
    KEPT_BYTES,
    LIBRARIES,
    LOGITS_AT_ONCE,
    RECORD_BYTES,
    SHARE_OF_HIDDEN,
    TOKENS_AT_ONCE,
    WORKSPACE,
    attention_bytes,
    cache_bytes,
    kept_width,
    sequences_at_once,
)
from rotquant.qat.estimate import Way as TrainingWay
from rotquant.qat.estimate import chosen_way
from rotquant.qat.method import SelfDistillation
from rotquant.recipes.recipe import Method
from rotquant.recipes.schemes import Calibration
from rotquant.tensors.devices import of_device, torch_dtype
from rotquant.tensors.stiefel import learning_bytes

#: Share of the `kept_width` of constants that recorded peaks have: 0.758 and 0.761 in SpinQuant Table 15, and 0.767
#: counted by hooks on SmolLM2. The width itself decides with room whether layers are computed again.
_OF_CONSTANTS = 0.76


@dataclass(frozen=True)
class Part:
    """Something that lies in memory: its name, its bytes, and what these follow from."""

    name: str
    bytes: int
    follows: str


def total(parts: Iterable[Part]) -> int:
    """Bytes of parts that are there at the same time."""
    return sum(part.bytes for part in parts)


@dataclass(frozen=True)
class Phase:
    """What lies on the device at the same time in one phase of the work.

    on_host: what lies on the host meanwhile: hidden states that are too large for the device, parts of a training.
    reserve: bytes of a GPU that it needs in addition. way: how a training runs there, in words.
    """

    name: str
    parts: tuple[Part, ...]
    on_host: tuple[Part, ...] = ()
    reserve: int = LIBRARIES
    way: str = ""

    @property
    def bytes(self) -> int:
        """All parts together."""
        return total(self.parts)


def phases(work: Work) -> list[Phase]:
    """The phases of the work on its device, in their order."""
    recipe, found = work.recipe, [Phase("loading", ())]  # the host's work
    if recipe.learner is not None:
        found.append(_network(work, recipe.learner))
    if recipe.rotation is not None:
        found.append(_rotation(work))
    for method in recipe.methods.values():
        if method is not recipe.learner:
            if method.written is not None:
                found.append(_writing(work, method.title, *method.written))
            found.append(_OF_WAY[way_of(method, recipe)](work, method))
    if recipe.weights is not None and not recipe.has_role("rounding"):
        found.append(Phase("round-to-nearest", (*_layer(work), _nearest(work, recipe.weights.clip_search))))
    if recipe.has_static_scales and not recipe.has_role("scales") and recipe.calibration is not None:
        found.append(_stream(work, "static scales", recipe.calibration))
    return found


def peak(work: Work) -> Phase:
    """The phase with most bytes on the device."""
    return max(phases(work), key=lambda phase: phase.bytes)


def _rotation(work: Work) -> Phase:
    """A weight, or rows of a large one, in float64: as it is, in two steps of its product, and changed; with a matrix.

    R1 turns the embedding too.
    """
    hidden, largest = work.shapes.architecture.hidden_size, work.shapes.largest
    residual = any(one.location == "residual" for one in work.recipe.transforms)
    elements = min(max(largest, work.shapes.embedding), max(BLOCK_ELEMENTS, largest)) if residual else largest
    parts = (
        Part("a weight in float64", 4 * 8 * elements, f"4 copies of {elements:,} numbers"),
        Part("R1" if residual else "a rotation", 8 * hidden**2, f"{hidden} x {hidden} in float64"),
    )
    return Phase("rotation", (*_layer(work), *parts))


def _nearest(work: Work, searched: bool) -> Part:
    """What rounding the largest weight takes, with a search for its clip ratio or without.

    A GPU was measured to hold three tensors of the candidates' size.
    """
    narrow, largest = work.itemsize < 4, work.shapes.largest
    if not searched:
        return _copies(work, largest, 3 + narrow)
    budget = of_device(CANDIDATES_AT_ONCE, _device(work))
    rows = min(largest, budget)
    candidates = min(80, budget // rows) * rows
    return Part(
        "candidates of clip ratios",
        4 * ((1 + narrow) * largest + 3 * candidates),
        f"3 x {candidates:,} numbers, and {largest:,} of the weight, float32",
    )


def _writing(work: Work, title: str, samples: int, length: int) -> Phase:
    """The network while it writes text: keys and values of all sequences that it writes side by side, and logits."""
    shapes = work.shapes
    shape = shapes.architecture
    count = min(samples, sequences_at_once(shape, length, work.itemsize))
    text = f"{count} sequences x {length:,} tokens"
    last = attention_bytes(shape, count, 1, work.itemsize, _device(work))
    repeated = 0 if shape.num_kv_heads == shape.num_heads else 2 * shape.num_heads * shape.head_dim * work.itemsize
    return Phase(
        f"{title} text",
        (
            Part("the network", work.parameters * work.itemsize, f"{work.parameters:,} numbers of {work.dtype}"),
            Part("keys and values", count * cache_bytes(shape, length, work.itemsize), text),
            Part("attention of a layer", last + count * length * repeated, text),
            Part("logits", 3 * 4 * count * shapes.vocabulary, f"3 x {count} sequences x {shapes.vocabulary:,}"),
        ),
    )


def _stream(work: Work, name: str, text: Calibration, more: tuple[Part, ...] = ()) -> Phase:
    """A text on its way through the decoder layers, one of which lies on the device; before, through the embedding."""
    here, there = _hidden(work, text, work.itemsize)
    passing = (*_layer(work), *here, *more, max(_attention(work, text), _activations(work, text), key=_size))
    return Phase(name, max(passing, _embedding(work, text, work.itemsize), key=total), there)


def _embedding(work: Work, text: Calibration, itemsize: int) -> tuple[Part, ...]:
    """What lies on the device while a text is embedded, before the first layer: the embedding comes there whole."""
    if work.device == "cpu" or work.resident:
        return ()
    count = work.shapes.embedding
    embedding = Part("the embedding", count * work.itemsize, f"{count:,} numbers of {work.dtype}")
    batch = _batch_tokens(work, text) * work.shapes.architecture.hidden_size * work.itemsize
    return (embedding, *_hidden(work, text, itemsize)[0], Part("a batch that is embedded", 2 * batch, "with its copy"))


def _of_stream(work: Work, method: Method) -> Phase:
    text = text_of(method, work.recipe)
    if text is None:
        return Phase(method.title, _layer(work))
    searched = getattr(method, "samples", None)
    if searched is not None:
        text = text.model_copy(update={"samples": min(text.samples, searched)})
    kept: tuple[Part, ...] = ()
    if "scales" in method.roles:
        shape, tokens = work.shapes.architecture, text.samples * text.sequence_length
        width = shape.hidden_size + (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        scores = 3 * 4 * shape.num_heads * text.sequence_length**2
        kept = (
            Part("outputs, queries, keys, values", tokens * width * work.itemsize, f"{tokens:,} tokens x {width:,}"),
            Part("attention of a sequence", scores, f"3 x {shape.num_heads} heads x {text.sequence_length}^2, float32"),
        )
    if method.reads == "sites":
        kept = (*kept, *_kept_inputs(work, text, work.itemsize, None))
    return _stream(work, method.title, text, kept)


def _kept_inputs(work: Work, text: Calibration | None, itemsize: int, last: str | None) -> Iterator[Part]:
    """Inputs of o_proj and down_proj that are kept until a layer is done, up to those of the site `last`."""
    tokens = 0 if text is None else text.samples * text.sequence_length
    for site in work.shapes.architecture.sites:
        size = tokens * site.features * itemsize
        if site.name.endswith("_output") and not site.experts and 0 < size <= of_device(RECORD_BYTES, _device(work)):
            yield Part(f"inputs of {site.name}", size, f"{tokens:,} tokens, kept until the layer is done")
        if site.name == last:
            return


def _sites(work: Work, method: Method) -> Phase:
    """The phase of the site with most bytes: its X^T X next to what earlier sites of the layer gave."""
    text = text_of(method, work.recipe)
    itemsize = 8 if getattr(method, "arithmetic", "model") == "float64" else work.itemsize
    exact, shape = max(itemsize, 4), work.shapes.architecture
    here, there = ((), ()) if text is None else _hidden(work, text, itemsize)
    best = Phase(method.title, ())
    for site in shape.sites:
        count, square = len(site.linears) if site.experts else 1, site.features**2
        matrices = Part(
            f"X^T X of {site.name}", count * square * exact, f"{count} x {site.features}^2, {8 * exact} bits"
        )
        rows = work.shapes.rows(site.linears[0])
        working = _copies(work, rows * site.features)
        if method.inverts:  # errors are spread by the inverse of X^T X, over all weights of the site
            every = rows * (1 if site.experts else len(site.linears)) * site.features
            factor = Part("its inverse's factor", 4 * 8 * square, f"4 x {site.features}^2 in float64")
            columns = Part("weights in columns", 3 * exact * every, f"3 x {every:,} numbers of {8 * exact} bits")
            working = max(factor, columns, key=_size)
        if text is not None:  # X^T X is summed while batches pass, before it is used
            attends = site.name == "attention_output"  # which is remembered
            passing = (_attention if attends else _activations)(work, text)
            working = max(working, passing, key=_size)
        parts = (*_layer(work), *here, *_kept_inputs(work, text, itemsize, site.name), matrices, working)
        best = max(best, Phase(method.title, parts, there), key=lambda phase: phase.bytes)
    return best if text is None else max(best, _stream(work, method.title, text), key=lambda phase: phase.bytes)


def _layers(work: Work, method: Method) -> Phase:
    """X^T X of all sites of a layer, summed while the text passes, then used for one weight after the other."""
    text, shape = text_of(method, work.recipe), work.shapes.architecture
    exact = max(4, work.itemsize)
    square = sum(site.features**2 for site in shape.sites)
    moments = (Part("X^T X of all sites", square * exact, f"{square:,} numbers of {8 * exact} bits"),)
    if text is None:
        return Phase(method.title, (*_layer(work), *moments))
    summed = Part("X^T X of a batch", exact * max(site.features**2 for site in shape.sites), "before it is added")
    read = max(sum(work.shapes.rows(one) for one in site.linears) * site.features for site in shape.sites)
    here, there = _hidden(work, text, work.itemsize)
    searching = Phase(method.title, (*_layer(work), *here, *moments, _copies(work, read)), there)
    return max(searching, _stream(work, method.title, text, (*moments, summed)), key=lambda phase: phase.bytes)


def _blocks(work: Work, method: Method) -> Phase:
    """A decoder layer with what is learned of it, and the hidden states of both networks.

    Gradients are freed before each step, and grow in the backward pass while what was kept for it is freed.
    """
    text = text_of(method, work.recipe)
    if text is None:
        return Phase(method.title, _layer(work))
    here, there = _hidden(work, text, work.itemsize, streams=2)
    layer = work.shapes.of_layer
    tokens = getattr(method, "batch_size", 1) * text.sequence_length
    kept = Part(
        "kept for the backward pass",
        4 * tokens * _width(work),
        f"{tokens:,} tokens x {_width(work):,}, float32",
    )
    learned = Part("the layer's training", 12 * layer, f"{layer:,} weights x 12 bytes: float32, two moments")
    gradient = Part("the layer's gradient", 4 * layer, f"{layer:,} numbers in float32")
    return Phase(method.title, (*_layer(work), *here, learned, max(kept, gradient, key=_size)), there)


def _network(work: Work, method: Method) -> Phase:
    """The whole network with a batch's activations, or with logits, which go before the layers' backward pass."""
    shapes, text = work.shapes, text_of(method, work.recipe)
    parts = [Part("the network", shapes.parameters * work.itemsize, f"{shapes.parameters:,} numbers of {work.dtype}")]
    if text is not None:
        length, device = text.sequence_length, _device(work)
        room = max(1, of_device(LOGITS_AT_ONCE, device) // (length * shapes.vocabulary))
        tokens = min(getattr(method, "batch_size", 1), room) * length
        logits = Part("logits", 3 * 4 * tokens * shapes.vocabulary, f"3 x {tokens:,} tokens x {shapes.vocabulary:,}")
        parts += _kept(work, tokens, logits, getattr(method, "constants", False))
    if matrices := len(online_matrices(work)) * shapes.architecture.num_layers:
        hidden = shapes.architecture.hidden_size
        follows = f"{matrices} matrices {hidden} x {hidden} with gradients, and a step of Cayley SGD"
        parts.append(Part("online rotations", learning_bytes(hidden, matrices), follows))
    return Phase(method.title, tuple(parts))


def _kept(work: Work, tokens: int, beside: Part, constants: bool) -> Iterator[Part]:
    """What a forward pass keeps for the backward one; layers are computed again where that is too much.

    constants: as `kept_width` takes it.
    """
    shape = work.shapes.architecture
    width = kept_width(shape, constants)
    every = tokens * width * shape.num_layers * work.itemsize
    if every <= of_device(KEPT_BYTES, _device(work)):
        width = round(_OF_CONSTANTS * width) if constants else width
        kept = tokens * width * shape.num_layers * work.itemsize
        yield Part("kept for the backward pass", kept, f"{tokens:,} tokens x {width:,} x {shape.num_layers} layers")
        yield beside
        return
    states = tokens * shape.hidden_size * shape.num_layers * work.itemsize
    yield Part("inputs of all layers", states, f"{tokens:,} tokens; layers are computed again (checkpointing)")
    again = Part("a layer computed again", tokens * width * work.itemsize, f"{tokens:,} tokens x {width:,}")
    yield max(again, beside, key=_size)


def _training(work: Work, method: Method) -> Phase:
    """Student, gradients and moments in float32, and the teacher; then what a layer keeps."""
    begin: tuple[Part, ...] = ()
    if work.device == "cuda":
        follows = "made on the host, the network is then its teacher"
        begin = (Part("student in float32", 4 * work.parameters, follows),)
    if isinstance(method, SelfDistillation):
        return _distillation(work, method, begin)
    text, parameters = method.budget(work.recipe), work.parameters
    layers, weights = work.shapes.architecture.num_layers, work.shapes.quantized_parameters
    kept, logits = 4 * text.seen * _width(work) * layers, 3 * 4 * text.seen * work.shapes.vocabulary
    parts = (
        Part("student", 16 * parameters, f"{parameters:,} x 16 bytes: float32, gradient, two moments of AdamW"),
        Part("teacher", work.itemsize * parameters, f"{parameters:,} numbers of {work.dtype}"),
        Part("quantized weights", 4 * weights, f"{weights:,} in float32"),
        Part("kept for the backward pass", kept, f"{text.seen:,} tokens, no checkpointing"),
        Part("logits", logits, f"3 x {text.seen:,} tokens x {work.shapes.vocabulary:,}"),
    )
    return Phase(method.title, parts, begin)


def _distillation(work: Work, method: SelfDistillation, begin: tuple[Part, ...]) -> Phase:
    """The way that a training chooses on this device; on the host `begin`, or later what training keeps there."""
    way, gpu = training_way(work, method), work.device == "cuda"
    sequences = way.at_once or method.batch_size
    together = "1 sequence" if sequences == 1 else f"{sequences} sequences"
    words = f"{together} at once{', moments and teacher on the host' if way.offloaded else ''}"
    held = "float32, gradient" if way.offloaded else "float32, gradient, two moments of AdamW"
    teacher = "of the teacher what is not on the host" if way.offloaded else f"the teacher in {work.dtype}"
    parts = (
        Part("student and teacher", way.networks, f"{work.parameters:,} parameters: {held}; {teacher}"),
        Part("quantizers", way.quantizers, f"their parameters: {held}"),
        Part("activations and loss", way.activations, f"{sequences} x {method.text.sequence_length:,} tokens"),
        Part("libraries", LIBRARIES if gpu else 0, "CUDA's context and libraries"),
    )
    later = (
        Part("moments of AdamW", way.moments, "they come to the GPU in each step"),
        Part("best parameters so far", way.best, "of the step with the least loss on held-out samples"),
    )
    on_host = max(begin, later, key=total)
    filled = (tuple(part for part in one if part.bytes) for one in (parts, on_host))
    return Phase(method.title, *filled, reserve=0 if gpu else LIBRARIES, way=words)


def training_way(work: Work, method: SelfDistillation) -> TrainingWay:
    """The way that a self-distillation chooses on the work's device, which need not be here."""
    device, memory = _device(work), work.memory if work.device == "cuda" else None
    untied = work.parameters - work.shapes.parameters
    dtype = torch_dtype(work.dtype)
    return chosen_way(work.shapes.model, work.recipe, method, device, dtype, memory, untied=untied)


_OF_WAY: dict[Way, Callable[[Work, Any], Phase]] = {
    "network": _network,
    "training": _training,
    "blocks": _blocks,
    "sites": _sites,
    "layers": _layers,
    "stream": _of_stream,
}
assert _OF_WAY.keys() == set(get_args(Way))


def _layer(work: Work) -> tuple[Part, ...]:
    """The decoder layer at work: one that is streamed, or the network where that lies on the GPU; on a CPU none.

    Matrices of online transforms stay where they were used once.
    """
    matrices = sum(online_matrices(work).values())
    follows = f"{work.shapes.architecture.num_layers} layers x {len(online_matrices(work))} inputs, float32"
    online = (Part("online rotations", matrices, follows),) if matrices else ()
    if work.device == "cpu":
        return online
    if work.recipe.rotation is not None or work.recipe.methods:
        online = (*online, Part("cuBLAS's workspace", WORKSPACE, "of the first product on"))
    if work.resident:
        every = work.parameters
        return (Part("the network", every * work.itemsize, f"{every:,} numbers of {work.dtype}"), *online)
    layer = work.shapes.of_layer
    return (Part("a decoder layer", layer * work.itemsize, f"{layer:,} numbers of {work.dtype}"), *online)


def _hidden(
    work: Work, text: Calibration, itemsize: int, streams: int = 1
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The hidden states of a text: on the device, or on the host where they exceed their share of a GPU."""
    width = work.shapes.architecture.hidden_size
    one = text.samples * text.sequence_length * width * itemsize
    follows = (
        f"{streams} x {text.samples} samples x {text.sequence_length} tokens x {width:,} features x {itemsize} bytes"
    )
    found = (Part("hidden states", streams * one, follows),)
    fits = work.device == "cpu" or one <= SHARE_OF_HIDDEN * work.memory
    return (found, ()) if fits else ((), found)


def _batch_tokens(work: Work, text: Calibration) -> int:
    """Tokens that pass a layer at a time."""
    length = text.sequence_length
    bound = max(1, of_device(TOKENS_AT_ONCE, _device(work)) // length) * length
    return min(bound, text.samples * length)


def _activations(work: Work, text: Calibration) -> Part:
    """What a layer has while a batch of the text passes it."""
    shape, tokens = work.shapes.architecture, _batch_tokens(work, text)
    width = 3 * shape.intermediate_size + 4 * shape.hidden_size
    return Part("a batch in the layer", tokens * width * work.itemsize, f"{tokens:,} tokens x {width:,} features")


def _attention(work: Work, text: Calibration) -> Part:
    """What a layer has while a batch of the text passes its attention."""
    length, device = text.sequence_length, _device(work)
    sequences = _batch_tokens(work, text) // length
    size = attention_bytes(work.shapes.architecture, sequences, length, work.itemsize, device)
    return Part("a batch in the attention", size, f"{sequences} sequences x {length:,} tokens")


def _copies(work: Work, elements: int, copies: int = 5) -> Part:
    """What searching scales and rounding makes of a weight."""
    exact = max(4, work.itemsize)
    follows = f"{copies} x {elements:,} numbers of {8 * exact} bits"
    return Part("copies of the weights at work", copies * exact * elements, follows)


def _size(part: Part) -> int:
    return part.bytes


def _width(work: Work) -> int:
    """Features that a token keeps in a layer for the backward pass."""
    return kept_width(work.shapes.architecture)


def _device(work: Work) -> torch.device:
    return torch.device(work.device)
