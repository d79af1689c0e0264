"""Editors check YAML files by schemas generated from the models that runs check them by: both accept what is here."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from reproduction import schemas
from reproduction.reading.written import read_yaml
from reproduction.schemas import MODELS, SCHEMAS
from rotquant.recipes.presets import PRESETS
from rotquant.recipes.registry import method_names

ROOT = Path(__file__).parents[2]
FOLDERS = ("config", "workflow/papers", "workflow/kernels")
schema = cache(schemas.schema)  # each takes a second to make
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.yaml"))


def as_json(data: Any) -> Any:
    """Data with text as keys, as an editor sees it."""
    if isinstance(data, dict):
        return {str(key): as_json(value) for key, value in data.items()}
    return [as_json(value) for value in data] if isinstance(data, list) else data


def problems(kind: str, data: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(schema(kind)).iter_errors(as_json(data))]


@pytest.mark.parametrize("kind", MODELS)
def test_a_schema_is_one(kind: str) -> None:
    Draft202012Validator.check_schema(schema(kind))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_names_its_schema_and_satisfies_it(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    kind = re.findall(r"^# yaml-language-server: \$schema=.*/(\w+)\.schema\.json\n", text)[0]
    where = os.path.relpath(SCHEMAS / f"{kind}.schema.json", path.parent)
    assert text.startswith(f"# yaml-language-server: $schema={where}\n")
    assert problems(kind, read_yaml(ROOT / path)) == []


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("config", "sedes: [0]", "'sedes' was unexpected"),
        ("config", "device: gpu", "'gpu' is not"),
        ("config", "standalone: true", "'device' is a required property"),
        ("config", "slots: {Llama-2-7B: {evaluation: {max_windows: 0}}}", "is not valid"),
        ("tables", "{paper: quarot, title: -, tables: []}", "should be non-empty"),
        ("targets", "{papers: {}, kinds: {}}", "'targets' is a required property"),
    ],
)
def test_a_schema_refuses_what_a_run_would(kind: str, text: str, sentence: str) -> None:
    assert any(sentence in problem for problem in problems(kind, yaml.safe_load(text)))


@pytest.mark.parametrize("text", ["slots: {Llama-2-7B: {compute: false}}", "slots: {Llama-2-7B: null}", "seeds: [7]"])
def test_a_file_on_top_of_others_says_what_differs(text: str) -> None:
    assert problems("config", yaml.safe_load(text)) == []


def test_an_editor_offers_every_method_and_explains_every_key() -> None:
    row = schema("tables")["$defs"]["Row"]["properties"]
    assert row["method"]["examples"] == sorted(PRESETS)
    for kind in ("config", "tables"):
        defined = schema(kind)["$defs"]
        assert list(defined["Methods"]["properties"]) == list(method_names())
        assert "steps" in defined["SpinQuant"]["properties"]
    unexplained = {
        f"{name}.{key}"
        for kind in MODELS
        for name, section in {kind: schema(kind), **schema(kind).get("$defs", {})}.items()
        for key, field in section.get("properties", {}).items()
        if not field.get("description") and "$ref" not in str(field) and key != "kind"
    }
    assert unexplained == set()


def test_a_run_reads_no_schema() -> None:
    sources = [
        path.read_text(encoding="utf-8") for path in (ROOT / "rotquant").rglob("*.py") if path.name != "schemas.py"
    ]
    assert not any(re.search(r"import jsonschema|from jsonschema|schema\.json", source) for source in sources)
