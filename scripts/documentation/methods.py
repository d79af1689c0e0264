"""The pages of methods and presets, made from the classes of `rotquant.methods`, their modules and the tables.

A page holds what its class says: sentence, source, settings. It adds the equations that the module's docstrings name,
the settings that differ from the paper or about which the paper is silent, and the reports whose rows use the method.
"""

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from reproduction.sources import load_project
from reproduction.tables.tables import RunTable
from rotquant.foundation.data import field_meanings
from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import DOING, ROLES, Method, Recipe, find_method
from rotquant.recipes.registry import built_in_names
from rotquant.recipes.schemes import RotationScheme, WeightQuantization
from scripts.documentation.links import ROOT
from scripts.documentation.words import cell, code, entries, paragraphs, sentence, sentences, shown, table, type_words

_EQUATION = re.compile(r"\bEqs?\. ?\(?[A-Z]?\d|\bSecs?\. ?[A-Z\d]|\bTheorem \d|\bAlgorithm \d")
#: Words by which the documentation of a setting says that paper and code, or two papers, do not agree.
_DISPUTED = re.compile(r"\bpapers?\b|\bpaper's\b|authors' code\b|\bcode (?:does|has)\b|'s code\b")
_STATEMENTS = ROOT / "tests/reproduction/paper_settings.yaml"


@dataclass(frozen=True)
class Subject:
    """What a page is about: a method, or one of the two sections of a recipe that papers call methods.

    modules: files with its code.
    uses: whether a recipe has it.
    prefix: of its fields in a recipe.
    """

    name: str
    title: str
    about: str
    source: str
    settings: type[BaseModel]
    modules: tuple[Path, ...]
    uses: Callable[[Recipe], bool]
    prefix: str
    roles: str


def subjects() -> Iterator[Subject]:
    """Rotations as drawn and rounding to nearest, then every built-in method by its name."""
    yield Subject(
        "rotation",
        "Rotation (QuaRot)",
        "Rotations R1 to R4 as they are drawn, without learning: the section `rotation` of a recipe.",
        "QuaRot, Sec. 4; SpinQuant, Sec. 3.1",
        RotationScheme,
        tuple(sorted((ROOT / "rotquant/models/rotation").glob("*.py"))),
        lambda recipe: recipe.fuses_norms and recipe.learner is None,
        "rotation",
        "rotates",
    )
    yield Subject(
        "rtn",
        "Rounding to nearest (RTN)",
        "Weights rounded to the nearest level, with a search of clips where the recipe says so: the section `weights` "
        "without a method that rounds.",
        "QuaRot, Sec. 5 and Table 3",
        WeightQuantization,
        (ROOT / "rotquant/tensors/quantization.py",),
        lambda recipe: recipe.weights is not None and not recipe.has_role("rounding"),
        "weights",
        "rounds the weights",
    )
    for name in built_in_names():
        yield _of(find_method(name))


def _of(method: type[Method]) -> Subject:
    return Subject(
        method.name,
        f"{method.title[0].upper()}{method.title[1:]}",
        "\n\n".join(paragraphs(method)),
        method.source,
        method,
        _modules(method),
        lambda recipe: method.name in recipe.methods,
        f"methods.{method.name}",
        ", ".join(f"{DOING[role]} (`{role}`)" for role in ROLES if role in method.roles).replace("same ", ""),
    )


def _modules(method: type[Method]) -> tuple[Path, ...]:
    """The file of a method, or those of its folder with the class first."""
    file = Path(inspect.getfile(method))
    found = [file, *(path for path in sorted(file.parent.glob("*.py")) if path != file)]
    if file.name != "__init__.py":
        found = [file]
    actions = importlib.util.find_spec(method.actions)
    if actions is not None and actions.origin and Path(actions.origin) not in found:
        found.append(Path(actions.origin))
    return tuple(found)


def pages() -> dict[str, str]:
    """All pages of methods by their places on the site."""
    found = {subject.name: subject for subject in subjects()}
    return {"methods/index.md": index(found.values())} | {
        f"methods/{name}.md": page(subject) for name, subject in found.items()
    }


def index(found: Iterable[Subject]) -> str:
    """The list of methods and of the presets that are made of them."""
    methods = [f"- [{one.title}]({one.name}.md): {sentence(one.about)} *{one.source}*" for one in found]
    presets = [
        f"- <a id='{name}'></a>{code(name)} ({widths(make())}): {paragraphs(make)[0]} Made of {_pages_of(make())}."
        for name, make in all_presets().items()
    ]
    return "\n\n".join(
        [
            "# Methods",
            "A recipe combines methods; at most one for each thing that is done to a model. Each page is made from the "
            "method's class when the site is built, so it says what the code does.",
            "\n".join(methods),
            "## Presets",
            "A preset is a paper's setting as a recipe, for `rotquant quantize --method NAME` and for rows of tables. "
            "`rotquant recipe NAME` prints every field. In brackets are the bits of weights, inputs and KV cache.",
            "\n".join(presets),
        ]
    )


def _pages_of(recipe: Recipe) -> str:
    return ", ".join(f"[{one.name}]({one.name}.md)" for one in _all() if one.uses(recipe)) or "nothing"


@cache
def _all() -> tuple[Subject, ...]:
    return tuple(subjects())


