"""What can be asked of a model, as frozen validated data: quantization schemes, rotations, calibration, metrics.

Nothing here computes and nothing here imports torch, so the workflow can expand thousands of runs in a second. A
disputed detail of a paper is a field with a documented default (as the paper says) and alternative (as its authors'
code does).
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rotquant.foundation.data import Frozen
from rotquant.recipes.corpus import CALIBRATION_CHARACTERS, CHARACTERS_PER_TOKEN

Granularity = Literal["tensor", "channel", "token", "group", "head"]


class QuantizationScheme(Frozen):
    """How one tensor is mapped to integers.

    Symmetric: scale = clip * max|x| / (2^(bits-1) - 1), integers -2^(bits-1) .. 2^(bits-1)-1 (QuaRot Sec. 4, stage 2b).
    Asymmetric: scale = clip * (max - min) / (2^bits - 1) over a range that includes zero, integers 0 .. 2^bits - 1.
    """

    bits: Annotated[int, Field(ge=2, le=8)]
    """Width of the integers."""
    symmetric: bool = True
    """Whether the range is symmetric around zero, or reaches from the least to the largest value."""
    granularity: Granularity = "token"
    """Which elements share a scale, always along the last axis: `tensor` one scale for all; `channel` (weights, [out,
    in]: one per output row) and `token` (activations, [..., features]: one per token) one per row; `group` one per
    `group_size` consecutive elements of a row; `head` the same with the head dimension as group size."""
    group_size: Annotated[int, Field(gt=0)] | None = None
    """Elements that share a scale, for granularity `group`."""
    clip_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the range that is kept; what lies beyond is clipped."""
    dynamic: bool = True
    """Whether scales are taken from each tensor as it comes, or once from calibration text."""

    @model_validator(mode="after")
    def _group_size_belongs_to_groups(self) -> "QuantizationScheme":
        if self.granularity == "group" and self.group_size is None:
            raise ValueError("granularity 'group' needs a group_size")
        if self.granularity not in ("group", "head") and self.group_size is not None:
            raise ValueError(f"group_size has no meaning for granularity {self.granularity!r}")
        return self

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code."""
        if self.symmetric:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1


class Calibration(Frozen):
    """Calibration text: random windows of the train split. QuaRot: 128 samples of 2048 tokens of WikiText-2, seed 0."""

    corpus: str = "wikitext2"
    """A key of the configuration's `corpora`; on the command line --corpus says the text."""
    samples: Annotated[int, Field(gt=0)] = 128
    """How many windows."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Draws the windows."""

    @property
    def characters(self) -> int:
        """How many characters at the head of the train split the windows are drawn from."""
        return max(CALIBRATION_CHARACTERS, CHARACTERS_PER_TOKEN * self.samples * self.sequence_length)


class RotationLearning(Frozen):
    """Rotations learned by Cayley SGD on the quantized network's loss, all weights frozen (SpinQuant Sec. 3.2, 4.1)."""

    steps: Annotated[int, Field(gt=0)] = 100
    """Iterations."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Sequences of text in an iteration."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.5
    """At the first step; it decays to zero."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the learning rate decays: `linear` as the paper says, `cosine` as its authors' code does."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Of the gradients; zero in the paper and in its authors' code."""
    gradient: Literal["errors", "scales"] = "errors"
    """What the straight-through gradient of a rotation sees of the rounding errors: `errors`, that these turn with it
    (Eq. 5, and the authors' code), or `scales`, that they grow with the scales which it decides."""
    network: Literal["activations", "all"] = "activations"
    """What is quantized while learning: `activations`, inputs of linear layers and KV cache alone, so that GPTQ is left
    with the weights ("Cayley on 16-4-KV"), or `all`, weights too, round-to-nearest ("Cayley on 4-4-KV", Table 3)."""
    targets: Literal["tokens", "predictions"] = "tokens"
    """What the quantized network's predictions are compared with by cross entropy: the next `tokens` of the text, as
    the paper does, or the `predictions` of the float network, which hold less noise than single tokens."""
    text: Calibration = Calibration(samples=800)
    """Where the sequences come from: its `samples` are gone through in random order, as often as needed."""


