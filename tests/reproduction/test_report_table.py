"""Tables for elsewhere: LaTeX that compiles whatever rows are called, and CSV, JSON and Markdown with every number."""

import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from reproduction.claims.claims import Score
from reproduction.commands.report import exported, report_app
from reproduction.frame.lines import to_frame, write_frame
from reproduction.render.pages.latex import escape, latex
from reproduction.render.pages.model import Claims, Grid, GridColumn, Report
from reproduction.run.results import read_result, write_result
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable
from tests.helpers.latex import check
from tests.helpers.project import Copy
from tests.helpers.reports import every_kind, page
from tests.helpers.speed import SPEED, record

SPACE = "\u00a0"
PLACE = ("QuaRot", "Llama-2-7B")
HOSTILE = r"a_b & 50% of $x^2 {#1} ~ \end{table} | <c>"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One table of each kind, computed."""
    with every_kind(tmp_path_factory.mktemp("kinds")) as loaded:
        yield loaded


@pytest.fixture
def speed(tmp_path: Path) -> Project:
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    project = load_project(root=tmp_path)
    record(tmp_path / "results/bench/some-gpu/quarot_table14.json", project.table("quarot_table14"))
    return project


def report(row: str, *cells: str) -> Report:
    """A report of one grid of one row: a number of ours and the paper's."""
    columns = [GridColumn([cell], row, "" if place else None) for place, cell in enumerate(cells)]
    grid = Grid(f"{row}, lower is better", [row], [[row]], columns)
    return Report(id=row, title=row, caption=row, source=row, grids=[grid], claims=Claims((), Score(), "Claims"))


def test_latex_of_every_kind_of_table_is_balanced(kinds: Project, speed: Project) -> None:
    for project, names in ((kinds, kinds.tables), (speed, speed.of(SpeedTable))):
        for name in names:
            check(exported(project, name, "latex"))


@given(st.text(st.sampled_from([*HOSTILE, "é", "→", SPACE]), min_size=1, max_size=30))
def test_no_name_breaks_the_latex(name: str) -> None:
    check(latex(report(name, f"1.0{SPACE}±{SPACE}0.1", name)))


def test_what_latex_reads_as_a_command_is_printed_as_it_is() -> None:
    assert escape(HOSTILE) == (
        r"a\_b \& 50\% of \$x\textasciicircum{}2 \{\#1\} \textasciitilde{} \textbackslash{}end\{table\} "
        r"\textbar{} \textless{}c\textgreater{}"
    )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (f"11.05{SPACE}±{SPACE}0.07", r"$11.05 \pm 0.07$"),
        ("-0.5", "$-0.5$"),
        ("1.23e+05", r"$1.23 \times 10^{5}$"),
        (f"0.20{SPACE}±{SPACE}1.0{SPACE}%", r"$0.20 \pm 1.0$\,\%"),
        ("NaN", "NaN"),
        ("-", "--"),
    ],
)
def test_numbers_are_mathematics_and_the_papers_italic(text: str, printed: str) -> None:
    line = latex(report("R", text, text)).splitlines()[-4]
    mine, papers = line.removesuffix(r" \\").split(" & ")[1:]
    assert mine == printed
    inner = printed.strip("$").partition("$")
    italic = rf"$\mathit{{{inner[0]}}}${inner[2]}" if "$" in printed else rf"\textit{{{printed}}}"
    assert papers == (printed if text == "-" else italic)


