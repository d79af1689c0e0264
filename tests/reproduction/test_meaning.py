"""What a page means: each rule on made-up numbers, and for every page of the papers sentences that can be read."""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduction.claims.claims import Answer, Outcome, Verdict, judge, outcomes
from reproduction.claims.estimates import Interval
from reproduction.claims.findings import Finding
from reproduction.claims.widths import Course, Line
from reproduction.frame import values as collected
from reproduction.frame.speed import read_numbers
from reproduction.frame.values import Number, Place, Text, Values, printed, printed_texts
from reproduction.render.figures import draw as figures
from reproduction.render.html.pages import render_pages
from reproduction.render.meaning.pages import Words, of_claims
from reproduction.render.meaning.sayings import Saying, Teller, sayings
from reproduction.render.meaning.tables import meaning_of, of_effects
from reproduction.render.meaning.words import EffectUnit, clause, told
from reproduction.render.pages.benchmarks import speed_report
from reproduction.render.pages.recipes import settings_report
from reproduction.render.pages.runs import runs_report
from reproduction.render.pages.verdicts import claims_of
from reproduction.run.results import table_path
from reproduction.scoreboard import page as html
from reproduction.tables.checks import Claim, headline
from reproduction.tables.project import Project
from reproduction.tables.quantities import KL, MAGNITUDES, PERPLEXITY, Quantity
from reproduction.tables.settings import SettingsTable
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.tables.tables import RunTable, WidthEffect
from rotquant.foundation.errors import ConfigError
from tests.helpers.project import TABLES
from tests.helpers.project import shipped_project as project
from tests.helpers.reports import compute, every_kind, load, page, table

BETTER: dict[str, Any] = {"mechanism": {"better": {"row": "Ours", "than": ["Theirs"]}}}
PAPER = {"Base": 5.0, "Ours": 6.0, "Theirs": 8.0, "Third": 7.0}
WIDE = "The paper says that ours is better"


def made(*claims: dict[str, Any], columns: tuple[str, ...] = ("7B",)) -> RunTable:
    """A table of four rows."""
    return RunTable.model_validate(
        {
            **dict.fromkeys(("paper", "paper_title", "title", "section", "caption"), "-"),
            "id": "quarot_table1",
            "metrics": [{"kind": "perplexity"}],
            "columns": columns,
            "baseline": "Base",
            "rows": [{"name": row, "method": "rtn"} for row in PAPER],
            "claims": [{"section": "-", **claim} for claim in claims],
        }
    )


def seeds(mean: float, spread: float = 0.01) -> tuple[float, ...]:
    return tuple(mean + spread * step for step in (-1.0, 0.0, 1.0))


def numbers(quantity: Quantity, **rows: float | tuple[float, ...]) -> dict[Place, Number]:
    """A number for each row and column 7B, with seeds where a row has several values."""
    found = {}
    for row, given in rows.items():
        values = given if isinstance(given, tuple) else (given,)
        found[row, "7B", quantity.name] = Number.of_seeds(values, (0, 1, 2)[: len(values)], tuple(map(str, values)))
    return found


def decided(
    ours: Mapping[str, float | tuple[float, ...]],
    *claims: dict[str, Any],
    quantity: Quantity = PERPLEXITY,
    papers: dict[str, float] = PAPER,
    finer: Mapping[str, float | tuple[float, ...]] | None = None,
    own: bool = False,
    experiment: Verdict | None = None,
) -> list[Outcome]:
    """Claims decided on made-up numbers of stand-ins, or of the paper's `own` models; `finer`: on KL divergence."""
    of, given = made(*claims), numbers(quantity, **ours)
    printed_there = {place: Number(one.mean) for place, one in numbers(quantity, **papers).items()}
    found = []
    for claim in of.claims:
        answers = {}
        for about, check in claim.checks.items():
            there = judge(check, of, printed_there, quantity)
            here = judge(check, of, given, quantity, {})
            if finer is not None and about == "mechanism":
                decides = judge(check, of, numbers(KL, **finer), KL, {})
                answers[about] = Answer(decides, there, on=KL, by=quantity, second=here)
            else:
                answers[about] = Answer(here, there, about == "mechanism" or own)
        found.append(Outcome(claim, answers, experiment))
    return found


