"""lm-eval around a model in memory. Importing this module imports lm-eval, which takes seconds.

What differs from lm-eval's own `HFLM`: BOS is put there or left out as asked, whatever the tokenizer's habit; texts are
tokenized in one batch; no item is ever truncated; logits become log-probabilities in float32; generation is greedy.
"""

import functools
import itertools
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from rotquant.foundation import progress
from rotquant.foundation.errors import TaskError
from rotquant.metrics.zeroshot.definitions import data_files, read_definition
from rotquant.models.limits import Limits
from rotquant.tensors.onednn import OneDNNLinear

#: Upper bound on the logits held at once, in elements: 2^28 float32 values are 1 GiB.
_LOGITS_AT_ONCE = 2**28

#: lm-eval's own default, by which it draws examples for tasks that do not take the first ones.
_EXAMPLES_SEED = 1234

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""A pair of context and continuation, as text and as token ids."""


@functools.lru_cache(maxsize=8)
def load_tasks(folder: Path, names: tuple[str, ...]) -> dict[str, Task]:
    """lm-eval's task objects of the definitions in `folder`; loaded once per process, since a folder never changes.

    Raises:
        TaskError: a definition is missing, or the hub's data cannot be read.
    """
    manager = TaskManager(include_defaults=False)
    state = random.getstate()  # loading draws from the global generator, which others may be using
    try:
        return {name: _load_task(manager, folder, name) for name in names}
    finally:
        random.setstate(state)


def _load_task(manager: TaskManager, folder: Path, name: str) -> Task:
    definition: dict[str, Any] | str = read_definition(folder, name)
    if "include" in definition:
        definition = str(folder / f"{name}.yaml")  # only lm-eval's own reader follows an include
    else:
        files = data_files(folder, definition)
        definition["dataset_kwargs"]["data_files"] = {split: str(file) for split, file in files.items()}
    try:
        return manager.load([definition])["tasks"][name]
    except Exception as error:  # The hub client has many failure types, some from libraries below it.
        reason = str(error).strip().split("\n")[0][:200]
        raise TaskError(
            f"the data of zero-shot task {name!r} could not be read ({type(error).__name__}: {reason}); without "
            "access to the hub, name a local folder with a data file per task."
        ) from error


def set_shots(tasks: dict[str, Task], shots: int) -> None:
    """Make every prompt begin with `shots` examples, the same ones in each evaluation.

    Raises:
        TaskError: a task has fewer.
    """
    for name, task in tasks.items():
        if shots and (available := len(cast(ConfigurableTask, task).sampler.df)) < shots:
            raise TaskError(f"zero-shot task {name!r} has {available} examples, fewer than {shots} shots.")
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(_EXAMPLES_SEED)


#: lm-eval registers its class by a decorator, after which type checkers take it for the interface that it implements.
_Model: Any = HFLM


class Harness(_Model):
    """A causal language model in memory, for log-likelihoods of continuations and for greedy generation.

    not_finite: names of the tasks on which the network's outputs were not: the first of several choices would be the
        likeliest, and accuracy that of a guess.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bos: bool, batch_size: int) -> None:
        pad_token = tokenizer.pad_token
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_batch_size=batch_size,
            add_bos_token=bos and tokenizer.bos_token_id is not None,
            softmax_dtype=torch.float32,
        )
        self.limits = Limits.of(model.config)
        tokenizer.pad_token = pad_token  # HFLM chooses one, which nothing here needs and the caller did not ask for
        self.not_finite: set[str] = set()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each request's continuation, and whether greedy decoding would give it.

        Raises:
            TaskError: an item is longer than the model's context.
        """
        encoded = self.encode([request.arguments for request in requests])
        lengths = [len(context) + len(continuation) - 1 for _, context, continuation in encoded]
        self._check_lengths(requests, lengths)
        at_once = _LOGITS_AT_ONCE // (max(lengths) * self.model.config.vocab_size)
        self.batch_size_per_gpu = max(1, min(self.batch_size_per_gpu, at_once))
        with progress.task("answering", "question", len(requests)) as under_way:
            self.set_cache_hook(_Answers(under_way))
            scores = self._loglikelihood_tokens(encoded, disable_tqdm=True)
        scored = zip(requests, scores, strict=True)
        self.not_finite |= {str(request.task_name) for request, (score, _) in scored if not math.isfinite(score)}
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each request's context, up to a stop string or its number of tokens.

        Raises:
            TaskError: context and continuation together may be longer than the model's context.
        """
        contexts = [context for _, context, _ in self.encode([(request.arguments[0], "") for request in requests])]
        settings = [
            (tuple(args["until"]), args["max_gen_toks"]) for _, args in (request.arguments for request in requests)
        ]
        lengths = [len(context) + tokens for context, (_, tokens) in zip(contexts, settings, strict=True)]
        self._check_lengths(requests, lengths)
        order = sorted(range(len(requests)), key=lambda index: (settings[index], -lengths[index]))
        texts = [""] * len(requests)
        with progress.task("writing", "text", len(requests)) as under_way:
            for setting, group in itertools.groupby(order, key=settings.__getitem__):
                for batch in _batches(list(group), self.batch_size_per_gpu):
                    found, finite = self._generate([contexts[index] for index in batch], *setting)
                    for index, text in zip(batch, found, strict=True):
                        texts[index] = text
                    if not finite:
                        self.not_finite |= {str(requests[index].task_name) for index in batch}
                    under_way.advance(len(batch))
        return texts

    def _generate(self, contexts: list[list[int]], until: tuple[str, ...], tokens: int) -> tuple[list[str], bool]:
        """Continue a batch of contexts, which are filled up on the left and masked there.

        Returns:
            The texts, and whether all logits were finite.
        """
        watch = _Watch()
        width = max(map(len, contexts))
        ids = torch.full((len(contexts), width), self.prefix_token_id)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
        with OneDNNLinear():
            generated = self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=tokens,
                do_sample=False,
                stop_strings=list(until),
                logits_processor=LogitsProcessorList([watch]),
                tokenizer=self.tokenizer,
                pad_token_id=self.prefix_token_id,
            )
        texts = self.tokenizer.batch_decode(generated[:, width:], skip_special_tokens=True)
        return [re.split("|".join(map(re.escape, until)), text, maxsplit=1)[0] for text in texts], watch.finite

    def _check_lengths(self, requests: list[Instance], lengths: list[int]) -> None:
        """Raise `TaskError` where the longest item does not fit into the model's context."""
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        context = self.limits.context
        if context is not None and lengths[longest] > context:
            raise TaskError(
                f"zero-shot task {requests[longest].task_name!r} needs {lengths[longest]} tokens for its longest item, "
                f"and the model's context is {context} tokens; leave the task out or take another model."
            )

    def encode(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Tokenize contexts and continuations as lm-eval does: the two together, then split after the context's tokens.

        Spaces at the end of a context go to its continuation. With `bos` every context begins with one BOS if the
        tokenizer has one; without, no token is added, but for an empty context, since a model needs something to
        predict from (EOS where there is no BOS).

        Raises:
            CheckpointError: a token lies beyond the model's vocabulary.
        """
        stripped = [(context.rstrip(), context[len(context.rstrip()) :] + rest) for context, rest in pairs]
        texts = list(dict.fromkeys(text for context, rest in stripped for text in (context, context + rest)))
        ids = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
        encoded = []
        for pair, (context, rest) in zip(pairs, stripped, strict=True):
            whole, length = ids[context + rest], len(ids[context])
            start = [self.prefix_token_id] if self.add_bos_token or length == 0 else []
            self.limits.check_ids(max(whole, default=0))
            encoded.append((pair, start + whole[:length], whole[length:]))
        return encoded

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        with torch.no_grad(), OneDNNLinear():
            return self.model(input_ids=inps, use_cache=False).logits


class _Watch(LogitsProcessor):
    """Sees whether all logits of a generation are finite, and leaves them as they are."""

    finite = True

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.finite = self.finite and bool(scores.isfinite().all())
        return scores


class _Answers(CacheHook):
    """Counts the answers, which lm-eval hands to its cache one by one; nothing is cached."""

    def __init__(self, under_way: progress.Task) -> None:
        super().__init__(None)
        self._task = under_way

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """One request has been answered."""
        self._task.advance()


def _batches(members: list[int], size: int) -> Iterator[list[int]]:
    return (members[start : start + size] for start in range(0, len(members), size))
