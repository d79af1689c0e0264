"""Checks of what a checkpoint's JSON files and safetensors headers declare, as plain data before a library acts on it.

Libraries meet a wrong value deep in a model's construction, or compute with it: integers without their scales are
weights to them. Importing this module loads neither torch nor transformers.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rotquant.foundation.errors import CheckpointError, nearest
from rotquant.models.architectures import check_family

Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Theta = Annotated[float, Field(gt=0.0, lt=1e38)]  # beyond float32 the frequencies are zeros
Factor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]

#: Kinds of rotary embeddings and the fields that each needs; `su` is longrope in configurations of Phi-3 from before.
ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}

#: Types of tensors in safetensors files that are numbers by themselves.
_FLOATS = ("F64", "F32", "F16", "BF16")
_STORED_AS = {"F": "8-bit or narrower floats", "I": "integers", "U": "integers", "B": "truth values"}
#: Keys of a config.json under which libraries say that they quantized the weights.
_QUANTIZED = ("quantization_config", "compression_config")


class _Rope(BaseModel):
    """Rotary embeddings, under `rope_parameters` or, in files from before, `rope_scaling`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Factor | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    short_factor: Annotated[list[Number], Field(min_length=1)] | None = None
    long_factor: Annotated[list[Number], Field(min_length=1)] | None = None
    attention_factor: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    original_max_position_embeddings: Annotated[int, Field(gt=0)] | None = None
    full_attention: "_Rope | None" = None
    sliding_attention: "_Rope | None" = None

    @model_validator(mode="after")
    def _kind_is_known(self) -> "_Rope":
        kind = self.rope_type or self.type or "default"
        if kind not in ROPE_FIELDS:
            raise ValueError(f"the rope_type {kind!r} is unknown; known: {', '.join(ROPE_FIELDS)}")
        for field in ROPE_FIELDS[kind]:
            if getattr(self, field) is None:
                raise ValueError(f"the rope_type {kind} needs {field}")
        self._check_bounds(("low_freq_factor", 1.0), ("high_freq_factor", math.inf))
        self._check_bounds(("beta_slow", 1.0), ("beta_fast", 32.0))
        return self

    def _check_bounds(self, low: tuple[str, float], high: tuple[str, float]) -> None:
        """Raise ValueError where a band of frequencies is empty, of which transformers only warns; with defaults."""
        first, second = (getattr(self, name) or usual for name, usual in (low, high))
        if first >= second:
            raise ValueError(f"{low[0]} is {first:g}, and {high[0]} has to be above it and is {second:g}")

    def check_lengths(self, features: int) -> None:
        """Raise ValueError where lists of factors are not of half of the features of a head that are rotated."""
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != features // 2:
                raise ValueError(
                    f"{name} has {len(factors)} factors, and a head's {features} features need {features // 2}"
                )


class _Shape(BaseModel):
    """Fields of a config.json that size a model: whole numbers above zero, which a file can have as anything."""

    model_config = ConfigDict(extra="ignore", strict=True)

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    max_position_embeddings: Size | None = None
    rms_norm_eps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-6
    sliding_window: Size | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> "_Shape":
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads evenly")
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(f"a hidden size of {self.hidden_size} is not shared evenly by {heads} heads")
        if (self.head_dim or self.hidden_size // heads) % 2:
            raise ValueError("a head of an odd number of features has no rotary embedding")
        return self


class _Declared(BaseModel):
    """Fields of a config.json by which a model computes, or by which generation ends."""

    model_config = ConfigDict(extra="ignore", strict=True)

    hidden_act: Annotated[str, Field(min_length=1)] = "silu"
    rope_theta: Theta | None = None
    rope_local_base_freq: Theta | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    bos_token_id: int | None = None
    eos_token_id: int | Annotated[list[int], Field(min_length=1)] | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(ge=0.0)] = 0.02
    attention_dropout: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    num_labels: Annotated[int, Field(ge=0, le=10_000)] = 2  # of a classifier: transformers makes a name for each


class _Tokenizer(BaseModel):
    """Fields of a tokenizer_config.json that are used by their values."""

    model_config = ConfigDict(extra="ignore", strict=True)

    tokenizer_class: str | None = None
    model_max_length: float | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None


def check_declared(folder: Path, config: Mapping[str, Any], quantized: bool = False) -> None:
    """Check the content of a config.json.

    Args:
        quantized: whether it may say how another library quantized the weights.

    Raises:
        CheckpointError: its weights are quantized already.
        ValidationError, ValueError: a field is of the wrong type, or a rotary embedding is unknown, lacks what it needs
            or has what gives no frequencies.
    """
    for key in () if quantized else _QUANTIZED:
        declared = config.get(key)
        if declared is not None:
            raise CheckpointError(
                f"{folder} is quantized already{_by(declared)}, as {key} in its config.json says: give the checkpoint "
                "in floating point that it was made from."
            )
    found, shape = _Declared.model_validate(config), _Shape.model_validate(config)
    for rope in filter(None, (found.rope_parameters, found.rope_scaling)):
        partial = rope.partial_rotary_factor or found.partial_rotary_factor or 1.0
        rope.check_lengths(int((shape.head_dim or shape.hidden_size // shape.num_attention_heads) * partial))


def check_activation(config: Mapping[str, Any]) -> None:
    """Raise ValueError where `hidden_act` in a config.json is no function that transformers has."""
    from transformers.activations import ACT2FN

    name = config.get("hidden_act", "silu")
    if name not in ACT2FN:
        raise ValueError(f"hidden_act: {name!r} is no activation function{nearest(name, list(ACT2FN))}")


def check_tokenizer_settings(settings: Any) -> None:
    """Check the content of a tokenizer_config.json.

    Raises:
        ValidationError, ValueError: it is no JSON object, or a field is of the wrong type.
    """
    if not isinstance(settings, dict):
        raise ValueError("it is no JSON object")
    _Tokenizer.model_validate(settings)


def check_shape(config: Any) -> int:
    """Check the content of a config.json before anything is made by it; how many weights it asks for at least.

    Raises:
        UnsupportedArchitectureError: no adapter knows this family.
        ValidationError, ValueError: a size is missing or none, or this is no configuration.
    """
    check_family(config)
    shape = _Shape.model_validate(config)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_hidden_layers * mlp + shape.vocab_size * shape.hidden_size


def check_floating(path: Path, header: Mapping[str, Any]) -> None:
    """Refuse weights of other types than floating point of 16 bits or more, which are no numbers without their scales.

    Args:
        header: of the safetensors file `path`.

    Raises:
        CheckpointError: the sentence names the first such weight and its type.
    """
    for name, entry in header.items():
        dtype = "" if name == "__metadata__" else str(entry.get("dtype"))
        if name.endswith(("weight", "bias")) and dtype not in _FLOATS:
            what = _STORED_AS.get(dtype[:1], "no floats")
            raise CheckpointError(
                f"{path} is quantized already: {name} holds {what} ({dtype}), which are no weights without their "
                "scales; give the checkpoint in floating point that it was made from."
            )


def _by(declared: object) -> str:
    """Name of the quantizer of a checkpoint and its bits, where the configuration declares them."""
    if not isinstance(declared, Mapping):
        return ""
    widths = {"load_in_4bit": 4, "load_in_8bit": 8}
    bits = declared.get("bits") or next((width for key, width in widths.items() if declared.get(key) is True), None)
    method = declared.get("quant_method") or ("bitsandbytes" if widths.keys() & declared.keys() else None)
    known = f" by {str(method)[:40]}" if method else ""
    return known + (f" to {bits} bits" if isinstance(bits, int) else "")