def test_latex_has_the_papers_numbers_beside_ours_and_says_whose_they_are(kinds: Project, speed: Project) -> None:
    text = exported(kinds, "quarot_table1", "latex")
    head = r" & \multicolumn{2}{c}{Llama-2-7B (here: small)} & \multicolumn{2}{c}{Llama-2-13B (here: larger)} \\"
    assert head in text
    assert r"QuaRot & $11.05 \pm 0.07$ & $\mathit{8.37}$ & $11.05 \pm 0.07$ & -- \\" in text
    assert r"\caption{QuaRot, Table 1: small. Perplexity, lower is better. Upright numbers are computed here" in text
    assert "Models: small (digest " in text
    measured = exported(speed, "quarot_table14", "latex")
    assert r"\textit{published, RTX 3090}" in measured
    assert r"measured on an \textbf{Some GPU} (another machine, " in measured


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="there is no TeX on this machine")
def test_latex_compiles(kinds: Project, tmp_path: Path) -> None:
    tables = "\n".join([latex(report(HOSTILE, "1.0")), *(exported(kinds, n, "latex") for n in kinds.tables)])
    start = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{start}\n{tables}\n\\end{{document}}\n")
    done = subprocess.run(["pdflatex", "-interaction=batchmode", "a.tex"], cwd=tmp_path, check=False)
    assert done.returncode == 0, (tmp_path / "a.log").read_text()


def test_csv_and_json_hold_the_frame(kinds: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = next(cell.runs for cell in kinds.cells("quarot_table1") if (cell.row, cell.column) == PLACE)
    known = {kinds.results.run(run.key): read_result(kinds.results.run(run.key)) for run in runs}
    for (path, result), value in zip(known.items(), (math.nan, math.inf), strict=True):
        write_result(path, replace(result, metrics={**result.metrics, "perplexity": value}))
    text = exported(kinds, "quarot_table1", "csv")
    monkeypatch.chdir(kinds.root)
    data = json.loads(CliRunner().invoke(report_app, ["table", "quarot_table1", "--format", "csv", "--json"]).stdout)
    assert CliRunner().invoke(report_app, ["table", "quarot_table1"]).exit_code == 0
    assert text == (kinds.root / "results/tables/quarot_table1.csv").read_text()
    for path, result in known.items():
        write_result(path, result)
    lines = [line for line in data["values"] if (line["row"], line["column"]) == PLACE]
    assert [(line["seed"], line["value"], line["published"]) for line in lines] == [(0, "nan", 8.37), (1, "inf", 8.37)]
    assert lines[0]["published_deviation"] is None
    assert len(data["values"]) == len(pd.read_csv(io.StringIO(text)))


def test_a_text_that_a_spreadsheet_would_calculate_is_kept_from_it(tmp_path: Path) -> None:
    texts = ["=HYPERLINK(1)", "+a", "-b", "@c", "'=d", "-", "-0.5", "1e-3", "x = -y", None]
    frame = to_frame([(text, -0.5) for text in texts], ("row", "value"))
    write_frame(tmp_path / "t.csv", frame)
    lines = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert [line.rpartition(",")[0] for line in lines] == [
        *("'=HYPERLINK(1)", "'+a", "'-b", "'@c", "''=d", "-", "-0.5", "1e-3", "x = -y", ""),
    ]
    assert all(line.endswith(",-0.5") for line in lines)
    assert pd.read_parquet(tmp_path / "t.parquet", dtype_backend="pyarrow").equals(frame)


def test_a_title_is_no_markup() -> None:
    assert r"\caption{5 * 3 * 2 and *B*. " in latex(report("5 * 3 * 2 and *B*", "1.0"))


def test_markdown_is_the_pages_table(kinds: Project) -> None:
    assert exported(kinds, "quarot_table1", "markdown").replace(SPACE, " ") in page(kinds, "quarot_table1")


def test_the_command_prints_a_table_that_is_collected(kinds: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kinds.root)
    done = CliRunner().invoke(report_app, ["table", "quarot_table1", "--format", "latex"])
    assert done.exit_code == 0
    assert done.stdout == exported(kinds, "quarot_table1", "latex")
    run = kinds.cells("quarot_table9")[0].runs[0]
    kinds.results.run(run.key).unlink()
    done = CliRunner().invoke(report_app, ["table", "quarot_table9", "--format", "csv"])
    missing = rf"1 of \d+ runs of quarot_table9 are not computed, such as {kinds.results.run(run.key).name}; `snakemake"
    assert re.match(missing, str(done.exception))
