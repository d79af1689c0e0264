"""Limits of what a model can read: how many tokens at once, and which. Every door through which tokens reach one asks
here.

Beyond its context a model computes numbers that mean nothing, without a sign of it; an id beyond its vocabulary ends a
GPU's process.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.recipes.recipe import Recipe
from rotquant.text import BOS, Tokens, evaluation_windows

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Tokens per window of text in the papers (GPTQ's evaluation, and calibration after it).
PAPER_LENGTH = 2048
#: Rotary embeddings whose configuration states the context before they stretch it by `factor`; that of others is after.
_STRETCHED = ("linear", "dynamic", "yarn")
#: What transformers writes as a tokenizer's `model_max_length` where nothing limits it is larger.
_UNLIMITED = 10**9


@dataclass(frozen=True)
class ModelLimits:
    """context: largest number of tokens that a model attends over; None where its configuration does not say.
    vocabulary: number of token ids that its embedding has.
    advised: how long a text should be at most, by its tokenizer: what it was trained on, where the context is a wish.
    window: how many tokens a layer's attention sees at most, the one that looks among them; None where all see all.
    prefix: tokens that stand before every text in the KV cache, which every token of the text must see.
    """

    context: int | None
    vocabulary: int
    advised: int | None = None
    window: int | None = None
    prefix: int = 0

    @classmethod
    def of(cls, config: Any, advised: int | None = None, prefix: int = 0) -> "ModelLimits":
        """The limits in a transformers configuration. A sliding window limits a text after a prefix alone: of others
        layers hand on what lies before it."""
        kinds = getattr(config, "layer_types", None)  # without which all layers are alike
        window = None if kinds and "sliding_attention" not in kinds else getattr(config, "sliding_window", None)
        return cls(_context(config), config.vocab_size, advised, window, prefix)

    @property
    def _usable(self) -> int | None:
        """The shortest of context, advised length and what a window leaves after a prefix; None where none is known."""
        after = self.window - self.prefix if self.prefix and self.window is not None else None
        return min((length for length in (self.context, self.advised, after) if length is not None), default=None)

    def length(self, asked: int | None = None, usual: int = PAPER_LENGTH) -> int:
        """Tokens per window: as asked for; else as usual, the papers' 2048, or as context and tokenizer allow.

        Raises:
            RecipeError: more are asked for than the context has.
        """
        if asked is not None:
            self.check_length(asked, "windows")
            return asked
        return usual if self._usable is None else min(usual, self._usable)

    def check_length(self, length: int, what: str) -> None:
        """Raise `RecipeError` where `what` is of more tokens than the context, or than a window leaves after a
        prefix."""
        self.check_prefix(self.prefix, length)
        if self.context is not None and length > self.context:
            raise RecipeError(
                f"{what} of {length} tokens exceed the model's context of {self.context} tokens: use no more."
            )

    def check(self, ids: "Tensor", what: str) -> None:
        """Raise where the model cannot read token ids, int64 [..., tokens].

        Raises:
            RecipeError: they are longer than its context.
            CheckpointError: an id lies beyond its vocabulary.
        """
        self.check_length(ids.shape[-1], what)
        self.check_ids(int(ids.max()) if ids.numel() else 0)

    def check_texts(self, recipe: Recipe) -> None:
        """Raise `RecipeError` where a text of a recipe has samples of more tokens than the context."""
        texts = {"calibration samples": recipe.calibration if recipe.needs_calibration else None}
        for name, method in recipe.methods.items():
            what = "samples that rotations are learned on" if method is recipe.learner else f"samples of {name}"
            texts[what] = method.own_text
        for what, text in texts.items():
            if text is not None:
                self.check_length(text.sequence_length, what)

    def check_prefix(self, tokens: int, text: int = 1) -> None:
        """Raise `RecipeError` where a text of so many tokens cannot stand after a prefix: it must see all of it."""
        if tokens and self.window is not None and tokens + text > self.window:
            raise RecipeError(
                f"every token of a text must see the prefix, and this model's attention has a window of {self.window} "
                f"tokens: after a prefix of {tokens} use texts of at most {max(0, self.window - tokens)}, not {text}."
            )
        if self.context is not None and tokens >= self.context:
            raise RecipeError(
                f"a prefix of {tokens} tokens leaves no room for a text in the model's context of {self.context}."
            )

    def check_ids(self, largest: int) -> None:
        """Raise `CheckpointError` where the largest id of a text lies beyond the vocabulary."""
        if largest >= self.vocabulary:
            raise CheckpointError(
                f"the tokenizer gives token {largest}, and the model's embedding ends at {self.vocabulary - 1}: the "
                "tokenizer belongs to another model; copy the model's own next to its weights."
            )

    def shorten(self, recipe: Recipe) -> Recipe:
        """A recipe whose texts are as long as `length` allows: what a method's defaults, the papers', become here."""
        usable = replace(self, prefix=max(self.prefix, recipe.prefix_tokens))._usable
        return Recipe.model_validate(_capped(recipe.model_dump(), usable)) if usable else recipe


def check_kept(recipe: Recipe, length: int) -> None:
    """Raise `RecipeError` where a recipe's KV cache keeps all tokens of such windows in full precision."""
    for scheme in filter(None, (recipe.keys, recipe.values)):
        if sum(scheme.kept) >= length:
            raise RecipeError(
                f"the first {scheme.kept_first} and last {scheme.kept_recent} tokens of the KV cache stay in full "
                f"precision, which are all of windows of {length} tokens: use windows of more than {sum(scheme.kept)}."
            )


def advised_length(model_max_length: Any) -> int | None:
    """Length of texts that a tokenizer's field declares; None for what stands there in its absence."""
    declared = isinstance(model_max_length, int) and 2 <= model_max_length < _UNLIMITED
    return model_max_length if declared else None


def model_windows(model: "nn.Module", tokens: Tokens, sequence_length: int, bos: BOS = "text") -> "Tensor":
    """`rotquant.text.evaluation_windows` for a model that can read them.

    Raises:
        CorpusError: the text is shorter than one window, or the tokenizer has no BOS for each.
        RecipeError, CheckpointError: as `ModelLimits.check`.
    """
    limits = ModelLimits.of(model.config)
    limits.check_length(sequence_length, "windows")
    windows = evaluation_windows(tokens, sequence_length, bos)
    limits.check(windows, "windows")
    return windows


class WindowMetric(Protocol):
    """A metric of windows of text, such as perplexity."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a window."""
        ...

    @property
    def max_windows(self) -> int | None:
        """How many windows, spread evenly over the text; None takes all."""
        ...

    @property
    def bos(self) -> BOS:
        """Where the text has a BOS."""
        ...


def metric_windows(model: "nn.Module", tokens: Tokens, metric: WindowMetric) -> "Tensor":
    """The windows that a metric asks for, int64 [windows, tokens]: all, or `max_windows` spread evenly over the text.

    Raises as `model_windows`.
    """
    windows = model_windows(model, tokens, metric.sequence_length, metric.bos)
    asked = metric.max_windows
    if asked is None or asked >= len(windows):
        return windows
    return windows[[place * len(windows) // asked for place in range(asked)]]


def _context(config: Any) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if positions is None or rope.get("rope_type") not in _STRETCHED:
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * (rope.get("factor") or 1.0)))


def _capped(data: Any, longest: int) -> Any:
    """A recipe's data in which no `sequence_length`, however deep, exceeds the longest."""
    if not isinstance(data, dict):
        return data
    return {
        name: min(value, longest) if name == "sequence_length" else _capped(value, longest)
        for name, value in data.items()
    }
