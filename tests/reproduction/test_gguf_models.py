"""A GGUF file as a slot's checkpoint: its sizes, its digest, and its origin in records and on pages."""

from pathlib import Path

import pytest

from reproduction.render.pages.origins import computed_on
from reproduction.run.provenance import of_checkpoint
from reproduction.run.results import RunResult, write_result
from reproduction.tables.configuration import hidden_size
from reproduction.tables.fitting import model_of
from rotquant.models.digests import checkpoint_digest
from rotquant.models.gguf.importing import origin_of_model, write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import tiny_model
from tests.helpers.reports import TEXT, load, metrics, page, provenance, table


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf", tiny_model(), kind="Q8_0")


def test_a_file_has_the_sizes_and_the_digest_of_its_folder(file: Path, tmp_path: Path) -> None:
    write_checkpoint(file, tmp_path / "folder")
    assert hidden_size(file) == 64
    digest = checkpoint_digest(file)
    assert digest == checkpoint_digest(tmp_path / "folder")
    model = model_of(str(file), digest)
    assert model is not None
    assert model[0].num_layers == 2


def test_records_and_pages_name_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = load(tmp_path / "project", monkeypatch, table("table1"))
    (project.root / "models").mkdir(exist_ok=True)
    write_checkpoint(file, project.root / "models/small")
    for cell in project.cells("quarot_table1"):
        for run in cell.runs:
            said = of_checkpoint(run, str(file))
            assert said["origin"]["file"] == "tiny.gguf"
            assert "origin" not in of_checkpoint(run, str(tmp_path))
            record = provenance(corpora={"evaluation": TEXT}, **said)
            write_result(project.results.run(run.key), RunResult(run, metrics(run, 5.0), record, None))
    origin = origin_of_model(file)
    assert origin is not None
    assert f"dequantized to bfloat16 from tiny.gguf, sha256 `{origin.sha256[:12]}`" in page(project)
    places = [one.checkpoint for one in computed_on(project, project.table("quarot_table1"))]
    assert any(str(origin) in place for place in places)
