"""Log-likelihoods of continuations and greedy generation by a model in memory, as lm-eval defines them.

BOS is added or left out as asked, whatever the tokenizer's default; none is added to an item that begins with it, or
after a prefix that holds it. No item is truncated. Texts are written by one rule for all models
(`rotquant.models.generation.greedy`), whatever a checkpoint's own settings. Log-probabilities are
float32. Questions whose contexts begin alike share a row, in which each sees its own context and itself. Nothing here
imports lm-eval.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, takewhile
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from rotquant.foundation import progress
from rotquant.foundation.errors import TaskError
from rotquant.models.generation import greedy
from rotquant.models.limits import ModelLimits
from rotquant.models.simulation.prefix import prefix_holds
from rotquant.models.simulation.runtime import scales_by_text
from rotquant.recipes.corpus import BOS
from rotquant.tensors.devices import of_device
from rotquant.tensors.faster import FasterKernels
from rotquant.text import bos_of

#: Upper bound on the logits held at once, in elements: 2^28 float32 values are 1 GiB.
_LOGITS_AT_ONCE = 2**28
#: Tokens that count as one item of a batch: few stay in a CPU's cache, and many keep a GPU busy.
_ITEM_TOKENS = {"cpu": 32, "cuda": 512}
#: Most tokens of a row that several short questions share.
_ROW_TOKENS = 512

T = TypeVar("T")

Encoded = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""
Setting = tuple[tuple[str, ...], int]
"""Where a generation stops: at one of some strings, if any, or after a number of tokens."""


@dataclass(frozen=True)
class Branch:
    """A question in a row: `tokens`, its context and continuation, leave the row's trunk at `fork`.

    index: its place among what was asked. answer: where its continuation begins in `tokens`.
    """

    index: int
    tokens: list[int]
    answer: int
    fork: int

    @property
    def own(self) -> list[int]:
        """The tokens that the trunk does not have, but for the last one, which predicts nothing."""
        return self.tokens[self.fork : -1]


@dataclass
class ScoredRow:
    """A context, the trunk, and after it what other questions have beyond it; each sees itself and its trunk."""

    trunk: list[int]
    branches: list[Branch] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.trunk) + sum(len(branch.own) for branch in self.branches)

    @property
    def is_text(self) -> bool:
        """Whether the row is one text, which needs no mask."""
        return all(not branch.own or branch.fork == len(self.trunk) for branch in self.branches) and (
            sum(bool(branch.own) for branch in self.branches) <= 1
        )

    def asked(self) -> Iterator[tuple[int, int]]:
        """Of each token of each continuation: the column that predicts it, its id."""
        column = len(self.trunk)
        for branch in self.branches:
            for place in range(branch.answer, len(branch.tokens)):
                before = place - 1
                yield before if before < branch.fork else column + before - branch.fork, branch.tokens[place]
            column += len(branch.own)


class Scorer:
    """A causal language model in memory.

    batch_size: items per forward pass, of 32 tokens on a CPU and 512 on a GPU; fewer where items are longer, or the
        logits would not fit.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bos: BOS, batch_size: int) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.prefixed = prefix_holds(model, bos_of(tokenizer))
        self.bos = bos != "none" and bos_of(tokenizer) is not None and not self.prefixed
        self.limits = ModelLimits.of(model.config)
        #: Whether a row may hold more than one text from its first column on: a decoder takes no masks.
        self.takes_masks: bool = getattr(model, "takes_masks", True)
        #: Whether inputs have a scale for each text: then a row is one, and says which of its tokens fill it up.
        self.by_text = self.takes_masks and scales_by_text(model)

    @property
    def first_token(self) -> int:
        """BOS, or EOS where the tokenizer has none: what a text of no tokens is predicted from."""
        ids: tuple[Any, ...] = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return next((one for one in ids if one is not None), 0)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]], tasks: Sequence[str]) -> list[tuple[float, bool]]:
        """Log-likelihood of each context's continuation, and whether greedy decoding would give it.

        Questions of one row on which the network is not finite are asked again, each alone: what is not finite spreads
        through attention to all that shares its row, masked or not.

        Args:
            tasks: the name of each pair's task, for errors.

        Raises:
            TaskError: an item is longer than the model's context.
        """
        encoded = self.encode(pairs)
        self._check_lengths(tasks, [len(context) + len(rest) - 1 for context, rest in encoded])
        rows = _arranged(self._asked(pairs), self._shared)
        found = self._answers(rows)
        shared = [branch for row in rows if len(row.branches) > 1 for branch in row.branches]
        if lost := [branch for branch in shared if not math.isfinite(found[branch.index][0])]:
            contexts = [branch.tokens[: branch.answer] for branch in lost]
            alone = [[replace(branch, fork=branch.answer)] for branch in lost]
            found |= self._answers([ScoredRow(*one) for one in zip(contexts, alone, strict=True)])
        return [found[index] for index in range(len(pairs))]

    def _answers(self, rows: list[ScoredRow]) -> dict[int, tuple[float, bool]]:
        """Log-likelihood and greediness of the continuations of all rows, by the index of the question."""
        found: dict[int, tuple[float, bool]] = {}
        with progress.task("answering", "question", sum(len(row.branches) for row in rows)) as under_way:
            for batch in _by_size(rows, lambda row: row.length, self._tokens):
                found_here = self._answer(batch)
                branches = (branch for row in batch for branch in row.branches)
                found |= {branch.index: answer for branch, answer in zip(branches, found_here, strict=True)}
                under_way.advance(len(found_here))
        return found

    def generate(
        self, prompts: Sequence[str], settings: Sequence[Setting], tasks: Sequence[str]
    ) -> list[tuple[str, bool]]:
        """The greedy continuation of each prompt, and whether all logits of it were finite, whatever those of others.

        Raises:
            TaskError: prompt and continuation together may be longer than the model's context.
        """
        contexts = [context for context, _ in self.encode([(prompt, "") for prompt in prompts])]
        self._check_lengths(tasks, [len(ids) + tokens for ids, (_, tokens) in zip(contexts, settings, strict=True)])
        order = sorted(range(len(prompts)), key=lambda index: (settings[index], -len(contexts[index])))
        found = [("", True)] * len(prompts)
        with progress.task("writing", "text", len(prompts)) as under_way:
            for setting, group in itertools.groupby(order, key=settings.__getitem__):
                most = self._tokens if self.takes_masks else 1  # a decoder continues one text after another
                for batch in _by_size(list(group), lambda index: len(contexts[index]), most):
                    texts, finite = self._continue([contexts[index] for index in batch], *setting)
                    for index, text, own in zip(batch, texts, finite, strict=True):
                        found[index] = text, own
                    under_way.advance(len(batch))
        return found

    def encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[Encoded, ...]:
        """Tokenize contexts and continuations as lm-eval does: the two together, then split after the context's tokens.

        Spaces at the end of a context go to its continuation. With `bos` every context begins with one BOS if the
        tokenizer has one; without, no token is added, but for an empty context, since a model needs something to
        predict from (EOS where there is no BOS). After a prefix that holds BOS a context loses its own.

        A continuation that only merges with the context's last tokens, as `,` after `f()` may, has none of its own, and
        lm-eval ends there. Then all continuations of that context begin with the tokens that they do not share, so that
        they differ as the whole texts' log-likelihoods do.

        Raises:
            CheckpointError: a token lies beyond the model's vocabulary.
        """
        encoded = _encoded(self._asked(pairs))
        self.limits.check_ids(max((max(ids, default=0) for one in encoded for ids in one), default=0))
        return encoded

    def shortened(self, text: str, longest: int) -> str:
        """A text of more than `longest` tokens without its middle: its first and its last half of so many, BOS counted.

        As LongBench does it (Bai et al. 2024, Sec. 4.1), the halves are text again before they are read.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) + self.bos <= longest:
            return text
        half = longest // 2
        return "".join(self.tokenizer.batch_decode([ids[: half - self.bos], ids[-half:]]))

    def _asked(self, pairs: Sequence[tuple[str, str]]) -> "_Asked":
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # a tokenizer in Python has no complete description to tell it from others
        identity = str(id(self.tokenizer)) if backend is None else backend.to_str()
        return _Asked(self.tokenizer, identity, self.first_token, self.bos, self.prefixed, tuple(pairs))

    @property
    def _tokens(self) -> int:
        """Tokens of a forward pass."""
        item = of_device(_ITEM_TOKENS, self.model.device)
        return max(1, min(self.batch_size * item, _LOGITS_AT_ONCE // self.model.config.vocab_size))

    @property
    def _shared(self) -> int | None:
        """The longest texts that may share a row; None where all may."""
        if self.by_text or not self.takes_masks:
            return 0
        return getattr(self.model.config, "sliding_window", None)

    def _check_lengths(self, tasks: Sequence[str], lengths: list[int]) -> None:
        """Raise `TaskError` where the longest item does not fit into the model's context."""
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        context = self.limits.context
        if context is not None and lengths[longest] > context:
            raise TaskError(
                f"zero-shot task {tasks[longest]!r} needs {lengths[longest]} tokens for its longest item, "
                f"and the model's context is {context} tokens; leave the task out or take another model."
            )

    @torch.no_grad()
    def _answer(self, rows: list[ScoredRow]) -> list[tuple[float, bool]]:
        """Log-likelihood and greediness of all continuations of some rows, which are filled up on the right."""
        width = max(row.length for row in rows)
        ids = torch.full((len(rows), width), self.first_token)
        for index, row in enumerate(rows):
            ids[index, : row.length] = torch.tensor([*row.trunk, *chain(*(branch.own for branch in row.branches))])
        asked = [(index, *one) for index, row in enumerate(rows) for one in row.asked()]
        places, columns, targets = torch.tensor(asked, device=self.model.device).T
        kept, columns = columns.unique(return_inverse=True)
        mask = {} if all(row.is_text for row in rows) else _branching(rows, width, self.model.dtype)
        if self.by_text:
            lengths = torch.tensor([row.length for row in rows])
            mask = {"attention_mask": (torch.arange(width) < lengths[:, None]).long()}
        with FasterKernels():
            logits = self.model(
                input_ids=ids.to(self.model.device),
                use_cache=False,
                logits_to_keep=kept,
                **{name: part.to(self.model.device) for name, part in mask.items()},
            ).logits
        logits = logits[places, columns].float()
        scores = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)).cpu()  # a GPU is waited for once
        greedy = (logits.argmax(1) == targets).cpu()
        counts = [len(branch.tokens) - branch.answer for row in rows for branch in row.branches]
        parts = zip(scores.split(counts), greedy.split(counts), strict=True)
        return [(float(one.sum()), bool(same.all())) for one, same in parts]

    def _continue(self, contexts: list[list[int]], until: tuple[str, ...], tokens: int) -> tuple[list[str], list[bool]]:
        """Continue a batch of contexts, which are filled up on the left and masked there.

        Returns:
            The texts, and of each whether all its logits were finite.
        """
        width = max(map(len, contexts))
        ids = torch.full((len(contexts), width), self.first_token)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
        with FasterKernels(), greedy(self.model, self.tokenizer, tokens, self.first_token) as ends:
            watch = _Watch(len(contexts), width, ends)
            generated = cast(Any, self.model).generate(
                input_ids=ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                stop_strings=list(until) or None,
                logits_processor=LogitsProcessorList([watch]),
                tokenizer=self.tokenizer,
            )
        written = [list(takewhile(lambda one: one not in ends, row)) for row in generated[:, width:].tolist()]
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        end = "|".join(map(re.escape, until)) or r"\Z"
        return [re.split(end, text, maxsplit=1)[0] for text in texts], watch.finite.tolist()