def meaning(found: list[Outcome], quantity: Quantity = PERPLEXITY, words: Words | None = None) -> list[str]:
    unit = EffectUnit.of(quantity)

    def say(outcome: Outcome) -> Iterator[Saying]:
        return sayings(outcome, Teller(lambda finding: told(finding, unit), quantity))

    return of_claims(found, say, words or Words(where="on the stand-ins"))


def claim(text: str = "Ours is better.", /, **fields: Any) -> dict[str, Any]:
    return {"text": text, **(fields or BETTER)}


def test_a_headline_that_holds_has_our_number_with_its_interval_and_the_papers_in_its_unit() -> None:
    first, last = meaning(decided({"Ours": seeds(10.0), "Theirs": seeds(12.0, 0.05)}, claim()))
    assert first == (
        f"{WIDE}, and on the stand-ins it holds: a gain of 2.00 [1.90, 2.10] in perplexity (10.00 against 12.00), "
        "where the paper has a gain of 2.00 (6.00 against 8.00)."
    )
    assert last == "Nothing that can be tested here speaks against the paper."


def test_of_several_comparisons_the_one_nearest_to_the_border_is_shown() -> None:
    both: dict[str, Any] = {"mechanism": {"better": {"row": "Ours", "than": ["Theirs", "Third"]}}}
    first, _ = meaning(decided({"Ours": 10.0, "Theirs": seeds(12.0), "Third": seeds(10.5)}, claim(**both)))
    assert "it holds in both comparisons, closest for 7B against Third: a gain of 0.50 [0.48, 0.52]" in first
    assert first.endswith("where the paper has a gain of 1.00 (6.00 against 7.00).")
    first, _ = meaning(decided({"Ours": 10.0, "Theirs": seeds(9.0), "Third": seeds(10.5)}, claim(**both)))
    assert "it does not hold in 1 of 2 comparisons, least of all for 7B against Theirs: a loss of 1.00" in first
    first, _ = meaning(decided({"Ours": 10.0, "Theirs": seeds(12.0), "Third": seeds(10.0, 0.1)}, claim(**both)))
    assert "it is undecided, as 1 of 2 comparisons holds and 7B against Third is open: a gain of 0.00" in first


def test_an_undecided_headline_says_what_would_decide_it() -> None:
    first, last = meaning(decided({"Ours": seeds(10.0), "Theirs": seeds(10.1, 0.2)}, claim()))
    assert re.search(
        r"but on the stand-ins it is undecided: a gain of 0.1 \[-0.37, 0.57\] .*, which 17 seeds would", first
    )
    assert "; the paper has a gain of 2.00" in first
    assert last == "Nothing that can be tested here speaks against the paper."
    (first,) = meaning(decided({"Ours": seeds(10.0)[:1], "Theirs": 12.0}, claim()))
    assert "cannot be checked here" in first  # one run, and no windows


CAUSE = {"cause": "Theirs clips; without clips it is worse", "check": {"better": {"row": "Base", "than": ["Third"]}}}


@pytest.mark.parametrize(
    ("tested", "said"),
    [
        (
            {"Base": seeds(1.0), "Third": seeds(2.0)},
            "the tested cause, that {}, is supported by this table (7B: a gain",
        ),
        (
            {"Base": seeds(2.0), "Third": seeds(1.0)},
            "cause unknown, as this table speaks against the tested one, that {} (7B",
        ),
        ({"Base": seeds(1.0, 0.5), "Third": seeds(1.1)}, "cause unknown, as this table leaves open whether {} (7B"),
        ({}, "cause unknown, as its test in this table is not computed."),
    ],
)
def test_what_does_not_hold_ends_in_what_its_experiment_found(tested: dict[str, Any], said: str) -> None:
    asked = claim(**BETTER, experiment=CAUSE)
    verdict = judge(CAUSE["check"], made(asked), numbers(PERPLEXITY, **tested), PERPLEXITY, {})
    found = decided({"Ours": seeds(12.0, 0.03), "Theirs": seeds(10.0)}, asked, experiment=verdict)
    first, last = meaning(found)
    assert (
        "but on the stand-ins it does not hold: a loss of 2.00 [1.95, 2.05] in perplexity (12.00 against 10.00)"
        in first
    )
    assert last.startswith("Why the first does not hold: " + said.format("theirs clips, and without clips it is worse"))


