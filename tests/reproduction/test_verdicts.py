"""The rule that decides our numbers: an interval over seeds and windows or items against the region that a check asks.

Numbers are made here as runs would store them: observations of each seed on each window.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reproduction.claims.claims import Verdict, judge
from reproduction.claims.estimates import (
    Components,
    Estimate,
    components,
    deviation_ratio,
    half_width,
)
from reproduction.claims.findings import ABOVE_ZERO, NO_DIFFERENCE, Finding, Region, allowing_for_their_number
from reproduction.claims.pairing import same_items
from reproduction.frame.values import Number
from reproduction.run.results import RunResult
from reproduction.run.samples import pack
from reproduction.tables.quantities import KL, PERPLEXITY, SNR_DB
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity
from tests.helpers.claims import BETTER, CASES, PAPER, RUN, Measured, columns_of, measured, table


def drawn(seed: int, seeds: int, windows: int, noise: "Mix") -> np.ndarray:
    """Deviations float64 [seeds, windows] of seeds, of windows, and of both together."""
    generator = np.random.default_rng(seed)
    by_seed, by_window = generator.normal(size=(seeds, 1)), generator.normal(size=(1, windows))
    both = generator.normal(size=(seeds, windows))
    return noise[0] * by_seed + noise[1] * by_window + noise[2] * both


def verdict(check: dict[str, Any], found: Measured, columns: list[str] | None = None) -> Verdict:
    return judge(check, table(), found[0], PERPLEXITY, found[1], columns)


def pair(mine: np.ndarray, other: np.ndarray, gain: float = 0.1) -> Measured:
    """QuaRot against QUIK on one model, the first better by so many nats."""
    return measured({("QuaRot", "7B"): (6.0, mine), ("QUIK", "7B"): (6.0 * math.exp(gain), other)})


def cells(case: str, good: bool, noise: float) -> dict[tuple[str, str], tuple[float, np.ndarray]]:
    """The numbers by which `CASES` has a check hold or fail; seeds where it has several, else three that are noisy."""
    found = {}
    given_numbers = CASES[case][1 if good else 2]
    for place, value in {**PAPER, **{(row, "7B"): one for row, one in given_numbers.items()}}.items():
        center = value.mean if isinstance(value, Number) else value
        seeds = np.repeat(value.values, 20) if isinstance(value, Number) else np.full(3, center)
        windows = drawn(len(found), len(seeds), 20, (0, 0, noise))
        found[place] = (center, np.log(seeds / center)[:, None] + windows - windows.mean(axis=1, keepdims=True))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_kind_holds_or_is_contradicted_beyond_its_noise_and_is_undecided_within(case: str) -> None:
    ((kind, arguments),) = CASES[case][0].items()
    wider = {"percent": 1.004, "points": 1.004, "at_most": 1.004, "at_least": 0.996}
    arguments = {name: value * wider[name] if name in wider else value for name, value in arguments.items()}
    said = [
        verdict({kind: arguments}, measured(cells(case, good, noise)), columns_of(case)).decision
        for good, noise in ((True, 1e-6), (False, 1e-6), (True, 3.0))
    ]
    if case in ("no_worse", "own"):  # the good case lies on the border itself
        said[0] = "holds" if said[0] == "undecided" else said[0]
    assert said[:2] == ["holds", "contradicted"]
    if kind != "spread_smaller":  # needs no windows
        assert said[2] == "undecided"


def test_two_rows_are_compared_window_by_window_and_seed_by_seed() -> None:
    """What both share, however large, neither widens nor moves the interval."""
    own, shared = drawn(0, 3, 20, (0.001, 0.001, 0.001)), drawn(1, 3, 20, (0.5, 1.0, 0.5))
    gains = []
    for common in (0 * shared, shared):
        numbers, results = pair(own + common, common, gain=0.02)
        logs = [
            np.array([results[key].samples["perplexity"] for key in numbers[row, "7B", "perplexity"].runs])
            for row in ("QuaRot", "QUIK")
        ]
        gains.append((Estimate(logs[1], (0, 1, 2)) - Estimate(logs[0], (0, 1, 2))).interval())
        assert gains[-1].low > 0
    assert (gains[0].low, gains[0].high) == pytest.approx((gains[1].low, gains[1].high))
    assert verdict(BETTER, pair(own, 0 * own, 0.02), ["7B"]).decision == "holds"


@pytest.mark.parametrize("gain", [-0.06, -0.02, 0.0, 0.02, 0.06])
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.2])
def test_a_difference_of_divergences_far_below_their_size_is_none(gain: float, noise: float) -> None:
    """Neither row is better and each is no worse than the other, where noise lets less than 5 % of them pass for it."""
    theirs = 0.1 + 0.1 * drawn(0, 5, 40, (0.0, 0.3, 0.0))
    deviations = drawn(1, 5, 40, (noise, noise, noise))
    mine = theirs + 0.1 * (deviations - deviations.mean() - gain)
    found = divergences({"QuaRot": mine, "QUIK": theirs + (0.1 - theirs.mean())})
    better, equal = (
        judge({kind: BETTER["better"]}, table(), found[0], KL, found[1], ["7B"]) for kind in ("better", "no_worse")
    )
    low, high = (getattr(better.findings[0].effect, end) / 0.1 for end in ("low", "high"))
    within = low > -NO_DIFFERENCE and high < NO_DIFFERENCE
    said = "no effect" if within else "holds" if low > 0 else "contradicted" if high < 0 else "undecided"
    assert better.decision == said
    no_worse = "holds" if low >= -NO_DIFFERENCE else "contradicted" if high < -NO_DIFFERENCE else "undecided"
    assert equal.decision == no_worse
    assert better.findings[0].effect is not None
    assert better.findings[0].effect.is_none == within
    assert within == (noise < 0.2 and abs(gain) <= 0.02)


@pytest.mark.parametrize(
    ("check", "decision"),
    [
        ({"better": {"rows": ["QuaRot", "QUIK"]}}, "no effect"),
        ({"across": {"row": "QuaRot", "pairs": [["13B", "7B"]]}}, "holds"),
    ],
)
def test_each_kind_that_compares_two_divergences_knows_when_there_is_no_difference(
    check: dict[str, Any], decision: str
) -> None:
    """Equal but for noise of a thousandth, which alone decides nothing."""
    noise = 0.0001 * drawn(1, 5, 40, (1, 1, 1))
    shared = 0.1 + 0.1 * drawn(0, 5, 40, (0.0, 0.3, 0.0))
    numbers, results = divergences({"QuaRot": shared + noise - noise.mean(), "QUIK": shared})
    numbers["QuaRot", "13B", "kl"] = numbers["QUIK", "7B", "kl"]
    columns = ["7B", "13B"] if "across" in check else ["7B"]
    found = judge(check, table(), numbers, KL, results, columns)
    assert found.decision == decision
    assert found.findings[0].effect is not None
    assert found.findings[0].effect.is_none


def test_a_difference_of_perplexities_however_small_is_not_none() -> None:
    noise = drawn(1, 5, 40, (1e-4, 1e-4, 1e-4))
    assert verdict(BETTER, pair(noise - noise.mean(), 0 * noise, 0.0), ["7B"]).decision == "undecided"


def divergences(rows: dict[str, np.ndarray]) -> Measured:
    """KL divergences [seeds, windows] of rows on one model, with the runs behind them."""
    numbers, results = {}, {}
    for row, values in rows.items():
        keys = tuple(f"{row}{seed}" for seed in range(len(values)))
        for key, windows in zip(keys, values, strict=True):
            samples = pack({"perplexity": tuple(windows), "kl": tuple(windows)})
            results[key] = RunResult(RUN, {"kl": float(windows.mean())}, {}, None, samples=samples)
        means = tuple(float(windows.mean()) for windows in values)
        numbers[row, "7B", "kl"] = Number.of_seeds(means, tuple(range(len(keys))), keys)
    return numbers, results


Mix = tuple[float, float, float]
#: Deviations by seeds, by windows and by both together.
MIXES: tuple[Mix, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 1.0, 0.5), (0.3, 1.0, 1.0), (1.0, 1.0, 1.0))
BOTH_ALONE: Mix = (0.0, 0.0, 1.0)


@pytest.mark.parametrize("noise", [*MIXES, (0.3, 0.0, 1.0), BOTH_ALONE])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_has_the_true_effect_in_it_as_often_as_it_says(seeds: int, noise: Mix) -> None:
    """In 93 to 97 % of 3000 drawn tables. Nothing tells few seeds that differ by chance from seeds that differ, so that
    it is wider where only both together count; the sum of both factors' variances would have 99 % there."""
    generator = np.random.default_rng(seeds)
    shapes = ((3000, seeds, 1), (3000, 1, 200), (3000, seeds, 200))
    parts = [size * generator.normal(size=shape) for size, shape in zip(noise, shapes, strict=True)]
    tables = parts[0] + parts[1] + parts[2]
    half = half_width(components(tables), np.float64(seeds), np.float64(200))
    covered = (abs(tables.mean(axis=(1, 2))) <= half).mean()
    assert 0.93 <= covered <= (0.98 if noise == BOTH_ALONE else 0.97)


