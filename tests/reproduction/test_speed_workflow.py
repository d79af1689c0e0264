"""Speed tables in the workflow: rendered from a committed record without a GPU, measured with one."""

from pathlib import Path

import pytest
import yaml

from reproduction.sources import load_tables
from rotquant.foundation.data import merge
from tests.helpers.project import CONFIG, Copy
from tests.helpers.speed import SPEED, record

PAGE, FIGURE = "reports/quarot_table14.md", "reports/quarot_figure7.md"
COMMITTED = "results/bench/some-gpu/quarot_table14.json"


@pytest.fixture
def project(tmp_path: Path) -> Copy:
    """A project with one accuracy table, one speed table and a figure of it, measured on another machine."""
    made = Copy(tmp_path)
    made.write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    record(tmp_path / COMMITTED, load_tables(tmp_path)["quarot_table14"])
    return made


def test_without_a_gpu_pages_are_rendered_from_the_committed_record(project: Copy) -> None:
    status, output = project.snakemake("speed")
    assert status == 0, output
    assert "recorded on another machine" in (project.root / PAGE).read_text()
    assert (project.root / "reports/figures/quarot_figure7.svg").exists()
    assert project.planned(PAGE, FIGURE) == {}
    record(project.root / COMMITTED, load_tables(project.root)["quarot_table14"], gpu="Newer GPU")
    assert project.planned(PAGE, FIGURE) == {"page": 2}
    (project.root / COMMITTED).unlink()
    (project.root / PAGE).unlink()
    status, output = project.snakemake(PAGE)
    assert (status, "Not measured yet" in (project.root / PAGE).read_text()) == (0, True), output


@pytest.mark.long
def test_with_a_gpu_a_renamed_row_is_not_measured_again_and_a_new_argument_is(project: Copy) -> None:
    project.set_config(merge(CONFIG, {"device": "cuda"}))
    assert project.planned(PAGE, FIGURE) == {"measure_speed": 1, "page": 2}
    project.edit("rotquant/tensors/devices.py", 'shutil.which("nvidia-smi") is not None', "True")  # as with a GPU
    project.edit(
        "workflow/reproduction/commands/bench.py", "from reproduction.run.stages.speed import", "from tests_fake import"
    )
    project.write("tests_fake.py", FAKE_MEASURING)
    status, output = project.snakemake(PAGE)
    assert status == 0, output
    project.edit("workflow/papers/quarot/speed.yaml", "{Layer} batch {Batch}", "{Layer}, batch {Batch}")
    assert project.planned(PAGE) == {"page": 1}
    project.edit("workflow/papers/quarot/speed.yaml", "tokens: 4096", "tokens: 8192")
    assert project.planned(PAGE) == {"measure_speed": 1, "page": 1}


FAKE_MEASURING = '''"""A measuring stage that makes its numbers up."""

import sys

sys.path.insert(0, "{repository}")
from tests.helpers.speed import record


def measure(table, output, **options):
    return record(output, table)
'''.replace("{repository}", str(Path(__file__).parents[2]))
