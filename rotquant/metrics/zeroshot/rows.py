"""The schemas of the papers' data files: one row of each task, with the hub's field names."""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Row(BaseModel):
    """One row of a data file; fields that lm-eval does not read are let through."""

    model_config = ConfigDict(strict=True, extra="ignore")


class PIQA(Row):
    """ybisk/piqa: the right solution is sol1 (label 0) or sol2 (1)."""

    goal: str
    sol1: str
    sol2: str
    label: Literal[0, 1]


class WinoGrande(Row):
    """allenai/winogrande: the sentence has one blank, written "_"."""

    sentence: str
    option1: str
    option2: str
    answer: Literal["1", "2"]

    @field_validator("sentence")
    @classmethod
    def _has_blank(cls, value: str) -> str:
        if "_" not in value:
            raise ValueError('should have a blank, written "_"')
        return value


class HellaSwag(Row):
    """Rowan/hellaswag: four endings; the label is a digit in quotes."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str] = Field(min_length=4, max_length=4)
    label: Literal["0", "1", "2", "3"]


class Choices(Row):
    """Answers and the letters (or digits) that name them."""

    text: list[str] = Field(min_length=2)
    label: list[str]


class _Keyed(Row):
    """A question whose answer is named by a letter."""

    choices: Choices
    answerKey: str  # noqa: N815 - the hub's name

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> "_Keyed":
        if len(self.choices.text) != len(self.choices.label):
            texts, labels = len(self.choices.text), len(self.choices.label)
            raise ValueError(f"field 'choices' has {texts} texts and {labels} labels")
        if self.answerKey.lstrip() not in self.choices.label:
            raise ValueError(f"field 'answerKey' is {self.answerKey!r}, which is none of the labels")
        return self


class ARC(_Keyed):
    """allenai/ai2_arc, configurations ARC-Easy and ARC-Challenge."""

    question: str


class OpenBookQA(_Keyed):
    """allenai/openbookqa, configuration main."""

    question_stem: str


class LAMBADA(Row):
    """EleutherAI/lambada_openai: the last word of the text is to be predicted."""

    text: str

    @field_validator("text")
    @classmethod
    def _has_two_words(cls, value: str) -> str:
        if len(value.split(" ")) < 2:
            raise ValueError("should have at least two words")
        return value


class BoolQ(Row):
    """aps/super_glue, configuration boolq: label 1 is yes."""

    passage: str
    question: str
    label: Literal[0, 1]


class SocialIQA(Row):
    """lighteval/siqa: the label is the number of the answer in quotes."""

    context: str
    question: str
    answerA: str  # noqa: N815 - the hub's name
    answerB: str  # noqa: N815
    answerC: str  # noqa: N815
    label: Literal["1", "2", "3"]


class MMLU(Row):
    """cais/mmlu, a configuration per subject: the answer is the index of the right choice."""

    question: str
    choices: list[str] = Field(min_length=4, max_length=4)
    answer: Literal[0, 1, 2, 3]


class TLDR(Row):
    """TLDR9+ (Sotudeh et al. 2021), which its authors distribute as files: a forum post and its author's summary."""

    document: str = Field(min_length=1)
    summary: str = Field(min_length=1)


class HumanEval(Row):
    """openai/openai_humaneval: a function's head with its documentation, and a function `check` of what it does."""

    prompt: str
    test: str
    entry_point: str

    @model_validator(mode="after")
    def _defines_what_is_checked(self) -> "HumanEval":
        if f"def {self.entry_point}(" not in self.prompt:
            raise ValueError(f"field 'prompt' defines no function {self.entry_point!r}, its 'entry_point'")
        if "def check(" not in self.test:
            raise ValueError("field 'test' defines no function 'check'")
        return self


class GSM8K(Row):
    """openai/gsm8k, configuration main: the solution ends with "#### " and the number."""

    question: str
    answer: str

    @field_validator("answer")
    @classmethod
    def _has_a_number(cls, value: str) -> str:
        if re.search(r"#### -?\$?[\d.,]*\d", value) is None:
            raise ValueError('should end with "#### " and a number')
        return value


class LongBench(Row):
    """A task of LongBench (Bai et al. 2024): a question about a long text, or the last of many examples."""

    input: str
    context: str
    answers: list[str] = Field(min_length=1)
    all_classes: list[str] | None = None
    length: int
