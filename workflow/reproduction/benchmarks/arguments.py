"""The arguments of the benchmarks: validated data, so that tables are read, checked and rendered without torch.

A combination that cannot be measured is refused here. A shape is a name in `benchmarks.shapes.SHAPES`.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rotquant.foundation.data import Frozen

Size = Annotated[int, Field(gt=0)]

# Kernels, layers and whole models on a GPU, with their peers and ceilings

Arithmetic = Literal["none", "float32", "float16"]
"""The arithmetic of an online Hadamard transform."""

#: Input features in a block of packed weights, and in a group of scales or look-up tables.
_K_BLOCK, _GROUP_SIZE = 64, 128
#: torch._int_mm refuses fewer rows.
_INT8_ROWS = 17
#: Implementations whose activations are quantized online, by our kernels.
_ONLINE = ("int4", "int4-grouped", "int4-a8", "w2a4", "w16a4")
#: Implementations whose weights have scales or tables for groups.
_GROUPED = ("int4-grouped", "w4a16", "int4pack", "w2a16", "w2a4", "marlin", "machete", "humming-w4a16", "humming-w2a16")

Regime = Literal["sustained", "single", "single-dirty"]
"""How calls follow each other.

sustained: one after the other, from a CUDA graph. single: after a pause, each with a cold L2 cache that holds nothing
to write back, as a short request meets a GPU. single-dirty: the cache is full of what must be written back.
"""


class LinearArguments(Frozen):
    """One linear layer, from 16-bit activations in to 16-bit activations out.

    implementation: fp16, bf16 (cuBLAS); fp8 (`torch._scaled_mm`, a scale for each row of either operand); int8
        (`torch._int_mm` and dequantization by torch); int4 (W4A4), int4-grouped (weight scales for groups of 128),
        int4-a8 (W4A8); w4a16 (4-bit weights with scales for groups of 128, fp16 activations), int4pack (the same in
        bf16 by `torch._weight_int4pack_mm`); w2a16, w2a4 (look-up tables); w16a4 (RCP Table 17: 16-bit weights,
        activations rounded to 4 bits). Of others, where they are installed: fp8-tensor (`torch._scaled_mm`, a scale for
        each operand); marlin, machete (w4a16 of vLLM), cutlass-fp8, cutlass-int8 (vLLM's, scales as fp8 here);
        humming-w4a16, humming-w2a16 (groups of 128), humming-w4a8, humming-w4a4 (scales for rows).
    hadamard: arithmetic of the online transform of the input.
    quantization: of the input. With `none` it arrives quantized, and a transform's result is not used (RCP's Tables 5
        and 18).
    product: force one of the two W4 kernels.
    overlapped: our kernels may fetch their weight while the launch before them ends, as in a decoder's graph.
    regime: see `Regime`.
    """

    tokens: Size
    in_features: Annotated[int, Field(gt=0, multiple_of=_K_BLOCK)]
    out_features: Size
    implementation: Literal[
        "fp16",
        "bf16",
        "fp8",
        "int8",
        "int4",
        "int4-grouped",
        "int4-a8",
        "w4a16",
        "int4pack",
        "w2a16",
        "w2a4",
        "w16a4",
        "fp8-tensor",
        "marlin",
        "machete",
        "cutlass-fp8",
        "cutlass-int8",
        "humming-w4a16",
        "humming-w2a16",
        "humming-w4a8",
        "humming-w4a4",
    ]
    hadamard: Arithmetic = "none"
    quantization: Literal["none", "dynamic", "static"] = "none"
    product: Literal["auto", "gemm", "gemv"] = "auto"
    overlapped: bool = False
    regime: Annotated[Regime, Field(exclude_if=lambda regime: regime == "sustained")] = "sustained"

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "LinearArguments":
        online = self.hadamard != "none" or self.quantization != "none"
        if online and self.implementation not in _ONLINE:
            raise ValueError(f"{self.implementation} takes its input as it is: no hadamard, quantization none")
        if self.product != "auto" and self.implementation not in ("int4", "int4-grouped", "int4-a8"):
            raise ValueError("only W4 products have a choice of kernel")
        if self.overlapped and self.implementation not in (*_ONLINE, "w4a16", "w2a16"):
            raise ValueError(f"{self.implementation} has no kernel of ours that could overlap")
        if self.implementation == "int8" and self.tokens < _INT8_ROWS:
            raise ValueError(f"torch._int_mm takes {_INT8_ROWS} rows or more")
        if self.implementation in _GROUPED and self.in_features % _GROUP_SIZE:
            raise ValueError(f"groups of {_GROUP_SIZE} do not divide {self.in_features} input features")
        return self


class DecodeAttentionArguments(Frozen):
    """Attention of one new token per sequence: its key and value are appended to the cache, then it attends.

    cache: tokens that it attends to, including itself. hadamard: arithmetic of the transform of query and key.
    implementation: int4 finds a scale and zero point for each token and head, int4-static has a scale for each head.
        fp16 takes the fastest of torch's attentions, flex is torch's flex_attention, which splits the cache over
        multiprocessors.
    """

    batch: Size
    heads: Size
    kv_heads: Size
    head_dim: Size = 128
    cache: Size
    implementation: Literal["fp16", "flex", "int4", "int4-static"]
    hadamard: Arithmetic = "none"

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "DecodeAttentionArguments":
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.implementation in ("fp16", "flex") and self.hadamard != "none":
            raise ValueError("a 16-bit cache needs no Hadamard transform")
        return self


class PrefixedAttentionArguments(DecodeAttentionArguments):
    """Attention of one new token per sequence, after a prefix.

    prefix: tokens that are attended to in 16 bits, before those of the 4-bit cache.
    """

    prefix: Size

    @model_validator(mode="after")
    def _the_cache_has_4_bits(self) -> "PrefixedAttentionArguments":
        if self.implementation in ("fp16", "flex"):
            raise ValueError("in a 16-bit cache a prefix is nothing but a longer text")
        return self


class TransformArguments(Frozen):
    """The Hadamard transform of every row, or across heads; `copy` is a device copy of the same tensor."""

    rows: Size
    features: Size
    dtype: Literal["float16"] = "float16"
    arithmetic: Literal["float32", "float16"] = "float32"
    heads: Annotated[int, Field(ge=0)] = 0
    implementation: Literal["ours", "copy", "fast-hadamard-transform", "hadacore"]


class QuantizeArguments(Frozen):
    """Quantization of fp16 rows to 4 bits or to floats of 8 or 4, with what a model does just before it fused in.

    scale: found for each row, or known for the tensor. output: integers, two codes to the byte or one, or floats in the
    formats of `layouts.codes.FloatRounding`. before: RMSNorm has no weight, which models fold into the next layer; with
    a residual it also adds, and writes the sum. Before a Hadamard transform it has one, since models that transform
    there fold none. copy: a device copy of the fp16 input.
    """

    rows: Size
    features: Size
    scale: Literal["dynamic", "static"] = "dynamic"
    output: Literal["packed", "held", "fp8", "mxfp4", "nvfp4"] = "packed"
    before: Literal["none", "hadamard", "rms-norm", "residual-rms-norm", "rms-norm-hadamard"] = "none"
    implementation: Literal["ours", "torch", "copy"]

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "QuantizeArguments":
        if self.output in ("packed", "held"):
            return self
        if not self.before.endswith("hadamard") or self.implementation == "torch" or self.scale == "static":
            raise ValueError(f"{self.output} is an output of our transform alone, and has no static scales")
        return self


class BlockArguments(Frozen):
    """One transformer block with random weights: prefill of `tokens` per sequence, or one token decoded after them."""

    shape: str
    batch: Size
    tokens: Size
    phase: Literal["prefill", "decode"]
    implementation: Literal["fp16", "int4"]


class FirstTokenArguments(Frozen):
    """Time to the first token of a whole model with random weights."""

    shape: str
    batch: Size
    tokens: Size
    implementation: Literal["fp16", "quarot", "prefixquant"]


class GenerateArguments(Frozen):
    """A prompt and `tokens` generated tokens at batch 1, by a whole model with random weights."""

    shape: str
    prompt: Size
    tokens: Size
    implementation: Literal["bf16", "w2"]


class WholeDecoderArguments(Frozen):
    """A whole model with random weights: the first token of a prompt, or one more token.

    tokens: of each text's prompt; they are in the cache when a token is decoded.
    activations: 4 bits as the weights, by dynamic scales for each token and QuaRot's transforms, or by a static one for
        each layer's input and PrefixQuant's, which lack the transform across heads; 16 bits with weights of 4 bits in
        groups (weights-alone) or of 16 (none).
    cache: float16; int4, with a scale and zero point for each token and head; int4-static, with a scale for each head.
    prefix: tokens whose 16-bit keys and values precede every text.
    """

    shape: str
    batch: Size
    tokens: Size
    phase: Literal["prefill", "decode"]
    activations: Literal["dynamic", "static", "weights-alone", "none"]
    cache: Literal["float16", "int4", "int4-static"]
    prefix: Annotated[int, Field(ge=0)] = 0


class CeilingArguments(Frozen):
    """The GPU's maximum rates: a large device copy, reading alone, or a large product in one number format."""

    what: Literal["copy", "read", "fp16", "bf16", "fp8", "int8"]


