"""ROUGE-L of generated summaries (Lin 2004): the F-measure of the longest common subsequence of words."""

import functools
from typing import Any


def rouge_l(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """ROUGE-L between an item's `summary` and what was generated for it, from 0 to 1; no stemming.

    lm-eval calls this for each item of a task that names it as `process_results`.
    """
    return {"rouge_l": _scorer().score(item["summary"], generated[0])["rougeL"].fmeasure}


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)
