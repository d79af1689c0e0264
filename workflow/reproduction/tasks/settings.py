"""The metric of zero-shot tasks as frozen data."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from rotquant.foundation.data import Frozen
from rotquant.recipes.corpus import BOS


def _items_bos(given: object) -> object:
    """Where items of tasks have BOS: each is a text of its own, so `window`, and true, are `text`; false is `none`."""
    return "none" if given is False else "text" if given is True or given == "window" else given


ItemsBOS = Annotated[
    BOS,
    BeforeValidator(_items_bos, json_schema_input_type=BOS | bool),
    PlainSerializer(lambda bos: bos != "none", return_type=bool),
]
"""`BOS` of texts that are read one by one; true and false in files and keys."""

Normalization = Literal["length", "unconditional"]


class ZeroShot(Frozen):
    """Zero-shot or few-shot accuracy, or ROUGE-L of summaries, by lm-eval's rules, in percent."""

    kind: Literal["zero_shot"] = "zero_shot"
    suite: Literal["paper", "shipped"] = "shipped"
    """`paper`, the papers' tasks from the hub or from local files; `shipped`, tasks made from a held-out text."""
    tasks: tuple[str, ...] = ()
    """Names within the suite; empty takes QuaRot's six, or the first six of the shipped ones."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Number of solved examples before each item; they are never items themselves."""
    path: str | None = None
    """`paper`: a folder with one data file per task; null reads the hub."""
    corpus: str | None = None
    """`shipped`: the text that the tasks are made from, a key of the configuration's `corpora`."""
    limit: Annotated[int, Field(gt=0)] | None = None
    """Number of items of each task, the first ones; null takes all."""
    bos: ItemsBOS = "text"
    """Whether each item begins with BOS: `text`, `window` and true mean that it does, `none` and false that it does
    not. lm-eval's default depends on the tokenizer; here it is always said. Where the tokenizer has none, or a prefix
    holds one, items begin without."""
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
