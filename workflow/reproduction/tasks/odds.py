"""What an item with choices says beyond right or wrong: the log-odds of the right one, and which was taken.

Accuracy counts the items whose decision changes; the log-odds change with every item, so that the same items tell
networks apart that answer alike.
"""

import math
from collections.abc import Sequence

#: Log-odds are kept to so many decimals; their deviation over items is about 1.
DECIMALS = 3


def log_odds(scores: Sequence[float], right: int) -> float:
    """log p(right) - log sum p(wrong), of choices of which each counts as exp(score).

    Args:
        scores: what the decision is made by, in nats: log-likelihoods, or these by character or against those without
            the question. Two at least, all finite.
        right: the place of the right choice.
    """
    wrong = [score for place, score in enumerate(scores) if place != right]
    most = max(wrong)
    return scores[right] - most - math.log(sum(math.exp(score - most) for score in wrong))


def item_scores(measure: str, scores: Sequence[float], right: int) -> dict[str, float]:
    """What one item says by a measure (acc, acc_norm, ...): its score, its log-odds and which choice was taken.

    Nothing but the score where there is one choice alone.
    """
    taken = max(range(len(scores)), key=scores.__getitem__)
    found = {measure: float(taken == right)}
    if len(scores) > 1:
        found |= {f"{measure}.log_odds": round(log_odds(scores, right), DECIMALS), f"{measure}.choice": float(taken)}
    return found
