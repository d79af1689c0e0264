"""Metrics that only a figure or table of the papers needs, as frozen data, and the union of all metrics.

Perplexity, which users of a model need too, is in `rotquant.recipes.schemes`, zero-shot tasks in `reproduction.tasks`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.data import Frozen
from rotquant.recipes.corpus import BOS
from rotquant.recipes.schemes import Perplexity
from rotquant.recipes.transforms import SiteName

Depth = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A layer as a share of the model's depth: index floor(depth * layers), so 0.5 is the middle one."""


class SNR(Frozen):
    """End-to-end signal-to-quantization-noise ratio in dB (SpinQuant Sec. B.2), the mean over windows of text.

    The signal is the unquantized checkpoint's logits, the noise what the run's logits differ by.
    """

    kind: Literal["snr"] = "snr"
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
    the place of its first token; `none` nowhere. A tokenizer without BOS puts none at the head of the text either."""


class OutlierTokens(Frozen):
    """Outlier tokens of windows of text, and where they stand (PrefixQuant Eq. 3, Figures 4 and 7).

    Tokens of a prefix are in front of the text and not of it.
    """

    kind: Literal["outlier_tokens"] = "outlier_tokens"
    corpus: str = "wikitext2"
    """The text: a key of the configuration's `corpora`."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of the text."""
    threshold: Annotated[float, Field(gt=1.0)] = 64.0
    """How many times the median of its window the largest |input of down_proj| of an outlier token is (eta)."""
    sequence_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens of a window."""
    max_windows: Annotated[int, Field(gt=0)] | None = None
    """Number of windows, spread evenly over the text; null takes all."""
    bos: BOS = "none"
    """Where the text has a BOS; see `token_maxima`."""


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
    """Whether the window begins with BOS; after a prefix it would be one more."""
    within: Literal["matrix", "row"] = "matrix"
    """Whose median the largest magnitude is set against: the matrix's, or that of its own token or output feature."""


class Outliers(Frozen):
    """Kurtosis and rounding errors at the linear layers that read the residual stream, by layer (SpinQuant Figure 3).

    These are Q, K, V, gate and up projection, with two inputs a layer. Activations are rounded asymmetrically with one
    scale per token, weights symmetrically with one per output channel (SpinQuant Eq. 1, Sec. A.4).
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

    The network quantizes neither inputs nor KV cache. Tokens of a prefix are not part of the text.
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
    """`none` puts no BOS: after a prefix it would be one more. `text` puts one at the head of the whole text, as for
    perplexity, and `window` one at the head of each window."""


class PrefixTokens(Frozen):
    """How many tokens are stored in front of every text, and which (PrefixQuant Table 1).

    The stored weights' recipe has a method that chooses a prefix. No text is read.
    """

    kind: Literal["prefix_tokens"] = "prefix_tokens"
    corpus: None = None
    """No text takes part in it."""


class ModelSize(Frozen):
    """How many parameters a model has, and how many bits: quantized weights at theirs, all else at 16 (RCP Figure 1).

    Tied embeddings count once. Scales and tables of groups are not counted.
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

    Both are measured on the run's network and on its checkpoint, and compared for each output element. The inputs are
    calibration text, drawn with the run's seed.
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
    """Of the weights, rounded asymmetrically (RCP Eq. 1) after clips by grid search (Eq. 6)."""
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