def test_what_seeds_and_windows_do_together_counts_once() -> None:
    """The variance of a mean over s seeds and w windows is a/s + b/w + c/(s w); so is, by many of both, the
    interval."""
    tables = np.stack([drawn(trial, 5, 20, (0.5, 1.0, 2.0)) for trial in range(2000)])
    found = [float(part.mean()) for part in components(tables)]
    assert found == pytest.approx([0.25, 1.0, 4.0], rel=0.1)
    many = np.float64(4000)
    width = float(half_width(Components(*np.array([0.25, 1.0, 4000.0])), many, many))
    assert width == pytest.approx(1.96 * math.sqrt((0.25 + 1.0 + 1.0) / 4000), rel=0.01)
    shares = Components(*np.array([0.0, 0.0, 4.0]))
    assert float(half_width(shares, np.float64(5), np.float64(20))) == pytest.approx(
        1.99 * math.sqrt(4 / 100), rel=0.01
    )


@pytest.mark.parametrize("comparisons", [1, 4, 8, 28])
def test_the_number_of_comparisons_makes_no_false_contradictions(comparisons: int) -> None:
    """All true effects lie on the border. Each comparison by itself is contradicted in some 2.5 %, so that one of 28
    is in half of all claims; with Holm's allowance it stays below 5 %, and a gross one is still found."""
    generator, alone, together, trials = np.random.default_rng(comparisons), 0, 0, 400
    for _ in range(trials):
        shared = generator.normal(size=(1, 60))  # windows that all models share
        observed = shared + generator.normal(size=(comparisons, 3, 1)) / 8 + generator.normal(size=(comparisons, 3, 60))
        found = [Estimate(one, (0, 1, 2)).interval() for one in observed]
        said = [ABOVE_ZERO.decide(one.low, one.high) for one in found]
        chances = [one.tail(0.0) if one.tail and one.high < 0 else 1.0 for one in found]
        findings = [Finding("-", word, chance=chance) for word, chance in zip(said, chances, strict=True)]
        alone += "contradicted" in said
        together += Verdict(allowing_for_their_number(findings)).decision == "contradicted"
    assert together / trials <= 0.05
    assert alone / trials >= 0.01 * min(comparisons, 12)
    gross = [Finding("-", "contradicted", chance=1e-6), *[Finding("-", "holds", chance=1.0)] * 27]
    assert Verdict(allowing_for_their_number(gross)).decision == "contradicted"


