"""Rankings: effects are paired, chances are corrected by Holm, methods share a letter where they are not told apart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction.claims.ranking import Ranked, holm, ranked, with_less_text
from reproduction.claims.ranking_letters import compact_letters
from reproduction.frame.lines import as_csv
from reproduction.frame.values import Number, Values
from reproduction.render.figures.draw import figure_path
from reproduction.render.figures.rankings import clusters, draw_costs, numbers, write_numbers
from reproduction.render.figures.style import styled
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.rankings import letters
from reproduction.run.results import RunResult, write_result
from reproduction.sources import load_project, source_of
from reproduction.tables.project import Project
from reproduction.tables.rankings import Ranking
from rotquant.foundation.errors import ConfigError
from tests.helpers.models import tiny_model
from tests.helpers.reports import load, metrics, provenance, rows, table

SEEDS = (1, 2, 3, 4, 5)
NOISE = np.random.default_rng(20)


def measured(means: Mapping[str, Sequence[float]], common: float = 0.2, own: float = 0.002) -> Ranked:
    """Methods by their divergence on two models, of five seeds that differ alike for all of them."""
    shared = common * NOISE.standard_normal((2, len(SEEDS)))
    numbers = {}
    for row, by_model in means.items():
        for column, mean, noise in zip(("A", "B"), by_model, shared, strict=True):
            values = mean + noise + own * NOISE.standard_normal(len(SEEDS))
            numbers[row, column, "kl"] = Number.of_seeds(
                tuple(values), SEEDS, tuple(f"{row}{column}{s}" for s in SEEDS)
            )
    return ranked(Values(numbers, {}), {}, list(means), ["A", "B"], "Second")


def test_pairs_tell_apart_what_unpaired_noise_hides() -> None:
    found = measured({"Best": (1.0, 2.0), "Second": (1.1, 2.1), "Third": (1.3, 2.3)})
    assert found.rows == ["Best", "Second", "Third"]
    assert found.best == ["Best"]
    assert [found.standings[row, "A"].groups for row in found.rows] == [(0,), (1,), (2,)]
    effect = found.standings["Best", "A"].effect
    assert effect is not None
    assert effect.low < 100 * (1.0 - 1.1) / 1.1 < effect.high < 0
    assert found.standings["Second", "A"].effect is None
    assert (found.seeds, found.models) == (1.0, 1.0)
    assert found.ranks == {"Best": [1] * 10, "Second": [2] * 10, "Third": [3] * 10}


def test_what_is_not_told_apart_is_one_group_and_another_order_lowers_the_agreement() -> None:
    found = measured({"Best": (1.0, 1.0), "Second": (1.0, 1.0), "Far": (3.0, 3.0)}, own=0.05)
    assert {found.standings[row, "A"].groups for row in ("Best", "Second")} == {(0,)}
    assert found.standings["Far", "A"].groups == (1,)
    assert set(found.best) == {"Best", "Second"}
    turned = measured({"One": (1.0, 3.0), "Second": (2.0, 2.0), "Three": (3.0, 1.0)})
    assert turned.models == -1.0
    assert turned.seeds == 1.0
    assert turned.best == []


def test_rows_without_a_number_are_left_out_and_one_seed_without_windows_has_no_chance() -> None:
    numbers = {(row, "A", "kl"): Number.of_seeds((value,), (1,), (row,)) for row, value in (("One", 1.0), ("Two", 2.0))}
    numbers["Broken", "A", "kl"] = Number.of_seeds((float("nan"),), (1,), ("Broken",))
    found = ranked(Values(numbers, {}), {}, ["One", "Two", "Broken", "Absent"], ["A"], "Two")
    assert found.left == ["Broken", "Absent"]
    assert found.standings["One", "A"].adjusted is None
    assert [found.standings[row, "A"].groups for row in found.rows] == [(0,), (1,)]  # without noise all that differs
    assert (found.seeds, found.models) == (None, None)


def test_log_odds_of_tasks_are_paired_with_those_of_the_row_that_all_are_compared_with() -> None:
    noise = NOISE.standard_normal(len(SEEDS))
    numbers = {}
    for row, kl, odds in (("One", 1.0, -0.1), ("Two", 1.2, -0.3), ("No tasks", 1.1, None)):
        for name, mean in (("kl", kl), ("log_odds", odds)):
            if mean is not None:
                values = tuple(mean + noise + 1e-3 * NOISE.standard_normal(len(SEEDS)))
                numbers[row, "A", name] = Number.of_seeds(values, SEEDS, tuple(f"{row}{name}{s}" for s in SEEDS))
    found = ranked(Values(numbers, {}), {}, ["One", "Two", "No tasks"], ["A"], "Two")
    odds = found.standings["One", "A"].odds
    assert odds is not None
    assert 0.19 < odds.low < 0.2 < odds.high < 0.21
    assert found.standings["Two", "A"].odds is None
    assert found.standings["No tasks", "A"].odds is None


def test_less_text_changes_the_order_of_the_rows_that_both_have() -> None:
    whole = measured({"Best": (1.0, 2.0), "Second": (1.1, 2.2), "Third": (1.3, 2.4)}, common=0.0, own=1e-6)
    less = measured({"Third": (1.4, 4.8), "Second": (2.2, 4.4)}, common=0.0, own=1e-6)
    found = with_less_text(whole, less, 0.1)
    assert found.rises == pytest.approx({"Second": 100.0, "Third": (100 / 13 + 100) / 2}, rel=1e-3)
    assert found.tau == 0.0  # turned on the first model alone
    assert with_less_text(whole, measured({"Third": (1.4, 4.8)}), 0.1).tau is None


def maximal_sets(count: int, apart: set[tuple[int, int]]) -> list[tuple[int, ...]]:
    """All largest sets of rows of which no two are told apart, by trying every set."""
    every = [set(one) for size in range(count + 1) for one in combinations(range(count), size)]
    alike = [one for one in every if not any(pair in apart for pair in combinations(sorted(one), 2))]
    return sorted(tuple(sorted(one)) for one in alike if not any(one < other for other in alike))


@pytest.mark.parametrize("seed", range(60))
def test_two_rows_share_a_letter_exactly_if_they_are_not_told_apart(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, share = int(random.integers(1, 9)), random.random()
    apart = {pair for pair in combinations(range(count), 2) if random.random() < share}
    found = compact_letters(count, sorted(apart, key=lambda _: random.random()))
    for one, other in combinations(range(count), 2):
        assert bool({*found[one]} & {*found[other]}) != ((one, other) in apart)
    groups = [tuple(row for row in range(count) if number in found[row]) for number in range(1 + max(map(max, found)))]
    assert groups == sorted(groups)  # letters are in the order of the rows
    assert found == compact_letters(count, sorted(apart))  # whatever the order of the tests
    assert found[0][0] == 0
    known = maximal_sets(count, apart)
    assert set(groups) <= set(known)
    for left_out in groups:  # no letter could be left out
        shown = [one for one in groups if one != left_out]
        pairs = {pair for one in shown for pair in combinations(one, 2)}
        lone = {row for one in shown for row in one}
        assert not ({*combinations(left_out, 2)} <= pairs and {*left_out} <= lone)


def test_letters_of_many_rows_of_which_only_near_ones_are_alike_are_one_for_each_run_of_rows() -> None:
    count = 40
    apart = [(one, other) for one, other in combinations(range(count), 2) if other - one > 2]
    found = compact_letters(count, apart)
    assert found[0] == (0,)
    assert found[20] == (18, 19, 20)
    assert letters((0, 25, 26, 51, 52)) == "azAZ(53)"


def test_p_is_below_5_percent_exactly_for_those_that_share_no_letter_with_what_they_are_compared_with() -> None:
    told = set()
    for own in (0.05, 0.2, 0.6):
        found = measured({"Best": (1.0, 1.0), "Second": (1.2, 1.2), "Third": (1.5, 1.5), "Far": (4.0, 4.0)}, own=own)
        for (row, column), standing in found.standings.items():
            if row != "Second":
                shared = {*standing.groups} & {*found.standings["Second", column].groups}
                assert standing.adjusted is not None
                assert (standing.adjusted <= 0.05) == (not shared)
                told.add(bool(shared))
    assert told == {True, False}


def test_points_that_nearly_touch_have_their_numbers_together() -> None:
    chosen = np.random.default_rng(3)
    for _ in range(30):
        places = {number: tuple(chosen.random(2)) for number in range(1, 15)}
        near = chosen.uniform(0, 0.3)
        linked = {number: {number} for number in places}  # slow: join the sets of each near pair until nothing changes
        for _ in places:
            for one, other in combinations(places, 2):
                if np.hypot(*np.subtract(places[one], places[other])) < near:
                    both = linked[one] | linked[other]
                    linked |= dict.fromkeys(both, both)
        assert clusters(places, near) == sorted({tuple(sorted(one)): sorted(one) for one in linked.values()}.values())
    assert [numbers(one) for one in ([4], [1, 2], [5, 6, 7])] == ["4", "1, 2", "5-7"]
    assert numbers([1, 3, 4, 8, 9, 10]) == "1, 3, 4, 8-10"


@pytest.mark.parametrize("most", [200.0, 1000.0])
def test_numbers_of_points_and_of_ticks_do_not_meet(most: float) -> None:
    """Eleven methods of one size, as in the classes of real pages: some far apart, some on top of each other."""
    seconds = np.geomspace(5, most, 11)
    divergences = [0.35, 0.52, 0.55, 0.64, 0.727, 0.735, 0.75, 0.756, 0.758, 4.8, 6.8]
    for costs in ([4.05] * 9 + [4.5] * 2, [*seconds], [4.0470, 4.0589] * 5 + [4.0470]):
        points = dict(enumerate(zip(costs, divergences, strict=True), start=1))
        with styled() as plt:
            figure = plt.figure(figsize=(1.9, 2.6), layout="constrained")
            axis = figure.subplots()
            draw_costs(axis, points, "seconds")
            figure.draw_without_rendering()
            write_numbers(axis, points)
            ticks = [[text for text in one.get_ticklabels() if text.get_text()] for one in (axis.xaxis, axis.yaxis)]
            for texts in (axis.texts, *ticks):
                boxes = [text.get_window_extent() for text in texts]
                assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
            assert len(axis.texts) > 3


def test_holm_is_step_down() -> None:
    # Holm 1979: the smallest is compared at alpha / n, the next at alpha / (n - 1); no later one is below an earlier.
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


RANKING: dict[str, Any] = {
    "paper": "quarot",
    "title": "A paper",
    "tables": [
        {
            "id": "quarot",
            "title": "Methods",
            "section": "-",
            "caption": "All of them.",
            "figure": "Ranks.",
            "classes": [{"table": "quarot_table1", "name": "W4A4KV4", "against": "First"}],
        }
    ],
}


def project_of(root: Path, monkeypatch: pytest.MonkeyPatch, ranking: dict[str, Any] = RANKING) -> Project:
    """A project with a table of three methods on two models, and a ranking of it."""
    monkeypatch.chdir(root)
    slots = ["Llama-2-7B", "Llama-3-8B"]
    whole = table("table1", columns=slots, rows=rows("First", "Other"), published=None, claims=[])
    less = {**whole, "id": "quarot_less", "text_share": 0.5}
    load(root, monkeypatch, whole, less)
    (root / "workflow/papers/quarot/ranking.yaml").write_text(json.dumps(ranking))
    return load_project(root=root)


def computed(project: Project, name: str = "quarot_table1", first: float = 1.0) -> None:
    """Run files with the divergence of a hundred windows; Other is worse by a tenth of a nat in each."""
    shared = NOISE.random(100)
    for cell in project.cells(name):
        for run in cell.runs:
            windows = shared + {"First": first, "Other": 1.1}.get(cell.row, 0.0)
            made = {"bits_per_weight": {"total": 4.25}, "seconds": 3.0, "peak_bytes": 3 * 2**29}
            weights = provenance(**made) if run.weights_key else None
            found, samples = metrics(run, 8.0), {}
            if not run.recipe.is_baseline:
                found, samples = metrics(run, 10.0) | {"kl": float(windows.mean())}, {"kl": [*map(float, windows)]}
            result = RunResult(run, found, provenance(), weights, samples=samples)
            write_result(project.results.run(run.key), result)


def test_a_page_says_which_method_is_first_and_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_of(tmp_path, monkeypatch)
    chosen = project.one(Ranking, "quarot")
    source = source_of(chosen)
    planned = source.planned(project, chosen)
    assert set(planned["runs"]) == {run.key for cell in project.cells("quarot_table1") for run in cell.runs}
    computed(project)
    collected = source.collect(project, chosen)
    page = markdown(source.report(project, chosen, collected)).replace("\u00a0", " ")
    assert "| [W4A4KV4](quarot_table1.md) | First | First |" in page
    line = next(line for line in page.splitlines() if line.startswith("| Other |"))
    assert "p < .001 | b |" in line
    assert "Llama-2-7B<br>here: small<br>KL, nats" in page
    assert 'Methods of a class that share a letter in the column "group" are not told apart at 5 %' in page
    assert "| 4.25 | 3 | 1.50 |" in line
    frame = source.frame(collected)
    effects = frame[(frame["row"] == "Other") & (frame["quantity"] == "kl")]["ratio"]
    assert ((effects > 5) & (effects < 10)).all()
    assert as_csv(frame).count("First") == 7  # both slots are one checkpoint here
    assert [*frame[frame["quantity"] == "group"]["text"]] == ["a", "b"]
    source.draw(project, chosen, collected, tmp_path / figure_path("quarot"))
    drawn = (tmp_path / figure_path("quarot")).read_text()
    assert "<!-- rank on Llama-2-7B (here: small) -->" in drawn


def test_a_method_that_lacks_seeds_is_not_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one seed the noise of a random rotation would be that of windows alone, far too small."""
    project = project_of(tmp_path, monkeypatch)
    computed(project)
    complete = project.cells("quarot_table1")
    one = [replace(cell, runs=cell.runs[:1]) if cell.row == "Other" else cell for cell in complete]
    monkeypatch.setattr(Project, "cells", lambda *_: tuple(one))
    chosen = project.one(Ranking, "quarot")
    page = markdown(source_of(chosen).report(project, chosen, source_of(chosen).collect(project, chosen)))
    assert "not ranked, since some of their seeds are not computed: Other." in page
    assert "| First |" in page
    assert "| Other |" not in page


