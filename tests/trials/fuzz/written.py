"""Formats that people write: configuration, tables of all kinds with what the papers print, recipes, options."""

import json
from pathlib import Path

from reproduction.sources import load_project, load_tables
from reproduction.tables.settings import SettingsTable
from reproduction.tables.speed.published import read_printed
from reproduction.tables.tables import RunTable
from rotquant.commands.options import changed, changes_of, named_recipe, rotation_fields
from rotquant.recipes.presets import preset
from tests.trials.fuzz.example import SETTINGS, SPEEDS
from tests.trials.fuzz.formats import Format, content_of, kinds

TABLES = "workflow/papers/quarot/tables.yaml"
PUBLISHED = "workflow/papers/quarot/published/"
OVER = "config/over.yaml"
OVER_TEXT = """seeds: [0]
device: cpu
slots:
  Llama-2-7B: {batch_size: 4, group_sizes: {128: 16}, methods: {gptq: {act_order: true}}}
zero_shot: {suite: shipped, corpus: wikitext2, tasks: [next_word]}
"""


def formats(root: Path) -> list[Format]:
    """Of a project that lies at `root`."""
    files = content_of(root, "config/*.yaml", "workflow/papers/**/*", "models/**/*", "text/*") | {
        OVER: OVER_TEXT.encode()
    }
    fast = {name: content for name, content in files.items() if not name.startswith("models")}
    sections = preset("quarot").model_dump(mode="json").items()
    recipe = "\n".join(f"{name}: {json.dumps(section)}" for name, section in sections).encode()
    return [
        Format("configuration", files, kinds("config/config.yaml", OVER), _project, 2.0, names_places=True),
        Format("tables of accuracy", files, kinds(TABLES), _tables, 2.0),
        Format("tables of speed", fast, kinds(SPEEDS), _speed, 2.0),
        Format("tables of settings", files, kinds(SETTINGS), _settings, 2.0),
        Format("printed numbers", files, kinds(f"{PUBLISHED}small.csv"), _tables, 1.5),
        Format("printed settings", files, kinds(f"{PUBLISHED}settings.csv"), _settings),
        Format("printed times", fast, kinds(f"{PUBLISHED}table14.csv"), _speed),
        Format("recipes", {"recipe.yaml": recipe}, {"recipe.yaml": "yaml"}, _recipe, 2.0),
        Format("options", {"options": OPTIONS.encode()}, {"options": "lines"}, _options),
    ]


OPTIONS = """weights.scheme.bits=3
rotation.residual=none
methods.gptq={act_order: true}
activations.clip_ratio=0.8"""


def _project(folder: Path) -> None:
    project = load_project([folder / OVER], folder)
    for name in project.tables:
        project.cells(name)


def _tables(folder: Path) -> None:
    project = load_project((), folder)
    for table in project.of(RunTable).values():
        project.cells(table.id)
        project.published(table)


def _speed(folder: Path) -> None:
    read_printed.cache_clear()
    load_tables(folder)


def _settings(folder: Path) -> None:
    from reproduction.render.pages.markdown import markdown
    from reproduction.render.pages.recipes import settings_report

    for table in load_project((), folder).of(SettingsTable).values():
        markdown(settings_report(table))


def _text(folder: Path, name: str) -> str:
    """A file of the case's as a user types it: what a command line can hold."""
    path = folder / name
    return path.read_bytes().decode(errors="replace") if path.is_file() and path.stat().st_size < 1 << 20 else ""


def _recipe(folder: Path) -> None:
    """The whole recipe as `--set` takes it, section by section where it is a mapping in flow style, and as a file."""
    text = _text(folder, "recipe.yaml")
    sections = [line.partition(": ") for line in text.split("\n")] if not text.startswith("{") else []
    changed(preset("quarot"), [f"{name}={value}" for name, _, value in sections] or [f"rotation={text}"])
    named_recipe(str(folder / "recipe.yaml"))


def _options(folder: Path) -> None:
    lines = _text(folder, "options").split("\n")
    changed(preset("quarot"), lines)
    changes_of(lines)
    rotation_fields(lines)