def test_of_contradicted_comparisons_each_has_the_level_that_those_before_it_leave() -> None:
    """Holm's steps at 2.5 %: of four 0.625 %, 0.833 %, 1.25 % and 2.5 %; where one fails, so do the rest."""
    chances = (0.024, 0.006, 0.02, 0.008)
    said = allowing_for_their_number([Finding("-", "contradicted", chance=chance) for chance in chances])
    assert [one.decision for one in said] == ["undecided", "contradicted", "undecided", "contradicted"]
    assert said[0].reason == "too near the bound for one of 4"
    facts = [Finding("-", "contradicted"), Finding("-", "contradicted", chance=0.02)]
    assert [one.decision for one in allowing_for_their_number(facts)] == ["contradicted"] * 2
    none = [Finding("-", "no effect", chance=chance) for chance in (0.001, 0.02)]
    assert [one.decision for one in allowing_for_their_number(none)] == ["no effect"] * 2
    none = [Finding("-", "no effect", chance=chance) for chance in (0.02, 0.02)]
    assert [one.decision for one in allowing_for_their_number(none)] == ["undecided"] * 2


def test_an_interval_and_its_chance_agree() -> None:
    """A bound at the end of the interval is as improbable as the level says, by t and by F."""
    found = Estimate(drawn(0, 4, 50, (0.5, 0.5, 0.5)), (0, 1, 2, 3)).interval()
    ratio = deviation_ratio(np.linspace(-1, 1, 8), np.linspace(-2, 2, 6))
    for one in (found, ratio):
        assert one.tail is not None
        assert [one.tail(end) for end in (one.low, one.high)] == pytest.approx([0.025, 0.025], rel=1e-6)


