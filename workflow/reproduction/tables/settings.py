"""Tables of settings as data: a paper's settings of methods, compared with the recipes here.

Rows name recipes and columns name facts of a part of the network (its weights, inputs of linear layers or KV cache),
or the reverse for a table about one method. Nothing is run: each cell follows from a recipe, preferably that of a row
of another table, which is computed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from reproduction.reading.written import Many, Written
from reproduction.tables.checks import Names, OneCheck, Statement, headline
from reproduction.tables.tables import OfPaper, RunTable, Table, Titled, read_published
from rotquant.foundation.errors import ConfigError, lookup
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme

Part = Literal["weights", "activations", "attention_output", "keys", "values", "cache"]
"""The quantized part; `cache` is keys and values."""

FactName = Literal["granularity", "group_size", "extent", "symmetry", "scales", "bits", "clipping"]

#: Text for a part that a recipe does not quantize.
UNQUANTIZED = "not quantized"


def fact(recipe: Recipe, part: Part, name: FactName) -> str:
    """One fact of a part, such as "per-token" or "asymmetric"; both keys' and values' where they differ."""
    if part != "cache":
        return _fact(recipe, part, name)
    keys, values = (_fact(recipe, one, name) for one in ("keys", "values"))
    return keys if keys == values else f"keys {keys}, values {values}"


def _fact(recipe: Recipe, part: Part, name: FactName) -> str:
    scheme = _scheme(recipe, part)
    return UNQUANTIZED if scheme is None else FACTS[name](recipe, scheme, part)


def _scheme(recipe: Recipe, part: Part) -> QuantizationScheme | None:
    """The quantization scheme of a part; by default o_proj's input has the scheme of other layers' inputs."""
    if part == "weights":
        return recipe.weights and recipe.weights.scheme
    if part == "attention_output" and recipe.attention_output is None:
        return recipe.activations
    return getattr(recipe, part)


def _clipping(recipe: Recipe, scheme: QuantizationScheme, part: Part) -> str:
    """The search or learning that clips the range, or the share of the range that is kept; "none" without clipping."""
    if part == "weights":
        chosen = (method.clips_weights(recipe) for method in recipe.methods.values())
        searched = "search" if recipe.rounded.clip_search else None
        way = next((way for way in (*chosen, searched) if way is not None), None)
        if way is not None:
            return way
    if not (scheme.dynamic or part == "weights") and recipe.has_role("scales"):
        return "search"
    return "none" if scheme.clip_ratio == 1 else f"{scheme.clip_ratio:g}"


FACTS: dict[FactName, Callable[[Recipe, QuantizationScheme, Part], str]] = {
    "granularity": lambda recipe, scheme, part: f"per-{scheme.granularity}",
    "group_size": lambda recipe, scheme, part: "-" if scheme.group_size is None else str(scheme.group_size),
    "extent": lambda recipe, scheme, part: (
        f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per-{scheme.granularity}"
    ),
    "symmetry": lambda recipe, scheme, part: "symmetric" if scheme.symmetric else "asymmetric",
    "scales": lambda recipe, scheme, part: "dynamic" if scheme.dynamic and part != "weights" else "static",
    "bits": lambda recipe, scheme, part: str(scheme.bits),
    "clipping": _clipping,
}
"""Each fact of a part. granularity: the numbers that share a scale; extent: the same, with the size of groups; weights'
scales are static."""


class RowOfTable(Written):
    """A row of a table of accuracy."""

    table: str
    """The table's id."""
    row: str
    """Its row."""


class SettingsColumn(Written):
    """A fact of every row's recipe."""

    name: str
    """As printed."""
    part: Part | None = None
    """What it is about, where rows do not say it."""
    fact: FactName
    """What is reported of it (`FACTS`)."""
    words: dict[str, str] = Field(default_factory=dict)
    """What the paper writes for a fact, where it has other words: {symmetric: Sym}."""


class SettingsRow(Written):
    """A recipe, or a part of one."""

    name: str
    """As printed."""
    as_in: RowOfTable | None = None
    """The row of another table with this recipe. A row has this or `method`."""
    method: str | None = None
    """A preset, see `rotquant methods`."""
    part: Part | None = None
    """What the row is about, where columns do not say it."""
    differs: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Why the recipe here is not as the paper prints it, by column."""

    @model_validator(mode="after")
    def _has_one_recipe(self) -> Self:
        if (self.method is None) == (self.as_in is None):
            raise ValueError("a row has a method, or is as in another table")
        return self


class AsPrinted(Written):
    """Cells that the paper prints."""

    rows: Names | None = None
    """Rows; default all."""
    columns: Names | None = None
    """Columns; default all."""


class Told(Written):
    """A fact that a sentence of the paper tells."""

    rows: Names
    """Of these rows."""
    column: str
    """The column with the fact."""
    says: str
    """The fact, in the words of that column."""


class SettingsCheck(OneCheck):
    """What is asked of some cells."""

    as_printed: AsPrinted | None = None
    """Each cell is as the paper's table prints it, where it prints one."""
    told: Told | None = None
    """The cells say what a sentence of the paper says."""


class SettingsClaim(Statement):
    """What a paper says of how methods quantize: a fact, since the recipes here were written after it."""

    fact: SettingsCheck
    """What is asked of the recipes here: shown with the cells, without a verdict."""