def test_bits_of_a_class_of_the_cache_alone_are_those_of_a_cached_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {
        "weights": None,
        "activations": None,
        "rotation": None,
        "values": {"granularity": "group", "group_size": 4},
    }
    others = [{"name": "Other", "method": "quarot-rtn", "recipe": alone}]
    (fields,) = RANKING["tables"]
    classes = [{**fields["classes"][0], "name": "KV4", "against": "Other"}]
    monkeypatch.chdir(tmp_path)
    columns = ["Llama-2-7B"]
    made = table("table1", columns=columns, rows=[*rows("First")[:1], *others], published=None, claims=[])
    load(tmp_path, monkeypatch, made)
    (tmp_path / "workflow/papers/quarot/ranking.yaml").write_text(
        json.dumps({**RANKING, "tables": [{**fields, "classes": classes}]})
    )
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "models/small/config.json").write_text(tiny_model(hidden_size=64, num_heads=8).config.to_json_string())
    project = load_project(root=tmp_path)
    computed(project)
    chosen = project.one(Ranking, "quarot")
    source = source_of(chosen)
    (found,) = source.collect(project, chosen)
    assert found.stored == {"Other": 4 + (32 / 8 + 32 / 4) / 2}
    page = markdown(source.report(project, chosen, [found])).replace("\u00a0", " ")
    assert "| 10.00 |" in next(line for line in page.splitlines() if line.startswith("| Other |"))


