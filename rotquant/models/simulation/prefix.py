"""A prefix in the KV cache (PrefixQuant Sec. 5.1): keys and values of a few tokens that stand in front of every text.

They are computed once, stay in full precision, and only attention sees them: a text's own tokens follow them, but
lengths, masks and positions that a caller gives or gets are those of the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture, architecture_of, config_of
from rotquant.models.limits import ModelLimits
from rotquant.models.stream import capture_layer_inputs


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys, after RoPE at the positions from 0 and without R3, and values, each [layers, kv heads, tokens, head_dim],
    and the ids of its tokens, as far as they are known.

    Two are equal only if they are one: a cache that was filled after one prefix does not fit another. Tensors that ask
    for a gradient get it, and may change between two calls.
    """

    keys: Tensor
    values: Tensor
    ids: tuple[int, ...] = ()
    _placed: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False
    )

    @property
    def tokens(self) -> int:
        """Number of tokens in the prefix."""
        return self.keys.shape[2]

    def before(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of a text [batch, kv heads, tokens, head_dim] after those of the prefix."""
        first, second = (part.expand(len(keys), *part.shape) for part in self._of(layer, keys))
        return torch.cat([first, keys], dim=2), torch.cat([second, values], dim=2)

    def _of(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values where `like` lies and of its type; a copy is kept of what is not trained."""
        if self.keys.requires_grad or self.values.requires_grad:
            return self.keys[layer].to(like), self.values[layer].to(like)
        place = layer, like.device, like.dtype
        if place not in self._placed:
            self._placed[place] = self.keys[layer].to(like), self.values[layer].to(like)
        return self._placed[place]


def shapes(architecture: Architecture, tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a prefix of that many tokens."""
    shape = architecture.num_layers, architecture.num_kv_heads, tokens, architecture.head_dim
    return {"keys": shape, "values": shape}


def empty_prefix(architecture: Architecture, dtype: torch.dtype) -> Prefix:
    """The prefix of no tokens."""
    shape = shapes(architecture, 0)
    return Prefix(torch.zeros(shape["keys"], dtype=dtype), torch.zeros(shape["values"], dtype=dtype))


def stored_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shapes of `stored_tensors`, with -1 for any number of tokens."""
    return {"ids": (-1,), **shapes(architecture, -1)}


def stored_tensors(ids: Sequence[int], prefix: Prefix) -> dict[str, Tensor]:
    """Tensors that a method stores for a prefix: its tokens, int64 [tokens], and keys and values of every layer."""
    return {"ids": torch.tensor(ids, dtype=torch.int64), "keys": prefix.keys, "values": prefix.values}


def stored_ids(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The tokens of `stored_tensors`."""
    return tuple(tensors["ids"].tolist())


def stored_prefix(tensors: Mapping[str, Tensor]) -> Prefix | None:
    """The prefix of `stored_tensors`, or None where it has no token."""
    return Prefix(tensors["keys"], tensors["values"], stored_ids(tensors)) if len(tensors["ids"]) else None


#: What results say where BOS was asked for and the prefix holds one.
BOS_OF_PREFIX = "no BOS of the text: the prefix holds one"


class PrefixMark:
    """A mark on a model, until it is removed, of the prefix that stands before every text: `prefix_holds` reads it."""

    def __init__(self, model: nn.Module, prefix: Prefix) -> None:
        self.model = model
        vars(model)["prefix_ids"] = prefix.ids

    def remove(self) -> None:
        """Take the mark away."""
        del vars(self.model)["prefix_ids"]


def prefix_ids(model: nn.Module) -> tuple[int, ...]:
    """The tokens that stand before every text in a model's KV cache: of a wrapped one, or of a decoder."""
    return getattr(model, "prefix_ids", ())


def prefix_holds(model: nn.Module, bos: int | None) -> bool:
    """Whether a model's prefix holds BOS, so that a text after it has none of its own: a second BOS would be an outlier
    again (PrefixQuant Sec. 5.1)."""
    return bos is not None and bos in prefix_ids(model)


def after_prefix(model: nn.Module, ids: Tensor, bos: int | None) -> Tensor:
    """Token ids of texts, int64 [..., tokens], as a model reads them: `without_bos` where its prefix holds BOS."""
    return without_bos(ids, bos) if prefix_holds(model, bos) else ids


def without_bos(ids: Tensor, bos: int | None) -> Tensor:
    """Token ids of texts, int64 [..., tokens], without their first token where one of them begins with BOS."""
    return ids[..., 1:] if bos is not None and bool((ids[..., :1] == bos).any()) else ids


def bos_of(model: nn.Module) -> int | None:
    """The token that begins texts by a model's configuration, None where it names none."""
    bos = config_of(model).bos_token_id
    return bos[0] if isinstance(bos, list) else bos


@torch.no_grad()
def compute_prefix(model: nn.Module, ids: Sequence[int], device: torch.device | str = "cpu") -> Prefix:
    """Run tokens through a model, one decoder layer at a time on `device`, and keep what attention sees of them.

    Args:
        model: as it is, with the online transforms of a rotated model and without quantizers.
        ids: of the tokens; none give `empty_prefix`.

    Raises:
        RecipeError, CheckpointError: the model cannot read them; see `rotquant.models.limits`.
    """
    if not ids:
        return empty_prefix(architecture_of(model), next(model.parameters()).dtype)
    stream = capture_layer_inputs(model, torch.tensor([list(ids)]), device)
    found: list[tuple[Tensor, Tensor]] = []
    for index, _ in stream.layers("the prefix"):
        stream.kwargs[index]["past_key_values"] = _Recorder(found)
        stream.advance(index)
    keys, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Prefix(keys, values, tuple(ids))


class _Recorder:
    """Stands in for a cache: keeps the keys and values of its one sequence, on the host."""

    def __init__(self, found: list[tuple[Tensor, Tensor]]) -> None:
        self.found = found

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.found.append((key_states.cpu(), value_states.cpu()))
        return key_states, value_states


def check_prefix(model: nn.Module, prefix: Prefix) -> None:
    """Raise `RecipeError` where a prefix does not fit a model."""
    architecture = architecture_of(model)
    expected = shapes(architecture, prefix.tokens)
    for name, shape in expected.items():
        found = tuple(getattr(prefix, name).shape)
        if found != shape:
            raise RecipeError(f"the prefix has {name} of shape {found}, not {shape}: compute it by this model.")
    ModelLimits.of(model.config).check_prefix(prefix.tokens)  # and of each text when it comes