class RotationScheme(Frozen):
    """Which rotations a model carries (SpinQuant's names R1..R4; QuaRot Sec. 4 stages 1a-1d)."""

    residual: Literal["none", "hadamard", "orthogonal"] = "hadamard"
    """R1 on the residual stream, fused into the weights, and with it each norm's gain, which does not commute with R1.
    `hadamard` is a randomized Hadamard matrix (QuaRot), `orthogonal` a Haar-random one from a QR decomposition (QuaRot
    Table 8, SpinQuant's floating-point rotation). `none` leaves norms and tied embeddings as they are: a scheme with
    everything off is a recipe without rotation."""
    values: Literal["none", "hadamard", "random_hadamard", "orthogonal"] = "hadamard"
    """R2 for each head's values, fused into v_proj and o_proj. `hadamard` is the exact Hadamard matrix (QuaRot);
    `random_hadamard` and `orthogonal` are drawn for each layer (SpinQuant)."""
    heads: bool = True
    """The online transform across heads before o_proj which completes R2 to a full Hadamard (QuaRot stage 1c; not in
    SpinQuant)."""
    keys: bool = True
    """R3, an online Hadamard transform on queries and keys after RoPE (QuaRot stage 1d)."""
    mlp: bool = True
    """R4, an online Hadamard transform before down_proj (QuaRot stage 1b)."""
    online_dtype: Literal["float32", "float16"] = "float32"
    """Arithmetic of the online transforms (QuaRot Table 10)."""
    center_embeddings: bool = False
    """Subtract each embedding row's mean before rotating. The authors' code does this even for RMSNorm models, where it
    changes the function; the paper does not. Default: as the paper."""
    learning: RotationLearning | None = None
    """How R1 and R2 are learned, starting from those above; null leaves them as drawn."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> "RotationScheme":
        if self.learning is not None and self.residual == "none" and self.values == "none":
            raise ValueError("learning needs residual or values: there is no rotation to learn")
        if self.center_embeddings and self.residual == "none":
            raise ValueError("center_embeddings is a part of R1: it needs residual")
        return self

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them."""
        return self.residual != "none"

    @property
    def is_random(self) -> bool:
        """Whether the seed of a run changes the rotation."""
        return self.residual != "none" or self.values in ("random_hadamard", "orthogonal") or self.learning is not None


class GPTQ(Frozen):
    """GPTQ's settings (Frantar et al. 2022). Defaults as in QuaRot: natural order, block 128, 1 % damping."""

    block_size: Annotated[int, Field(gt=0)] = 128
    """Columns that are corrected together before the others are."""
    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the Hessian's mean diagonal that is added to its diagonal."""
    act_order: bool = False
    """Whether columns are rounded by falling diagonal of the Hessian instead of in their natural order."""
    group_scales: Literal["updated", "block_start"] = "updated"
    """`updated` takes a group's scale from weights already corrected for all earlier columns (the algorithm as
    published); `block_start` from weights corrected only up to the current block, as QuaRot's code does."""
    hessian_inputs: Literal["float", "quantized"] = "float"
    """`float` calibrates on rotated inputs that are not quantized, as QuaRot's code does (the paper is silent);
    `quantized` on inputs and KV cache quantized as the recipe says, those of the running network. Weights of layers
    that came before are quantized either way."""


class WeightQuantization(Frozen):
    """How the linear layers' weights (embeddings and lm_head excepted) become integers."""

    scheme: QuantizationScheme
    """The integers and their scales."""
    gptq: GPTQ | None = None
    """Settings of GPTQ, or null for round-to-nearest."""
    clip_search: bool = True
    """For each scale, search the clip ratio among 80 steps of 1 % for the least sum |error|^clip_norm (QuaRot Sec. 5:
    "linear search over the squared error")."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 2.0
    """The norm of that search; the authors' code uses 2.4."""


class Smoothing(Frozen):
    """SmoothQuant (Xiao et al. 2023, Eq. 4): s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), from activation to weight."""

    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """How much of the difficulty goes from activations to weights."""