def test_a_class_with_less_text_says_how_the_order_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fields,) = RANKING["tables"]
    classes = [{**fields["classes"][0], "less": "quarot_less"}]
    project = project_of(tmp_path, monkeypatch, {**RANKING, "tables": [{**fields, "classes": classes}]})
    whole, less = (project.cells(name) for name in ("quarot_table1", "quarot_less"))
    texts = {cell.runs[0].recipe.calibration.samples for cell in whole if cell.runs[0].recipe.calibration}
    assert {cell.runs[0].recipe.calibration.samples for cell in less if cell.runs[0].recipe.calibration} == {
        max(1, round(samples / 2)) for samples in texts
    }
    chosen = project.one(Ranking, "quarot")
    source = source_of(chosen)
    assert {run.key for cell in less for run in cell.runs} <= set(source.planned(project, chosen)["runs"])
    computed(project)
    computed(project, "quarot_less", first=2.0)
    collected = source.collect(project, chosen)
    page = markdown(source.report(project, chosen, collected)).replace("\u00a0", " ")
    assert "KL with 0.5 of the text, %" in page
    assert "| [W4A4KV4](quarot_table1.md) | First | First | 1.00 | - | -1.00 |" in page
    assert set(source.frame(collected)["quantity"]) >= {"memory", "less_text"}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("table", "quarot_table2", "no table of perplexity 'quarot_table2'"),
        ("less", "quarot_table2", "no table of perplexity 'quarot_table2'"),
        ("against", "Firts", "quarot_table1 computes no row 'Firts'; nearest: First"),
    ],
)
def test_a_class_that_does_not_exist_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: str, sentence: str
) -> None:
    (fields,) = RANKING["tables"]
    wrong = {**RANKING, "tables": [{**fields, "classes": [{**fields["classes"][0], field: value}]}]}
    with pytest.raises(ConfigError, match=sentence):
        project_of(tmp_path, monkeypatch, wrong)