class Fp8NetworkArguments(Frozen):
    """A whole network with random float8 weights (SpinQuant Table 14).

    tokens: length of each prompt, and of a decoded token's context, including itself. together: largest number of texts
    in one pass of the prefill. hadamard: with R4, the online transform before the down projection.
    """

    shape: str
    batch: Size
    tokens: Size
    together: Size
    hadamard: bool


#: Alignment to 16 bytes, in elements of the smallest type.
_MULTIPLE = 8


class FakeQuantizeArguments(Frozen):
    """A weight [out_features, in_features] as the codes of its groups stand for it, and the gradients (RCP Sec. 4.3).

    kind, straight_through: of the quantizer (`qat.quantizers.make_quantizer`).
    phase: `backward` has the gradient of the value given, `both` are a step of training.
    implementation: ours; torch, the same formulas in eager mode; copy, of as many bytes of weights as must be read and
        written, two weights for the forward pass and three for the backward one.
    """

    out_features: Annotated[int, Field(gt=0, multiple_of=2)]
    in_features: Size
    group_size: Annotated[int, Field(gt=0, multiple_of=_MULTIPLE)] = 128
    dtype: Literal["bfloat16", "float16", "float32"]
    kind: Literal["range", "learned_range", "ldp", "n2uq", "nf3", "nf3_ldp"] = "ldp"
    straight_through: Literal["step", "ramp"] = "step"
    phase: Literal["forward", "backward", "both"]
    implementation: Literal["ours", "torch", "copy"]

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "FakeQuantizeArguments":
        if self.in_features % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {self.in_features} input features")
        if self.phase == "backward" and self.implementation == "torch":
            raise ValueError("torch has no backward pass without the forward one: ask for both")
        return self