class OutlierFeatures(Frozen):
    """Input features kept in higher precision, chosen by calibration and moved to the end (QUIK, Atom)."""

    features: Annotated[int, Field(gt=0)]
    """How many input features of every linear layer; a slot scales the papers' numbers to its width."""
    bits: Literal[8, 16] = 16
    """16 keeps them as floats (QUIK), 8 quantizes them symmetrically, one scale per token or output channel (Atom)."""
    statistic: Literal["max", "square"] = "max"
    """What ranks a feature over the calibration set: `max` |x| (QUIK) or `square` sum of squares (Atom)."""
    order: Literal["natural", "ascending"] = "natural"
    """How the other features are arranged: `natural` as they were (QUIK), `ascending` by the statistic, so that the
    members of a group have similar ranges (Atom's reordering)."""


class OmniQuant(Frozen):
    """OmniQuant (Shao et al. 2023): learnable weight clipping and equivalent transformation, block by block."""

    steps: Annotated[int, Field(gt=0)] = 2560
    """Optimizer steps per block (the paper: 20 epochs over 128 samples at batch 1)."""
    batch_size: Annotated[int, Field(gt=0)] = 1
    """Samples in each step."""
    clipping_lr: Annotated[float, Field(gt=0.0)] = 5e-3
    """Learning rate of the clipping, as in the paper; the authors' code has it for the transformation."""
    transformation_lr: Annotated[float, Field(gt=0.0)] = 1e-2
    """Learning rate of the transformation, as in the paper; the authors' code has it for the clipping."""
    smoothing_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Of the SmoothQuant scales from which the transformation starts."""


class AWQ(Frozen):
    """AWQ (Lin et al. 2023, Sec. 3.2): input features are scaled by s = mean|x|^alpha before weights are rounded."""

    grid: Annotated[int, Field(gt=0)] = 20
    """alpha is searched for among 0, 1/grid, ... below 1 for each group of layers that read one input (Eqs. 4-5)."""
    clip_search: bool = True
    """Then shrink each scale to the share among 1, 1 - 1/grid, ... above 1/2 with the least error of the output (the
    authors' code, which leaves q and k alone; the paper mentions clipping without its search)."""


class QuIP(Frozen):
    """QuIP# (Tseng et al. 2024) without fine-tuning: weights in a rotated basis, rounded to the E8P lattice codebook.

    `weights.scheme` says 2 bits, one codebook, or 4, a second one for what the first leaves.
    """

    damping: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    """Share of the Hessian's mean diagonal that is added to its diagonal."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the signs of the randomized Hadamard transforms."""


class LLMQAT(Frozen):
    """LLM-QAT (Liu et al. 2023, "Data-Free Quantization Aware Training"): weights trained on the model's own text."""

    samples: Annotated[int, Field(gt=0)] = 100_000
    """How much text the model generates, in sequences (the paper: 100k)."""
    sequence_length: Annotated[int, Field(gt=1)] = 1024
    """Tokens of a sequence (the paper: 1024)."""
    steps: Annotated[int, Field(gt=0)] = 12_500
    """Of AdamW (the paper: every sample once)."""
    batch_size: Annotated[int, Field(gt=0)] = 8
    """Sequences in each step (the paper: one on each of 8 GPUs)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    """At the first step; it decays to zero along a cosine."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the text and of its order."""


class Perplexity(Frozen):
    """The papers' perplexity: one BOS for the whole text, non-overlapping windows, tail dropped, exp(mean NLL)."""

    kind: Literal["perplexity"] = "perplexity"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """Only the first windows; null, the papers' protocol, evaluates all."""
    bos: Literal["text", "window", "none"] = "text"
    """`text` puts one BOS at the head of the whole text (the papers' codes); `window` at the head of each window, in
    the place of its first token; `none` nowhere. A tokenizer without BOS puts none at the head of the text either."""


class ZeroShot(Frozen):
    """Zero-shot or few-shot accuracy, or ROUGE-L of summaries, through lm-eval, in percent (`metrics.zeroshot`)."""

    kind: Literal["zero_shot"] = "zero_shot"
    suite: Literal["paper", "shipped"] = "shipped"
    """`paper`, the papers' tasks from the hub or from local files; `shipped`, tasks made from a held-out text."""
    tasks: tuple[str, ...] = ()
    """Names within the suite; empty takes QuaRot's six, or the first six of the shipped ones."""
    shots: Annotated[int, Field(ge=0)] = 0
    """How many solved examples stand before each item; they are never items themselves."""
    path: str | None = None
    """`paper`: a folder with one data file per task; null reads the hub."""
    corpus: str | None = None
    """`shipped`: the text that the tasks are made from, a key of the configuration's `corpora`."""
    limit: Annotated[int, Field(gt=0)] | None = None
    """Only the first items of each task; null takes all."""
    bos: bool = True
    """Whether each item begins with BOS. lm-eval's default depends on the tokenizer; here it is always said. Where the
    tokenizer has none, items begin without."""

    @model_validator(mode="after")
    def _data_fits_suite(self) -> "ZeroShot":
        if self.suite == "shipped" and (self.corpus is None or self.path is not None):
            raise ValueError("suite 'shipped' is made from a corpus and takes no path")
        if self.suite == "paper" and self.corpus is not None:
            raise ValueError("suite 'paper' has its own data and takes no corpus")
        return self


class SNR(Frozen):
    """End-to-end signal-to-quantization-noise ratio in dB (SpinQuant Sec. B.2), the mean over windows of text.

    The signal is the unquantized checkpoint's logits, the noise what the run's logits differ by.
    """

    kind: Literal["snr"] = "snr"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """Only the first windows; null, the papers' protocol, evaluates all."""
    bos: Literal["text", "window", "none"] = "text"
    """`text` puts one BOS at the head of the whole text (the papers' codes); `window` at the head of each window, in
    the place of its first token; `none` nowhere. A tokenizer without BOS puts none at the head of the text either."""


Depth = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A layer by its share of the model's depth: index floor(depth * layers), so 0.5 is the middle one."""

SiteName = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]