def test_without_an_experiment_the_cause_is_the_authors_or_unknown() -> None:
    ours: dict[str, Any] = {"Ours": seeds(12.0), "Theirs": seeds(10.0)}
    assert (
        meaning(decided(ours, claim()))[-1] == "Why the first does not hold: cause unknown, as no experiment tests one."
    )
    because = claim(**BETTER, because="Here the model is small")
    found = decided(ours, because)
    assert meaning(found)[-1] == "Why the first does not hold: here the model is small."
    assert claims_of(found, "Claims").lines[0].cause == "Here the model is small."
    tested = claim(**BETTER, because="Here the model is small", experiment=CAUSE)
    assert meaning(decided(ours, tested))[-1].endswith("here the model is small.")
    with pytest.raises(ValueError, match="because"):
        made(claim(**BETTER, because="A full stop is the page's."))


def test_the_second_sentence_counts_what_else_holds_or_is_open_and_shows_the_clearest() -> None:
    ours: dict[str, Any] = {"Base": seeds(5.0), "Ours": seeds(10.0), "Theirs": seeds(12.0), "Third": seeds(10.05, 0.1)}
    others = [
        claim("Base is better than theirs.", mechanism={"better": {"row": "Base", "than": ["Theirs"]}}),
        claim("Base is better than ours.", mechanism={"better": {"row": "Base", "than": ["Ours"]}}),
        claim("Ours is better than the third.", mechanism={"better": {"row": "Ours", "than": ["Third"]}}),
    ]
    _, second, _ = meaning(decided(ours, claim(), *others))
    assert second.startswith("Of 3 further claims 2 hold, most clearly that base is better than ")
    assert ", and one is undecided, namely whether ours is better than the third, with a gain of 0.05 [" in second
    assert second.endswith(" seeds would decide.")
    _, second, _ = meaning(decided(ours, claim(), *others[:2]))
    assert second.startswith("Both further claims hold as well, most clearly that base")
    _, second, _ = meaning(decided(ours, claim(), others[0]))
    assert second.startswith("It also holds that base is better than theirs, with a gain of 7.00 in perplexity.")
    _, second, _ = meaning(decided(ours, claim(), others[2]))
    assert second.startswith("It is undecided whether ours")
    _, second, _ = meaning(decided({**ours, "Third": math.nan}, claim(), others[2]))
    assert second == "It cannot be checked whether ours is better than the third (Third, 7B: NaN, not finite)."


def test_what_is_at_chance_cannot_be_checked_and_says_so() -> None:
    first, second = decided(
        {"Ours": seeds(10.0), "Theirs": seeds(12.0), "Third": seeds(13.0)}, claim(), claim("It differs.")
    )
    reason = "an accuracy of 20.00 [15.00, 25.00], at chance: none is above 25.00, which knowing nothing scores"
    here = Answer(Verdict((Finding("Ours and Theirs, 7B", reason, "not checkable"),)), Verdict(()))
    _, said, _ = meaning([first, replace(second, answers={"mechanism": here})])
    assert said == f"It cannot be checked whether it differs (Ours and Theirs, 7B: {reason})."
    (said, *_) = meaning([replace(first, answers={"mechanism": here})])
    assert said == f"{WIDE}, which cannot be checked here (Ours and Theirs, 7B: {reason})."


