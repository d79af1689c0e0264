"""Effective bits per weight: the derived number is what the stored files hold, for every preset."""

from pathlib import Path

import pytest
from safetensors import safe_open

from reproduction.frame.values import Values
from reproduction.render.pages.grids import BITS, value_grids
from reproduction.render.pages.origins import row_bits
from reproduction.run.results import RunResult
from reproduction.tables.project import Project
from rotquant.models.architectures import architecture_of
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.actions import hooks
from rotquant.weights.bits import bits_per_weight
from rotquant.weights.build import build_weights
from rotquant.weights.storage import save_quantized
from tests.helpers.cases import one_of_each
from tests.helpers.families import method
from tests.helpers.models import tiny_model, tiny_tokens

SAMPLES = tiny_tokens(batch=4, tokens=24, seed=5)
STORING = [name for name in all_presets() if preset(name).weights is not None]
#: Groups of 10 do not divide 64 or 96 features, so that the last of a row is shorter.
RAGGED = {"weights": {"scheme": {"granularity": "group", "group_size": 10}}}


def stored(recipe: Recipe, folder: Path) -> tuple[dict[str, float], dict[str, float], int]:
    """Derived bits per weight by part, those of the file by the same parts, and the number of weights."""
    model = tiny_model()
    learned = hooks(recipe.learner).learn_rotations(model, recipe, 3, SAMPLES) if recipe.learner else None
    texts = dict.fromkeys(recipe.own_texts, SAMPLES)
    rotations = learned and learned.rotations
    made = build_weights(model, None, recipe, 3, SAMPLES, texts=texts, progress=False, rotations=rotations)
    save_quantized(folder, made)
    shapes = made.manifest.quantized
    derived = bits_per_weight(recipe, architecture_of(model), shapes, 32, made.state.tensors)
    weights = sum(rows * columns for rows, columns in shapes.values())
    parts = {"codes": "codes", "lattice": "codes", "scale": "scales", "zero_point": "zero_points", "columns": "order"}
    parts |= {"outlier_values": "outliers", "outlier_scale": "outliers", "levels": "tables", "ends": "tables"}
    parts |= {"sides": "tables", "centred": "tables", "global_scale": "scales"}
    found: dict[str, float] = {}
    with safe_open(folder / "quantized.safetensors", "pt") as file:
        names = set(file.keys())
        for name in names:
            tensor, (owner, _, part) = file.get_tensor(name), name.rpartition(".")
            if owner in shapes:
                lattice = f"{owner}.lattice" in names
                kind = "signs" if lattice and part in ("rows", "columns") else parts[part]
            elif name.startswith(
                tuple(f"rotquant.methods.{one}" for one in ("duquant", "outliers", "flatquant", "wush"))
            ):
                kind = "transforms"
            else:
                continue  # floating point layers, prefixes and static scales of inputs
            found[kind] = found.get(kind, 0) + 8 * tensor.nbytes / weights
    return derived, found, weights


def padded(recipe: Recipe, derived: float) -> float:
    """Integers of 2 and 3 bits lie in half bytes."""
    bits = recipe.rounded.scheme.bits
    levels = any(one.stored_as == "codebook" for one in recipe.methods.values())
    return derived * (1 if bits >= 4 or levels else 4 / bits)


@pytest.mark.parametrize("name", one_of_each(STORING))
def test_the_derived_bits_are_those_of_the_stored_file(name: str, tmp_path: Path) -> None:
    """Exactly, but for the padding of integers of 2 and 3 bits; rows here are whole bytes."""
    recipe = method(name)
    if name == "rcp":  # partitions that have not moved are stored by their ends alone
        recipe = override(recipe, {"methods": {"rcp": {"quantizer_lr": 0.3}}}, "test")
    derived, found, _ = stored(recipe, tmp_path / "folder")
    assert derived["total"] == pytest.approx(sum(derived.values()) - derived["total"], rel=1e-12)
    expected = {**derived, "codes": padded(recipe, derived["codes"])}
    assert found == pytest.approx({part: bits for part, bits in expected.items() if part != "total"}, rel=1e-12)


@pytest.mark.parametrize("name", ["rtn", "quarot", "atom-128g", "awq-128g"])
def test_the_last_group_of_a_ragged_row_costs_a_scale_too(name: str, tmp_path: Path) -> None:
    recipe = override(method(name), RAGGED, "test")
    derived, found, _ = stored(recipe, tmp_path / "folder")
    assert found == pytest.approx({part: bits for part, bits in derived.items() if part != "total"}, rel=1e-12)
    per_channel, _, _ = stored(preset("rtn"), tmp_path / "other")
    assert derived["scales"] > 3 * per_channel["scales"]


def test_weights_that_are_not_quantized_have_sixteen_bits() -> None:
    assert bits_per_weight(Recipe(), architecture_of(tiny_model()), {})["total"] == 16


def test_a_page_shows_the_range_over_columns_and_nothing_without_records(project: Project) -> None:
    table = project.table("quarot_table1")
    cells = project.cells(table.id)
    totals = {"Llama-2-7B": 5.5, "Llama-2-13B": 5.25, "Llama-2-70B": 5.0}

    def results(*, recorded: bool) -> dict[str, RunResult]:
        return {
            run.key: RunResult(run, {}, {}, {"bits_per_weight": {"total": totals[cell.column]}} if recorded else {})
            for cell in cells
            for run in cell.runs
        }

    found = row_bits(project, table, results(recorded=True))
    assert found["QuaRot-128G"] == "5.00 to 5.50"
    assert found["Baseline"] == "16.00"
    assert row_bits(project, table, results(recorded=False)) == {}
    grids = value_grids(project, table, Values({}, {}), found)
    assert all(grid.stub[-1] == BITS and grid.labels[0][-1] == "16.00" for grid in grids)
