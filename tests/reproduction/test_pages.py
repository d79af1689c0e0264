"""The first screen of a page: what it shows, whether it agrees, why not, the best numbers; all else is folded."""

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduction.claims.claims import Answer, Outcome, judge, outcomes
from reproduction.claims.findings import Effect, Finding, Region
from reproduction.claims.ranking import Class, LessText, ranked
from reproduction.frame import values as collected
from reproduction.frame.speed import read_numbers
from reproduction.frame.values import Number, Place, Text, Values, printed, printed_texts
from reproduction.render.figures import draw as figures
from reproduction.render.html.pages import render_pages
from reproduction.render.pages import comparisons as words
from reproduction.render.pages.benchmarks import speed_report
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.model import ClaimLine
from reproduction.render.pages.rankings import ranking_report
from reproduction.render.pages.recipes import settings_report
from reproduction.render.pages.runs import runs_report
from reproduction.render.pages.verdicts import claims_of
from reproduction.scoreboard import page as html
from reproduction.tables.checks import Claim, headline
from reproduction.tables.project import Project
from reproduction.tables.quantities import KL, PERPLEXITY, Quantity
from reproduction.tables.rankings import MethodClass, Ranking
from reproduction.tables.settings import SettingsTable
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.tables.tables import RunTable
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import write_text
from tests.helpers.project import TABLES
from tests.helpers.project import shipped_project as project
from tests.helpers.reports import compute, every_kind, load, page, rows, table
from tests.helpers.sentences import long_sentences, sentences

BETTER: dict[str, Any] = {"mechanism": {"better": {"row": "Ours", "than": ["Theirs"]}}}
PAPER = {"Base": 5.0, "Ours": 6.0, "Theirs": 8.0, "Third": 7.0}


def made(*claims: dict[str, Any]) -> RunTable:
    """A table of four rows."""
    return RunTable.model_validate(
        {
            **dict.fromkeys(("paper", "paper_title", "title", "section", "caption"), "-"),
            "id": "quarot_table1",
            "metrics": [{"kind": "perplexity"}],
            "columns": ("7B",),
            "baseline": "Base",
            "rows": [{"name": row, "method": "rtn"} for row in PAPER],
            "claims": [{"section": "-", **claim} for claim in claims],
        }
    )


def seeds(mean: float, spread: float = 0.01) -> tuple[float, ...]:
    return tuple(mean + spread * step for step in (-1.0, 0.0, 1.0))


Given = Mapping[str, float | tuple[float, ...]]


def numbers(quantity: Quantity, given: Given) -> dict[Place, Number]:
    """A number for each row and column 7B, with seeds where a row has several values."""
    found = {}
    for row, one in given.items():
        values = one if isinstance(one, tuple) else (one,)
        found[row, "7B", quantity.name] = Number.of_seeds(values, (0, 1, 2)[: len(values)], tuple(map(str, values)))
    return found


def line(
    ours: Given, fields: dict[str, Any], finer: Given | None = None, own: bool = False, tested: Given | None = None
) -> ClaimLine:
    """A claim decided on made-up numbers of stand-ins, or of the paper's `own` models; finer: on KL divergence."""
    of = made({"text": "Ours is better.", **fields})
    claim, answers = of.claims[0], {}
    there = {place: Number(one.mean) for place, one in numbers(PERPLEXITY, PAPER).items()}
    for about, check in claim.checks.items():
        papers, here = judge(check, of, there, PERPLEXITY), judge(check, of, numbers(PERPLEXITY, ours), PERPLEXITY, {})
        decides = None if finer is None else judge(check, of, numbers(KL, finer), KL, {})
        answers[about] = (
            Answer(here, papers, about == "mechanism" or own)
            if decides is None or about != "mechanism"
            else Answer(decides, papers, on=KL, second=here)
        )
    experiment = claim.experiment
    verdict = experiment and judge(experiment.check, of, numbers(PERPLEXITY, tested or {}), PERPLEXITY, {})
    return claims_of([Outcome(claim, answers, verdict or None)], "Claims").lines[0]