class _Watch(LogitsProcessor):
    """Sees of each text of a batch whether all logits to its end are finite, and leaves them as they are."""

    def __init__(self, texts: int, prompt: int, ends: tuple[int, ...]) -> None:
        self.finite, self.prompt, self.ends = torch.ones(texts, dtype=torch.bool), prompt, torch.tensor(ends)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.finite, self.ends = self.finite.to(scores.device), self.ends.to(scores.device)
        ended = torch.isin(input_ids[:, self.prompt :], self.ends).any(dim=1)
        self.finite &= ended | scores.isfinite().all(dim=1)
        return scores


@dataclass(frozen=True)
class _Asked:
    """What the tokens of questions follow from: the tokenizer (by its `identity`), the first token, the texts."""

    tokenizer: PreTrainedTokenizerBase = field(compare=False)
    identity: str
    first_token: int
    bos: bool
    prefixed: bool
    pairs: tuple[tuple[str, str], ...]


@lru_cache(maxsize=2)
def _encoded(asked: _Asked) -> tuple[Encoded, ...]:
    """`Scorer.encode`, once for all that are asked the same: a sixth of the time that a small model takes to answer."""
    stripped = [(context.rstrip(), context[len(context.rstrip()) :] + rest) for context, rest in asked.pairs]
    texts = list(dict.fromkeys(text for context, rest in stripped for text in (context, context + rest)))
    ids: Any = asked.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ids = dict(zip(texts, ids, strict=True))
    common = {context: len(ids[context]) for context, _ in stripped}
    merged = {context for context, rest in stripped if rest and len(ids[context + rest]) <= common[context]}
    for context, rest in stripped:
        if context in merged:
            common[context] = min(common[context], _common(ids[context], ids[context + rest]))
    encoded = []
    for context, rest in stripped:
        whole, length = ids[context + rest], common[context]
        headed = length > 0 and whole[0] == asked.first_token
        if headed and asked.prefixed and length > 1:
            whole, length = whole[1:], length - 1
        start = [asked.first_token] if (asked.bos and not headed) or length == 0 else []
        encoded.append((start + whole[:length], whole[length:]))
    return tuple(encoded)


