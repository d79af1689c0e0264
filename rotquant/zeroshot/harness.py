"""lm-eval around a model in memory. Importing this module imports lm-eval, which takes seconds.

What differs from lm-eval's own `HFLM`: BOS is put there or left out as asked, whatever the tokenizer's habit; texts are
tokenized in one batch; no item is ever truncated; logits become log-probabilities in float32.
"""

import functools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotquant.errors import TaskError
from rotquant.onednn import OneDNNLinear
from rotquant.zeroshot.folders import data_file, read_definition

#: Upper bound on the logits held at once, in elements: 2^28 float32 values are 1 GiB.
_LOGITS_AT_ONCE = 2**28

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
        definition["dataset_kwargs"]["data_files"]["test"] = str(data_file(folder, definition))
    try:
        return manager.load([definition])["tasks"][name]
    except Exception as error:  # The hub client has many failure types, some from libraries below it.
        reason = str(error).strip().split("\n")[0][:200]
        raise TaskError(
            f"the data of zero-shot task {name!r} could not be read ({type(error).__name__}: {reason}); without "
            "access to the hub, name a local folder with a data file per task."
        ) from error


class Harness(HFLM):
    """A causal language model in memory, for log-likelihoods of continuations."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bos: bool, batch_size: int) -> None:
        pad_token = tokenizer.pad_token
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_batch_size=batch_size,
            add_bos_token=bos,
            softmax_dtype=torch.float32,
        )
        tokenizer.pad_token = pad_token  # HFLM chooses one, which nothing here needs and the caller did not ask for

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each request's continuation, and whether greedy decoding would give it.

        Raises:
            TaskError: an item is longer than the model's context.
        """
        encoded = self.encode([request.args for request in requests])
        lengths = [len(context) + len(continuation) - 1 for _, context, continuation in encoded]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] > self.max_length:
            raise TaskError(
                f"zero-shot task {requests[longest].task_name!r} needs {lengths[longest]} tokens for its longest item, "
                f"and the model's context is {self.max_length} tokens; leave the task out or take another model."
            )
        at_once = _LOGITS_AT_ONCE // (lengths[longest] * self.model.config.vocab_size)
        self.batch_size_per_gpu = max(1, min(self.batch_size_per_gpu, at_once))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    def encode(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Tokenize contexts and continuations as lm-eval does: the two together, then split after the context's tokens.

        Spaces at the end of a context go to its continuation. With `bos` every context begins with one BOS; without, no
        token is added, but for an empty context, since a model needs something to predict from.
        """
        stripped = [(context.rstrip(), context[len(context.rstrip()) :] + rest) for context, rest in pairs]
        texts = list(dict.fromkeys(text for context, rest in stripped for text in (context, context + rest)))
        ids = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
        encoded = []
        for pair, (context, rest) in zip(pairs, stripped, strict=True):
            whole, length = ids[context + rest], len(ids[context])
            start = [self.prefix_token_id] if self.add_bos_token or length == 0 else []
            encoded.append((pair, start + whole[:length], whole[length:]))
        return encoded

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        with torch.no_grad(), OneDNNLinear():
            return self.model(input_ids=inps, use_cache=False).logits