class Magnitudes(Frozen):
    """Magnitudes of what linear layers read, or of their weights, as matrices (QuaRot Figure 1, SpinQuant Figure 2)."""

    kind: Literal["magnitudes"] = "magnitudes"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    tensor: Literal["activations", "weights"] = "activations"
    """`activations`, token by feature, or `weights`, output by input feature, of each site's first linear layer."""
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)] = ("mlp_input",)
    """Which sites."""
    depths: Annotated[tuple[Depth, ...], Field(min_length=1)] = (0.5,)
    """Of which layers, by their share of the model's depth: 0.5 is the middle one."""
    tokens: Annotated[int, Field(gt=1)] = 128
    """How many tokens of the text (one window, with BOS) are looked at."""


class Outliers(Frozen):
    """Kurtosis and rounding errors at the linear layers that read the residual stream, by layer (SpinQuant Figure 3).

    These are Q, K, V, gate and up projection, which read two inputs a layer. Activations are rounded asymmetrically
    with one scale per token, weights symmetrically with one per output channel (SpinQuant Eq. 1, Sec. A.4).
    """

    kind: Literal["outliers"] = "outliers"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    bits: Annotated[int, Field(ge=2, le=8)] = 4
    """Of activations and weights."""
    tokens: Annotated[int, Field(gt=1)] = 512
    """How many tokens of the text (one window, with BOS) are looked at."""


class RangeUse(Frozen):
    """How evenly rotated points of two or three features fill the axes, an example (SpinQuant Sec. 4.4, Figure 6).

    No model takes part in it.
    """

    kind: Literal["range_use"] = "range_use"
    corpus: None = None
    """No text takes part in it."""
    magnitudes: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], Field(min_length=2, max_length=3)] = (2.0, 0.5)
    """The points lie between the ends +-`magnitudes` of the axes."""
    rotation: Literal["none", "turns", "learned"] = "none"
    """`none`; `turns`, by 45 degrees from the first axis towards each other one, the last first; or `learned` by Cayley
    SGD, starting from there."""


Metric = Annotated[Perplexity | ZeroShot | SNR | Magnitudes | Outliers | RangeUse, Field(discriminator="kind")]
