"""Keys, verdicts and numbers stay as they were recorded (`tests.frozen`)."""

from typing import Any

import pytest

from tests.frozen import KINDS, compared, differences, keys, machine, of_archives

CLAIM = {"mechanism": {"here": "reproduced", "7B": "holds 0.590419 0.546135 0.634704"}}


def test_every_key_is_the_recorded_one() -> None:
    with machine():
        assert not compared("keys", keys())


@pytest.mark.long
def test_every_verdict_and_every_number_of_the_archived_runs_is_the_recorded_one() -> None:
    with machine() as patch:
        assert not [f"{name}: {line}" for name, facts in of_archives(KINDS, patch) for line in compared(name, facts)]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (CLAIM, []),
        ({"mechanism": {"here": "reproduced", "7B": "holds 0.590420 0.546135 0.634704"}}, []),
        (
            {"mechanism": {"here": "undecided", "7B": "holds 0.590419 0.546135 0.634704"}},
            ["mechanism: here: was reproduced, is undecided"],
        ),
        (
            {"mechanism": {"here": "reproduced", "7B": "holds 0.590519 0.546135 0.634704"}},
            ["mechanism: 7B: was holds 0.590419 0.546135 0.634704, is holds 0.590519 0.546135 0.634704"],
        ),
        (
            {"mechanism": {"here": "reproduced"}, "fact": 1},
            ['mechanism: 7B: gone, was "holds 0.590419 0.546135 0.634704"', "fact: new, 1"],
        ),
    ],
)
def test_differences_are_named(after: dict[str, Any], said: list[str]) -> None:
    assert [*differences(CLAIM, after)] == said


def test_runs_that_went_and_came_are_named() -> None:
    runs = " ".join(f"{number:016x}" for number in range(12))
    assert [*differences({"weights": runs}, {"weights": f"{runs[17:]} {99:016x}"})] == [
        f"weights: gone ['{0:016x}'], new ['{99:016x}']"
    ]
