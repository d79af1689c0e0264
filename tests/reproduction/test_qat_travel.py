"""How far RCP's partitions can leave the uniform ones that they begin as (Choi et al. 2025, Secs. 4.3 and 5.1): numbers
on its page, and steps of Adam itself.

Adam moves a parameter by about its rate in a step at most, where all gradients have one sign. So a rate and a number of
steps say how far a logit can go, and the sigmoid how far a share of the range goes with it.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from rotquant.tensors.partition import partitions

#: Of the range that every partition has at the start.
_UNIFORM = 1 / 3


def reach(rate: float, steps: int, schedule: str = "constant") -> float:
    """The sum of a schedule's rates over all steps: what a parameter moves under gradients of one sign.

    Args:
        schedule: `constant`, or `cosine` to zero.
    """
    shares = (1.0 if schedule == "constant" else (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))
    return rate * sum(shares)


def share_within(logits: float) -> float:
    """How much of the range the first partition gains where s1 rises by so many logits from its start."""
    return 1 / (1 + math.exp(-(_logit(_UNIFORM) + logits))) - _UNIFORM


def logits_for(share: float) -> float:
    """By how many logits s1 must rise for the first partition to gain such a share of the range."""
    return _logit(_UNIFORM + share) - _logit(_UNIFORM)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_adam_goes_as_far_as_it_can_under_gradients_of_one_sign(schedule: str) -> None:
    rate, steps = 1e-2, 50
    s1, s2 = (torch.nn.Parameter(torch.logit(torch.tensor([share], dtype=torch.float64))) for share in (1 / 3, 1 / 2))
    before = s1.item()
    optimizer = torch.optim.Adam([s1], lr=rate)
    for step in range(steps):
        share = 1.0 if schedule == "constant" else (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate * share
        s1.grad = torch.full_like(s1, -3.0)
        optimizer.step()
    # Adam's epsilon is 1e-8 of the gradient.
    assert s1.item() - before == pytest.approx(reach(rate, steps, schedule), rel=1e-6)
    gained = partitions(s1, s2)[0].item() - 1 / 3
    assert gained == pytest.approx(share_within(s1.item() - before), rel=1e-6)
    assert logits_for(gained) == pytest.approx(s1.item() - before, rel=1e-6)


def test_the_page_says_what_the_printed_rates_allow() -> None:
    text = " ".join(Path("workflow/papers/rcp/reports.yaml").read_text(encoding="utf-8").split())
    (found,) = re.findall(r"at most ([\d.]+) logits in 1,000 steps and ([\d.]+) in 8,000", text)
    assert found == tuple(f"{reach(1e-5, steps):.2f}" for steps in (1000, 8000))
    (found,) = re.findall(r"from 33\.3 to at most ([\d.]+) or ([\d.]+) % of the range", text)
    assert found == tuple(f"{100 * (1 / 3 + share_within(reach(1e-5, steps))):.1f}" for steps in (1000, 8000))
    (found,) = re.findall(r"by a tenth of itself takes ([\d.]+) logits, about ([\d,]+) steps", text)
    needed = logits_for(1 / 30)
    assert found == (f"{needed:.3f}", f"{round(needed / 1e-5, -2):,.0f}")
    (found,) = re.findall(r"by at most ([\d.]+) % of the range with 64 steps and ([\d.]+) % with 1,024", text)
    assert found == tuple(f"{100 * share_within(reach(1e-3, steps, 'cosine')):.1f}" for steps in (64, 1024))