def test_the_third_sentence_shows_the_clearest_of_what_does_not_hold_and_tells_all_causes() -> None:
    ours: dict[str, Any] = {"Ours": seeds(10.0), "Theirs": seeds(12.0), "Third": seeds(11.0, 0.03)}
    wrong = [
        claim("The third is better than ours.", mechanism={"better": {"row": "Third", "than": ["Ours"]}}),
        claim("Theirs is better than ours.", mechanism={"better": {"row": "Theirs", "than": ["Ours"]}}),
    ]
    *_, last = meaning(decided(ours, claim(), wrong[0]))
    assert last == (
        "It does not hold that the third is better than ours, with a loss of 1.00 [0.95, 1.05] in perplexity, where "
        "the paper has a loss of 1.00; the paper's own numbers contradict it too: cause unknown, as no experiment "
        "tests one."
    )
    *_, last = meaning(decided(ours, claim(), *wrong))
    assert last.startswith(
        "2 claims do not hold, above all that theirs is better than ours, with a loss of 2.00 in perplexity"
    )
    assert last.endswith("cause unknown, as no experiment tests one; the other's cause is unknown too.")
    *_, last = meaning(decided(ours, wrong[1], wrong[0]))
    assert last.startswith(
        "Why the first does not hold: cause unknown, as no experiment tests one; it does not hold either"
    )
    assert last.endswith("; its cause is unknown too.")
    known = {**wrong[0], "because": "It is small"}
    *_, last = meaning(decided(ours, claim(), wrong[1], known))
    assert last.endswith("; of 1 of the others a cause is given with the claim.")


def test_what_is_said_of_the_papers_models_is_shown_and_not_tested_on_stand_ins() -> None:
    bound: dict[str, Any] = {"no_worse": {"row": "Ours", "than": ["Base"], "points": 1.0}}
    ours: dict[str, Any] = {"Base": 10.0, "Ours": seeds(12.0), "Theirs": seeds(13.0)}
    asked = claim("Ours loses at most 1.00.", setting=bound)
    (only,) = meaning(decided(ours, asked))
    assert only == (
        "The paper says that ours loses at most 1.00, which stand-ins cannot show: they have a loss of 2.00 [1.98, "
        "2.02] in perplexity (from 10.00 to 12.00), the paper a loss of 1.00 (from 5.00 to 6.00)."
    )
    *_, last = meaning(decided(ours, claim(), asked))
    assert last == (
        "Nothing that can be tested here speaks against the paper; one statement about the paper's own models cannot "
        "be tested on stand-ins, namely that ours loses at most 1.00 (here a loss of 2.00 [1.98, 2.02] in perplexity, "
        "in the paper a loss of 1.00)."
    )
    assert "it does not hold: a loss of 2.00" in meaning(decided(ours, asked, own=True))[0]


