"""Methods are compared on equal terms: seeds draw all that is drawn, and shares of features are the papers'."""

import json

import pytest

from reproduction.identity.run import Run
from reproduction.render.pages.effort import given
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from rotquant.recipes.presets import PRESETS, preset
from rotquant.recipes.recipe import Budget
from tests.helpers.project import REPOSITORY

#: Widths of the papers' models, which their numbers of groups and outlier features are made for.
WIDTHS = {"Llama-2-7B": 4096, "Llama-2-13B": 5120, "Llama-2-70B": 8192, "Llama-3-8B": 4096, "Llama-3-70B": 8192}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"baseline", "rtn", "fp8", "mxfp4", "int4-per-token-head"}))
def test_every_method_draws_something_but_rounding_to_nearest_without_rotation(name: str) -> None:
    """A calibration sample, a rotation, signs, or text of its own: so each has as many seeds as the others."""
    assert preset(name).is_random
    assert not preset("rtn").is_random


def test_every_quantized_cell_of_a_table_has_all_seeds_or_nothing_to_draw(project: Project) -> None:
    seeds = project.config.seeds
    assert len(seeds) >= 3
    for table in project.of(RunTable).values():
        for cell in project.cells(table.id) if table.repeats == "seeds" else ():
            expected = seeds if cell.runs[0].recipe.is_random else (0,)
            assert tuple(run.seed for run in cell.runs) == expected, (table.id, cell.row)
    single = {table.id for table in project.of(RunTable).values() if table.repeats == "once"}
    assert all("_figure" in name for name in single)  # distributions of one model, which a mean would blur


def test_seeds_have_weights_of_their_own(project: Project) -> None:
    """The calibration sample is drawn anew for each, also where nothing is rotated."""
    cell = next(cell for cell in project.cells("spinquant_table1") if cell.row == "GPTQ 4-4-4")
    assert len({run.weights_key for run in cell.runs}) == len(project.config.seeds)


def test_a_stand_in_keeps_the_papers_share_of_outlier_features_and_has_16_groups_a_row(project: Project) -> None:
    """Atom's 128 outlier features are one in 32 as on Llama-2-7B, to whole ones; "64G" is half of the paper's 128."""
    for name in WIDTHS:
        slot = project.config.slot(name)
        hidden = json.loads((REPOSITORY / slot.checkpoint / "config.json").read_text())["hidden_size"]
        assert slot.hidden_size == hidden
        for number in (256, 128):
            assert abs(slot.scaled("outlier_features", number) - hidden * number / 4096) <= 0.5, (name, number)
        for number, groups in ((256, 8), (128, 16), (64, 32)):
            assert abs(slot.scaled("group_sizes", number) - hidden / groups) <= 0.5, (name, number)


@pytest.mark.parametrize(("hidden", "size"), [(96, 6), (256, 16), (320, 20), (384, 24), (448, 28), (512, 32)])
def test_group_sizes_follow_the_width(project: Project, hidden: int, size: int) -> None:
    slot = project.config.slot("Llama-2-7B").model_copy(update={"hidden_size": hidden})
    assert [slot.scaled("group_sizes", number) for number in (64, 128, 256)] == [size // 2, size, 2 * size]
    assert slot.model_copy(update={"group_sizes": {128: 5}}).scaled("group_sizes", 128) == 5  # a number stands before
    assert slot.mapped("group_sizes")[128] == size
    real = slot.model_copy(update={"hidden_size": 8192})  # a model of real size has the paper's own
    assert (real.scaled("group_sizes", 128), real.scaled("outlier_features", 256)) == (128, 256)


def test_a_page_says_what_each_method_was_given(project: Project) -> None:
    """Text, steps and rates of the slot's own, rows with the same together; a tuned slot apart."""
    table = project.table("spinquant_table1")
    found = {one.method: one for one in given(project, table, {}) if "Llama-2-7B" in (one.columns or ["Llama-2-7B"])}
    learning = project.config.slot("Llama-2-7B").methods["llm_qat"]
    steps, batch, length = learning["steps"], learning["batch_size"], learning["sequence_length"]
    rates = (("learning_rate", learning["learning_rate"]),)
    assert found["LLM-QAT"].budget == Budget(learning["samples"] * length, steps, batch * length, rates)
    assert found["LLM-QAT"].rows == [f"LLM-QAT {bits}" for bits in ("4-8-16", "4-8-8", "4-4-16", "4-4-4")]
    assert found["GPTQ"].budget == Budget(found["AWQ"].budget.tokens)
    assert "SpinQuant-hard 4-4-4" in found["GPTQ"].rows
    assert "RTN 4-4-4" not in {row for one in found.values() for row in one.rows}
    slots = dict(project.config.slots)
    slots["Mistral-7B"] = slots["Mistral-7B"].model_copy(
        update={"methods": {**slots["Mistral-7B"].methods, "llm_qat": {**learning, "steps": 7}}}
    )
    tuned = Project(project.root, project.config.model_copy(update={"slots": slots}), project.tables)
    alone = [one for one in given(tuned, table, {}) if one.columns == ["Mistral-7B"]]
    assert [(one.method, one.budget.steps) for one in alone] == [("LLM-QAT", 7)]


def test_a_run_without_anything_random_has_one_key(project: Project) -> None:
    run = next(cell.runs[0] for cell in project.cells("spinquant_table1") if cell.row == "RTN 4-4-4")
    assert Run.model_validate({**run.model_dump(), "seed": 7}).key == run.key
