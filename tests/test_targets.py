"""The list of targets names every table and figure of the four papers once, of a known paper and kind."""

from pathlib import Path

import pytest
import yaml

LISTED = yaml.safe_load((Path(__file__).parents[1] / "config" / "targets.yaml").read_text(encoding="utf-8"))
TARGETS = LISTED["targets"]

# Figures that are diagrams of a method (QuaRot 2, 3, 5, 6; SpinQuant 1, 5; RCP 2, 4, 5, 7; PrefixQuant 5, 6) or sample
# outputs (RCP 9, 10) have nothing to compute and are not targets.
EXPECTED = {
    "quarot": (17, [1, 4, 7], []),
    "spinquant": (19, [2, 3, 4, 6, 7, 8, 9, 10, 11], []),
    "rcp": (20, [1, 3, 6, 8], ["lemma1"]),
    "prefixquant": (19, [1, 2, 3, 4, *range(7, 18)], []),
}


def test_ids_are_unique() -> None:
    ids = [target["id"] for target in TARGETS]
    assert len(ids) == len(set(ids)) == 107


def test_every_target_has_the_four_fields_and_a_known_paper_and_kind() -> None:
    for target in TARGETS:
        assert set(target) == {"id", "paper", "kind", "title"}, target
        assert target["paper"] in LISTED["papers"]
        assert target["kind"] in LISTED["kinds"]
        assert target["title"].strip()


@pytest.mark.parametrize("paper", EXPECTED)
def test_a_paper_lists_all_its_tables_and_figures_in_order(paper: str) -> None:
    tables, figures, others = EXPECTED[paper]
    names = [f"table{n}" for n in range(1, tables + 1)] + [f"figure{n}" for n in figures] + others
    assert [target["id"] for target in TARGETS if target["paper"] == paper] == [f"{paper}_{name}" for name in names]


def test_the_papers_and_kinds_are_the_ones_in_use() -> None:
    assert set(LISTED["papers"]) == set(EXPECTED) == {target["paper"] for target in TARGETS}
    assert set(LISTED["kinds"]) == {target["kind"] for target in TARGETS}


def test_titles_tell_targets_of_a_paper_apart() -> None:
    titles = [(target["paper"], target["title"]) for target in TARGETS]
    assert len(titles) == len(set(titles))
