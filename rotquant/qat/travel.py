"""How far RCP's partitions can leave the uniform ones that they begin as (Choi et al. 2025, Secs. 4.3 and 5.1).

Adam moves a parameter by about its rate in a step at most, where all gradients have one sign. So a rate and a number of
steps say how far a logit can go, and the sigmoid how far a share of the range goes with it.
"""

import math

#: Of the range that every partition has at the start.
UNIFORM = 1 / 3


def reach(rate: float, steps: int, schedule: str = "constant") -> float:
    """The sum of a schedule's rates over all steps: what a parameter moves under gradients of one sign.

    Args:
        schedule: `constant`, or `cosine` to zero.
    """
    shares = (1.0 if schedule == "constant" else (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))
    return rate * sum(shares)


def share_within(logits: float) -> float:
    """How much of the range the first partition gains where s1 rises by so many logits from its start."""
    return 1 / (1 + math.exp(-(_logit(UNIFORM) + logits))) - UNIFORM


def logits_for(share: float) -> float:
    """By how many logits s1 must rise for the first partition to gain such a share of the range."""
    return _logit(UNIFORM + share) - _logit(UNIFORM)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
