"""Origin of numbers: checkpoints, settings, run files, learned rotations, and the provenance of all of them."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.render.pages import cells
from reproduction.render.pages.model import Fact
from reproduction.run.provenance import WeightsProvenance, told
from reproduction.run.results import REPORTS, RunResult, rotations_of
from reproduction.tables.configuration import Slot
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from reproduction.words.describe import measurement, settings
from reproduction.words.templates import commit, sentences
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import canonical_json, read_object
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
    """Origin of each column; those of one checkpoint with the same sizes together."""
    found: dict[str, list[str]] = {}
    for column in project.columns(table):
        slot = project.slot(table, column).model_dump(mode="json", exclude={"name"})
        found.setdefault(canonical_json(slot), []).append(column)
    slots = [(columns, project.slot(table, columns[0])) for columns in found.values()]
    return [
        Computed(
            columns, slot, _card(project, slot.checkpoint), project.digest(slot.name), _shape(project, slot.checkpoint)
        )
        for columns, slot in slots
    ]


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
    for row in table.rows:
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


def model_facts(results: Results, on_models: bool = True) -> list[Fact]:
    """Models, where any is measured, and seeds of the results."""
    return _facts("models", runs=[result.run for result in results.values()], on_models=on_models)


def origin_facts(results: Results) -> list[Fact]:
    """Commit, code, date, device and texts of the results; empty without results."""
    weights = {result.run.weights_key: result.weights for result in results.values() if result.weights}
    records = {
        "runs": [result.provenance for result in results.values()],
        "weights": [*weights.values()],
        "rotations": [*rotations_of(results.values()).values()],
    }
    shown = {kind: [told(record) for record in members] for kind, members in records.items()}
    made = [Fact(f"Code of {kind}", _made(members)) for kind, members in shown.items() if members]
    return [*made, *_facts("origin", **shown)]


def _made(records: list[dict[str, Any]]) -> str:
    """The commit and the code digest of some results, and how many have both."""
    counts = Counter(f"{commit(record)}, digest `{record['code_digest']}`" for record in records)
    return "; ".join(f"{count} by {code}" if len(counts) > 1 else code for code, count in counts.items())


def _facts(macro: str, **arguments: object) -> list[Fact]:
    """Facts of a macro, each once."""
    return Fact.of(dict.fromkeys(sentences("pages/provenance.jinja", macro, **arguments)))
