"""Pages of speed tables: ratios from records, claims decided by them and by the paper's numbers, nothing invented."""

import copy
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

from reproduction.benchmarks.arguments import LinearArguments
from reproduction.benchmarks.records import CellRecord, Measurement, read_record, write_record
from reproduction.benchmarks.registry import benchmark_digest
from reproduction.claims.claims import Answer
from reproduction.claims.replays import outcomes
from reproduction.commands.report import report_app
from reproduction.frame import limits
from reproduction.frame.speed import SpeedNumbers, collect, find_record, read_numbers, record_path
from reproduction.render.figures import speed as figures
from reproduction.render.pages.benchmarks import speed_report
from reproduction.render.pages.cells import digits
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.verdicts import claims_of
from reproduction.scoreboard import page as html
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedCell, SpeedTable
from rotquant.foundation.errors import ResultError
from tests.helpers.project import Copy
from tests.helpers.speed import SPEED, kernel, record, seconds

OWN = Path("results/speed/quarot_table14.json")
COMMITTED = Path("results/bench/some-gpu/quarot_table14.json")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    return load_project(root=tmp_path)


def page(project: Project, table: SpeedTable) -> str:
    return markdown(speed_report(project, table, read_numbers(project, table)))


def table_of(project: Project) -> SpeedTable:
    return project.table("quarot_table14")


def numbers_of(project: Project) -> SpeedNumbers:
    return collect(project, table_of(project), find_record(project, table_of(project)))


def decided(project: Project, **check: object) -> Answer:
    """The answer to one claim about INT4 over FP16, or what `check` says."""
    data = {**SPEED["tables"][0], "paper": "quarot", "paper_title": "QuaRot", "published": table_of(project).published}
    rows = check.pop("rows", ["*"])
    asked = {"column": "INT4", "over": "FP16", **check}
    kind = next(name for name in ("at_least", "at_most", "increasing") if name in asked)
    bound = asked.pop(kind)
    mechanism = {kind: asked if kind == "increasing" else {**asked, "value": bound}}
    claim = {"text": "T", "section": "1", "rows": rows, "mechanism": mechanism}
    table = SpeedTable.model_validate({**data, "claims": [claim]})
    (outcome,) = outcomes(table, collect(project, table, find_record(project, table)))
    return outcome.answers["mechanism"]