def test_a_claim_of_a_direction_and_a_size_holds_in_its_direction() -> None:
    both = claim(**BETTER, setting={"better": {"row": "Ours", "than": ["Theirs"], "points": 5.0}})
    first, last = meaning(decided({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, both))
    assert "on the stand-ins its direction holds: a gain of 2.00" in first
    assert last == "Nothing that can be tested here speaks against the paper."
    *_, second, _ = meaning(decided({"Ours": seeds(10.0), "Theirs": seeds(12.0), "Third": 13.0}, claim(), both))
    assert second.startswith("It also holds in direction that ours")


def test_where_kl_decides_both_quantities_are_named_and_a_difference_is_said() -> None:
    far, near = {"Ours": seeds(10.0), "Theirs": seeds(12.0, 0.03)}, {"Ours": seeds(10.0), "Theirs": seeds(10.0, 0.3)}
    kl: dict[str, Any] = {"Ours": seeds(0.1, 0.001), "Theirs": seeds(0.2, 0.003)}
    first, _ = meaning(decided(far, claim(), finer=kl))
    assert "on the stand-ins it holds by KL divergence and by perplexity: a gain of 2.00 [1.95, 2.05] (10.00" in first
    first, _ = meaning(decided(near, claim(), finer=kl))
    assert (
        "it holds by KL divergence: a gain of 0.10 nats [0.095, 0.10] (0.10 against 0.20 nats), though perplexity "
        "leaves it open with a gain of 0.00 [-0.72, 0.72]; the paper has a gain of 2.00 (6.00 against 8.00)."
    ) in first
    against: dict[str, Any] = {"Ours": seeds(0.2, 0.001), "Theirs": seeds(0.1, 0.001)}
    first, last = meaning(decided(far, claim(), finer=against))
    assert "it is undecided by KL divergence: a loss of 0.10 nats" in first
    assert "though perplexity supports it with a gain of 2.00" in first
    assert last == "Nothing that can be tested here speaks against the paper."
    none: dict[str, Any] = {"Ours": seeds(0.1, 1e-6), "Theirs": seeds(0.102, 1e-6)}
    first, last = meaning(decided(near, claim(), finer=none))
    assert "it does not hold by KL divergence: a gain of 0.002 nats" in first
    assert "a difference of less than 5 % either way" in first
    assert "cause unknown" in last


def test_facts_are_not_judged_and_agree_with_the_numbers_or_not() -> None:
    limit: dict[str, Any] = {"value": {"row": "Ours", "at_most": 7.0}}
    small, large = (
        claim("Ours is small.", fact=limit),
        claim("Theirs is small.", fact={"value": {"row": "Theirs", "at_most": 7}}),
    )
    first, second = meaning(decided({"Ours": 3.0, "Theirs": 9.0}, small, large, quantity=MAGNITUDES[0]), MAGNITUDES[0])
    assert first == (
        "The paper says that ours is small, and the numbers here agree: 3.00 (max/median, at most 7 is asked), where "
        "the paper has 6.00."
    )
    assert second.startswith(
        "One statement does not agree with the numbers here, namely that theirs is small, with 9.00"
    )
    first, second = meaning(decided({"Ours": 9.0, "Theirs": 3.0}, small, large, quantity=MAGNITUDES[0]), MAGNITUDES[0])
    assert "which the numbers here do not show" in first
    assert second.startswith("The further statement agrees with the numbers here, namely that theirs is small")


def test_the_headline_is_the_first_claim_or_the_one_that_is_marked() -> None:
    third: dict[str, Any] = {"mechanism": {"better": {"row": "Ours", "than": ["Third"]}}}
    marked = claim("Ours beats the third.", **third, headline=True)
    ours: dict[str, Any] = {"Ours": seeds(10.0), "Theirs": seeds(12.0), "Third": seeds(11.0)}
    assert meaning(decided(ours, claim(), marked))[0].startswith("The paper says that ours beats the third")
    with pytest.raises(ValueError, match="at most one is the headline"):
        made({**claim(), "headline": True}, marked)
    assert headline(()) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Rotation helps.", "rotation helps"),
        ("QuaRot helps; users say so.", "QuaRot helps"),
        ("Atom helps.", "Atom helps"),
        ("A prefix helps.", "a prefix helps"),
        ("Fine-tuning helps.", "fine-tuning helps"),
        ("In 2-D, it helps.", "in 2-D, it helps"),
        ("Llama-2-7B has three.", "Llama-2-7B has three"),
        ("R4 matters.", "R4 matters"),
        ("W4A4 is fast.", "W4A4 is fast"),
    ],
)
def test_a_statement_becomes_a_clause(text: str, said: str) -> None:
    assert clause(text) == said


def test_effects_over_widths_go_towards_the_paper_or_away_from_it() -> None:
    def course(name: str, slope: float, half: float) -> Course:
        effect = WidthEffect(name=name, row="A", over="B", published=(6.0, 5.0), source="Table 1")
        rises = {str(width): Interval(40.0 - at, 0, 0) for at, width in enumerate((128, 256, 512))}
        return Course(
            effect, rises, {width: int(width) for width in rises}, 20.0, Line(0.3, slope, slope - half, slope + half)
        )

    first, second = of_effects([course("Groups", -0.02, 0.001), course("R4", 0.01, 0.1)])
    assert first == (
        "Of 2 effects one goes towards what the papers print as models become wider, none goes away from it, and one "
        "is undecided."
    )
    assert second.replace("\u00a0", " ") == (
        "The clearest is Groups, from +40.0 % at width 128 to +38.0 % at width 512, where the paper has +20.0 %."
    )
    assert of_effects([]) == []


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with every_kind(tmp_path_factory.mktemp("kinds")) as loaded:
        yield loaded


