"""The notebook of the first steps runs from its first cell to its last, and shows what its words say."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import REPOSITORY

pytestmark = pytest.mark.long

NOTEBOOK = REPOSITORY / "examples/first_steps.ipynb"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The names that the notebook's cells leave, run in its own folder as Jupyter does."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "Agg")
        patch.chdir(NOTEBOOK.parent)
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {cell['id']}", "exec"), names)
        assert Path.cwd() == REPOSITORY
    return names


def test_it_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_rotation_changes_no_output_and_methods_come_in_their_order(found: dict[str, Any]) -> None:
    perplexities = found["perplexities"]
    assert perplexities["16 bits, rotated"] == pytest.approx(perplexities["16 bits"], rel=1e-4)
    rise = {name: value / perplexities["16 bits"] - 1 for name, value in perplexities.items()}
    assert rise["rtn"] > 2 * rise["quarot-rtn"] > 0  # GPTQ on so little text may gain nothing
    assert 0 < rise["quarot"] < rise["rtn"] / 2


def test_the_figure_shows_that_rotation_takes_outliers_away(found: dict[str, Any]) -> None:
    assert len(found["figure"].axes) == 2
    for axis in found["figure"].axes:
        before, after = (line.get_ydata() for line in axis.get_lines())
        assert before[0] > 2 * after[0]  # times the median feature


def test_it_prints_the_meaning_of_the_page(found: dict[str, Any]) -> None:
    page = (REPOSITORY / "docs/gallery/shipped/quarot_table1.md").read_text(encoding="utf-8").splitlines()
    after = page[page.index("## What it means") + 2 :]
    sentences = list(takewhile(lambda line: line.startswith("- "), after))
    assert sentences
    assert found["meaning"].splitlines() == sentences