def test_a_ratio_is_over_the_baseline_of_the_same_row(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    number = numbers_of(project)["Linear layer", "4096x4096 batch 2", "INT4"]
    assert number.ratio == pytest.approx(2.5)
    assert number.ratio_spread == pytest.approx(0.01 * 2**0.5)  # both times are ± 1 %
    assert number.papers[0].ratio == pytest.approx(1.902 / 0.696)


def test_the_page_says_which_rows_compare_different_runs(project: Project) -> None:
    table = table_of(project)
    made = record(project.root / OWN, table)
    assert ", in the same run." in page(project, table)
    again = made.cells[0].model_copy(update={"sitting": 1})
    sittings = (*made.sittings, *made.sittings)
    write_record(project.root / OWN, made.model_copy(update={"sittings": sittings, "cells": (again, *made.cells[1:])}))
    assert f"in the same run but for rows {table.cells[0].row}" in page(project, table)


def test_a_cell_that_could_not_be_measured_says_why_and_has_no_ratio(project: Project) -> None:
    def time(cell: SpeedCell) -> float | str:
        return "out of GPU memory" if cell.column == "FP16" and "batch 2" in cell.row else seconds(cell)

    record(project.root / OWN, table_of(project), time)
    numbers = numbers_of(project)
    assert numbers["Linear layer", "4096x4096 batch 2", "FP16"].missing == "out of GPU memory"
    assert numbers["Linear layer", "4096x4096 batch 2", "INT4"].ratio is None
    text = page(project, table_of(project))
    assert "- out of GPU memory: 1 cell (4096x4096 batch 2, FP16)" in text
    assert "1 not checkable" not in text  # the other row still decides


def test_reasons_that_differ_in_a_number_alone_are_one_line(project: Project) -> None:
    def time(cell: SpeedCell) -> float | str:
        return f"no product of {cell.arguments.tokens} tokens." if cell.column == "FP8" else seconds(cell)

    record(project.root / OWN, table_of(project), time)
    line = "- no product of 2048 tokens, and so on: 2 cells (4096x4096 batch 1, FP8; 4096x4096 batch 2, FP8)"
    assert line in page(project, table_of(project))


def test_without_a_record_the_page_shows_the_papers_numbers_alone_and_says_so(project: Project) -> None:
    text = page(project, table_of(project))
    assert "**Not measured yet:**" in text
    assert "*2.82*" in text
    assert "not measured: 6 cells" in text
    assert "not checkable: no number for INT4 over FP16" in text


def test_the_page_names_gpu_date_commit_and_whether_it_was_recorded_elsewhere(project: Project) -> None:
    record(project.root / COMMITTED, table_of(project))
    text = page(project, table_of(project))
    assert "were measured on an **Some GPU** (another machine, 2026-11-21)" in text
    assert "commit `aaaaaaaaaaaa`" in text
    assert "SM clock 1980 MHz, 300 W" in text
    record(project.root / OWN, table_of(project), gpu="Own GPU")
    assert "were measured on an **Own GPU** (2026-11-21)" in page(project, table_of(project))


def test_the_page_says_whether_the_code_is_still_the_measured_one(project: Project) -> None:
    made = record(project.root / OWN, table_of(project))
    assert "6 of 6 cells were measured by **other code than the present**" in page(project, table_of(project))
    present = benchmark_digest("linear")
    cells = tuple(cell.model_copy(update={"code": present}) for cell in made.cells)
    write_record(project.root / OWN, made.model_copy(update={"cells": cells}))
    assert f"`{present}`, the present code" in page(project, table_of(project))


def test_a_commit_that_digests_identified_stands_beside_the_recorded_one(project: Project) -> None:
    made = record(project.root / OWN, table_of(project))
    environment = {**made.sittings[0].environment, "git_dirty": True, "identified": {"git_commit": "b" * 40}}
    sitting = made.sittings[0].model_copy(update={"environment": environment})
    write_record(project.root / OWN, made.model_copy(update={"sittings": (sitting,)}))
    text = page(project, table_of(project))
    assert (
        "commit `aaaaaaaaaaaa` with uncommitted changes; the measured code is that of `bbbbbbbbbbbb` by its digest"
        in text
    )


def test_ratios_stand_next_to_ratios_and_times_have_their_spread(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    text = page(project, table_of(project))
    assert "| Layer | Batch | INT4 | *RTX 3090* | FP8 |" in text
    assert "| 4096x4096 | 1 | **2.50** | *2.82* | 1.50 |" in text
    assert "| 4096x4096 | 1 | 0.2048\u00a0±\u00a01.0\u00a0% | *1.043* |" in text


def test_the_newest_of_several_committed_records_is_shown(project: Project) -> None:
    for folder, date in (("a", "2026-01-01"), ("b", "2026-03-01"), ("c", "2026-02-01")):
        path = project.root / f"results/bench/{folder}/quarot_table14.json"
        record(path, table_of(project), gpu=folder)
        path.write_text(path.read_text().replace("2026-11-21", date))
    assert record_path(project.root, "quarot_table14") == Path("results/bench/b/quarot_table14.json")


def test_a_damaged_record_is_one_sentence(project: Project) -> None:
    (project.root / OWN).parent.mkdir(parents=True)
    (project.root / OWN).write_text('{"table": "quarot_table14"}')
    with pytest.raises(ResultError, match=r"is damaged .*measure it again"):
        page(project, table_of(project))


def test_a_record_of_another_table_is_refused(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    with pytest.raises(ResultError, match="is of quarot_table14, not of quarot_table15"):
        read_record(project.root / OWN, "quarot_table15")


def test_a_cell_holds_numbers_or_a_reason_and_never_both() -> None:
    fields = {"benchmark": "linear", "arguments": {}, "code": "0", "sitting": 0, "seconds": 1.0}
    with pytest.raises(ValueError, match="either quantities or the reason"):
        CellRecord(**fields)
    with pytest.raises(ValueError, match="either quantities or the reason"):
        CellRecord(**fields, quantities={"seconds": Measurement(1.0, "s")}, missing="no")


@pytest.mark.parametrize(
    ("check", "ours", "papers"),
    [
        ({"at_least": 2.4}, "holds", "holds"),
        ({"at_least": 2.8}, "contradicted", "contradicted"),  # the paper has 2.82 and 2.73
        ({"at_least": 2.8, "of": "best"}, "contradicted", "holds"),
        ({"at_least": 2.75, "of": "mean"}, "contradicted", "holds"),
        ({"at_most": 2.6}, "holds", "contradicted"),
        ({"compare": "cost", "at_most": 0.42}, "holds", "holds"),
        ({"increasing": True}, "undecided", "contradicted"),  # equal to within their spread
        ({"at_least": 2.8, "rows": ["* batch 1"]}, "contradicted", "holds"),
        ({"column": "FP8", "at_least": 1.4}, "holds", "not checkable"),  # the paper has no FP8
        ({"compare": "amount", "over": None, "at_most": 0.3}, "holds", "contradicted"),  # milliseconds
        ({"compare": "amount", "over": None, "column": "FP8", "at_most": 0.3}, "holds", "not checkable"),
    ],
)
def test_claims_are_decided_by_ratios(project: Project, check: dict, ours: str, papers: str) -> None:
    record(project.root / OWN, table_of(project))
    outcome = decided(project, **check)
    assert (outcome.ours.decision, outcome.papers.decision) == (ours, papers)


def test_what_lies_within_the_spread_of_the_replays_is_undecided(project: Project) -> None:
    """Each time is known to within 1 %, a ratio to within 2 %."""
    record(project.root / OWN, table_of(project))
    ratios = [one.effect.size for one in decided(project, at_least=1.0).ours.findings if one.effect]
    for factor, said in ((0.97, "holds"), (0.99, "undecided"), (1.01, "undecided"), (1.03, "contradicted")):
        assert decided(project, at_least=factor * min(ratios)).ours.decision == said


def test_a_check_of_several_columns_asks_each_of_them(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    outcome = decided(project, column=["INT4", "FP8"], at_least=2, rows=["* batch 1"])
    findings = {finding.place: finding.decision for finding in outcome.ours.findings}
    assert findings == {"INT4, 4096x4096 batch 1": "holds", "FP8, 4096x4096 batch 1": "contradicted"}
    assert outcome.ours.decision == "contradicted"


@pytest.mark.parametrize(
    ("device", "gpus", "unit", "expected"),
    [
        ("NVIDIA H200", ["NVIDIA RTX 3090"], "ms", "not tested here"),
        ("NVIDIA GeForce RTX 3090", ["NVIDIA RTX 3090"], "ms", "not reproduced"),
        ("NVIDIA A100-SXM4-80GB", ["NVIDIA RTX 3090", "NVIDIA A100-80GB"], "ms", "not reproduced"),
        ("NVIDIA A100-SXM4-80GB", ["NVIDIA A100 SXM 40GB"], "ms", "not tested here"),
        ("NVIDIA H200", ["GPU not named"], "ms", "not tested here"),
        ("NVIDIA H200", ["NVIDIA RTX 3090"], "GiB", "not reproduced"),  # memory is the same on all
    ],
)
def test_a_papers_times_are_judged_on_its_gpu_alone_and_a_direction_on_any(
    project: Project, device: str, gpus: list[str], unit: str, expected: str
) -> None:
    record(project.root / OWN, table_of(project))
    data = copy.deepcopy(SPEED["tables"][0])
    data["grids"][0]["unit"] = unit
    text = {name: data["claims"][0][name] for name in ("text", "section")}
    check = {"at_least": {"column": "INT4", "over": "FP16", "value": 9}}
    claims = [{**text, about: check} for about in ("mechanism", "setting", "fact")]
    said = {**data, "gpus": gpus, "claims": claims, "published": None, "paper": "quarot", "paper_title": "QuaRot"}
    table = SpeedTable.model_validate(said)
    direction, setting, fact = outcomes(table, collect(project, table, find_record(project, table)), device)
    assert direction.answers["mechanism"].here == "not reproduced"
    assert setting.answers["setting"].here == expected
    found = claims_of((direction, setting, fact), "Claims of the paper")
    assert (found.score.total, [line.judged for line in found.lines]) == (1, [True, True, False])
    assert "9" in found.lines[2].here


def test_the_brackets_of_speed_are_no_confidence_intervals(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    text = page(project, table_of(project))
    assert "In brackets the 10th to the 90th percentile of the replays" in text
    assert "95 %" not in text


def test_an_increasing_ratio_is_recognised(project: Project) -> None:
    record(project.root / OWN, table_of(project), lambda cell: seconds(cell) ** (1.0 if cell.column == "FP16" else 1.1))
    assert decided(project, increasing=True).ours.decision == "contradicted"
    record(project.root / OWN, table_of(project), lambda cell: seconds(cell) ** (1.1 if cell.column == "FP16" else 1.0))
    assert decided(project, increasing=True).ours.decision == "holds"


def test_the_csv_has_every_cell_of_ours_and_of_the_paper(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    record(project.root / OWN, table_of(project))
    monkeypatch.chdir(project.root)
    for command in ("table", "page"):
        result = CliRunner().invoke(report_app, [command, "quarot_table14"])
        assert result.exit_code == 0, result.output
    lines = (project.root / "results/tables/quarot_table14.csv").read_text().splitlines()
    assert len(lines) == 1 + 6 + 4
    assert (project.root / "reports/quarot_table14.md").exists()


def test_a_figure_shows_parts_of_tables_and_names_them(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    text = page(project, project.table("quarot_figure7"))
    assert "| 4096x4096 | 1 | 2.50 | *2.82* |" in text
    assert "[quarot_table14](quarot_table14.md)" in text
    assert "4096x4096 | 2 |" not in text


def test_equal_records_give_equal_figures(project: Project) -> None:
    record(project.root / OWN, table_of(project))
    paths = [project.root / f"{name}.svg" for name in "ab"]
    for path in paths:
        figures.draw(project, project.table("quarot_figure7"), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<svg" in paths[0].read_bytes()


def test_a_figure_can_be_drawn_before_anything_is_measured(project: Project) -> None:
    figures.draw(project, project.table("quarot_figure7"), project.root / "empty.svg")
    assert (project.root / "empty.svg").exists()


def test_the_roofline_can_be_drawn_with_and_without_a_record(tmp_path: Path) -> None:
    Copy(tmp_path, small=False)
    table = load_project(root=tmp_path).table("kernels_h200")
    figures.draw(load_project(root=tmp_path), table, tmp_path / "empty.svg")
    record(tmp_path / "results/speed/kernels_h200.json", table, kernel)
    figures.draw(load_project(root=tmp_path), table, tmp_path / "full.svg")
    assert (tmp_path / "full.svg").stat().st_size > (tmp_path / "empty.svg").stat().st_size
    text = page(load_project(root=tmp_path), table)
    assert "copy 4.00 TB/s" in text
    assert "int8 1893 TOP/s" in text
    assert "| 4096 x 4096 | 1 | 50 % m |" in text


def test_the_index_shows_a_speed_table_with_its_claims_and_gpu(project: Project) -> None:
    record(project.root / COMMITTED, table_of(project))
    text = html.index(project)
    assert "recorded on some-gpu" in text
    assert ">4-bit</span> layer is twice as fast." in text
    assert "<em>RTX 3090</em>" in text
    assert "<strong>Some GPU</strong> (another machine, 2026-11-21)" in text


def test_a_page_says_what_else_the_machine_did(project: Project) -> None:
    made = record(project.root / COMMITTED, table_of(project))
    assert "- Note: " not in page(project, table_of(project))
    busy = made.sittings[0].environment | {"note": "A backup ran."}
    sitting = made.sittings[0].model_copy(update={"environment": busy})
    write_record(project.root / COMMITTED, made.model_copy(update={"sittings": (sitting,)}))
    assert "- Note: A backup ran." in page(project, table_of(project))


def test_the_floor_of_a_kernel_is_memory_or_arithmetic_whichever_takes_longer() -> None:
    ceilings = {"copy": 4e12, "int8": 1e15}
    point = limits.Point(("g", "r", "c"), seconds=2e-3, bytes=4e9, operations=5e11, arithmetic="int8")
    assert point.floor(ceilings) == (1e-3, "memory")
    point = limits.Point(("g", "r", "c"), seconds=2e-3, bytes=4e8, operations=1e12, arithmetic="int8")
    assert point.floor(ceilings) == (1e-3, "arithmetic")


def test_every_product_is_held_against_a_ceiling_of_arithmetic() -> None:
    assert set(get_args(LinearArguments.model_fields["implementation"].annotation)) == limits.FORMATS.keys()


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123456, "0.0123"), (1.23456, "1.235"), (123.456, "123.5"), (123456.0, "123456"), (0, "0")]
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert digits(value) == text
