"""A decoder's shape and its arithmetic, as frozen data: `DecoderConfig` and `Precision`.

A precision is to a decoder what a recipe is to a simulated model, in the few combinations that the kernels compute:
4-bit weights and inputs with a 4-bit cache (QuaRot Sec. 4, PrefixQuant), 4-bit weights and 16-bit inputs (W4A16), or
2-bit look-up tables (RCP). Data only.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from rotquant.foundation.data import Frozen
from rotquant.recipes.schemes import INPUTS, RotationScheme
from rotquant.recipes.transforms import Location, SiteName, Transform

#: The linear layers of a decoder layer; q, k and v are one, gate and up are one.
LINEARS: "tuple[LinearName, ...]" = ("qkv", "o", "gate_up", "down")
LinearName = Literal["qkv", "o", "gate_up", "down"]
#: The site of the simulation at which each stands.
SITE_OF: dict[str, SiteName] = dict(zip(LINEARS, get_args(SiteName), strict=True))
#: Locations where the kernels have a Hadamard transform.
TRANSFORMED: tuple[Location, ...] = ("attention_input", "across_heads", "mlp_input", "mlp_output", "queries_keys")
Size = Annotated[int, Field(gt=0)]


class DecoderConfig(Frozen):
    """Shape of a decoder of Llama's family.

    inverse_frequencies: of the rotary embedding, one for two features of a head. rope_scale: multiplies cos and sin.
    biases: linear layers that have one.
    norm_gains: False where the gains were fused into the weights (QuaRot stage 1a).
    input_norms: whether an RMSNorm comes before attention and MLP, which else read the residual stream (OLMo2).
    post_norms: whether one comes after them, before the residual stream (OLMo2, Gemma 3).
    head_norms: whether each head of queries and keys has an RMSNorm before RoPE (Qwen3), all with the same gain; or
        `all` heads together have one (OLMo2).
    activation: of the gate: SiLU, or GELU by tanh (Gemma).
    embedding_scale: what embeddings are multiplied by, but not in the head (Gemma).
    local_layers: those whose rotary embedding has `local_frequencies` (Gemma 3's with a window).
    window: longest text, prefix included, where the model's layers attend to so many tokens at most; within it they
        attend to all, as the kernels do.
    prefix: how many tokens stand in the cache before every text, in full precision (PrefixQuant Sec. 5.1).
        prefix_ids: these tokens; folders of 0.2.0 do not name them.
    """

    vocabulary: Size
    hidden: Size
    intermediate: Size
    layers: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    norm_eps: float
    inverse_frequencies: tuple[float, ...]
    rope_scale: float = 1.0
    max_positions: Size = 4096
    biases: tuple[LinearName, ...] = ()
    norm_gains: bool = True
    input_norms: bool = True
    post_norms: bool = False
    head_norms: bool | Literal["all"] = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    local_layers: tuple[int, ...] = ()
    local_frequencies: tuple[float, ...] = ()
    window: Size | None = None
    tied: bool = False
    prefix: Annotated[int, Field(ge=0)] = 0
    prefix_ids: Annotated[tuple[int, ...], Field(exclude_if=lambda ids: not ids)] = ()

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DecoderConfig":
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        frequencies = [self.inverse_frequencies, *([self.local_frequencies] if self.local_layers else [])]
        if any(2 * len(one) != self.head_dim for one in frequencies):
            raise ValueError(f"a head of {self.head_dim} features has {self.head_dim // 2} rotary frequencies")
        return self

    @classmethod
    def from_shape(cls, shape: dict[str, int], *, rope_theta: float = 10000.0, **fields: Any) -> "DecoderConfig":
        """Make a configuration from the arguments of a LlamaConfig; `fields` add or override."""
        heads = shape["num_attention_heads"]
        head_dim = shape.get("head_dim") or shape["hidden_size"] // heads
        values = {
            "vocabulary": shape.get("vocab_size", 32000),
            "hidden": shape["hidden_size"],
            "intermediate": shape["intermediate_size"],
            "layers": shape["num_hidden_layers"],
            "heads": heads,
            "kv_heads": shape.get("num_key_value_heads", heads),
            "head_dim": head_dim,
            "norm_eps": 1e-5,
            "inverse_frequencies": tuple(rope_theta ** (-2 * i / head_dim) for i in range(head_dim // 2)),
        }
        return cls.model_validate(values | fields)

    def features(self, linear: str) -> tuple[int, int]:
        """(in, out) of a linear layer."""
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, inner + 2 * kv),
            "o": (inner, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }[linear]


class InputScheme(Frozen):
    """How inputs of linear layers become integers: symmetric, one scale per token, or one static scale per layer.

    packed: two 4-bit codes a byte, for GPUs with INT4 tensor cores; otherwise a byte each.
    """

    bits: Literal[4, 8] = 4
    clip_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    static: bool = False
    packed: bool = False

    @model_validator(mode="after")
    def _only_four_bits_pack(self) -> "InputScheme":
        if self.packed and self.bits != 4:
            raise ValueError("only 4-bit codes are packed two to a byte")
        return self


class CacheScheme(Frozen):
    """A 4-bit key-value cache: asymmetric, a scale and zero point for each token, head and `group_size` features.

    group_size: None is the whole head.
    static: symmetric instead, with one scale for each head that is known beforehand (PrefixQuant Sec. 6.1).
    """

    key_clip: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    value_clip: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    group_size: Size | None = None
    static: bool = False

    @model_validator(mode="after")
    def _static_scales_are_of_heads(self) -> "CacheScheme":
        if self.static and (self.group_size is not None or min(self.key_clip, self.value_clip) < 1):
            raise ValueError("static scales of a cache are whole heads' and clip nothing: no group_size, no clip")
        return self


class Precision(Frozen):
    """The arithmetic of a decoder.

    weights: `float`; `int4` and `int4-grouped` (a scale per output feature, or per 128 of its weights); `lut2`, 2-bit
        codes into four-entry tables.
    table_group: input features that share a table of `lut2`; None for all of a layer. The kernel's groups have 128;
        smaller ones take as much memory as those.
    inputs: how the inputs of linear layers are quantized; None leaves them floats.
    cache: None keeps keys and values as floats.
    transforms: online Hadamard transforms: across heads before o, R4 before down (QuaRot stages 1c, 1b), and R3 of
        queries and of keys before these are quantized. Those before qkv and gate_up may be matrices of each layer.
    dtype: of everything that is not an integer; float64 on a CPU alone, where it shows what is computed when nothing is
        rounded but codes.
    """

    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    weights: Literal["float", "int4", "int4-grouped", "lut2"] = "float"
    table_group: Size | None = 128
    inputs: InputScheme | None = None
    cache: CacheScheme | None = None
    transforms: tuple[Transform, ...] = ()

    @model_validator(mode="after")
    def _kernels_have_the_transforms(self) -> "Precision":
        for one in self.transforms:
            dense = one.kind in ("random_hadamard", "orthogonal") and one.location in INPUTS.values()
            known = one.location in TRANSFORMED and (dense or (one.kind == "hadamard" and not one.tensors))
            if not one.online or one.size is not None or not known:
                raise ValueError(f"the kernels have no transform like {one.name} ({one.kind} at {one.location})")
        return self

    @model_validator(mode="after")
    def _weights_fit_inputs(self) -> "Precision":
        if self.weights == "float" and self.inputs is not None:
            raise ValueError("quantized inputs need quantized weights")
        if self.weights == "lut2" and self.inputs is not None and (self.inputs.bits != 4 or self.inputs.packed):
            raise ValueError("look-up tables take 4-bit inputs, a byte each")
        return self


def online(*, heads: bool = True, keys: bool = True, mlp: bool = True, half: bool = False) -> tuple[Transform, ...]:
    """QuaRot's online transforms, or some of them; half: in float16 (QuaRot Table 10)."""
    scheme = RotationScheme(heads=heads, keys=keys, mlp=mlp, online_dtype="float16" if half else "float32")
    return tuple(one for one in scheme.transforms if one.online)


_QUAROT_CACHE = CacheScheme(key_clip=0.95, value_clip=0.95)
_QUAROT = Precision(weights="int4", inputs=InputScheme(clip_ratio=0.9), cache=_QUAROT_CACHE, transforms=online())

#: The precisions that the papers' tables time, by name.
KINDS: dict[str, Precision] = {
    "fp16": Precision(),
    "bf16": Precision(dtype="bfloat16"),
    "w4a16": Precision(weights="int4-grouped"),
    "quarot": _QUAROT,
    "quarot-fp16-hadamard": _QUAROT.model_copy(update={"transforms": online(half=True)}),
    "quarot-no-hadamard": _QUAROT.model_copy(update={"transforms": ()}),
    "quarot-128g": _QUAROT.model_copy(update={"weights": "int4-grouped"}),
    "quarot-kv16": _QUAROT.model_copy(update={"cache": None}),
    # No transform across heads: PrefixQuant takes SpinQuant's R1 to R4, of which R3 and R4 are online.
    "prefixquant": _QUAROT.model_copy(
        update={
            "inputs": InputScheme(static=True),
            "cache": CacheScheme(static=True),
            "transforms": online(heads=False),
        }
    ),
    "w2": Precision(dtype="bfloat16", weights="lut2"),
    "w2a4": Precision(weights="lut2", inputs=InputScheme(), transforms=online(heads=False, keys=False)),
    # RCP Sec. 5.1: the rotations and clips are QuaRot's.
    "w2a4kv4": _QUAROT.model_copy(update={"weights": "lut2"}),
}
