"""Tables of settings: facts follow from recipes, each cell stands beside the paper's, and what differs is marked."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from reproduction.claims.unmeasured import outcomes
from reproduction.commands.report import exported, report_app
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.recipes import settings_report
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.settings import FACTS, UNQUANTIZED, FactName, Part, SettingsTable, fact
from rotquant.foundation.errors import ConfigError
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import override
from tests.helpers.latex import check
from tests.helpers.project import TABLES, Copy, shipped_project
from tests.helpers.settings_tables import PUBLISHED, TABLE


def load(root: Path, change: Callable[[dict[str, Any]], Any] = lambda table: None) -> Project:
    """A project with this table of settings beside the small one, after a change."""
    copy = Copy(root)
    table = json.loads(json.dumps(TABLE))
    change(table)
    copy.write("workflow/papers/quarot/published/settings.csv", PUBLISHED)
    file = {"paper": "quarot", "title": TABLES["title"], "tables": [table]}
    copy.write("workflow/papers/quarot/settings.yaml", yaml.safe_dump(file))
    return load_project(root=root)


RECIPES: list[tuple[str, dict[str, Any], Part, dict[FactName, str]]] = [
    ("baseline", {}, "weights", dict.fromkeys(FACTS, UNQUANTIZED)),
    (
        "quarot",
        {},
        "weights",
        {
            "granularity": "per-channel",
            "extent": "per-channel",
            "symmetry": "symmetric",
            "clipping": "search",
            "bits": "4",
        },
    ),
    (
        "quarot",
        {},
        "cache",
        {"granularity": "per-head", "symmetry": "asymmetric", "clipping": "0.95", "scales": "dynamic"},
    ),
    ("quarot-128g", {}, "activations", {"extent": "groups of 128", "group_size": "128", "clipping": "0.9"}),
    ("quarot", {}, "activations", {"extent": "per-token", "group_size": "-"}),
    ("quarot", {}, "attention_output", {"extent": "per-token"}),
    ("spinquant-hard", {}, "attention_output", {"extent": "per-head", "clipping": "none"}),
    ("quarot", {"values": {"symmetric": True}}, "cache", {"symmetry": "keys asymmetric, values symmetric"}),
    ("quarot", {"values": None}, "cache", {"bits": f"keys 4, values {UNQUANTIZED}"}),
    ("prefixquant", {}, "cache", {"scales": "static", "clipping": "search"}),
    ("prefixquant", {}, "weights", {"scales": "static", "clipping": "search"}),
    ("prefixquant-tuned", {}, "weights", {"clipping": "learned scales"}),
    ("omniquant", {}, "weights", {"clipping": "LWC"}),
    ("duquant-lwc", {}, "weights", {"clipping": "LWC"}),
    ("duquant", {}, "weights", {"clipping": "0.8"}),
    ("rtn", {"weights": {"clip_search": False}}, "weights", {"clipping": "none"}),
]


@pytest.mark.parametrize(("name", "changes", "part", "facts"), RECIPES)
def test_facts_follow_from_the_recipe(
    name: str, changes: dict[str, Any], part: Part, facts: dict[FactName, str]
) -> None:
    recipe = override(preset(name), changes, "test") if changes else preset(name)
    assert {one: fact(recipe, part, one) for one in facts} == facts


@pytest.mark.parametrize("name", sorted(all_presets()))
def test_every_fact_of_every_preset_is_told(name: str) -> None:
    parts: tuple[Part, ...] = ("weights", "activations", "attention_output", "keys", "values", "cache")
    assert all(fact(preset(name), part, one) for part in parts for one in FACTS)
    empty = name == "baseline"
    assert ({fact(preset(name), part, "bits") for part in parts} == {UNQUANTIZED}) == empty


def test_cells_stand_beside_the_papers_and_what_differs_is_marked(tmp_path: Path) -> None:
    settings = load(tmp_path).table("quarot_table4")
    said = {(one.row, one.column): (one.here, one.published, one.same, one.reason) for one in settings.cells}
    assert said == {
        ("QuaRot", "Weight"): ("per-channel", "Per-Channel", True, None),
        ("QuaRot", "Cache"): ("Asym", "Sym", False, "A misprint."),
        ("QuaRot", "Clip"): ("0.9", None, None, None),
        ("Groups", "Weight"): ("per-group", None, None, None),
        ("Groups", "Cache"): ("Asym", "Asym", True, None),
        ("Groups", "Clip"): ("0.9", None, None, None),
    }
    facts = [one.answers["fact"] for one in outcomes(settings)]
    decisions = [(one.ours.decision, one.papers.decision) for one in facts]
    assert decisions == [("contradicted", "holds"), ("holds", "holds"), ("holds", "not checkable")]
    text = markdown(settings_report(settings))
    assert "| Method | Weight | *published* | Cache | *published* | Clip |" in text
    assert "| QuaRot | per-channel | *Per-Channel* | Asym ≠ | *Sym* | 0.9 |" in text
    assert "- QuaRot, Cache: Asym here, *Sym* in the paper. A misprint." in text
    assert "| QuaRot, Cache | Asym, Sym asked | - | contradicted | *Sym* |" in text
    assert "95 % interval" not in text
    assert "| QuaRot | [`quarot_table1`](quarot_table1.md), QuaRot | rotation R1" in text
    assert "| Groups | `quarot-128g` | rotation R1" in text


def test_a_row_follows_the_table_that_it_is_as_in(tmp_path: Path) -> None:
    """Another recipe in the one table is another cell in the other."""
    copy = Copy(tmp_path)
    tables = json.loads(json.dumps(TABLES))
    tables["tables"][0]["rows"][1] |= {"recipe": {"activations": {"clip_ratio": 0.7}}}
    copy.set_tables(tables)
    rows = [{"name": "QuaRot", "as_in": {"table": "quarot_table1", "row": "QuaRot"}}, TABLE["rows"][1]]
    file = {"paper": "quarot", "title": "-", "tables": [{**TABLE, "rows": rows}]}
    copy.write("workflow/papers/quarot/published/settings.csv", PUBLISHED)
    copy.write("workflow/papers/quarot/settings.yaml", yaml.safe_dump(file))
    settings = load_project(root=tmp_path).tables["quarot_table4"]
    assert [settings.cell(row, "Clip").here for row in ("QuaRot", "Groups")] == ["0.7", "0.9"]


def set_in(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field."""

    def change(table: dict[str, Any]) -> None:
        place = table
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_in("rows", 0, "differs", value={"Weight": "why"}), "Weight is no other than the paper prints"),
        (set_in("rows", 0, "differs", value={"Clip": "why"}), "Clip is no other than the paper prints"),
        (set_in("rows", 0, "differs", value={"Clop": "why"}), "unknown column 'Clop'"),
        (set_in("rows", 0, "as_in", "row", value="QuaRat"), "unknown row 'QuaRat'"),
        (set_in("rows", 0, "as_in", "table", value="quarot_table9"), "unknown table 'quarot_table9'"),
        (set_in("rows", 0, "method", value="quarot"), "a row has a method, or is as in another table"),
        (set_in("rows", 1, "part", value="weights"), "either rows or columns name a part"),
        (set_in("rows", 1, "name", value="Others"), "unknown row 'Groups'"),
        (set_in("columns", 0, "fact", value="colour"), "columns"),
        (set_in("columns", 0, "name", value="Cache"), "a name that occurs twice"),
        (set_in("claims", 1, "fact", value={"as_printed": {"columns": ["Clip"]}}), "the paper prints none of these"),
        (set_in("claims", 1, "fact", value={}), "a claim has one check"),
        (set_in("claims", 2, "fact", "told", "column", value="Clop"), "unknown column 'Clop'"),
        (set_in("published", value="published/none.csv"), "do not exist"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    def changed(table: dict[str, Any]) -> None:
        if sentence.startswith("unknown row 'Groups'"):
            table["claims"] = table["claims"][:1]
        change(table)

    with pytest.raises(ConfigError, match=r"settings\.yaml") as error:
        load(tmp_path, changed)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_writes_the_page_and_the_table_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "quarot_table4" in scoreboard.index(project)
    for command, written in (("table", "results/tables/quarot_table4.csv"), ("page", "reports/quarot_table4.md")):
        done = CliRunner().invoke(report_app, [command, "quarot_table4"])
        assert (done.exit_code, done.output.strip()) == (0, written), done.output
    frame = (tmp_path / "results/tables/quarot_table4.csv").read_text()
    assert frame == exported(project, "quarot_table4", "csv")
    assert "QuaRot,Cache,Asym,Sym,False,A misprint." in frame
    assert (tmp_path / "results/tables/quarot_table4.parquet").exists()
    latex = exported(project, "quarot_table4", "latex")
    check(latex)
    assert r"QuaRot & per-channel & \textit{Per-Channel} & Asym $\ne$ & \textit{Sym} & $0.9$ \\" in latex
    lines = json.loads(CliRunner().invoke(report_app, ["table", "quarot_table4", "--json"]).output)["values"]
    assert [line["same"] for line in lines] == [True, False, None, None, True, None]
    assert "| settings | computed | - | - | - |" in scoreboard.index(project)


def repository() -> dict[str, SettingsTable]:
    return shipped_project().of(SettingsTable)


@pytest.mark.parametrize("name", sorted(repository()))
def test_every_claim_can_fail_names_the_papers_words_and_is_asked_once(name: str) -> None:
    """With any other words in any of its cells a claim is contradicted."""
    settings = repository()[name]
    others = settings.model_copy(update={"cells": [replace(one, here=f"not {one.here}") for one in settings.cells]})
    assert {one.fact and one.fact.ours.decision for one in outcomes(others)} == {"contradicted"}
    asked = [json.dumps(claim.fact.model_dump(), sort_keys=True) for claim in settings.claims]
    assert len(set(asked)) == len(asked)
    assert all(claim.quote for claim in settings.claims)
    for cell in settings.cells:
        assert (cell.same is False) == (cell.reason is not None), (cell.row, cell.column, "a difference has a reason")
