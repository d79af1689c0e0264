"""Settings of a model's quantization and evaluation, as frozen validated data: quantization schemes, rotations,
calibration, metrics.

Nothing here computes and nothing here imports torch, so the workflow can expand thousands of runs in a second. A
disputed detail of a paper is a field with a documented default (as the paper says) and alternative (as its authors'
code does).
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rotquant.foundation.data import Frozen
from rotquant.recipes.corpus import BOS, CALIBRATION_CHARACTERS, CHARACTERS_PER_TOKEN
from rotquant.recipes.transforms import Kind, Location, SiteName, Transform

Granularity = Literal["tensor", "channel", "token", "group", "head"]


#: The largest number of E4M3, 8-bit floats with 4 bits of exponent and 3 of mantissa, without infinities.
LARGEST_E4M3 = 448
#: That of E2M1, 4-bit floats with 2 bits of exponent and 1 of mantissa.
LARGEST_E2M1 = 6


class QuantizationScheme(Frozen):
    """How one tensor is mapped to integers or floats of 8 or 4 bits.

    Symmetric: scale = clip * max|x| / (2^(bits-1) - 1), integers -2^(bits-1) .. 2^(bits-1)-1 (QuaRot Sec. 4, stage 2b);
    `scale` has another divisor.
    Asymmetric: scale = clip * (max - min) / (2^bits - 1) over a range that includes zero, integers 0 .. 2^bits - 1,
    and a zero point that is whole or not. Floats of 8 bits: scale = clip * max|x| / 448, codes are numbers of E4M3.
    Floats of 4 bits (`tensors.fp4`): codes are numbers of E2M1, scales have 8 bits themselves. Groups of 32 are MXFP4,
    groups of 16 are NVFP4.
    """

    bits: Annotated[int, Field(ge=2, le=8)]
    """Width of the codes."""
    type: Literal["int", "float"] = Field(default="int", exclude_if=lambda kind: kind == "int")
    """Codes: integers, or `float` of weights and inputs alone: of 8 bits E4M3 (Micikevicius et al. 2022), of 4 bits
    MXFP4 or NVFP4 by `group_size`."""
    symmetric: bool = True
    """Whether the range is symmetric around zero, or reaches from the least to the largest value."""
    zero_point: Literal["whole", "exact"] = "whole"
    """Zero point of an asymmetric range of inputs or KV cache: `whole`, the code that stands for zero, as integer
    kernels need and the codes of SpinQuant's and QuaRot's authors have; `exact`, the least value itself, whether the
    range includes zero or not (SpinQuant Eq. 1). Stored weights have whole ones."""
    granularity: Granularity = "token"
    """Which elements share a scale, always along the last axis: `tensor` one scale for all (of activations that are
    quantized dynamically, for all tokens of the pass that begins a text; each token that is decoded after it has its
    own); `channel` (weights, [out,
    in]: one per output row) and `token` (activations, [..., features]: one per token) one per row; `group` one per
    `group_size` consecutive elements of a row, of which the last group may have fewer; `head` the same with the head
    dimension as group size."""
    group_size: Annotated[int, Field(gt=0)] | None = None
    """Elements that share a scale, for granularity `group`."""
    clip_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the range that is kept; what lies beyond is clipped."""
    scale: Literal["paper", "full", "mse", "four_over_six"] = Field(
        default="paper", exclude_if=lambda scale: scale == "paper"
    )
    """Divisor of a symmetric range: `paper`, 2^(bits-1) - 1, so that the largest code stands for max|x|; `full`,
    (2^bits - 1) / 2, so that the range takes all steps between the codes, as compressed-tensors and GPTQModel have it:
    max|x| / 7 and max|x| / 7.5 for 4 bits. Scales of 4-bit floats: `paper`, as compressed-tensors has them, max|x| / 6
    for NVFP4, for MXFP4 the power of two by which max|x| lies in [3.5, 7); `mse`, the one of least squared error among
    0.7 to 1.5 times that, or its half and double; `four_over_six` (Cook et al. 2025), of NVFP4: max|x| / 6 or / 4."""
    dynamic: bool = True
    """Whether scales are taken from each tensor as it comes, or once from calibration text. Of NVFP4 that text gives
    the scale of the whole tensor alone, as engines have it; a dynamic one is of a token."""
    rule: Literal["own", "vllm"] = Field(default="own", exclude_if=lambda rule: rule == "own")
    """How codes are found: `own`, as above; `vllm`, of the KV cache alone, as vLLM's cache type int4_per_token_head
    finds them. That is after a random Hadamard transform in bfloat16, with a range that need not include zero, codes by
    the scale's reciprocal, halves rounded away from zero, and zero points in the last 4 bits of the scale."""

    kept_first: Annotated[int, Field(ge=0, exclude_if=lambda kept: not kept)] = 0
    """How many of the first tokens that a query sees stay in full precision: of the KV cache alone."""
    kept_recent: Annotated[int, Field(ge=0, exclude_if=lambda kept: not kept)] = 0
    """How many of the last tokens that a query sees, itself one of them, stay in full precision until they are older:
    of the KV cache alone."""

    @model_validator(mode="after")
    def _group_size_belongs_to_groups(self) -> "QuantizationScheme":
        if self.granularity == "group" and self.group_size is None:
            raise ValueError("granularity 'group' needs a group_size")
        if self.granularity not in ("group", "head") and self.group_size is not None:
            raise ValueError(f"group_size has no meaning for granularity {self.granularity!r}")
        if self.symmetric and self.zero_point == "exact":
            raise ValueError("zero_point 'exact' has no meaning for a symmetric scheme: set symmetric to false too")
        if not self.symmetric and self.scale == "full":
            raise ValueError("scale 'full' has no meaning for an asymmetric scheme: leave scale out")
        ours = {"bits": 4, "symmetric": False, "granularity": "head", "group_size": None, "clip_ratio": 1.0}
        ours |= {"zero_point": "whole", "dynamic": True}
        if self.rule == "vllm" and any(getattr(self, name) != value for name, value in ours.items()):
            raise ValueError(
                "rule 'vllm' takes 4 bits, granularity head, symmetric false, and nothing else but defaults"
            )
        if self.type == "float" and not self.fp4 and not (self.bits == 8 and self.symmetric and self.scale == "paper"):
            raise ValueError("type 'float' takes 8 bits, a symmetric range and scale 'paper', or 4 bits in groups")
        self._check_fp4()
        return self

    def _check_fp4(self) -> None:
        """Refuse what neither MXFP4 nor NVFP4 is."""
        if not self.fp4:
            if self.scale in ("mse", "four_over_six"):
                raise ValueError(f"scale {self.scale!r} is of 4-bit floats: set type to float, or leave scale out")
            return
        if self.granularity != "group" or self.group_size not in (16, 32) or not self.symmetric:
            raise ValueError("4-bit floats are symmetric and have granularity group, of 32 (MXFP4) or 16 (NVFP4)")
        if self.scale == "full" or (self.fp4 == "MXFP4" and self.scale == "four_over_six"):
            raise ValueError(f"scale {self.scale!r} has no meaning for {self.fp4}: set it to paper or mse")
        if self.fp4 == "MXFP4" and not self.dynamic:
            raise ValueError("MXFP4 has no scale of a whole tensor that could be static: set dynamic to true")

    @property
    def fp4(self) -> Literal["MXFP4", "NVFP4"] | None:
        """The format of 4-bit floats; None of other codes."""
        if self.type != "float" or self.bits != 4:
            return None
        return "MXFP4" if self.group_size == 32 else "NVFP4"

    @property
    def signed(self) -> bool:
        """Whether codes are integers around zero."""
        return self.symmetric and self.type == "int"

    @property
    def kept(self) -> tuple[int, int]:
        """How many of the first and of the last tokens stay in full precision."""
        return self.kept_first, self.kept_recent

    @property
    def steps(self) -> float:
        """How many scales the range is: max|x| of a symmetric one, max - min of another."""
        return self.code_range[1] + (0.5 if self.scale == "full" else 0)

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code."""
        if self.type == "float":
            largest = LARGEST_E2M1 if self.fp4 else LARGEST_E4M3
            return -largest, largest
        if self.symmetric:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1


class Calibration(Frozen):
    """Calibration text: random windows of the train split. QuaRot: 128 samples of 2048 tokens of WikiText-2, seed 0."""

    corpus: str = "wikitext2"
    """A key of the configuration's `corpora`; on the command line --corpus says the text."""
    samples: Annotated[int, Field(gt=0)] = 128
    """Number of windows."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Added to a run's seed it draws the windows: the papers' codes draw them with the run's seed, 0 by default."""
    bos: Annotated[BOS, Field(exclude_if=lambda bos: bos == "text")] = "text"
    """`text` puts one BOS at the head of the text that windows are drawn from (the papers' codes), which hardly any
    window begins with; `window` at the head of each window, in the place of its last token; `none` nowhere. A tokenizer
    without BOS puts none at the head of the text either."""

    @property
    def characters(self) -> int:
        """How many characters at the head of the train split the windows are drawn from."""
        return max(CALIBRATION_CHARACTERS, CHARACTERS_PER_TOKEN * self.samples * self.sequence_length)