def said_of(project: Project, name: str) -> list[str]:
    chosen = project.table(name)
    return [*runs_report(project, chosen, *collected.collect(project, chosen)).meaning]


def test_a_page_without_claims_says_which_rows_are_best_and_worst(kinds: Project) -> None:
    (only,) = said_of(kinds, "quarot_table5")
    assert only.startswith("QuaRot has 11.05 in perplexity for 1.0 where Baseline has 10.00")
    best, worst = said_of(kinds, "quarot_switches")
    assert best.startswith(
        "Of 4 rows other than Baseline, QuaRot is best in both columns, with 11.05 in perplexity for Llama-2-7B"
    )
    assert worst.startswith("One is worst in both columns, with 12.05")
    assert said_of(kinds, "quarot_figure1") == []  # of a largest magnitude no row is best


def test_a_page_opens_with_what_it_means_before_any_caveat_and_so_does_the_index(kinds: Project) -> None:
    text = page(kinds)
    sentence = said_of(kinds, "quarot_table1")[0]
    places = [
        text.index(part) for part in ("A small table.", "## What it means", sentence, "## How to read it", "> All")
    ]
    assert places == sorted(places)
    assert text.index("## How to read it") < text.index("## Values")
    assert sentence in text.partition("<details>")[0]  # which MLflow shows as a run's overview
    without = page(kinds, "quarot_figure1")
    assert "What it means" not in without
    assert "How to read it" not in without
    chosen = kinds.table("quarot_table1")
    values, _ = collected.collect(kinds, chosen)
    collected.write_values(kinds.root, chosen.id, values)
    figures.draw(kinds, chosen, values, kinds.root / figures.figure_path(chosen.id))
    (kinds.root / f"reports/{chosen.id}.md").write_text(text, encoding="utf-8")
    assert sentence in html.index(kinds)
    assert f"<li>{sentence}</li>" in render_pages(kinds)[f"{chosen.id}.html"]
    (kinds.root / table_path(chosen.id)).unlink()


def test_a_page_without_claims_says_which_causes_of_others_it_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asking(cause: str, row: str, than: str) -> dict[str, Any]:
        check = {"better": {"row": row, "than": [than]}}
        return {
            **TABLES["tables"][0]["claims"][0],
            "text": cause,
            "experiment": {"cause": cause, "target": "quarot_groups", "check": check},
        }

    found = [asking("Rotation costs", "Baseline", "QuaRot"), asking("Rotation helps", "QuaRot", "Baseline")]
    groups = table("groups", claims=[], published=None)
    project = load(tmp_path, monkeypatch, table("table1", claims=found), groups)
    compute(project, "quarot_groups", QuaRot=15.0)
    first, second = said_of(project, "quarot_groups")
    assert first.startswith(
        "This page tests 2 causes that other pages give where a claim does not hold: one is supported, namely"
    )
    assert "that rotation costs, with a gain of 5.05" in first
    assert second.startswith("One is contradicted, namely that rotation helps, with a loss of 5.05")
    (tmp_path / "one").mkdir()
    project = load(tmp_path / "one", monkeypatch, table("table1", claims=found[1:]), groups)
    compute(project, "quarot_groups", QuaRot=15.0)
    (only,) = said_of(project, "quarot_groups")
    assert "that rotation helps, and contradicts it with a loss of 5.05" in only


