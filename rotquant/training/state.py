"""State of a training after some steps, as one file from which it continues to the same last bit.

The file is safetensors: the tensors of everything that changes, and in its metadata, as JSON, what is no tensor.
Nothing is unpickled. It names what it belongs to, and is replaced as a whole or not at all.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import atomic_path, short_hash
from rotquant.foundation.parsing import parse_json

Record = dict[str, Any]

#: How the file is written; one of another format is another code's.
_FORMAT = "rotquant-training-1"


class Stateful(Protocol):
    """Interface of what can be stored and restored: modules, optimizers, schedules of torch, and whatever else has
    these two."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and JSON values, nested in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Become what `state_dict` gave, on devices of one's own."""
        ...


#: A tensor is restored in place, a generator to the same draws.
Part = Tensor | torch.Generator | Stateful


@dataclass(frozen=True)
class Checkpoint:
    """Where a training's state is saved, and how often.

    path: a file, which the caller deletes once the result is safe.
    identity: a digest of what decides the result: settings, seed, data, model, and code where that may change.
    every, seconds: steps, and seconds, between two writings; None for no limit. The state after the last step is
        always written. Processes that train together count steps, since their clocks differ.
    writes: False in processes that help to gather a state and leave the file to another.
    """

    path: Path
    identity: str
    every: int | None = 10
    seconds: float | None = None
    writes: bool = True

    def of(self, part: str) -> "Checkpoint":
        """Checkpoint of a part of the training, in a file next to this one that bears the part's name."""
        return replace(self, path=self.path.with_name(f"{self.path.name}.{part}"), identity=f"{self.identity} {part}")

    def due(self, step: int, waited: float) -> bool:
        """Whether the state after `step` steps is to be written, so many seconds after it was last."""
        by_steps = self.every is not None and step % self.every == 0
        return by_steps or (self.seconds is not None and waited > self.seconds)

    def save(self, step: int, parts: Mapping[str, Part], history: list[Record]) -> None:
        """Write everything that a continued training needs, atomically.

        Raises:
            ResultError: the disk is full or cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        packed = {name: _pack(_state_of(part), name, tensors, seen) for name, part in parts.items()}
        if not self.writes:
            return
        state = json.dumps({"step": step, "history": history, "parts": packed})
        metadata = {"format": _FORMAT, "identity": self.identity, "state": state, "digest": short_hash(state)}
        with atomic_path(self.path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    def load(self, parts: Mapping[str, Part]) -> tuple[int, list[Record]]:
        """Continue from the file, if there is one: bring the parts to its state.

        Returns:
            How many steps have been taken, and their history.

        Raises:
            ResultError: the file is damaged or belongs to another training.
        """
        if not self.path.is_file():
            return 0, []
        with self._read() as (metadata, tensors):
            return self._restored(parts, metadata, tensors)

    def _restored(
        self, parts: Mapping[str, Part], metadata: dict[str, str], tensors: Callable[[str], Tensor]
    ) -> tuple[int, list[Record]]:
        """Bring the parts to the state of an open file."""
        ours = (metadata.get("format"), metadata.get("identity")) == (_FORMAT, self.identity)
        text = metadata.get("state", "") if ours else "{}"
        if ours and metadata.get("digest") != short_hash(text):
            raise self._damaged("its state was changed")
        try:
            state = _State.model_validate(parse_json(text.encode()))
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            raise self._damaged(problem) from None
        if not ours or state.parts.keys() != parts.keys():
            raise ResultError(f"checkpoint {self.path} belongs to another learning; delete it to learn from the start.")
        for name, part in parts.items():
            try:
                _restore(part, _unpack(state.parts[name], tensors))
            except (torch.OutOfMemoryError, ResultError):
                raise
            except Exception as error:  # what a strange state makes of torch's classes has no common type
                raise self._damaged(f"{name}: {type(error).__name__}") from None
        return state.step, state.history

    @contextmanager
    def _read(self) -> Iterator[tuple[dict[str, str], Callable[[str], Tensor]]]:
        """The file's metadata, and what reads a tensor: so no more of them exist than a part has."""
        try:
            with safe_open(self.path, framework="pt") as file:

                def read(name: str) -> Tensor:
                    # A copy: the file's map need not be aligned, and products of such matrices may round differently.
                    tensor = file.get_tensor(name).clone()
                    if not tensor.isfinite().all():
                        raise self._damaged(f"tensor {name} holds inf or nan")
                    return tensor

                yield file.metadata() or {}, read
        except (OSError, SafetensorError) as error:
            raise self._damaged(error) from None

    def _damaged(self, problem: object) -> ResultError:
        return ResultError(f"checkpoint {self.path} is damaged ({problem}); delete it to learn from the start.")


class _State(BaseModel):
    """Metadata of a file, stored next to its tensors."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)] = 0
    history: list[dict[str, Any]] = Field(default_factory=list)
    parts: dict[str, Any] = Field(default_factory=dict)


def _state_of(part: Part) -> Any:
    if isinstance(part, Tensor):
        return part
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _restore(part: Part, state: Any) -> None:
    if isinstance(part, Tensor):
        part.detach().copy_(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _pack(value: Any, name: str, tensors: dict[str, Tensor], seen: set[int]) -> Any:
    """A nested value as JSON, in which tensors are names; the tensors themselves go to `tensors`, on the host.

    What is on the host, as gigabytes of moments may be, is not copied, except what begins at an address in `seen`: the
    file may not hold one memory twice.
    """
    if isinstance(value, Tensor):
        own = value.detach()
        there = own.is_cpu and own.is_contiguous() and own.data_ptr() not in seen
        tensors[name] = own if there else own.to("cpu", copy=True).contiguous()
        seen.add(own.data_ptr())
        return {"tensor": name}
    if isinstance(value, Mapping):  # keys need not be strings: optimizers count parameters
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors, seen)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{name}.{index}", tensors, seen) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def _unpack(value: Any, tensors: Callable[[str], Tensor]) -> Any:
    """Restore the value that `_pack` was given."""
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors(content)
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    return tuple(_unpack(item, tensors) for item in content)