#: The field of `RotationScheme` that says whether a model carries a transform, by the transform's name.
ROTATION_FIELDS = {
    "R1": "residual",
    "R1_attention": "inputs",
    "R1_mlp": "inputs",
    "R2": "values",
    "heads": "heads",
    "R3": "keys",
    "R4": "mlp",
}


#: The sites of `RotationScheme.inputs`, by the names of the transforms there.
INPUTS: dict[str, SiteName] = {"R1_attention": "attention_input", "R1_mlp": "mlp_input"}


class RotationScheme(Frozen):
    """Rotations that a model carries (SpinQuant's names R1..R4; QuaRot Sec. 4 stages 1a-1d)."""

    residual: Literal["none", "hadamard", "orthogonal"] = "hadamard"
    """R1 on the residual stream, fused into the weights, and with it each norm's gain, which does not commute with R1.
    `hadamard` is a randomized Hadamard matrix (QuaRot), `orthogonal` a Haar-random one from a QR decomposition (QuaRot
    Table 8, SpinQuant's floating-point rotation). `none` leaves norms and tied embeddings as they are: a scheme with
    everything off is a recipe without rotation."""
    inputs: Literal["none", "hadamard", "random_hadamard", "orthogonal"] | Annotated[int, Field(gt=1)] = Field(
        default="none", exclude_if=lambda value: value == "none"
    )
    """Online transforms of what q, k, v and gate, up read, in place of R1, whose inverses are fused into these weights.
    They need nothing of the norms, so that layers with norms after attention and MLP take them (Gemma 2 and 3, OLMo2).
    `hadamard` is the exact Hadamard matrix, and a number its blocks of so many features, as for `mlp`;
    `random_hadamard` and `orthogonal` are dense matrices, drawn or learned for each layer and site. They are stored."""
    values: Literal["none", "hadamard", "random_hadamard", "orthogonal"] = "hadamard"
    """R2 for each head's values, fused into v_proj and o_proj. `hadamard` is the exact Hadamard matrix (QuaRot);
    `random_hadamard` and `orthogonal` are drawn for each layer (SpinQuant)."""
    heads: bool | Annotated[int, Field(gt=1)] = True
    """The online transform across heads before o_proj which completes R2 to a full Hadamard (QuaRot stage 1c; not in
    SpinQuant). A number puts in its place Hadamard blocks of so many features of o_proj's input."""
    keys: bool | Annotated[int, Field(gt=1)] = True
    """R3, an online Hadamard transform on queries and keys after RoPE (QuaRot stage 1d). A number makes it
    block-diagonal, as for `mlp` (SAW-INT4: 16)."""
    mlp: bool | Annotated[int, Field(gt=1)] = True
    """R4, an online Hadamard transform before down_proj (QuaRot stage 1b). A number makes it block-diagonal, with
    blocks of so many features, for widths that have no Hadamard matrix."""
    online_dtype: Literal["float32", "float16"] = "float32"
    """Arithmetic of the online transforms (QuaRot Table 10)."""
    center_embeddings: bool = False
    """Subtract each embedding row's mean before rotating. The authors' code does this even for RMSNorm models, where it
    changes the function; the paper does not. Default: as the paper."""

    @model_validator(mode="after")
    def _embeddings_belong_to_the_residual_stream(self) -> "RotationScheme":
        if self.center_embeddings and self.residual == "none":
            raise ValueError("center_embeddings is a part of R1: it needs residual")
        return self

    @model_validator(mode="after")
    def _inputs_stand_in_for_the_residual_stream(self) -> "RotationScheme":
        if self.inputs != "none" and self.residual != "none":
            raise ValueError("inputs takes the place of R1: set residual to none")
        return self

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them."""
        return self.residual != "none"

    @property
    def is_random(self) -> bool:
        """Whether the seed of a run changes the rotation."""
        return any(one.origin == "drawn" for one in self.transforms)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What the scheme says, as data: R1 and R2 with matrices of their own, then the online transforms."""
        found = []
        if self.residual != "none":
            found.append(_fused("R1", "random_hadamard" if self.residual == "hadamard" else "orthogonal", "residual"))
        if self.inputs != "none":
            found += self._inputs()
        if self.values != "none":
            found.append(_fused("R2", self.values, "values"))
        online = partial(Transform, kind="hadamard", online=True, dtype=self.online_dtype)
        if self.heads is True:
            found.append(online(name="heads", location="across_heads"))
        elif self.heads:
            found.append(online(name="heads", location="attention_output", size=self.heads))
        if self.keys:
            found.append(online(name="R3", location="queries_keys", size=None if self.keys is True else self.keys))
        if self.mlp:
            found.append(online(name="R4", location="mlp_output", size=None if self.mlp is True else self.mlp))
        return tuple(found)

    def _inputs(self) -> Iterator[Transform]:
        """The transforms of `inputs`; matrices have the names of their sites."""
        for name, site in INPUTS.items():
            if self.inputs in ("random_hadamard", "orthogonal"):
                matrix = {"kind": self.inputs, "origin": "drawn", "tensors": (site,)}
            else:
                matrix = {"kind": "hadamard", "size": None if self.inputs == "hadamard" else self.inputs}
            yield Transform(name=name, location=site, online=True, dtype=self.online_dtype, **matrix)


