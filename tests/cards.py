"""The table of the shipped models' README, made from their cards and recipes: `python -m tests.cards`.

What `rotquant card` wrote into a card is the record. Nothing is measured here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.commands.card import CARD_END, CARD_START
from rotquant.foundation.files import read_json, read_text, write_text

MODELS = Path(__file__).parents[1] / "workflow/resources/models"
START, END = "<!-- cards:start -->", "<!-- cards:end -->"

#: Of how many models a figure is asked where not of all, by its label.
SOME = {"first token, down_proj input": 3, "above 8 behind the prefix": 3}
#: What is asked of one model, which no card judges.
STATIC = 2.5

Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Card:
    """What the folder of a model says of it.

    on: text, tasks and seed of the figures. tables: by title the rows by their first cell. static: the perplexity with
    static inputs over that with dynamic ones. recipe: the file. parameters: how many.
    """

    name: str
    on: str
    tables: dict[str, Rows]
    static: str
    recipe: dict[str, Any]
    parameters: int


@dataclass(frozen=True)
class Line:
    """A row of the table: what it shows, and a cell for each model.

    asked: of a model, in words. met: which models have it; None where nothing is asked. least: of how many models it is
    asked; None for all.
    """

    label: str
    cells: list[str]
    asked: str = ""
    met: list[bool] | None = None
    least: int | None = None

    def __str__(self) -> str:
        """In Markdown; where too few models have what is asked, those that have it not are bold."""
        of = "" if self.least is None else f", on {self.least} model" + "s" * (self.least > 1)
        met = [True] * len(self.cells) if self.met is None else self.met
        enough = sum(met) >= (len(met) if self.least is None else self.least)
        cells = [cell if enough or one else f"**{cell}**" for cell, one in zip(self.cells, met, strict=True)]
        return f"| {' | '.join([self.label, self.asked + of, *cells])} |".replace("|  |", "| |")


def cards(models: Path = MODELS) -> list[Card]:
    """The models whose cards have figures: names with numbers first, in the order of these."""
    found = [_card(file.parent) for file in models.glob("*/MODEL_CARD.md") if "**Phenomena**" in _figures(file)]
    return sorted(found, key=lambda card: [int(part) if part.isdigit() else part for part in _parts(card.name)])


def table(found: list[Card]) -> str:
    """Which text the figures are of, and the table.

    Raises:
        ValueError: the cards are not of the same text, or not the same is asked in them.
    """
    on = _only("the figures are of different texts", (card.on for card in found))
    head = [Line("", [card.name for card in found], "asked"), Line("---", ["---" for _ in found], "---")]
    rows = "\n".join(map(str, [*head, *_shapes(found), *_asked(found), *_others(found)]))
    return f"The figures are of `rotquant card`, on {on}. What falls short is bold.\n\n{rows}"


def readme(models: Path = MODELS) -> str:
    """The README with the table of the cards between its markers."""
    before, _, rest = read_text(models / "README.md", "README").partition(START)
    return f"{before}{START}\n{table(cards(models))}\n{END}{rest.partition(END)[2]}"


def _shapes(found: list[Card]) -> list[Line]:
    models = [card.recipe["model"] for card in found]
    heads = [(model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]) for model in models]
    return [
        Line("stands for", [card.recipe["stands_for"] for card in found]),
        Line("width x layers", [f"{one['hidden_size']} x {one['num_hidden_layers']}" for one in models]),
        Line("heads (key-value heads) x size", [f"{many} ({groups}) x {size}" for many, groups, size in heads]),
        Line("FFN width", [str(model["intermediate_size"]) for model in models]),
        Line("million parameters", [f"{card.parameters / 1e6:.1f}" for card in found]),
        Line("steps; peak rate", [f"{card.recipe['steps']:,}; {card.recipe['learning_rate']:g}" for card in found]),
    ]


def _asked(found: list[Card]) -> list[Line]:
    """The figures that cards set beside what is asked. One that a card lacks counts as not met."""
    tables = [{_figure(name): row for name, row in card.tables["Phenomena"].items()} for card in found]
    lines = []
    for figure in dict.fromkeys(name for rows in tables for name in rows):
        asked = _only(f"{figure}: not the same is asked", (rows[figure][1] for rows in tables if figure in rows))
        cells = [_short(rows[figure][0]) if figure in rows else "-" for rows in tables]
        met = [figure in rows and rows[figure][2] == "yes" for rows in tables]
        lines.append(Line(figure, cells, asked, met, SOME.get(figure)))
    return lines


def _others(found: list[Card]) -> list[Line]:
    perplexity = [card.tables["Perplexity"] for card in found]
    presets = [[rows[f"preset {name} (W4A4KV4)"][-1] for name in ("rtn", "quarot-rtn")] for rows in perplexity]
    tokens = [list(card.tables["Outlier tokens"].items()) for card in found]
    elsewhere = [(rows[0][1][1], rows[-1][1][1]) for rows in tokens]
    static = [float(card.static) >= STATIC for card in found]
    return [
        Line("static inputs over dynamic, rotated", [card.static for card in found], f"at least {STATIC}", static, 1),
        Line("the prefix", [rows[-1][0] for rows in tokens]),
        Line("elsewhere, down_proj input: no prefix; prefix", ["; ".join(map(_short, pair)) for pair in elsewhere]),
        Line("presets rtn; quarot-rtn over unquantized", ["; ".join(map(_short, pair)) for pair in presets]),
        Line("unquantized, perplexity", [rows["unquantized"][0] for rows in perplexity]),
    ]


def _card(folder: Path) -> Card:
    figures = _figures(folder / "MODEL_CARD.md")
    on, static = re.search(r"`, on ([^;\n]*)[^\n]*\.\n", figures), re.search(r"\(([^ ]+)[^()]* times the dyn", figures)
    if on is None or static is None:
        raise ValueError(f"{folder / 'MODEL_CARD.md'} does not say what its figures are of: write it again.")
    parts = re.split(r"^\*\*([^*]+)\*\*: ", figures, flags=re.MULTILINE)
    tables = {title: _rows(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    parameters = read_json(folder / "curve.json", "curve")["parameters"]
    recipe = read_json(folder / "recipe.json", "recipe")
    return Card(folder.name, on[1], tables, static[1], recipe, parameters)


def _figures(card: Path) -> str:
    return read_text(card, "model card").partition(CARD_START)[2].partition(CARD_END)[0]


def _rows(text: str) -> Rows:
    """The rows of a table in Markdown by their first cell, without its head."""
    lines = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {first: cells for first, *cells in lines[2:]}


def _short(cell: str) -> str:
    """A cell without the standard error and the number of the layer."""
    return re.sub(r" ± [^ %]+| \(\d+\)$", "", cell)


def _figure(name: str) -> str:
    """The name of a figure without the tokens of a model's own prefix."""
    return re.sub(r" behind .*", " behind the prefix", name)


def _only(otherwise: str, values: Iterable[str]) -> str:
    found = set(values)
    if len(found) != 1:
        raise ValueError(f"{otherwise}: {'; '.join(sorted(found))}")
    return found.pop()


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


if __name__ == "__main__":
    write_text(MODELS / "README.md", readme())