def invented(found: Project, of: RunTable, salt: int) -> Values:
    """Numbers of ours near the paper's where it prints some, with noise between none and more than rows differ by."""
    papers, ours, texts = printed(found, of), {}, {}
    for cell in found.cells(of.id):
        runs = tuple(run.key for run in cell.runs)
        for quantity in (*cell.quantities, *cell.endpoints):
            place = (cell.row, cell.column, quantity.name)
            chosen = random.Random(hashlib.sha256(repr((salt, place)).encode()).hexdigest())
            if quantity.text:
                texts[place] = Text(tuple("." for _ in runs), tuple(run.seed for run in cell.runs), runs)
                continue
            paper = papers.get(place)
            mean = paper.mean if paper and math.isfinite(paper.mean) else chosen.uniform(5, 50)
            noise = (0.001, 0.02, 0.3)[salt] * (chosen.uniform(0, 1) if len(runs) > 1 else 0)
            values = tuple(mean * (1 + chosen.gauss(0, 0.05) + chosen.gauss(0, noise)) for _ in runs)
            ours[place] = Number.of_seeds(values, tuple(run.seed for run in cell.runs), runs)
    return Values(ours, papers, texts, printed_texts(found, of))


def readable(sentences: list[str]) -> None:
    assert len(sentences) <= 3
    for sentence in sentences:
        assert re.fullmatch(r"[A-Z0-9].*\.", sentence), sentence
        assert not re.search(r"None|  | [,;.:]|\(\)|\[\]|\.\.|,,|undefined|nan", sentence), sentence
        assert all(sentence.count(left) == sentence.count(right) for left, right in ("()", "[]")), sentence
        assert len(sentence.split()) < 130, sentence


@pytest.mark.parametrize(("name", "salt"), [*itertools.product(project().of(RunTable), range(3))])
def test_every_page_of_accuracy_has_sentences_whatever_its_numbers(name: str, salt: int) -> None:
    of = project().table(name)
    values = invented(project(), of, salt)
    found = outcomes(project(), of, values, {})
    said = meaning_of(project(), of, values, {}, found)
    readable(said)
    judged = [saying for outcome in found for saying in sayings(outcome, Teller(told)) if saying.about != "fact"]
    assert said or all(quantity.key in ("peak_ratio",) for quantity in project().quantities(of)[:1])
    if any(one.here == "not reproduced" for one in judged):
        assert re.search("cause", said[-1]), said
    for line in claims_of(found, "Claims").lines:
        denied = any(verdict.here == "not reproduced" for _, verdict in line.verdicts)
        assert bool(line.cause) == denied


@pytest.mark.parametrize("name", list(project().of(SpeedTable)))
def test_every_page_of_speed_has_sentences(name: str) -> None:
    table = project().one(SpeedTable, name)
    said = [*speed_report(project(), table, read_numbers(project(), table)).meaning]
    assert said
    readable(said)


def test_a_table_that_was_not_measured_means_nothing_yet() -> None:
    of = project().table("quarot_table14")
    lacking = replace(project(), root=Path("/nowhere"))
    table = of.model_copy(update={"published": None})
    assert speed_report(lacking, table, read_numbers(lacking, table)).meaning == []


@pytest.mark.parametrize("name", list(project().of(SettingsTable)))
def test_every_page_of_settings_has_sentences(name: str) -> None:
    found = project().table(name)
    said = [*settings_report(found).meaning]
    readable(said)
    differs = [cell for cell in found.cells if cell.same is False]
    assert (len(said) == 3) == bool(differs and any(claim.fact.told for claim in found.claims))
    if differs:
        assert str(differs[0].published) in said[-1]


def test_texts_of_claims_stand_alone() -> None:
    """A sentence shows a claim without those before it."""
    leaning = re.compile(r"(So|The same|There|It|They|That|Nor|And|These|Those|Its|Their|This)\b(?! are no| exist)")
    found = [(of.id, one.text) for of in project().tables.values() for one in of.claims if leaning.match(one.text)]
    assert not found


def test_because_and_headline_are_read_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TABLES["tables"][0]["claims"][0]
    with pytest.raises(ConfigError, match="at most one is the headline"):
        load(tmp_path, monkeypatch, table("table1", claims=[{**first, "headline": True}] * 2))
    assert Claim.model_validate({**first, "because": "It is small"}).because == "It is small"
