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
    Asymmetric: scale = clip * (max - min) / (2^bits - 1) over a range that includes zero, integers 0 .. 2^bits - 1,
    and a zero point that is whole or not.
    """

    bits: Annotated[int, Field(ge=2, le=8)]
    """Width of the integers."""
    symmetric: bool = True
    """Whether the range is symmetric around zero, or reaches from the least to the largest value."""
    zero_point: Literal["whole", "exact"] = "whole"
    """Of an asymmetric range of inputs or KV cache: `whole`, the code that stands for zero, as integer kernels need and
    the codes of SpinQuant's and QuaRot's authors have; `exact`, the least value itself, whether the range includes zero
    or not (SpinQuant Eq. 1). Stored weights have whole ones."""
    granularity: Granularity = "token"
    """Which elements share a scale, always along the last axis: `tensor` one scale for all (of activations that are
    quantized dynamically, for all tokens of a text); `channel` (weights, [out,
    in]: one per output row) and `token` (activations, [..., features]: one per token) one per row; `group` one per
    `group_size` consecutive elements of a row, of which the last group may have fewer; `head` the same with the head
    dimension as group size."""
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
        if self.symmetric and self.zero_point == "exact":
            raise ValueError("zero_point 'exact' has no meaning for a symmetric scheme: set symmetric to false too")
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
    """Added to a run's seed it draws the windows: the papers' codes draw them with the run's seed, 0 by default."""

    @property
    def characters(self) -> int:
        """How many characters at the head of the train split the windows are drawn from."""
        return max(CALIBRATION_CHARACTERS, CHARACTERS_PER_TOKEN * self.samples * self.sequence_length)


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

    @property
    def fuses_norms(self) -> bool:
        """Whether norms give their gains to the weights that read them."""
        return self.residual != "none"

    @property
    def is_random(self) -> bool:
        """Whether the seed of a run changes the rotation."""
        return self.residual != "none" or self.values in ("random_hadamard", "orthogonal")


class WeightQuantization(Frozen):
    """How the linear layers' weights (embeddings and lm_head excepted) become integers."""

    scheme: QuantizationScheme
    """The integers and their scales."""
    clip_search: bool = True
    """For each scale, search the clip ratio among 80 steps of 1 % for the least sum |error|^clip_norm (QuaRot Sec. 5:
    "linear search over the squared error")."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 2.0
    """The norm of that search; the authors' code uses 2.4."""


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
    """So many windows, spread evenly over the text; null, the papers' protocol, evaluates all."""
    bos: Literal["text", "window", "none"] = "text"
    """`text` puts one BOS at the head of the whole text (the papers' codes); `window` at the head of each window, in
    the place of its first token; `none` nowhere. A tokenizer without BOS puts none at the head of the text either."""


Normalization = Literal["length", "unconditional"]


class ZeroShot(Frozen):
    """Zero-shot or few-shot accuracy, or ROUGE-L of summaries, by lm-eval's rules, in percent (`metrics.zeroshot`)."""

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
    normalization: Normalization = "length"
    """`paper`: by what a choice's likelihood counts in ARC and OpenBookQA. `length`, per byte, which is lm-eval's
    acc_norm (QuaRot); `unconditional`, over its likelihood after "Answer:" alone (Brown et al. 2020, Sec. 2.4)."""
    template: Annotated[str, Field(pattern=r"^[^{}]*\{question\}[^{}]*$")] | None = None
    """`paper`: what is written around each question of HumanEval, GSM8K and LongBench, which stands at "{question}", as
    models fine-tuned on instructions expect; null asks it alone."""
    longest_prompt: Annotated[int, Field(gt=1)] | None = None
    """`paper`: of a prompt of LongBench with more tokens the first and the last half of so many stay (Bai et al. 2024,
    Sec. 4.1); null refuses one that exceeds the model's context."""

    @model_validator(mode="after")
    def _data_fits_suite(self) -> "ZeroShot":
        if self.suite == "shipped" and self.normalization != "length":
            raise ValueError(f"normalization {self.normalization!r} is about tasks of suite 'paper'")
        if self.suite == "shipped" and (self.template is not None or self.longest_prompt is not None):
            raise ValueError("template and longest_prompt are about tasks of suite 'paper'")
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
    """So many windows, spread evenly over the text; null, the papers' protocol, evaluates all."""
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
    """How many tokens of the text (one window) are looked at."""
    bos: Literal["text", "none"] = "text"
    """Whether the window begins with BOS; behind a prefix it would be one more."""
    within: Literal["matrix", "row"] = "matrix"
    """Whose median the largest magnitude is set against: the matrix's, or that of its own token or output feature."""


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


