"""Origin of numbers: checkpoints, settings, run files, learned rotations, and the provenance of all of them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from reproduction.frame.values import Values
from reproduction.render.pages import cells
from reproduction.render.pages.model import Fact, RunLine
from reproduction.run.provenance import WeightsProvenance, told
from reproduction.run.results import REPORTS, RunResult, rotations_of
from reproduction.tables.configuration import Slot
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from reproduction.words.describe import measurement, settings
from reproduction.words.numbers import show
from reproduction.words.templates import sentences
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import read_object
from rotquant.models.gguf.importing import described, origin_of_model
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import UNQUANTIZED_BITS

Results = Mapping[str, RunResult]
"""Run results by key: all of a table's, or of an older table those that are still there."""


class Computed(NamedTuple):
    """Origin of computed columns: a slot with its checkpoint as a link, digest and shape."""

    columns: list[str]
    slot: Slot
    checkpoint: str
    digest: str
    shape: str


class RowRecipe(NamedTuple):
    """A row's recipe in words, on the table's first slot; the columns where it holds, if not all."""

    row: str
    columns: list[str]
    preset: str
    recipe: str


def computed_on(project: Project, table: RunTable) -> list[Computed]:
    """Origin of each column, those of one slot together."""
    slots: dict[str, list[str]] = {}
    for column in project.columns(table):
        slots.setdefault(project.slot(table, column).name, []).append(column)
    found = []
    for name, columns in slots.items():
        slot = project.config.slot(name)
        checkpoint = slot.checkpoint
        place = (_card(project, checkpoint), project.digest(name), _shape(project, checkpoint))
        found.append(Computed(columns, slot, *place))
    return found


def has_groups(recipe: Recipe) -> bool:
    """Whether something is quantized in groups."""
    schemes = [recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys, recipe.values]
    return any(scheme.granularity == "group" for scheme in schemes if scheme)


def row_bits(project: Project, table: RunTable, results: Results) -> dict[str, str]:
    """Effective bits per weight of each row, with scales and all else stored (`rotquant.weights.bits`).

    The range covers columns and seeds; empty without a record of any quantized row.
    """
    found: dict[str, set[float]] = {}
    recorded = False
    for cell in project.cells(table.id):
        for run in cell.runs:
            if run.recipe.weights is None and not run.recipe.has_role("rounding"):
                found.setdefault(cell.row, set()).add(float(UNQUANTIZED_BITS))
            elif (result := results.get(run.key)) and result.weights:
                total = told(result.weights, WeightsProvenance)["bits_per_weight"].get("total")
                recorded |= total is not None
                found.setdefault(cell.row, set()).update([] if total is None else [total])
    if not recorded:
        return {}
    return {row: cells.ends(bits) for row, bits in found.items() if bits}


def shared_checkpoints(project: Project, slots: list[str]) -> list[tuple[str, str]]:
    """Each slot whose checkpoint is also used for an earlier slot of the configuration, with that one."""
    pairs = []
    for name in slots:
        checkpoint = project.config.slot(name).checkpoint
        first = next(other for other in project.config.slots.values() if other.checkpoint == checkpoint).name
        pairs += [(name, first)] if first != name else []
    return pairs


def _card(project: Project, checkpoint: str) -> str:
    """The checkpoint with a link to its model card, and the GGUF file that it was dequantized from."""
    if (origin := origin_of_model(project.root / checkpoint)) is not None:
        return f"`{checkpoint}`, {origin}"
    for card in ("MODEL_CARD.md", "README.md"):
        if (project.root / checkpoint / card).is_file():
            return f"[{checkpoint}]({os.path.relpath(Path(checkpoint) / card, REPORTS)})"
    if (project.root / checkpoint).exists() or checkpoint.count("/") != 1:
        return f"`{checkpoint}`"
    return f"[{checkpoint}](https://huggingface.co/{checkpoint.partition('@')[0]})"


def _shape(project: Project, checkpoint: str) -> str:
    path = described(project.root / checkpoint) / "config.json"
    if not path.is_file():
        return "-"
    config = read_object(path, "model configuration", CheckpointError)
    heads, kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    grouped = f", {kv} KV" if kv and kv != heads else ""
    width, ffn, layers = config.get("hidden_size"), config.get("intermediate_size"), config.get("num_hidden_layers")
    return f"{layers} layers, width {width}, FFN {ffn}, {heads} heads{grouped}"


def row_settings(project: Project, table: RunTable) -> list[RowRecipe]:
    """The recipe of each row on the first slot; several if a row's recipe changes with the column."""
    first = project.slot(table, project.columns(table)[0])
    lines = []
    for row in table.computed_rows:
        found: dict[str, list[str]] = {}
        for cell in project.cells(table.id):
            if cell.row == row.name and project.slot(table, cell.column) == first:
                found.setdefault(settings(cell.runs[0].recipe), []).append(cell.column)
        for recipe, columns in found.items():
            varies = list(dict.fromkeys(columns)) if len(found) > 1 else []
            lines.append(RowRecipe(row.name, varies, str(row.method), recipe))
    return lines


def measurements(project: Project, table: RunTable) -> dict[str, list[str]]:
    """Settings of each metric, with the rows that use them; no rows where the baseline does."""
    cells = [(measurement(cell.runs[0]), cell.row) for cell in project.cells(table.id)]
    usual = {how for how, row in cells if row == table.baseline}
    return {how: [] if how in usual else [row for other, row in cells if other == how] for how, _ in cells}


def _link(project: Project, key: str) -> str:
    """The path of a run's file from the reports folder."""
    return f"../results/runs/{project.results.run(key).name}"


def run_lines(project: Project, table: RunTable, values: Values, results: Results) -> tuple[RunLine, ...]:
    """Every run of the table with the main number of its metric."""
    first = {cell.quantities[0].name: cell.quantities[0].title for cell in project.cells(table.id)}
    return tuple(
        RunLine(row, column, seed, f"{first[name]} {show(value)}", _seconds(results.get(key)), key, _link(project, key))
        for (row, column, name), number in values.items()
        if name in first
        for key, seed, value in zip(number.runs, number.seeds, number.values, strict=True)
    )


def _seconds(result: RunResult | None) -> str:
    return "-" if result is None else f"{result.provenance.get('seconds', 0.0):.1f}"


def model_facts(results: Results) -> list[Fact]:
    """Models and seeds of the results."""
    return _facts("models", runs=[result.run for result in results.values()])


def origin_facts(results: Results) -> list[Fact]:
    """Date, device, code and texts of the results; empty without results."""
    weights = {result.run.weights_key: result.weights for result in results.values() if result.weights}
    records = [result.provenance for result in results.values()]
    learned = rotations_of(results.values()).values()
    kinds = {"runs": records, "weights": weights.values(), "rotations": learned}
    return _facts("origin", **{kind: [told(record) for record in members] for kind, members in kinds.items()})


def _facts(macro: str, **arguments: object) -> list[Fact]:
    """Facts of a macro, each once."""
    return Fact.of(dict.fromkeys(sentences("pages/provenance.jinja", macro, **arguments)))
