"""LongBench's tasks and metrics, for those seven tasks that RCP prints (Bai et al. 2024; RCP Tables 15 and 16).

Prompts, lengths of answers and metrics are the benchmark's. lm-eval's tasks of these names give other numbers: they
strip what was generated (ROUGE-L differs), score an empty first line of triviaqa and samsum instead of skipping it, and
have other white space in three prompts; their metrics also import jieba and fuzzywuzzy.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from reproduction.tasks.definitions import written

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


def f1(prediction: str, answer: str) -> float:
    """F-measure of the words that two texts share, each as often as both have it; no case, punctuation or articles."""

    def words(text: str) -> Counter[str]:
        plain = "".join(character for character in text.lower() if character not in string.punctuation)
        return Counter(re.sub(r"\b(a|an|the)\b", " ", plain).split())

    predicted, true = words(prediction), words(answer)
    common = (predicted & true).total()
    return 2 * common / (predicted.total() + true.total()) if common else 0.0


def rouge_of_words(prediction: str, answer: str) -> float:
    """ROUGE-L of summaries (Lin 2004, Sec. 3.2) as the package `rouge` has it, the F-measure of sets of words.

    A word counts once: it is in a longest common subsequence of a sentence of the one and of the other text. Sentences
    end with a full stop. `reproduction.tasks.rouge` is of sequences instead.
    """
    from rouge_score.rouge_scorer import lcs_ind

    predicted, true = (
        [sentence.split() or [""] for sentence in text.split(".") if sentence] for text in (prediction, answer)
    )
    common = {other[place] for one in true for other in predicted for place in lcs_ind(other, one)}
    if not common:
        return 0.0
    precision, recall = (len(common) / len(set().union(*text)) for text in (predicted, true))
    return 2 * precision * recall / (precision + recall)


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in a text that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def by_f1(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`f1` of the best of an item's answers; lm-eval calls this for each item."""
    return _best(f1, item, generated[0])


def by_f1_of_a_line(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`by_f1` of the first line: what follows it is the next example."""
    return _best(f1, item, generated[0].lstrip("\n").split("\n")[0])


def by_rouge_of_a_line(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`rouge_of_words` of the first line and the best of an item's answers."""
    return _best(rouge_of_words, item, generated[0].lstrip("\n").split("\n")[0])


def by_count(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """`count` of the best of an item's answers."""
    return _best(count, item, generated[0])


def _best(metric: Callable[[str, str], float], item: dict[str, Any], prediction: str) -> dict[str, float]:
    return {"score": max(metric(prediction, answer) for answer in item["answers"])}


DEFINITIONS: dict[str, dict[str, Any]] = {
    task: {
        "dataset_path": "Xnhyacinth/LongBench",  # a copy without code, which calls `input` otherwise
        "dataset_name": task,
        "test_split": "test",
        "doc_to_text": prompt.replace("%s", "{{input if input is defined else question}}"),
        **written("{{answers[0]}}", [], tokens, "score", judge),
    }
    for task, prompt, tokens, judge in (
        ("hotpotqa", _SEVERAL, 32, by_f1),
        ("multifieldqa_en", _ONE, 64, by_f1),
        ("triviaqa", _EXAMPLES, 32, by_f1_of_a_line),
        ("2wikimqa", _SEVERAL, 32, by_f1),
        ("musique", _SEVERAL, 32, by_f1),
        ("samsum", _DIALOGUES, 128, by_rouge_of_a_line),
        ("passage_count", _COUNT, 32, by_count),
    )
}
"""lm-eval's configuration of each task, in the order of RCP's tables. Generation ends with EOS or its length."""

EXAMPLES_IN_TEXT = ("triviaqa", "samsum")
"""Tasks whose text is examples to be continued, which LongBench puts into no chat template."""
