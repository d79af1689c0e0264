"""LongBench's tasks and metrics, for those seven tasks that RCP prints (Bai et al. 2024; RCP Tables 15 and 16).

Prompts and lengths of answers are the benchmark's; its metrics are written anew. ROUGE-L is that of the package
`rouge`, which the benchmark takes: of sets of words, where `rotquant.metrics.zeroshot.rouge` is of sequences.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

_SEVERAL = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nThe following are given passages.\n{{context}}\n\nAnswer the question based on the given passages. Only give "
    "me the answer and do not output any other words.\n\nQuestion: %s\nAnswer:"
)
_ONE = (
    "Read the following text and answer briefly.\n\n{{context}}\n\nNow, answer the following question based on the "
    "above text, only give me the answer and do not output any other words.\n\nQuestion: %s\nAnswer:"
)
_EXAMPLES = (
    "Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
    "following are some examples.\n\n{{context}}\n\n%s"
)
_DIALOGUES = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{{context}}\n\n%s"
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
    "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, "
    "how many non-repeating paragraphs are there in total?\n\n{{context}}\n\nPlease enter the final count of unique "
    "paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so "
    "on.\n\nThe final answer is: "
)
#: The copy of the hub that needs no code to be read calls the question by another name than the benchmark's files.
_QUESTION = "{{input if input is defined else question}}"
_HUB = "Xnhyacinth/LongBench"


def f1(prediction: str, answer: str) -> float:
    """F-measure of the words that two texts share, each as often as both have it; no case, punctuation or articles."""
    predicted, true = (Counter(_words(text)) for text in (prediction, answer))
    common = (predicted & true).total()
    return 2 * common / (predicted.total() + true.total()) if common else 0.0


def rouge_of_words(prediction: str, answer: str) -> float:
    """ROUGE-L of summaries (Lin 2004, Sec. 3.2) as the package `rouge` has it, the F-measure of sets of words.

    A word counts once: it is in a longest common subsequence of a sentence of the one and of the other text. Sentences
    end with a full stop.
    """
    predicted, true = _sentences(prediction), _sentences(answer)
    if not predicted or not true:
        return 0.0
    common: set[str] = set()
    for sentence, other in product(true, predicted):
        common |= _common_words(sentence, other)
    sizes = (len({word for sentence in text for word in sentence}) for text in (predicted, true))
    precision, recall = (len(common) / size for size in sizes)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in a text that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def by_f1(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`f1` of the best of an item's answers; lm-eval calls this for each item."""
    return _best(f1, item, generated[0])


def by_f1_of_a_line(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`by_f1` of the first line: what follows it is the next example."""
    return _best(f1, item, _first_line(generated[0]))


def by_rouge_of_a_line(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`rouge_of_words` of the first line and the best of an item's answers."""
    return _best(rouge_of_words, item, _first_line(generated[0]))


def by_count(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`count` of the best of an item's answers."""
    return _best(count, item, generated[0])


def _definition(task: str, prompt: str, tokens: int, judge: Callable[..., dict[str, float]]) -> dict[str, Any]:
    return {
        "dataset_path": _HUB,
        "dataset_name": task,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": prompt.replace("%s", _QUESTION),
        "doc_to_target": "{{answers[0]}}",
        "generation_kwargs": {"until": [], "max_gen_toks": tokens, "do_sample": False},
        "process_results": judge,
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
    }


DEFINITIONS: dict[str, dict[str, Any]] = {
    "hotpotqa": _definition("hotpotqa", _SEVERAL, 32, by_f1),
    "multifieldqa_en": _definition("multifieldqa_en", _ONE, 64, by_f1),
    "triviaqa": _definition("triviaqa", _EXAMPLES, 32, by_f1_of_a_line),
    "2wikimqa": _definition("2wikimqa", _SEVERAL, 32, by_f1),
    "musique": _definition("musique", _SEVERAL, 32, by_f1),
    "samsum": _definition("samsum", _DIALOGUES, 128, by_rouge_of_a_line),
    "passage_count": _definition("passage_count", _COUNT, 32, by_count),
}
"""lm-eval's configuration of each task, in the order of RCP's tables. Generation ends with EOS or its length."""

EXAMPLES_IN_TEXT = ("triviaqa", "samsum")
"""Tasks whose text is examples to be continued, which LongBench puts into no chat template."""


def _best(metric: Callable[[str, str], float], item: dict[str, Any], prediction: str) -> dict[str, float]:
    return {"score": max(metric(prediction, answer) for answer in item["answers"])}


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _sentences(text: str) -> list[list[str]]:
    return [words for sentence in text.split(".") if sentence and (words := sentence.split() or [""])]


def _common_words(one: list[str], other: list[str]) -> set[str]:
    """The words of a longest common subsequence: the one found from the ends, giving up a word of the first sentence
    only where that alone keeps the length."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for row, word in enumerate(one, start=1):
        for column, candidate in enumerate(other, start=1):
            above, left = lengths[row - 1][column], lengths[row][column - 1]
            lengths[row][column] = lengths[row - 1][column - 1] + 1 if word == candidate else max(above, left)
    found: set[str] = set()
    row, column = len(one), len(other)
    while row and column:
        if one[row - 1] == other[column - 1]:
            found.add(one[row - 1])
            row, column = row - 1, column - 1
        elif lengths[row - 1][column] > lengths[row][column - 1]:
            row -= 1
        else:
            column -= 1
    return found
