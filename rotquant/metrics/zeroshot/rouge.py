"""ROUGE-L of generated summaries (Lin 2004): the F-measure of the longest common subsequence of words."""

import functools
from typing import Any

MEASURES = ("rouge_l", "rouge_l_squared")
"""What is averaged over the items: the score, and for its standard error its square."""


def rouge_l(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """ROUGE-L between an item's `summary` and what was generated for it, from 0 to 1, and its square; no stemming.

    lm-eval calls this for each item of a task that names it as `process_results`.
    """
    score = _scorer().score(item["summary"], generated[0])["rougeL"].fmeasure
    return dict(zip(MEASURES, (score, score**2), strict=True))


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)
