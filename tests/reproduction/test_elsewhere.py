"""Numbers that others measured: shown beside the paper's with where they are from, judged as printed, never run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from reproduction.commands.report import exported, report_app
from reproduction.render.pages.markdown import markdown
from reproduction.scoreboard import page as html
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project, source_of
from reproduction.tables.elsewhere import ElsewhereTable
from reproduction.tables.project import Project
from rotquant.foundation.errors import ConfigError
from tests.helpers.elsewhere import NUMBERS, TABLE
from tests.helpers.latex import check
from tests.helpers.project import TABLES, Copy


def load(root: Path, change: Callable[[dict[str, Any]], Any] = lambda table: None, numbers: str = NUMBERS) -> Project:
    """A project with this table beside the small one of runs, after a change."""
    copy = Copy(root)
    table = json.loads(json.dumps(TABLE))
    change(table)
    file = {"paper": "quarot", "title": TABLES["title"], "tables": [table]}
    copy.write("workflow/papers/quarot/numbers/others.csv", numbers)
    copy.write("workflow/papers/quarot/elsewhere.yaml", yaml.safe_dump(file))
    return load_project(root=root)


def page(project: Project) -> str:
    table = project.one(ElsewhereTable, "quarot_others")
    return markdown(source_of(table).report(project, table, source_of(table).collect(project, table))).replace(
        "\u00a0", " "
    )


def test_numbers_stand_beside_the_papers_with_where_they_are_from(tmp_path: Path) -> None:
    text = page(load(tmp_path))
    assert "| Method | Llama-2-7B | *published* | Llama-2-13B (*published*) |" in text
    assert "| Baseline | 5.472 | *5.47* | - (*4.88*) |" in text
    assert "| QuaRot | 6.200 ± 0.050 | *8.37* | - |" in text
    assert "BLEU, higher is better; measured elsewhere." in text
    assert "Upright numbers were measured elsewhere, not by this project: A README. *Italic*" in text
    assert "- Measured elsewhere: somebody, issue 12" in text
    assert "95 %" not in text


def test_claims_are_judged_by_them_and_the_setting_on_the_papers_models_alone(tmp_path: Path) -> None:
    text = page(load(tmp_path / "a"))
    assert "1 of 2 mechanisms reproduced, 1 not reproduced" in text
    assert "| not tested here" in text
    assert "neither windows nor seeds are known" in text
    own = page(load(tmp_path / "b", lambda table: table.update(on_papers_models=True)))
    assert "not tested here" not in own


@pytest.mark.parametrize(
    ("change", "numbers", "sentence"),
    [
        ({"rows": ["QuaRat"]}, NUMBERS, "has no row 'QuaRat'; nearest: QuaRot"),
        ({"columns": ["7B"]}, NUMBERS, "has no column '7B'"),
        ({"metrics": {}}, NUMBERS, "unknown metric 'bleu'"),
        ({"numbers": "numbers/none.csv"}, NUMBERS, "do not exist"),
        ({"numbers": "../../../secret.csv"}, NUMBERS, "numbers of quarot_others"),
        ({"origin": ""}, NUMBERS, "origin"),
        ({}, NUMBERS.replace("6.2", "about 6"), "write a number"),
        ({}, "row,column,metric,value\nBaseline,Llama-2-7B,perplexity,-\n", "unknown row 'QuaRot'|has no number"),
        ({"rows": ["Baseline", "QuaRot"]}, NUMBERS, "claims.1: unknown row 'Other'"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], numbers: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        load(tmp_path, lambda table: table.update(change), numbers)
    assert "\n" not in str(error.value)


def test_an_experiment_is_refused_since_nothing_is_run(tmp_path: Path) -> None:
    experiment = {"cause": "A cause", "check": {"better": {"row": "Other", "than": ["QuaRot"]}}}
    with pytest.raises(ConfigError, match="nothing is run for numbers from elsewhere"):
        load(tmp_path, lambda table: table["claims"][0].update(experiment=experiment))


def test_every_command_and_the_scoreboard_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = load(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "*Elsewhere*" not in scoreboard.index(project)
    for command, written in (("table", "results/tables/quarot_others.csv"), ("page", "reports/quarot_others.md")):
        done = CliRunner().invoke(report_app, [command, "quarot_others"])
        assert (done.exit_code, done.output.strip()) == (0, written), done.output
    lines = (tmp_path / "results/tables/quarot_others.csv").read_text().splitlines()
    assert lines[0] == "row,column,quantity,value,deviation,published,published_deviation,origin,note"
    assert 'QuaRot,Llama-2-7B,perplexity,6.2,0.05,8.37,,elsewhere,"somebody, issue 12"' in lines
    assert "Baseline,Llama-2-13B,perplexity,,,4.88,,published," in lines
    check(exported(project, "quarot_others", "latex"))
    assert "*Elsewhere*: measured by others" in scoreboard.index(project)
    assert '<span class="badge elsewhere">' in html.index(project)
    assert "has no figure" in str(CliRunner().invoke(report_app, ["figure", "quarot_others"]).exception)