class MaximaByToken(Frozen):
    """Largest magnitude of each token in every layer, and how far apart those of tokens are (PrefixQuant Sec. 4).

    Of a network that quantizes neither inputs nor KV cache. Tokens of a prefix are in front of the text and not of it.
    """

    kind: Literal["token_maxima"] = "token_maxima"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    tensors: Literal["inputs", "attention"] = "inputs"
    """`inputs` of the linear layers, site by site, after online transforms; or what `attention` computes with: Q and K
    after RoPE, and after R3 where the recipe has it, and V."""
    sequence_length: Annotated[int, Field(gt=2)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """So many windows, spread evenly over the text; null takes all."""
    bos: Literal["text", "window", "none"] = "none"
    """`none` puts no BOS: behind a prefix it would be one more. `text` puts one at the head of the whole text, as for
    perplexity, and `window` one at the head of each window."""


class OutlierTokens(Frozen):
    """Which tokens of windows of text are outlier tokens, and where they stand (PrefixQuant Eq. 3, Figures 4 and 7).

    Tokens of a prefix are in front of the text and not of it.
    """

    kind: Literal["outlier_tokens"] = "outlier_tokens"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    threshold: Annotated[float, Field(gt=1.0)] = 64.0
    """How many times the median of its window the largest |input of down_proj| of an outlier token is (eta)."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """So many windows, spread evenly over the text; null takes all."""
    bos: Literal["text", "window", "none"] = "none"
    """Where the text has a BOS; see `token_maxima`."""


class PrefixTokens(Frozen):
    """How many tokens are stored in front of every text, and which (PrefixQuant Table 1).

    Of stored weights whose recipe has a method that chooses a prefix. No text takes part in it.
    """

    kind: Literal["prefix_tokens"] = "prefix_tokens"
    corpus: None = None
    """No text takes part in it."""


#: Bits of a parameter that is not quantized: BF16 or FP16.
UNQUANTIZED_BITS = 16


class ModelSize(Frozen):
    """How many parameters a model has, and how many bits: quantized weights at theirs, all else at 16 (RCP Figure 1).

    Of the checkpoint, whose tied embeddings count once. Scales and tables of groups are not counted.
    """

    kind: Literal["model_size"] = "model_size"
    corpus: None = None
    """No text takes part in it."""


class TrainingLoss(Frozen):
    """The loss while the stored weights were trained: its spikes at the beginning, what is left at the end (RCP
    Figure 6).

    A spike is a step whose loss is more than `factor` times the least of the steps before it.
    """

    kind: Literal["training_loss"] = "training_loss"
    corpus: None = None
    """The text is the training's."""
    first: Annotated[int, Field(gt=1)] = 100
    """Spikes are those of so many steps."""
    factor: Annotated[float, Field(gt=1.0)] = 1.5
    """How many times the least loss before it a spike is at least."""


WeightName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class WeightKurtosis(Frozen):
    """What rotation does to the kurtosis of groups of weights and to output errors in 2 bits (RCP Sec. 3, A.3).

    Both are taken of the run's network and of its checkpoint, and set against each other output element by output
    element. The inputs are calibration text, drawn with the run's seed.
    """

    kind: Literal["weight_kurtosis"] = "weight_kurtosis"
    corpus: str = "wikitext2"
    """The text, whose train split is read: a key of the configuration's `corpora`."""
    samples: Annotated[int, Field(gt=0)] = 8
    """How many windows of it."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    weights: Annotated[tuple[WeightName, ...], Field(min_length=1)] = ("down_proj",)
    """Which weights."""
    depths: Annotated[tuple[Depth, ...], Field(min_length=1)] = (0.99,)
    """Of which layers, by their share of the model's depth: 0.99 is the last of up to 100."""
    bits: Annotated[int, Field(ge=2, le=3)] = 2
    """Of the weights, rounded asymmetrically (RCP Eq. 1) behind clips by grid search (Eq. 6)."""
    group_size: Annotated[int, Field(gt=1)] = 128
    """Input features of a group, which shares scale and clips, and whose kurtosis is taken."""
    clips: Literal["both", "rotated"] = "both"
    """Which weights have their groups clipped before they are rounded: `both`, so that nothing but rotation differs; or
    the `rotated` one alone, for the paper writes of the rotated and clipped W_rc and of W."""
    target: Literal["weight", "clipped"] = "weight"
    """Of what the kurtosis is taken and from what errors are measured, those of the search for clips too: the `weight`,
    or the `clipped` one, as QErr(W_rc, X) and Eq. 6 are printed, which takes no notice of what clipping does."""
    groups: Annotated[int, Field(gt=0)] | None = None
    """So many groups of equal size in every row, in place of groups of `group_size`."""
    bins: Annotated[int, Field(gt=1, le=100)] = 24
    """Of the histogram, along each axis."""


Distribution = Literal[
    "uniform", "two_point", "beta", "truncated_normal", "skewed", "laplace", "turned_two_point", "common_scale"
]


class HadamardKurtosis(Frozen):
    """Excess kurtosis of vectors with drawn components after a Hadamard transform, by samples (RCP Lemma 1, A.2).

    No model takes part in it.
    """

    kind: Literal["hadamard_kurtosis"] = "hadamard_kurtosis"
    corpus: None = None
    """No text takes part in it."""
    distributions: Annotated[tuple[Distribution, ...], Field(min_length=1)] = ("uniform",)
    """Of the components (`metrics.hadamard_kurtosis`); those of `turned_two_point` and `common_scale` depend on each
    other."""
    sizes: Annotated[tuple[Annotated[int, Field(gt=1)], ...], Field(min_length=1)] = tuple(2**k for k in range(1, 11))
    """Lengths of the vectors, powers of two."""
    samples: Annotated[int, Field(gt=0)] = 2**23
    """Components that are drawn for each distribution and length."""
    batches: Annotated[int, Field(gt=2)] = 64
    """Independent batches of them, from which standard errors come."""

    @model_validator(mode="after")
    def _batches_hold_whole_vectors(self) -> "HadamardKurtosis":
        for size in self.sizes:
            if size & (size - 1):
                raise ValueError(f"a length of {size} is no power of two")
            if self.samples % (self.batches * size) or self.samples < 8 * self.batches * size:
                raise ValueError(f"{self.batches} batches of {self.samples} samples hold too few vectors of {size}")
        return self


Metric = Annotated[
    Perplexity
    | ZeroShot
    | SNR
    | Magnitudes
    | Outliers
    | RangeUse
    | MaximaByToken
    | OutlierTokens
    | PrefixTokens
    | ModelSize
    | TrainingLoss
    | WeightKurtosis
    | HadamardKurtosis,
    Field(discriminator="kind"),
]