class SettingsFields(Titled):
    """One table of settings."""

    columns: Annotated[Many[SettingsColumn], Field(min_length=1)]
    """The columns."""
    rows: Annotated[Many[SettingsRow], Field(min_length=1)]
    """The rows."""
    claims: Many[SettingsClaim]
    """What the paper says about them."""

    @model_validator(mode="after")
    def _names_refer_to_something(self) -> Self:
        rows, columns = ({one.name: one for one in parts} for parts in (self.rows, self.columns))
        if len(rows) < len(self.rows) or len(columns) < len(self.columns):
            raise ValueError("a row or a column has a name that occurs twice")
        for row in self.rows:
            for column in self.columns:
                if (row.part is None) == (column.part is None):
                    raise ValueError(f"rows.{row.name}, {column.name}: either rows or columns name a part")
            for column in row.differs:
                lookup(columns, column, f"rows.{row.name}.differs: unknown column")
        headline(self.claims)
        for number, claim in enumerate(self.claims):
            asked, told = claim.fact.as_printed, claim.fact.told
            for row in (asked.rows or () if asked else ()) + (told.rows if told else ()):
                lookup(rows, row, f"claims.{number}: unknown row")
            for column in (asked.columns or () if asked else ()) + ((told.column,) if told else ()):
                lookup(columns, column, f"claims.{number}: unknown column")
        return self


class SettingsFile(OfPaper):
    """A table of settings is data: which recipes, which facts of them, and what the paper prints."""

    tables: Annotated[Many[SettingsFields], Field(min_length=1)]
    """The tables."""


@dataclass(frozen=True)
class Setting:
    """A cell: the recipe's value and the paper's printed value, None if it prints nothing or our text lacks it.

    reason: why the two differ, if the table gives it.
    """

    row: str
    column: str
    here: str
    published: str | None
    reason: str | None = None

    @property
    def same(self) -> bool | None:
        """Whether the recipe agrees with the printed cell, ignoring case; None without a printed cell."""
        return None if self.published is None else self.here.casefold() == self.published.casefold()


class SettingsTable(SettingsFields, Table):
    """A table of settings; after all tables are loaded, with its recipes by row and its cells row by row."""

    of: ClassVar[str] = "recipes"
    recipes: dict[str, Recipe] = Field(default_factory=dict)
    cells: tuple[Setting, ...] = ()

    def cell(self, row: str, column: str) -> Setting:
        """Find a cell by row and column."""
        return next(one for one in self.cells if (one.row, one.column) == (row, column))


def settle(table: SettingsTable, tables: Mapping[str, Table], root: Path) -> SettingsTable:
    """Complete a table with its recipes and cells, and check that its reasons and claims refer to existing cells.

    Raises:
        ConfigError: a name that refers to nothing, or a reason for a difference that does not exist.
    """
    recipes = {row.name: _recipe(row, tables, table.id) for row in table.rows}
    cells = tuple(_cells(table, recipes, _printed(table, root)))
    settled = table.model_copy(update={"recipes": recipes, "cells": cells})
    for row in table.rows:
        for column in row.differs:
            if settled.cell(row.name, column).same is not False:
                raise ConfigError(f"rows.{row.name}.differs: {column} is no other than the paper prints; leave it out.")
    for number, claim in enumerate(table.claims):
        if not any(True for _ in asked_cells(settled, claim)):
            raise ConfigError(f"claims.{number}: the paper prints none of these cells.")
    return settled


def _recipe(row: SettingsRow, tables: Mapping[str, Table], where: str) -> Recipe:
    if row.as_in is None:
        return preset(str(row.method))
    of_runs = {name: table for name, table in tables.items() if isinstance(table, RunTable)}
    table = lookup(of_runs, row.as_in.table, f"rows.{row.name}.as_in: unknown table")
    source = table.row(row.as_in.row)
    return source.computed(f"table {table.id}, row {source.name}")


def _printed(table: SettingsTable, root: Path) -> dict[tuple[str, str], str]:
    """The paper's printed cells by row and column, checked to be rows and columns of the table."""
    rows, columns = ({one.name: one for one in parts} for parts in (table.rows, table.columns))
    found = {} if table.published is None else read_published(table.published, root)
    for row, column, _ in found:
        lookup(rows, row, "published: unknown row")
        lookup(columns, column, "published: unknown column")
    return {(row, column): one.text for (row, column, _), one in found.items() if one.text is not None}


def _cells(
    table: SettingsTable, recipes: Mapping[str, Recipe], printed: Mapping[tuple[str, str], str]
) -> Iterator[Setting]:
    for row in table.rows:
        for column in table.columns:
            part: Any = row.part or column.part
            said = fact(recipes[row.name], part, column.fact)
            place = row.name, column.name
            yield Setting(*place, column.words.get(said, said), printed.get(place), row.differs.get(column.name))


def asked_cells(table: SettingsTable, claim: SettingsClaim) -> Iterator[tuple[Setting, str]]:
    """The cells of a claim, each with the expected text."""
    asked, told = claim.fact.as_printed, claim.fact.told
    for cell in table.cells:
        if asked and cell.row in (asked.rows or (cell.row,)) and cell.column in (asked.columns or (cell.column,)):
            if cell.published is not None:
                yield cell, cell.published
        elif told and cell.row in told.rows and cell.column == told.column:
            yield cell, told.says