@lru_cache(maxsize=2)
def _arranged(asked: _Asked, longest: int | None) -> list[ScoredRow]:
    """Questions in rows, texts last and long ones first: those whose contexts begin alike share one, if that saves.

    In descending order a context comes right before those that are the beginning of it. Texts of more than `longest`
    tokens have rows of their own. That is a sliding window of attention, since what it hides counts from a token's
    place in its text.
    """
    encoded = _encoded(asked)
    rows: list[ScoredRow] = []
    for index in sorted(range(len(encoded)), key=lambda index: encoded[index], reverse=True):
        context, rest = encoded[index]
        tokens = context + rest
        alone = longest is not None and len(tokens) > longest
        fork = _common(rows[-1].trunk, context) if rows and not alone else 0
        if 2 * fork <= len(context) or rows[-1].length + len(tokens) - fork > max(_ROW_TOKENS, 2 * len(context)):
            rows.append(ScoredRow(context))
            fork = len(context)
        rows[-1].branches.append(Branch(index, tokens, len(context), fork))
    return sorted(rows, key=lambda row: (row.is_text, -row.length))


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    unequal = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(unequal, min(len(first), len(second)))


def _branching(rows: list[ScoredRow], width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Mask [rows, 1, width, width] and positions [rows, width] by which branches see the trunk up to their fork.

    The mask is what attention adds: every implementation takes that.
    """
    layout = torch.tensor([-1, 0, 0]).repeat(len(rows), width, 1)  # of a branch 0 is the trunk, -1 what fills a row up
    for index, row in enumerate(rows):
        tokens = [(0, len(row.trunk), place) for place in range(len(row.trunk))]
        for count, branch in enumerate(row.branches, start=1):
            tokens += [(count, branch.fork, branch.fork + place) for place in range(len(branch.own))]
        layout[index, : row.length] = torch.tensor(tokens)
    number, fork, positions = layout.unbind(-1)
    of_trunk = (number == 0)[:, None, :] & (positions[:, None, :] < fork[:, :, None])
    seen = (of_trunk | (number[:, None, :] == number[:, :, None])) & torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return {"attention_mask": mask[:, None], "position_ids": positions}


def _by_size(members: list[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Members in order, as many together as have `limit` tokens when all are filled up to the longest; at least one."""
    batch: list[T] = []
    longest = 0
    for member in members:
        longest = max(longest, size(member))
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], size(member)
        batch.append(member)
    if batch:
        yield batch