class RoundRowsArguments(Frozen):
    """A float32 weight [out_features, in_features] rounded to 4 bits and back, to bfloat16, by a scale
    for each row that is learned (block-wise tuning, PrefixQuant Sec. 5.2).

    phase, implementation: see `FakeQuantizeArguments`; the copy moves as many bytes.
    """

    out_features: Annotated[int, Field(gt=0, multiple_of=4)]
    in_features: Annotated[int, Field(gt=0, multiple_of=_MULTIPLE)]
    phase: Literal["forward", "both"]
    implementation: Literal["ours", "torch", "copy"]


# Learning and quantization on a GPU (SpinQuant Table 15, PrefixQuant Table 10, RCP Table 8)


def _ascending(two: tuple[int, int]) -> tuple[int, int]:
    if two[0] >= two[1]:
        raise ValueError("give a number and a larger one")
    return two


Two = Annotated[tuple[Size, Size], AfterValidator(_ascending)]
"""The fewer and the more of what is measured, whose difference gives the rest."""


class LearnRotationsArguments(Frozen):
    """Learning a model's rotations with random weights, on as many GPUs.

    steps: of the whole learning; batch_size: sequences in each, `tokens` long.
    taken: steps that are taken and timed, where not all of them are; the first warms up, so three at least.
    """

    shape: str
    steps: Size = 100
    batch_size: Size = 8
    tokens: Size = 2048
    taken: Size | None = None
    gpus: Size = 1

    @model_validator(mode="after")
    def _a_step_can_be_timed(self) -> "LearnRotationsArguments":
        if not 3 <= (self.taken or self.steps) <= self.steps:
            raise ValueError("taken must be at least 3 steps, and no more than there are")
        return self


class CalibrateArguments(Frozen):
    """GPTQ of a model with random weights on one GPU.

    samples: calibration texts of `tokens` tokens. layers: the fewer and the more layers of two shortened models whose
    times give those of all layers; None quantizes the whole model.
    """

    shape: str
    samples: Size = 128
    tokens: Size = 2048
    layers: Two | None = None


