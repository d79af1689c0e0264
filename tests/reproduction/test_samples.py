"""What a run's numbers are means of is stored with it, is its own, and gives the noise that statistics gives."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reproduction.corpora import DOCSTRINGS
from reproduction.frame.values import standard_error
from reproduction.identity.run import Run
from reproduction.run.results import RunResult, read_result, write_result
from reproduction.run.samples import Samples, check_samples, flipped, observations, pack
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_json, write_json
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity

TEXT = Perplexity(corpus="docstrings")
TWO = ZeroShot(corpus="docstrings", tasks=("last_word", "grammar", "summary"))
ANSWERS: Samples = {"last_word": "1101", "grammar": "10", "summary": [0.5, 0.25, 0.75]}
SCORES = {"last_word": 75.0, "grammar": 50.0, "summary": 50.0, "average": 62.5, "rouge_l": 50.0}
LOSSES = st.lists(st.floats(min_value=0.1, max_value=9.0), min_size=2, max_size=40)


@given(LOSSES)
def test_a_perplexitys_observations_have_its_value_and_the_standard_error_of_the_delta_method(losses: list[float]):
    value = math.exp(statistics.fmean(losses))
    found = observations(TEXT, "perplexity", {"perplexity": value}, pack({"perplexity": losses}))
    assert found is not None
    assert found.mean() == pytest.approx(value)
    error = value * statistics.stdev(losses) / math.sqrt(len(losses))
    assert standard_error([found]) == pytest.approx(error, abs=1e-9)


def test_a_task_is_the_mean_of_its_items_and_the_average_that_of_its_tasks_whatever_their_items():
    for name in ("last_word", "grammar", "average", "rouge_l"):
        found = observations(TWO, name, SCORES, ANSWERS)
        assert found is not None
        assert found.mean() == pytest.approx(SCORES[name])


@given(st.lists(st.booleans(), min_size=60, max_size=200), st.lists(st.booleans(), min_size=60, max_size=200))
def test_the_averages_standard_error_is_that_of_independent_tasks(first: list[bool], second: list[bool]):
    tasks = {"last_word": [float(right) for right in first], "grammar": [float(right) for right in second]}
    means = {name: 100 * statistics.fmean(values) for name, values in tasks.items()}
    metrics = {**means, "average": statistics.fmean(means.values())}
    found = observations(TWO, "average", metrics, pack(tasks))
    errors = [100 * statistics.stdev(values) / math.sqrt(len(values)) for values in tasks.values()]
    # The deviations of the two are taken over n - 1 items together and apart: a part in 60 at most.
    assert standard_error([found]) == pytest.approx(math.hypot(*errors) / 2, rel=0.02, abs=1e-9)


ODDS: Samples = {"grammar_log_odds": [0.5, -1.25], "next_word_log_odds": [2.0, 1.0, 0.0], "grammar_choices": "03"}
CHOSEN = ZeroShot(corpus="docstrings", tasks=("last_word", "grammar", "next_word"))
OF_ODDS = {"grammar_log_odds": -0.375, "next_word_log_odds": 1.0, "log_odds": 0.3125}


def test_log_odds_and_divergences_are_means_in_their_own_unit_and_choices_have_none():
    for name, value in OF_ODDS.items():
        found = observations(CHOSEN, name, OF_ODDS, ODDS)
        assert found is not None
        assert found.mean() == pytest.approx(value)
    windows: Samples = {"kl": [0.1, 0.3], "flips": [0.25, 0.75]}
    for name, value in (("kl", 0.2), ("flips", 50.0)):
        found = observations(TEXT, name, {"kl": 0.2, "flips": 50.0}, windows)
        assert found is not None
        assert found == pytest.approx([value / 2, 3 * value / 2])
    assert check_samples(TEXT, {"kl": 0.2, "flips": 50.0}, windows) == windows
    assert check_samples(CHOSEN, OF_ODDS, ODDS) == ODDS
    assert observations(TEXT, "kl_median", {"kl_median": 0.2}, windows) is None
    with pytest.raises(ValueError, match=r"give 0\.2 and not 0\.3"):
        check_samples(TEXT, {"kl": 0.3, "flips": 50.0}, windows)


def test_a_flip_is_an_item_whose_choice_is_another_one_and_tasks_count_alike():
    mine: Samples = {"grammar_choices": "0123", "next_word_choices": "01"}
    other: Samples = {"grammar_choices": "0120", "next_word_choices": "10"}
    assert flipped(CHOSEN, mine, other) == pytest.approx((25 + 100) / 2)
    assert flipped(CHOSEN, mine, mine) == 0
    for lacking in ({}, {"grammar_choices": "0123"}, {**other, "next_word_choices": "011"}):
        assert flipped(CHOSEN, mine, lacking) is None


def test_seeds_that_answer_the_same_items_share_their_noise():
    """The standard error is that of the item means: nothing is gained where every seed answers alike."""
    alike = np.array([0.0, 100.0, 100.0, 0.0])
    assert standard_error([alike, alike]) == standard_error([alike])
    assert standard_error([alike, 100 - alike]) == 0.0
    assert standard_error([alike, None]) is None


def result(samples: Samples) -> RunResult:
    run = Run(
        checkpoint="model", checkpoint_digest="0", recipe=Recipe(), metric=TWO, corpora={"docstrings": DOCSTRINGS}
    )
    return RunResult(run, SCORES, {}, None, samples=samples)


def test_a_run_file_keeps_them_and_one_without_is_read_too(tmp_path: Path):
    path = tmp_path / f"{result({}).key}.json"
    for samples in (ANSWERS, {}):
        write_result(path, result(samples))
        assert read_result(path).samples == samples
    assert observations(TWO, "average", SCORES, {}) is None


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"last_word": "1102"}, "the answers of last_word are 0 and 1"),
        ({"last_word": [math.nan]}, "finite"),
        ({"last_word": "1111"}, "give 100 and not 75"),
        ({"preposition": "1"}, "'preposition', which is not measured"),
    ],
)
def test_samples_that_are_not_the_runs_own_are_refused(tmp_path: Path, samples: Samples, said: str):
    with pytest.raises((ValidationError, ValueError), match=said):
        check_samples(TWO, SCORES, samples)
    path = tmp_path / f"{result({}).key}.json"
    write_result(path, result(ANSWERS))
    write_json(path, {**read_json(path, "run file"), "samples": samples})
    with pytest.raises(ResultError, match=r"is damaged .*; delete it and run again to recompute it\.$"):
        read_result(path)


def test_a_perplexity_beyond_all_numbers_is_that_of_its_samples():
    assert check_samples(TEXT, {"perplexity": math.inf}, {"perplexity": [800.0, 900.0]})
    with pytest.raises(ValueError, match="give inf and not 9"):
        check_samples(TEXT, {"perplexity": 9.0}, {"perplexity": [800.0, 900.0]})


def test_what_is_not_finite_is_not_stored():
    assert pack({"perplexity": (1.0, math.nan), "grammar": ()}) == {}
