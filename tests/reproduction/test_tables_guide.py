"""docs/tables.md is true: what it says to write is a table that expands, and every field that it explains is one."""

import re
from pathlib import Path

import yaml

from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.shorthand import written_out
from reproduction.tables.tables import Row, RunTableFields, TableFile

PAGE = Path("docs/tables.md").read_text(encoding="utf-8")
TABLE, NAMES, AMOUNTS, CLAIMS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def project_with(root: Path, table: str) -> Project:
    """This project, unchanged, with the page's table, slot, corpus and configuration next to it."""
    for name in ("workflow", "config"):
        (root / "project" / name).mkdir(parents=True)
    for name in ("workflow/papers", "workflow/resources", "config/config.yaml"):
        (root / "project" / name).symlink_to(Path(name).resolve())
    (root / "mine").mkdir()
    (root / "mine/tables.yaml").write_text(table)
    (root / "text.txt").write_text("a text\n" * 100)
    names = NAMES.replace("/models/my-model", "workflow/resources/models/rq-7b")
    names = names.replace("/texts/my-text", str(root / "text.txt"))
    (root / "mine.yaml").write_text(names + AMOUNTS)
    return load_project([root / "mine.yaml"], root / "project")


def test_the_pages_table_expands_to_the_cells_that_it_shows(tmp_path: Path) -> None:
    cells = project_with(tmp_path, TABLE).cells("mine_bits")
    assert {(cell.row, cell.column): len(cell.runs) for cell in cells} == {
        ("Unquantized", "My model"): 1,
        ("RTN", "My model"): 1,
        ("QuaRot", "My model"): 3,
    }
    rotated = cells[-1].runs[0]
    assert rotated.recipe.rounded.scheme.bits == 3
    assert rotated.recipe.calibration.sequence_length == 1024
    assert (rotated.metric.corpus, rotated.metric.max_windows) == ("my-text", 50)


def test_the_pages_claims_are_claims_of_its_table() -> None:
    file = yaml.safe_load(TABLE)
    file["tables"][0] |= yaml.safe_load(CLAIMS)
    (table,) = TableFile.model_validate(written_out(file)).tables
    assert len(table.claims) == 2


def test_every_field_that_the_page_explains_is_one() -> None:
    explained = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    names = {name for cell in explained for name in re.findall(r"`([\w.*]+)`", cell)}
    assert names >= {"id", "metrics", "columns", "rows", "claims", "rows.*.columns"}
    known = {*TableFile.model_fields, *RunTableFields.model_fields} | {f"rows.*.{name}" for name in Row.model_fields}
    assert names <= known
