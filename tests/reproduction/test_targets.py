"""Every table and figure of the four papers is defined as data; the scoreboard says how far each is."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from reproduction.claims.claims import Score
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project, load_tables
from reproduction.tables.project import Project
from rotquant.foundation.files import write_text
from tests.helpers.project import Copy, checkpoints_by_name
from tests.helpers.reports import compute
from tests.helpers.speed import SPEED, record

# Figures that are diagrams of a method (QuaRot 2, 3, 5, 6; SpinQuant 1, 5; RCP 2, 4, 5, 7; PrefixQuant 5, 6) or sample
# outputs (RCP 9, 10) have nothing to compute and are not targets.
EXPECTED = {
    "quarot": (17, [1, 4, 7], []),
    "spinquant": (19, [2, 3, 4, 6, 7, 8, 9, 10, 11], []),
    "rcp": (20, [1, 3, 6, 8], ["lemma1"]),
    "prefixquant": (19, [1, 2, 3, 4, *range(7, 18)], []),
}


def test_the_papers_tables_and_figures_are_all_defined_and_their_titles_tell_them_apart() -> None:
    printed = [table for table in load_tables(Path(__file__).parents[2]).values() if table.is_printed]
    for paper, (tables, figures, others) in EXPECTED.items():
        names = [f"table{n}" for n in range(1, tables + 1)] + [f"figure{n}" for n in figures] + others
        assert [table.id for table in printed if table.paper == paper] == [f"{paper}_{name}" for name in names]
    assert {table.paper for table in printed} == set(EXPECTED)
    assert len({(table.paper, table.title) for table in printed}) == len(printed) == 107


TABLE = {
    "title": "small",
    "section": "5.1",
    "caption": "A small table.",
    "metrics": [{"kind": "perplexity", "corpus": "wikitext2"}],
    "columns": ["Llama-2-7B"],
    "baseline": "Baseline",
    "rows": [{"name": "Baseline", "method": "baseline"}, {"name": "QuaRot", "method": "quarot-rtn"}],
    "claims": [
        {"text": "One.", "section": "5", "mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}}},
        {"text": "Two.", "section": "5", "mechanism": {"better": {"row": "QuaRot", "than": ["Baseline"]}}},
        {
            "text": "Three.",
            "section": "5",
            "mechanism": {"across": {"row": "QuaRot", "over": "Baseline", "pairs": [["Llama-2-7B", "Llama-2-7B"]]}},
        },
    ],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    checkpoints_by_name(monkeypatch)
    tables = [{"id": "quarot_table1", **TABLE}, {"id": "quarot_switches", **TABLE}]
    Copy(tmp_path).set_tables({"paper": "quarot", "title": "QuaRot: a title", "tables": tables})
    return load_project(root=tmp_path)


def render(project: Project, name: str) -> None:
    """A report and its numbers: QuaRot is worse than the baseline."""
    compute(project, name, QuaRot=11.0)
    write_text(project.root / f"reports/{name}.md", "# Report")


def test_the_scoreboard_begins_with_nothing_and_lists_everything(project: Project) -> None:
    text = scoreboard.index(project)
    assert "0 of 1 of the papers' tables and figures are built." in text
    assert "| quarot_table1 | small | accuracy | not yet | - | - | - |" in text
    assert "| quarot_switches |" in text


def test_a_rendered_target_counts_with_the_outcomes_of_its_claims(project: Project) -> None:
    render(project, "quarot_table1")
    text = scoreboard.index(project)
    counts = ". Of 3 directions that they claim 1 agree, 1 disagree, and 1 are not tested here."
    assert text.count(f"1 of 1 of the papers' tables and figures are built{counts}") == 2
    assert "| [quarot_table1](quarot_table1.md) |" in text
    assert "| accuracy | computed | 1 | 1 | 1 |" in text
    standing = scoreboard.standings(project)["quarot"][0]
    assert (standing.label, standing.score) == ("Table 1", Score(reproduced=1, not_reproduced=1, unchecked=1))


def test_a_report_of_our_own_stands_under_its_paper_and_is_not_counted(project: Project) -> None:
    render(project, "quarot_switches")
    text = scoreboard.index(project)
    assert "0 of 1 of the papers' tables" in text
    quarot = text.partition("## QuaRot")[2].partition("\n## ")[0]
    assert "| [quarot_switches](quarot_switches.md) | small | report of our own | computed | 1 | 1 | 1 |" in quarot
    (own,) = [standing for group in scoreboard.standings(project).values() for standing in group if not standing.listed]
    assert own.label == "Switches"
    assert replace(own, id="quarot_h200").label == "H200"
    assert replace(own, id="quarot_figure12").label == "Figure 12"


def test_a_record_from_another_machine_names_its_gpu(project: Project) -> None:
    write_text(project.root / "workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    project = load_project(root=project.root)
    assert "| quarot_table14 | Time of the 4-bit linear layer |" in scoreboard.index(project)
    assert "recorded on" not in scoreboard.index(project)
    record(project.root / "results/bench/some-gpu/quarot_table14.json", load_tables(project.root)["quarot_table14"])
    assert "| recorded on some-gpu | 1 | 0 | 0 |" in scoreboard.index(project)


def test_a_record_of_this_machine_counts_as_computed(project: Project) -> None:
    write_text(project.root / "workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    project = load_project(root=project.root)
    record(project.root / "results/speed/quarot_table14.json", load_tables(project.root)["quarot_table14"])
    assert "| computed | 1 | 0 | 0 |" in scoreboard.index(project)
