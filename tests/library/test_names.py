"""Public names: a class has one name in the library and the reproduction, so that a search finds one thing."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def duplicates() -> set[str]:
    """Public names that several classes at modules' top levels have."""
    files = [path for package in ("rotquant", "workflow/reproduction") for path in (ROOT / package).rglob("*.py")]
    names = Counter(
        statement.name
        for path in files
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")
    )
    return {name for name, count in names.items() if count > 1}


def test_a_public_class_name_occurs_once(duplicates: set[str]) -> None:
    assert duplicates == set()