def widths(recipe: Recipe) -> str:
    """Bits of weights, inputs and KV cache."""
    schemes = (recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys)
    return "-".join(str(scheme.bits if scheme else 16) for scheme in schemes)


def page(subject: Subject) -> str:
    """The page of one method."""
    parts = [
        f"# {subject.title}",
        subject.about,
        "\n".join(
            [
                f"- Source: {subject.source}",
                f"- What it does: {subject.roles}",
                f"- In a recipe: {code(subject.prefix)}",
                f"- Code: {', '.join(code(path.relative_to(ROOT).as_posix()) for path in subject.modules)}",
            ]
        ),
        "## Settings",
        settings(subject),
        "## Where it differs from its paper",
        differences(subject),
        "## Equations in the code",
        equations(subject),
        "## Presets and results",
        results(subject),
    ]
    return "\n\n".join(parts)


def settings(subject: Subject) -> str:
    """The fields of a class, those of its sections in order."""
    rows = list(_rows(subject))
    if not rows:
        return "It has none."
    lead = f"`--set {subject.prefix}.{rows[0][0]}=VALUE` changes one, in a table's row `recipe`, in Python a field."
    return "\n\n".join(
        [lead, entries([(name, f"{kind}, {default}", meaning) for name, kind, default, meaning in rows])]
    )


def _rows(subject: Subject) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each field, in words."""
    meanings = field_meanings(subject.settings)
    for name, field in subject.settings.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else f"default {code(shown(value))}"
        yield name, type_words((field.annotation, field.metadata)), default, meanings.get(name, "")


def differences(subject: Subject) -> str:
    """Settings whose documentation speaks of paper and code, and the sources of what presets set of the method."""
    disputed = [
        f"- {code(field)}, {default}: {meaning}"
        for field, _, default, meaning in _rows(subject)
        if _DISPUTED.search(meaning)
    ]
    said = [
        [cell(one["source"]), ", ".join(code(name) for name in one["methods"]), cell(", ".join(_fields(subject, one)))]
        for one in _statements()
        if "paper" not in one and _fields(subject, one)
    ]
    parts = [
        "A disputed detail is a setting: by default as the paper says, as its authors' code by choice.",
        "\n".join(disputed) or "No setting of this method is disputed between its paper and its authors' code.",
    ]
    if said:
        parts += [
            "What the presets set, and where that is from:",
            table(["Source", "Presets", "Settings"], said),
        ]
    return "\n\n".join(parts)


@cache
def _statements() -> list[dict[str, Any]]:
    """What is said of the sources of presets, read once for all methods."""
    return yaml.safe_load(_STATEMENTS.read_text(encoding="utf-8"))


def _fields(subject: Subject, statement: dict[str, Any]) -> list[str]:
    """What a statement about presets decides of the method, as `field = value`."""
    start = f"{subject.prefix}."
    return [
        f"{code(field.removeprefix(start))} = {shown(value)}"
        for field, value in statement["settings"].items()
        if field.startswith(start)
    ]


def equations(subject: Subject) -> str:
    """The functions and classes whose documentation names an equation, a section or an algorithm of a paper."""
    rows = [
        [code(name), cell(text), code(path.relative_to(ROOT).as_posix())]
        for path in subject.modules
        for name, text in _documented(path)
        if _EQUATION.search(text)
    ]
    if not rows:
        return f"The mathematics is in {code(subject.modules[-1].relative_to(ROOT).as_posix())}."
    return table(["Where", "What", "File"], rows)


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    """A module, its functions and classes with the sentences of their docstrings that name a place in a paper."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
            found = [one for one in sentences(said.partition("\n\nArgs:")[0]) if _EQUATION.search(one)]
            yield getattr(node, "name", path.stem if path.stem != "__init__" else path.parent.name), " ".join(found)


def results(subject: Subject) -> str:
    """Presets that are made of the method, and the pages of the gallery whose rows are."""
    presets = [name for name, make in all_presets().items() if subject.uses(make())]
    tables = [
        [f"[{name}](../{_report(name)})", cell(title), cell(", ".join(rows))]
        for name, title, rows in _tables(subject.uses)
    ]
    links = ", ".join(f"[{name}](index.md#{name})" for name in presets)
    parts = [f"Presets: {links}." if presets else "No preset uses it; a row of a table does, or `--set`."]
    if tables:
        parts.append(table(["Report", "What it shows", "Rows"], tables))
    return "\n\n".join(parts)


def _report(name: str) -> str | None:
    """The gallery's page of a table below docs/, of a real model where there is one."""
    places = (f"gallery/{name}.md", f"gallery/shipped/{name}.md")
    return next((place for place in places if (ROOT / "docs" / place).is_file()), None)


@cache
def _recipes() -> tuple[tuple[str, str, str, Recipe], ...]:
    """Name and title of every table of runs that the gallery has, with each of its rows and the row's recipe."""
    return tuple(
        (name, one.title, row.name, row.computed(row.name))
        for name, one in load_project(root=ROOT).of(RunTable).items()
        if _report(name)
        for row in one.rows
    )


def _tables(uses: Callable[[Recipe], bool]) -> list[tuple[str, str, list[str]]]:
    """The tables with rows that use a method: name, title, these rows."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for name, title, row, recipe in _recipes():
        if uses(recipe):
            found.setdefault(name, (name, title, []))[2].append(row)
    return list(found.values())