def test_a_claim_that_agrees_has_our_numbers_and_the_papers() -> None:
    found = line({"Ours": seeds(10.0), "Theirs": seeds(12.0, 0.05)}, BETTER)
    assert (found.word, found.finer, found.here, found.paper) == (
        "agrees",
        None,
        "10.00 against 12.00",
        "6.00 against 8.00",
    )
    (comparison,) = found.checks[0].comparisons
    assert comparison == ("7B", "10.00 against 12.00", "gain 2.00 [1.90, 2.10]", "holds", "6.00 against 8.00")


def test_of_several_comparisons_the_one_nearest_to_the_border_is_shown_or_farthest_beyond() -> None:
    both: dict[str, Any] = {"mechanism": {"better": {"row": "Ours", "than": ["Theirs", "Third"]}}}
    found = line({"Ours": 10.0, "Theirs": seeds(12.0), "Third": seeds(10.5)}, both)
    assert (found.here, found.paper) == ("7B against Third: 10.00 against 10.50", "6.00 against 7.00")
    found = line({"Ours": 10.0, "Theirs": seeds(9.0), "Third": seeds(10.5)}, both)
    assert (found.word, found.here) == ("disagrees", "7B against Theirs: 10.00 against 9.00")


@pytest.mark.parametrize(
    ("ours", "finer", "fields", "word", "verdict"),
    [
        ({"Ours": seeds(12.0), "Theirs": seeds(10.0)}, None, BETTER, "disagrees", None),
        ({"Ours": seeds(10.0), "Theirs": seeds(10.1, 0.2)}, None, BETTER, "not tested here", "undecided"),
        ({"Ours": math.nan, "Theirs": seeds(10.1)}, None, BETTER, "not tested here", "not checkable"),
        ({"Ours": 10.0, "Theirs": 12.0}, {"Ours": seeds(0.1, 1e-6), "Theirs": seeds(0.102, 1e-6)}, BETTER,
         "disagrees", "no effect"),
        ({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, {"Ours": seeds(0.2, 1e-3), "Theirs": seeds(0.1, 1e-3)}, BETTER,
         "not tested here", "endpoints disagree"),
        ({"Ours": seeds(12.0), "Base": 10.0}, None,
         {"setting": {"no_worse": {"row": "Ours", "than": ["Base"], "points": 1.0}}}, "not tested here", None),
    ],
)  # fmt: skip
def test_a_reader_has_three_words_and_beside_them_the_verdict(
    ours: Given, finer: Given | None, fields: dict[str, Any], word: str, verdict: str | None
) -> None:
    found = line(ours, fields, finer)
    assert (found.word, found.finer) == (word, verdict)


def test_a_direction_agrees_though_its_size_is_not_tested_and_a_size_is_judged_on_the_papers_models() -> None:
    both = {**BETTER, "setting": {"better": {"row": "Ours", "than": ["Theirs"], "points": 5.0}}}
    here = line({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, both)
    assert (here.word, here.finer) == ("agrees", "in direction")
    papers = line({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, both, own=True)
    assert (papers.word, papers.finer) == ("disagrees", None)


def test_where_quantities_say_the_same_the_papers_is_shown_else_both() -> None:
    kl: Given = {"Ours": seeds(0.1, 0.001), "Theirs": seeds(0.2, 0.003)}
    assert line({"Ours": seeds(10.0), "Theirs": seeds(12.0, 0.03)}, BETTER, kl).here == "10.00 against 12.00"
    found = line({"Ours": seeds(10.0), "Theirs": seeds(10.0, 0.3)}, BETTER, kl)
    assert found.here == "KL divergence 0.10 against 0.20 nats; 10.00 against 10.00"
    assert [(check.on, check.decides) for check in found.checks] == [("KL divergence", True), ("perplexity", False)]


CAUSE = {"cause": "Theirs clips; without clips it is worse", "check": {"better": {"row": "Base", "than": ["Third"]}}}


@pytest.mark.parametrize(
    ("tested", "said"),
    [
        ({"Base": seeds(1.0), "Third": seeds(2.0)}, "supports it (7B: 1.00 against 2.00)."),
        ({"Base": seeds(2.0), "Third": seeds(1.0)}, "speaks against it (7B: 2.00 against 1.00). Cause unknown."),
        ({"Base": seeds(1.0, 0.5), "Third": seeds(1.1)}, "leaves it open (7B: 1.00 against 1.10). Cause unknown."),
        (None, "Cause unknown: this table would test one and is not computed."),
    ],
)
def test_why_not_is_what_an_experiment_supports_and_all_else_is_folded(tested: Given | None, said: str) -> None:
    found = line({"Ours": seeds(12.0), "Theirs": seeds(10.0)}, {**BETTER, "experiment": CAUSE}, tested=tested)
    assert said in found.cause
    assert found.why == (f"{CAUSE['cause']} (this table)" if "supports" in said else "")


def test_without_an_experiment_the_cause_is_the_authors_or_unknown() -> None:
    ours: Given = {"Ours": seeds(12.0), "Theirs": seeds(10.0)}
    assert line(ours, BETTER).cause == "Cause unknown: no experiment tests one."
    because = {**BETTER, "because": "Here the model is small"}
    assert line(ours, because).cause == "Here the model is small."
    assert line({"Ours": seeds(9.0), "Theirs": seeds(10.0)}, because).cause == ""
    with pytest.raises(ValueError, match="because"):
        made({"text": "-", **BETTER, "because": "A full stop is the page's."})


def test_a_fact_is_not_judged_and_shown_first_where_nothing_is() -> None:
    fact = line({"Ours": seeds(9.0)}, {"fact": {"value": {"row": "Ours", "at_most": 7.0}}})
    assert (fact.judged, fact.word, fact.here, fact.paper) == (
        False,
        "disagrees",
        "9.00 (at most 7 asked)",
        "6.00",
    )
    judged = line({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, BETTER)
    claims = claims_of((), "Claims")
    assert replace(claims, lines=(fact, judged)).shown == (judged,)
    assert replace(claims, lines=(fact,)).shown == (fact,)


def test_the_headline_goes_first_and_what_is_not_tested_last() -> None:
    judged = line({"Ours": seeds(10.0), "Theirs": seeds(12.0)}, BETTER)
    claims = claims_of((), "Claims")
    lines = (
        replace(judged, number=1, word="not tested here"),
        replace(judged, number=2),
        replace(judged, number=3, headline=True),
        replace(judged, number=4, same_as=2),
    )
    assert [one.number for one in replace(claims, lines=lines).shown] == [3, 2, 1]
    many = tuple(replace(lines[0], number=number) for number in range(5, 14))
    assert [one.number for one in replace(claims, lines=(*lines, *many)).shown] == [3, 2]
    with pytest.raises(ValueError, match="at most one is the headline"):
        made({"text": "-", **BETTER, "headline": True}, {"text": "-", **BETTER, "headline": True})
    assert headline(()) is None


def effect(kind: Any, size: float, *compared: float, **more: Any) -> Finding:
    return Finding(
        "7B", "holds", Effect(kind, size, size, size, more.pop("region", Region()), compared=compared, **more)
    )


@pytest.mark.parametrize(
    ("finding", "quantity", "said"),
    [
        (effect("gain", 0.01, 0.04, 0.05, unit="nats"), KL, ("0.0400 against 0.0500 nats", "gain 0.01 nats", "")),
        (effect("loss", 0.0, 5.0, 5.0, region=Region(-1, 1)), PERPLEXITY, ("5.00 to 5.00", "loss 0.00", "within ±1")),
        (effect("apart", 1.0, 4, 3, unit="%", of="loss"), KL, ("loss 4.00 against 3.00 %", "difference 1.00 %", "")),
        (effect("ratio", 0.5, 1.0, 2.0, of="deviation"), PERPLEXITY, ("deviation 1.00 against 2.00", "ratio 0.50", "")),
        (effect("number", 1.042, region=Region(low=1.9), unit="x"), None, ("1.042x", "", "at least 1.9x")),
        (effect("number", 1.042, region=Region(low=1.0), unit="x"), None, ("1.042x", "", "")),
        (effect("gain", math.inf, 5.0, math.inf), PERPLEXITY, ("5.00 against Inf", "gain Inf", "")),
        (Finding("7B", "not checkable", reason="NaN, not finite"), PERPLEXITY, ("NaN, not finite", "", "")),
    ],
)  # fmt: skip
def test_a_comparison_is_printed_by_its_kind(
    finding: Finding, quantity: Quantity | None, said: tuple[str, ...]
) -> None:
    assert (words.numbers(finding, quantity), words.change(finding), words.asked(finding)) == said


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with every_kind(tmp_path_factory.mktemp("kinds")) as loaded:
        yield loaded


def test_the_first_screen_is_the_claims_the_values_and_the_figure_and_all_else_is_folded(kinds: Project) -> None:
    text = page(kinds)
    first, *_ = text.partition("<details>")
    parts = (
        "# QuaRot, Table 1: small",
        "A small table.",
        "✅ agrees: ",
        "| QuaRot | 11.05",
        "Upright",
        "figures/quarot_table1.svg",
    )
    places = [first.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>")
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert outside.rstrip() == first.rstrip()
    assert "run file" not in first.lower()
    for run in kinds.cells("quarot_table1")[0].runs:
        assert run.key not in text  # keys of runs are in the CSV
    chosen = kinds.one(RunTable, "quarot_table1")
    values, _ = collected.collect(kinds, chosen)
    figures.draw(kinds, chosen, values, kinds.root / figures.figure_path(chosen.id))
    write_text(kinds.root / f"reports/{chosen.id}.md", text)
    for shown in (html.index(kinds), render_pages(kinds)[f"{chosen.id}.html"]):
        assert "A small table." in shown
        assert "✓\u00a0agrees: " in shown or "✓ agrees: " in shown
        assert "<svg" in shown


def test_the_best_of_equal_bits_is_bold_and_full_precision_is_apart(kinds: Project) -> None:
    text = page(kinds, "quarot_switches")
    table_of = text[text.index("| Method |") :].split("\n\n")[0].splitlines()
    assert [row.split(" | ")[0] for row in table_of[2:]] == [
        "| Baseline",
        "| ",
        "| QuaRot",
        "| One",
        "| Two",
        "| Three",
    ]
    assert "| QuaRot | **11.05 ± 0.07** (*8.37*) | **11.05 ± 0.07** |" in table_of
    assert text.partition("<details>")[0].count("**") == 4


def test_rows_of_other_bits_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = rows("Four", "Four too", "Six")
    several[-1] = {"name": "Six", "method": "quarot", "recipe": {"activations": {"bits": 6}}}
    loaded = load(tmp_path, monkeypatch, table("table1", rows=several, claims=[], published=None, figure=None))
    values: dict[str, float] = {"Four": 12.0, "Four too": 11.0, "Six": 10.5}
    compute(loaded, "quarot_table1", **values)
    first = page(loaded).partition("<details>")[0]
    assert "| Four too | **11.05 ± 0.07** |" in first
    assert "| Six | 10.55 ± 0.07 |" in first


def test_a_page_without_claims_says_which_causes_of_others_it_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asking(cause: str, row: str, than: str) -> dict[str, Any]:
        asked = {"cause": cause, "target": "quarot_groups", "check": {"better": {"row": row, "than": [than]}}}
        return {**TABLES["tables"][0]["claims"][0], "text": cause, "experiment": asked}

    found = [asking("Rotation costs", "Baseline", "QuaRot"), asking("Rotation helps", "QuaRot", "Baseline")]
    groups = table("groups", claims=[], published=None)
    loaded = load(tmp_path, monkeypatch, table("table1", claims=found), groups)
    compute(loaded, "quarot_groups", QuaRot=15.0)
    first = page(loaded, "quarot_groups").partition("<details>")[0]
    assert "| Rotation costs. | ✅ supported: Llama-2-7B: 10.00 against 15.05 |" in first
    assert "| Rotation helps. | ❌ contradicted: Llama-2-7B: 15.05 against 10.00 |" in first


def invented_class(said: MethodClass) -> Class:
    """The rows of a table ranked by invented numbers."""
    of = project().one(RunTable, said.table)
    rows = [row.name for row in of.rows if row.name != of.baseline]
    found = ranked(invented(project(), of), {}, rows, project().columns(of), said.against)
    less = LessText(0.1, 1.0, dict.fromkeys(rows, 2.0)) if said.less else None
    return Class(said, found, dict.fromkeys(rows, 4.25), *(dict.fromkeys(rows, 1.0),) * 2, {}, less)


def invented(found: Project, of: RunTable) -> Values:
    """Numbers of ours near the paper's where it prints some, with noise between none and more than rows differ by."""
    papers, ours, texts = printed(found, of), {}, {}
    for cell in found.cells(of.id):
        runs = tuple(run.key for run in cell.runs)
        for quantity in (*cell.quantities, *cell.endpoints):
            place = (cell.row, cell.column, quantity.name)
            chosen = random.Random(hashlib.sha256(repr(place).encode()).hexdigest())
            if quantity.text:
                texts[place] = Text(tuple("." for _ in runs), tuple(run.seed for run in cell.runs), runs)
                continue
            paper = papers.get(place)
            mean = paper.mean if paper and math.isfinite(paper.mean) else chosen.uniform(5, 50)
            noise = 0.02 * (chosen.uniform(0, 1) if len(runs) > 1 else 0)
            values = tuple(mean * (1 + chosen.gauss(0, 0.05) + chosen.gauss(0, noise)) for _ in runs)
            ours[place] = Number.of_seeds(values, tuple(run.seed for run in cell.runs), runs)
    return Values(ours, papers, texts, printed_texts(found, of))


def readable(text: str) -> None:
    assert not long_sentences(text)
    for sentence in sentences(text):
        assert not re.search(r"\bNone\b|\(\)|\[\]|\.\.(?!\.)|,,|undefined", sentence), sentence


@pytest.mark.parametrize("name", list(project().tables))
def test_every_page_has_short_sentences_and_every_disagreement_a_cause_or_none(name: str) -> None:
    of = project().table(name)
    if isinstance(of, RunTable):
        values = invented(project(), of)
        report = runs_report(project(), of, values, {})
        for one in report.claims.lines:
            if report.claims.name != "Causes" and one.judged:
                assert bool(one.cause) == (one.word == "disagrees")
        assert len(outcomes(project(), of, values, {})) in (0, len(report.claims.lines))
    elif isinstance(of, SpeedTable):
        report = speed_report(project(), of, read_numbers(project(), of))
    elif isinstance(of, Ranking):
        report = ranking_report(project(), of, [*map(invented_class, of.classes)])
        assert [len(grid.labels) > 2 for grid in report.grids[1:]] == [True] * len(of.classes)
    else:
        assert isinstance(of, SettingsTable)
        report = settings_report(of)
    text = markdown(report)
    readable(text)
    assert "<summary>Provenance</summary>" in text


def test_a_table_that_was_not_measured_says_so() -> None:
    of = project().one(SpeedTable, "quarot_table14")
    lacking = replace(project(), root=Path("/nowhere"))
    report = speed_report(
        lacking,
        of.model_copy(update={"published": None}),
        read_numbers(lacking, of.model_copy(update={"published": None})),
    )
    assert {one.word for one in report.claims.lines} == {"not tested here"}
    assert "**Not measured yet:**" in report.reading


def test_texts_of_claims_stand_alone() -> None:
    """A page may show a claim without those before it."""
    leaning = re.compile(r"(So|The same|There|It|They|That|Nor|And|These|Those|Its|Their|This)\b(?! are no| exist)")
    found = [
        (of.id, one.text)
        for of in project().tables.values()
        for one in getattr(of, "claims", ())
        if leaning.match(one.text)
    ]
    assert not found


def test_because_and_headline_are_read_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TABLES["tables"][0]["claims"][0]
    with pytest.raises(ConfigError, match="at most one is the headline"):
        load(tmp_path, monkeypatch, table("table1", claims=[{**first, "headline": True}] * 2))
    assert Claim.model_validate({**first, "because": "It is small"}).because == "It is small"