@given(st.integers(0, 10**6), st.floats(0.01, 0.3))
def test_the_seeds_and_windows_that_would_decide_do_so_and_fewer_do_not(seed: int, effect: float) -> None:
    found = Estimate(effect + drawn(seed, 4, 50, (0.5, 0.5, 0.1)), (0, 1, 2, 3)).interval()
    counts = found.to_decide(0.0)
    assume(counts is not None and found.low <= 0 <= found.high)
    assert counts is not None
    assert found.half_width is not None
    seeds, windows = counts
    fewer = (seeds - 1, windows) if windows == 50 else (seeds if seeds == 4 else seeds - 4, windows - 50)
    enough, less = found.half_width(np.array([seeds, fewer[0]], float), np.array([windows, fewer[1]], float))
    assert enough < abs(found.effect)
    assert less >= abs(found.effect) or fewer[0] < 2 or fewer[1] < 50


def test_an_undecided_claim_says_how_many_seeds_or_windows_would_decide_it() -> None:
    still = np.zeros((3, 20))
    seeds = verdict(BETTER, pair(np.add(still, [[0.08], [0.0], [-0.08]]), still, 0.05), ["7B"]).findings[0]
    assert (seeds.decision, seeds.reason.split(" ", 1)[1]) == ("undecided", "seeds would decide")
    windows = drawn(3, 1, 20, (0.0, 1.0, 0.0)) - drawn(3, 1, 20, (0.0, 1.0, 0.0)).mean()
    alone = verdict(BETTER, pair(windows, 0 * windows, 0.2), ["7B"]).findings[0]
    assert (alone.decision, alone.reason.split(" ", 1)[1]) == ("undecided", "windows would decide")


def test_what_more_than_thirty_seeds_would_decide_cannot_be_decided_here() -> None:
    still = np.zeros((3, 20))
    for gain, said in ((0.05, "seeds would decide"), (0.005, "cannot be decided here")):
        (found,) = verdict(BETTER, pair(np.add(still, [[0.08], [0.0], [-0.08]]), still, gain), ["7B"]).findings
        assert (found.decision, found.reason.endswith(said)) == ("undecided", True)


def test_one_seed_of_something_random_decides_nothing_and_one_run_of_nothing_random_does() -> None:
    recipe = Recipe.model_validate({"rotation": {}})
    assert recipe.is_random
    numbers, results = pair(np.zeros((1, 20)), np.zeros((1, 20)))
    assert verdict(BETTER, (numbers, results), ["7B"]).decision == "holds"
    random = {key: replace(one, run=RUN.model_copy(update={"recipe": recipe})) for key, one in results.items()}
    (finding,) = verdict(BETTER, (numbers, random), ["7B"]).findings
    assert (finding.decision, finding.reason) == ("undecided", "3 seeds could decide")


def test_runs_without_windows_are_compared_by_their_seeds_and_a_single_one_not_at_all() -> None:
    cells = {("QuaRot", "7B"): (6.0, drawn(0, 3, 4, (0.001, 0, 0))), ("QUIK", "7B"): (7.0, np.zeros((1, 4)))}
    assert verdict(BETTER, measured(cells, stored=False), ["7B"]).decision == "holds"
    cells["QuaRot", "7B"] = (6.0, np.zeros((1, 4)))
    (finding,) = verdict(BETTER, measured(cells, stored=False), ["7B"]).findings
    assert finding.decision == "not checkable"
    assert "no run file holds" in finding.reason


def other_corpus(result: RunResult, **record: Any) -> RunResult:
    return replace(result, provenance={"corpora": {"evaluation": {"name": "docstrings", **record}}})