class PrefixQuantArguments(Frozen):
    """A part of PrefixQuant W4A4KV4 on a model with random weights on one GPU, as its method's settings say.

    part: `prefix`, finding the tokens; `grid`, both grid searches; `tuning`, of all blocks, grid searches with it.
    samples: of `tokens` tokens, of the calibration text or, of `tuning`, of its own.
    epochs: of `tuning`. taken: the fewer and the more epochs of two shortened tunings whose times give those of all.
    layers: the fewer and the more layers of two shortened models whose times give those of all layers.
    """

    shape: str
    part: Literal["prefix", "grid", "tuning"]
    samples: Size = 8
    tokens: Size = 1024
    epochs: Size = 20
    taken: Two = (1, 2)
    layers: Two = (1, 2)


class DistillArguments(Frozen):
    """Quantization-aware training of a W2A4KV4 model with random weights on one GPU (RCP Table 8).

    method: BitDistiller, the same in a rotated model, or RCP.
    batch_size: sequences in each step, `tokens` long. samples: of the text, each seen `epochs` times.
    taken: steps that are taken; the first two warm up, so four at least.
    layers: the fewer and the more layers of two shortened models whose steps and memory give those of all layers; None
        trains the whole model.
    """

    shape: str
    method: Literal["BitDistiller", "BitDistiller rotated", "RCP"]
    batch_size: Size = 8
    tokens: Size = 1024
    samples: Size = 8000
    epochs: Size = 8
    taken: Size = 6
    layers: Two | None = None

    @model_validator(mode="after")
    def _a_step_can_be_timed(self) -> "DistillArguments":
        if not 4 <= self.taken <= self.steps:
            raise ValueError("taken must be at least 4 steps, and no more than there are")
        return self

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.epochs * (self.samples // self.batch_size)


class SharedDistillArguments(DistillArguments):
    """The same on one GPU or several of one host, which share each batch evenly; the model is whole.

    at_once: sequences of its share that pass a GPU together; None for all.
    """

    gpus: Size = 2
    at_once: Size | None = None

    @model_validator(mode="after")
    def _shares_are_equal(self) -> "SharedDistillArguments":
        if self.batch_size % self.gpus:
            raise ValueError(f"batches of {self.batch_size} have no equal shares for {self.gpus} GPUs")
        if self.layers is not None:
            raise ValueError("layers are not left out where GPUs share a model")
        return self


# Decoding on a CPU (SpinQuant Table 6)


class CpuDecodeArguments(Frozen):
    """One token through a whole decoder with random weights, with `context` tokens in the cache, including itself.

    layers_in_memory: number of layers with their own weights, which the others reuse in turn; far more than the caches
        hold.
    """

    shape: str
    context: Size
    layers_in_memory: Size


class CpuLinearArguments(Frozen):
    """One linear layer on one token, by every implementation there is."""

    in_features: Size
    out_features: Size


class CpuTransformArguments(Frozen):
    """The Hadamard transform of bfloat16 rows, ours and in torch operations."""

    rows: Size
    features: Size


# Files on disk (RCP Table 6)

#: Bits that a quantizer of weights has, by its name in `qat.quantizers`.
_BITS = {"range": (2, 3), "ldp": (2,), "nf3": (3,), "nf3_ldp": (3,)}


class CheckpointArguments(Frozen):
    """Files of a model with random weights at a shape: linear layers quantized in groups of 128, the rest in 16 bits.

    quantizer: of linear layers' weights; None leaves them in 16 bits. bits: of a code.
    form: as the weights stage stores them, or as the decoder reads them.
    tied: embedding and head are one tensor.
    """

    shape: str
    quantizer: Literal["range", "ldp", "nf3", "nf3_ldp"] | None = None
    bits: Literal[2, 3, 16] = 16
    form: Literal["stored", "decoder"] = "stored"
    tied: bool = False

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "CheckpointArguments":
        if self.bits not in (_BITS[self.quantizer] if self.quantizer else (16,)):
            raise ValueError(f"weights of {self.quantizer or 'no quantizer'} do not have {self.bits} bits")
        if self.form == "decoder" and self.bits != 2:
            raise ValueError("the decoder reads tables of 2-bit codes; other widths are simulated")
        return self