def _fused(name: str, kind: Kind, location: Location) -> Transform:
    """A rotation in the weights, whose matrix has the name of its location (`models.rotation.matrices`)."""
    origin = "fixed" if kind == "hadamard" else "drawn"
    return Transform(name=name, kind=kind, location=location, origin=origin, tensors=(location,))


class WeightQuantization(Frozen):
    """How the linear layers' weights (embeddings and lm_head excepted) become integers."""

    scheme: QuantizationScheme
    """The integers and their scales."""
    clip_search: bool = True
    """Whether clip ratios are searched for each scale, among 80 steps of 1 % for the least sum |error|^clip_norm
    (QuaRot Sec. 5: "linear search over the squared error")."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 2.0
    """The norm of that search; the authors' code uses 2.4."""

    @field_validator("scheme", mode="before")
    @classmethod
    def _zero_points_are_whole(cls, scheme: Any) -> Any:
        given = scheme.get("zero_point") if isinstance(scheme, dict) else getattr(scheme, "zero_point", None)
        if given == "exact":  # before the scheme's own rules, whose advice would not help here
            raise ValueError("weights take zero_point whole, which is how they are stored")
        return scheme

    @model_validator(mode="after")
    def _fp4_searches_its_own_scales(self) -> "WeightQuantization":
        if self.scheme.fp4 and self.clip_search:
            raise ValueError("4-bit floats search scales by weights.scheme.scale mse: set clip_search to false")
        return self


class Perplexity(Frozen):
    """The papers' perplexity: one BOS for the whole text, non-overlapping windows, tail dropped, exp(mean NLL)."""

    kind: Literal["perplexity"] = "perplexity"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of the text."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """Number of windows, spread evenly over the text; null, the papers' protocol, evaluates all."""
    bos: BOS = "text"
    """`text` puts one BOS at the head of the whole text (the papers' codes); `window` at the head of each window, in
    the place of its first token; `none` nowhere. A tokenizer without BOS puts none at the head of the text either, and
    a text after a prefix that holds BOS gets no other."""


#: Bits of a parameter that is not quantized: BF16 or FP16.
UNQUANTIZED_BITS = 16