OTHERS: dict[str, Any] = {
    "fewer windows": lambda one, mark: replace(one, samples={"perplexity": one.samples["perplexity"][mark:]}),
    "another length": lambda one, mark: replace(
        one, run=one.run.model_copy(update={"metric": Perplexity(corpus="docstrings", sequence_length=8 + mark)})
    ),
    "another text": lambda one, mark: other_corpus(one, splits={"test": {"sha256": str(mark)}}),
    "other ids": lambda one, mark: other_corpus(one, splits={"test": {"sha256": "1", "ids": str(mark)}}),
    "other tasks": lambda one, mark: replace(one, provenance={"tasks": {"tasks": {"piqa": {"sha256": str(mark)}}}}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_runs_on_other_windows_are_no_pairs(what: str) -> None:
    """As of two machines that made other tasks, or of a text that has changed: of one row or of both."""
    noise = drawn(0, 3, 20, (0.1, 0.1, 0.1))
    numbers, results = pair(noise, noise + drawn(1, 3, 20, (0.001, 0.001, 0.001)))
    alike = {key: OTHERS[what](one, 0) for key, one in results.items()}
    assert verdict(BETTER, (numbers, alike), ["7B"]).decision == "holds"
    for changed in (numbers["QUIK", "7B", "perplexity"].runs, numbers["QUIK", "7B", "perplexity"].runs[1:2]):
        others = alike | {key: OTHERS[what](results[key], 1) for key in changed}
        assert not same_items(others[changed[0]], alike[numbers["QuaRot", "7B", "perplexity"].runs[0]])
        found = verdict(BETTER, (numbers, others), ["7B"])
        assert found.decision == "not checkable"
        assert found.findings[0].reason.startswith("measured on different windows or items")
    known = {key: replace(one, provenance={}) if "QUIK" in key else one for key, one in alike.items()}
    assert verdict(BETTER, (numbers, known), ["7B"]).decision == "holds"  # an older file does not say


def test_models_of_other_texts_are_compared_without_pairing_their_windows() -> None:
    """Between columns: as many windows of another text cancel nothing."""
    windows = drawn(2, 1, 40, (0, 0.3, 0))
    rows = {
        ("Baseline", "7B"): (6.0, windows),
        ("QuaRot", "7B"): (6.6, 2 * windows),
        ("Baseline", "13B"): (6.0, windows),
        ("QuaRot", "13B"): (6.2, 2 * windows),
    }
    numbers, results = measured(rows)
    larger = {"across": {"row": "QuaRot", "over": "Baseline", "pairs": [["7B", "13B"]]}}
    texts = {key: other_corpus(one, ids="13B" in key) for key, one in results.items()}
    same, other = (verdict(larger, (numbers, found)).findings[0] for found in (results, texts))
    assert (same.decision, other.decision) == ("holds", "undecided")


def test_columns_of_the_same_runs_count_once_and_no_network_is_compared_with_itself() -> None:
    numbers, results = pair(drawn(0, 3, 20, (0, 0, 0.001)), np.zeros((3, 20)))
    twice = {(row, column, name): one for (row, _, name), one in numbers.items() for column in ("7B", "13B")}
    more = {**twice, ("Atom", "13B", "perplexity"): Number(7.0, None, (7.0,), (0,), ("other",))}
    for found in (twice, more):  # a row that the claim does not name makes no second column
        assert [finding.place for finding in verdict(BETTER, (found, results)).findings] == ["7B"]
    larger = {"across": {"row": "QuaRot", "over": "QUIK", "pairs": [["7B", "13B"]]}}
    assert "are computed on one" in verdict(larger, (twice, results)).missing[0]
    alike = dict.fromkeys(numbers, numbers["QUIK", "7B", "perplexity"])
    found = verdict(BETTER, (alike, results), ["7B"])
    assert (found.decision, found.findings[0].reason) == ("not checkable", "the same run, so that nothing is compared")


@pytest.mark.parametrize("case", ["better", "no_worse", "close", "bound"])
def test_one_network_under_two_names_is_not_checkable_and_does_not_hide_the_others(case: str) -> None:
    """As a number of prefix tokens that two rows share: equal on every window, by runs of their own."""
    noise = drawn(0, 3, 20, (0.1, 0.1, 0.1))
    check = CASES[case][0]
    other = "QUIK" if case in ("better", "no_worse") else "Baseline"
    one = {("QuaRot", "7B"): (6.0, noise), (other, "7B"): (6.0, noise)}
    found = verdict(check, measured(one), ["7B"])
    assert found.decision == "not checkable"
    assert "equal on all windows: one network under two names" in found.findings[0].reason
    gain = 0.5 if other == "QUIK" else 0.005
    second = {("QuaRot", "13B"): (6.0, noise), (other, "13B"): (6.0 * math.exp(gain), noise + 1e-4)}
    assert verdict(check, measured(one | second)).decision == "holds"


def test_facts_are_compared_as_they_are() -> None:
    """Of nothing random and without items, such as decibels of one network."""
    numbers = {
        (row, "7B", "snr"): Number(value, None, (value,), (0,), (row,))
        for row, value in (("QuaRot", 9.1), ("QUIK", 9.0))
    }
    assert judge(BETTER, table(), numbers, SNR_DB, {}, ["7B"]).decision == "holds"


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(-5, 5), st.floats(0, 5), st.booleans())
def test_a_region_and_its_interval_say_one_of_three_things(
    low: float, width: float, start: float, length: float, open_: bool
) -> None:
    region = Region(start, start + length, open_)
    said = region.decide(low, low + width)
    assume(min(abs(end - border) for end in (low, low + width) for border in (start, start + length)) > 1e-6)
    inside = start <= low and low + width <= start + length
    outside = low + width < start or low > start + length
    assert said == ("holds" if inside else "contradicted" if outside else "undecided")


def test_equal_is_not_better_and_is_no_worse() -> None:
    assert ABOVE_ZERO.decide(0.0, 0.0) == "contradicted"
    assert Region(low=0.0).decide(0.0, 0.0) == "holds"


def test_deviations_are_compared_by_the_f_distribution() -> None:
    """Two samples of 20 differ beyond chance from a ratio of 1.59 on, the root of 2.526, F(19, 19) at 97.5 %."""
    wide = np.linspace(-1, 1, 20)
    assert deviation_ratio(wide / 1.60, wide).high < 1 < deviation_ratio(wide / 1.58, wide).high
    found = deviation_ratio(wide[::7] / 4, wide[::7])
    counts = found.to_decide(1.0)
    assert found.high > 1
    assert counts is not None
    assert 4 <= counts[0] <= 20


def test_models_of_different_texts_have_the_noise_of_both() -> None:
    """Unequal numbers of windows are not paired: the variances of independent means add up."""
    one, other = Estimate(drawn(0, 1, 40, (0, 1.0, 0))), Estimate(drawn(1, 1, 90, (0, 2.0, 0)))
    apart = (one - other).interval()
    errors = [float(each.observed.std(ddof=1) / math.sqrt(each.observed.size)) for each in (one, other)]
    assert apart.high - apart.effect == pytest.approx(1.98 * math.hypot(*errors), rel=0.02)


def limited(kind: str, rise: float, fall: float) -> str:
    """What a bound by another quantity says of a number that lies so far above it with one seed, below with two."""
    bound, own = (9.0, 12.0, 15.0), (9.0 + rise, 12.0 - fall, 15.0 - fall)
    numbers = {
        ("QuaRot", "7B", name): Number.of_seeds(values, (0, 1, 2), tuple(f"{name}{seed}" for seed in range(3)))
        for name, values in (("perplexity", own), ("normal", bound))
    }
    return judge({"value": {"row": "QuaRot", kind: "normal"}}, table(), numbers, PERPLEXITY, {}, ["7B"]).decision


def test_a_bound_that_is_another_quantity_of_the_row_is_compared_seed_by_seed() -> None:
    """Its own spread, which the number shares, does not count."""
    assert (limited("at_least", -1.0, 1.0), limited("at_most", -1.0, 1.0)) == ("contradicted", "holds")
    assert (limited("at_least", 1.0, -1.1), limited("at_most", 1.0, -1.1)) == ("holds", "contradicted")
    assert (limited("at_least", 1.0, 1.0), limited("at_most", 1.0, 1.0)) == ("undecided", "undecided")


def test_a_bound_that_is_not_known_is_named_and_the_papers_own_are_compared_as_they_are() -> None:
    check = {"value": {"row": "QuaRot", "at_least": "normal"}}
    numbers = {("QuaRot", "7B", "perplexity"): Number(52.2)}
    lacking = judge(check, table(), numbers, PERPLEXITY, None, ["7B"])
    assert (lacking.decision, lacking.missing) == ("not checkable", ("normal of QuaRot, 7B",))
    for bound, expected in ((67.6, "contradicted"), (50.0, "holds")):
        told = judge(check, table(), {**numbers, ("QuaRot", "7B", "normal"): Number(bound)}, PERPLEXITY, None, ["7B"])
        assert told.decision == expected
        assert told.findings[0].effect is not None
        assert told.findings[0].effect.compared == (52.2, bound)
