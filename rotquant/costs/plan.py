"""The plan of a piece of work: all of its costs, the GPUs that it fits, and what to change where it does not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotquant.costs.disk import disk, stored_bits
from rotquant.costs.memory import Part, Phase, peak, phases, total
from rotquant.costs.time import Duration, durations
from rotquant.costs.ways import way_of
from rotquant.costs.work import Work, text_of
from rotquant.recipes.recipe import Recipe, override

#: Bytes of GPUs' memory by what they are sold as; a card of 80 GB has a little less.
GPUS = {"24 GB": 24 * 2**30, "80 GB": 79 * 2**30}
#: Bytes of a process with Python, torch and transformers, as measured; on a GPU CUDA's libraries come on top, a guess.
PROCESS = {"cpu": 500 * 2**20, "cuda": 3 * 2**30}
#: Bytes of a file of a large checkpoint: what is saved with transformers has shards of about so many.
_SHARD = 5 * 10**9
#: Texts and batches are not made smaller than this.
_LEAST_SAMPLES, _LEAST_LENGTH = 8, 256


@dataclass(frozen=True)
class Fit:
    """Whether the work fits a GPU.

    peak: bytes that it allocates there. changes: options that make it fit where it does not, and `then` its bytes with
    them; without a number no change of type, batch or text suffices, and `least` is what remains.
    way: how a training runs there, with the changes. host: bytes of the host's memory at its fullest, likewise.
    """

    gpu: str
    memory: int
    peak: int
    fits: bool
    way: str
    host: int
    changes: tuple[str, ...] = ()
    then: int | None = None
    least: int | None = None


@dataclass(frozen=True)
class WorkCosts:
    """The costs of a piece of work.

    device: the phases there. host: what lies in the host's memory at its fullest. disk: of the folder that is written.
    """

    work: Work
    device: list[Phase]
    host: list[Part]
    disk: list[Part]
    time: list[Duration]
    fits: list[Fit]

    @property
    def peak(self) -> Phase:
        """The phase with most bytes on the device."""
        return max(self.device, key=lambda phase: phase.bytes)

    @property
    def seconds(self) -> float:
        """Seconds of all parts whose time is recorded."""
        return sum(one.seconds or 0.0 for one in self.time)

    @property
    def timed(self) -> bool:
        """Whether the time of everything is recorded."""
        return all(one.seconds is not None and one.whole for one in self.time)


def costs_of(work: Work, folder: Path | None = None, gpus: dict[str, int] | None = None) -> WorkCosts:
    """The costs of a piece of work.

    Args:
        folder: of the checkpoint, whose tokenizer is copied.
        gpus: bytes of further GPUs' memory by their names.
    """
    asked = {**GPUS, **(gpus or {})} if work.device == "cuda" else {}
    fits = [fit(replace(work, memory=memory), name) for name, memory in asked.items()]
    return WorkCosts(work, phases(work), host(work), disk(work, folder), durations(work), fits)


def host(work: Work) -> list[Part]:
    """What lies in the host's memory at its fullest: while weights are made on a CPU, or while they are saved."""
    shapes, recipe, parameters = work.shapes, work.recipe, work.parameters
    bits = stored_bits(work)
    scales = sum(count for part, count in bits.items() if part != "codes") // 8
    codes = shapes.quantized_parameters if recipe.weights is not None else 0
    worst = peak(work)
    parts = [
        Part("the network", parameters * work.itemsize, f"{parameters:,} numbers of {work.dtype}"),
        Part("quantized weights", codes + scales, "a byte for each code, and scales"),
        Part("Python and torch", PROCESS[work.device], "a process without a model"),
    ]
    if recipe.learner is not None and work.dtype == "float16":
        parts.append(Part("the network in bfloat16", 2 * shapes.parameters, "in which its rotations are learned"))
    packed, floats = sum(bits.values()) // 8, (parameters - shapes.quantized_parameters) * work.kept
    narrowed = floats if work.kept < work.itemsize else 0
    written = packed + narrowed + min(packed + floats, _SHARD)
    last = Part("what is saved", written, "packed weights, other parameters in their type, a file's bytes")
    if work.device == "cpu":
        working = Part(f"{worst.name} at work", worst.bytes, "as on a device, which is the host here")
        last = max(last, working, key=lambda part: part.bytes)
    there = max((phase.on_host for phase in phases(work)), key=total, default=())
    return [*parts, *there, last]


def fit(work: Work, name: str) -> Fit:
    """Whether work fits the GPU of its memory, and with which changes it does."""
    worst = peak(work)
    needed = best = worst.bytes
    if _fits(work, worst):
        return _fit(work, name, needed, fits=True)
    changes: list[str] = []
    for option, changed in _smaller(work):
        found = peak(changed)
        if found.bytes < best:
            changes = [one for one in changes if one.partition("=")[0] != option.partition("=")[0]] + [option]
            best = found.bytes
        if _fits(changed, found):
            return _fit(changed, name, needed, changes=tuple(changes), then=best)
    return _fit(work, name, needed, least=best)


def _fits(work: Work, phase: Phase) -> bool:
    return phase.bytes + phase.reserve <= work.memory


def _fit(work: Work, name: str, needed: int, *, fits: bool = False, **found: Any) -> Fit:
    """What is found of work on a GPU, with the way that it takes there."""
    return Fit(name, work.memory, needed, fits, peak(work).way, total(host(work)), **found)


def _smaller(work: Work) -> Iterator[tuple[str, Work]]:
    """Options of the command that make the work smaller, one on top of the other, with the work that they leave."""
    if work.dtype == "float32":
        work = replace(work, dtype="bfloat16")
        yield "--dtype=bfloat16", work
    for name, method in work.recipe.methods.items():
        size = getattr(method, "batch_size", 1)
        while size > 1:
            size //= 2
            work = _changed(work, {"methods": {name: {"batch_size": size}}})
            yield f"--set methods.{name}.batch_size={size}", work
    while (text := work.recipe.calibration) is not None and text.samples > _LEAST_SAMPLES:
        work = _changed(work, {"calibration": {"samples": text.samples // 2}})
        yield f"--samples={text.samples // 2}", work
    for name, method in work.recipe.methods.items():
        samples = method.own_text.samples if method.own_text and way_of(method, work.recipe) == "blocks" else 0
        while samples // 2 >= max(_LEAST_SAMPLES, getattr(method, "batch_size", 1)):
            samples //= 2
            work = _changed(work, {"methods": {name: {"text": {"samples": samples}}}})
            yield f"--set methods.{name}.text.samples={samples}", work
    while (length := _length(work.recipe)) // 2 >= _LEAST_LENGTH:
        texts = {
            name: {"text": {"sequence_length": length // 2}}
            for name, one in work.recipe.methods.items()
            if one.own_text
        }
        calibration = {"sequence_length": length // 2}
        work = _changed(work, {"methods": texts} | ({"calibration": calibration} if work.recipe.calibration else {}))
        yield f"--sequence-length={length // 2}", work


def _length(recipe: Recipe) -> int:
    """The longest text's tokens in a sample."""
    texts = [text_of(method, recipe) for method in recipe.methods.values()]
    return max((text.sequence_length for text in texts if text is not None), default=0)


def _changed(work: Work, changes: dict[str, Any]) -> Work:
    return replace(work, recipe=override(work.recipe, changes, "a smaller amount"))
