"""Digests of the definitions that something uses: what changes them, and what does not.

Each test states it of a small package: a change of the sources, and whether the digest of `pack.main:run` is another.
"""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rotquant.foundation.errors import ConfigError
from rotquant.study.sources import Sources

Digest = Callable[..., str]

HELPER = """
def used(x):
    return x + OFFSET

def unused(x):
    return x * 2

OFFSET = 1
"""
MAIN = """
from pack.helper import used

def run(x):
    return used(x)
"""


@pytest.fixture
def digest(tmp_path: Path) -> Digest:
    """Digest of `pack.main:run` in a package of these files; those of before are gone."""
    number = iter(range(100))

    def of(files: dict[str, str], entry: str = "pack.main:run", aside: tuple[str, ...] = ()) -> str:
        root = tmp_path / str(next(number))
        for name, text in {"pack/__init__.py": "", **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
            if name.endswith(".py"):
                (path.parent / "__init__.py").touch()
        return Sources(root / "pack", aside).digest(entry)

    return of


@pytest.fixture
def one(digest: Digest) -> Callable[[str], str]:
    """The digest where everything is in one module."""
    return lambda text: digest({"pack/main.py": text})


@pytest.mark.parametrize(
    "edit", [("x + OFFSET", "x - OFFSET"), ("OFFSET = 1", "OFFSET = 2"), ("def used(x)", "def used(x=0)")]
)
def test_an_edit_of_what_is_used_changes_the_digest(digest: Digest, edit: tuple[str, str]) -> None:
    before = digest({"pack/main.py": MAIN, "pack/helper.py": HELPER})
    assert digest({"pack/main.py": MAIN, "pack/helper.py": HELPER.replace(*edit)}) != before


def test_an_edit_of_a_neighbour_that_is_not_used_changes_nothing(digest: Digest) -> None:
    before = digest({"pack/main.py": MAIN, "pack/helper.py": HELPER})
    edited = HELPER.replace("x * 2", "x * 3") + "class More:\n    pass\n"
    assert digest({"pack/main.py": MAIN + "\ndef other():\n    return 1\n", "pack/helper.py": edited}) == before


@pytest.mark.parametrize(
    "main",
    [
        "from pack.deep.place import used\n\ndef run(x):\n    return used(x)",
        "from .deep.place import used\n\ndef run(x):\n    return used(x)",
        "from pack.deep.place import used as other\n\ndef run(x):\n    return other(x)",
        "import pack.deep.place\n\ndef run(x):\n    return pack.deep.place.used(x)",
        "import pack.deep.place as place\n\ndef run(x):\n    return place.used(x)",
        "from pack.deep import place\n\ndef run(x):\n    return place.used(x)",
        "def run(x):\n    from pack.deep.place import used\n    return used(x)",
        "def run(x):\n    from pack.deep import place as there\n    return there.used(x)",
    ],
)
def test_where_a_definition_lies_and_how_it_is_imported_changes_nothing(digest: Digest, main: str) -> None:
    before = digest({"pack/main.py": MAIN, "pack/helper.py": HELPER})
    assert digest({"pack/main.py": main, "pack/deep/place.py": HELPER}) == before
    assert digest({"pack/main.py": main, "pack/deep/place.py": HELPER.replace("x + OFFSET", "x")}) != before


def test_definitions_may_be_spread_over_modules_and_come_through_a_package(digest: Digest) -> None:
    before = digest({"pack/main.py": MAIN, "pack/helper.py": HELPER})
    spread = {
        "pack/main.py": "from pack.rooms import used\n\ndef run(x):\n    return used(x)",
        "pack/rooms/__init__.py": "from pack.rooms.first import used\n__all__ = ['used']",
        "pack/rooms/first.py": "from ..numbers import OFFSET\ndef used(x):\n    return x + OFFSET",
        "pack/numbers.py": "OFFSET = 1",
    }
    assert digest(spread) == before
    assert digest({**spread, "pack/numbers.py": "OFFSET = 3"}) != before
    star = {**spread, "pack/rooms/__init__.py": "from pack.rooms.first import *"}
    assert digest({**star, "pack/numbers.py": "OFFSET = 3"}) != digest(star)


def test_other_packages_are_told_apart_however_they_are_imported(one: Callable[[str], str]) -> None:
    before = one("import torch\n\ndef run(x):\n    return torch.nn.functional.relu(x)")
    assert one("from torch.nn import functional as F\n\ndef run(x):\n    return F.relu(x)") == before
    assert one("def run(x):\n    from torch.nn.functional import relu\n    return relu(x)") == before
    assert one("from jax.nn import functional as F\n\ndef run(x):\n    return F.relu(x)") != before


def test_two_definitions_of_one_name_are_told_apart(digest: Digest) -> None:
    files = {
        "pack/first.py": "def used(x):\n    return x",
        "pack/second.py": "def used(x):\n    return -x",
        "pack/main.py": """
            from pack import first, second

            def run(x):
                return first.used(x), both(x)

            def both(x):
                return first.used(x), second.used(x)
        """,
    }
    swapped = files["pack/main.py"].replace("return first.used(x), both", "return second.used(x), both")
    assert digest({**files, "pack/main.py": swapped}) != digest(files)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def run(x):\n    return x", '"""A module."""\n\ndef run(x):\n    """Run."""\n    # why\n    return (x)'),
        ("def run(x):\n    return x", "def run(x: int, /) -> int:\n    return x".replace(", /", "")),
        ("def run(x):\n    y = x\n    return y", "def run(x):\n    y: int = x\n    z: str\n    return y"),
        ("A = 1\ndef run():\n    return A", "A: int = 1\ndef run():\n    return A"),
        ("def run(x):\n    return x", "from typing import cast\ndef run(x):\n    return cast(int, x)"),
        ("def run(x):\n    return x.a.b", "import typing as t\ndef run(x):\n    return t.cast('int', x.a).b"),
        (
            "def run(x):\n    return x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack import more\ndef run(x):\n    return x",
        ),
        (
            "def run(x):\n    return x",
            "from typing import overload\n@overload\ndef run(x: int) -> int: ...\ndef run(x):\n    return x",
        ),
        (
            "from torch import nn\nclass Net(nn.Module):\n    f = 1\ndef run():\n    return Net()",
            "from torch import nn\nclass Net(nn.Module):\n    f: int = 1\n    w: int\ndef run():\n    return Net()",
        ),
        (
            "from pydantic import BaseModel\nclass A(BaseModel):\n    a: int\ndef run():\n    return A()",
            "from pydantic import BaseModel\nclass A(BaseModel):\n    a: int\n    'Says.'\ndef run():\n    return A()",
        ),
        ("def run(x):\n    return x", "def run(x):\n    return x\nif __name__ == '__main__':\n    run(1)"),
    ],
)
def test_what_computes_nothing_does_not_count(one: Callable[[str], str], before: str, after: str) -> None:
    assert one(before) == one(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def run(x):\n    return x", "def run(x):\n    return -x"),
        ("def run(x):\n    return x", "def run(y):\n    return y"),
        ("def run(x=1):\n    return x", "def run(x=2):\n    return x"),
        ("def run():\n    return 'a'", "def run():\n    return 'b'"),
        ("def run():\n    return 1", "def run():\n    return 1.0"),
        ("def run(x, y):\n    return x", "def run(x, *, y):\n    return x"),
        (
            "from pydantic import BaseModel\nclass A(BaseModel):\n    a: int = 1\ndef run():\n    return A()",
            "from pydantic import BaseModel\nclass A(BaseModel):\n    a: float = 1\ndef run():\n    return A()",
        ),
        (
            "class B:\n    def f(self): return 1\nclass A(B):\n    pass\ndef run():\n    return A()",
            "class B:\n    def f(self): return 2\nclass A(B):\n    pass\ndef run():\n    return A()",
        ),
        (
            "def wrap(f):\n    return f\n@wrap\ndef run():\n    return 1",
            "def wrap(f):\n    return 2\n@wrap\ndef run():\n    return 1",
        ),
        ("A, B = 1, 2\ndef run():\n    return A", "A, B = 1, 3\ndef run():\n    return A"),
        ("A = [1]\nA.append(2)\ndef run():\n    return A", "A = [1]\nA.append(3)\ndef run():\n    return A"),
    ],
)
def test_what_computes_counts(one: Callable[[str], str], before: str, after: str) -> None:
    assert one(before) != one(after)


@pytest.mark.parametrize(
    "body",
    [
        "hidden = x\n    return hidden",
        "return [hidden for hidden in x]",
        "return (lambda hidden: hidden)(x)",
        "return {hidden: 1 for hidden in x}",
        "for hidden in x:\n        return hidden",
        "def inner(hidden):\n        return hidden\n    return inner(x)",
        "with x as hidden:\n        return hidden",
    ],
)
def test_a_variable_is_not_the_definition_of_its_name(one: Callable[[str], str], body: str) -> None:
    text = "def hidden():\n    return {}\ndef run(x):\n    {}"
    assert one(text.format(1, body)) == one(text.format(2, body))


@pytest.mark.parametrize(
    "body",
    [
        "return [x for x in hidden()]",
        "return [hidden(y) for y in x] + [hidden for hidden in x]",
        "def inner(hidden):\n        return hidden\n    return inner(hidden)",
        "class Inner:\n        hidden = 1\n        def f(self):\n            return hidden()\n    return Inner()",
        "return x + (lambda y=hidden(): y)()",
    ],
)
def test_a_definition_is_found_beside_variables_of_its_name(one: Callable[[str], str], body: str) -> None:
    text = "def hidden():\n    return {}\ndef run(x):\n    {}"
    assert one(text.format(1, body)) != one(text.format(2, body))


def test_what_runs_at_import_counts_with_a_module_that_is_reached(digest: Digest) -> None:
    def registered(factor: int) -> dict[str, str]:
        return {
            "pack/register.py": "KNOWN = []\ndef register(f):\n    KNOWN.append(f)\n    return f",
            "pack/methods.py": f"""
                from pack.register import register

                @register
                def method(x):
                    return x * {factor}

                def helper(x):
                    return x
            """,
            "pack/main.py": "from pack.methods import helper\n\ndef run(x):\n    return helper(x)",
        }

    assert digest(registered(1)) != digest(registered(2))
    unreached = "from pack.register import KNOWN\n\ndef run(x):\n    return KNOWN[0](x)"
    for_effect = f"import pack.methods  # registers\n{unreached}"
    first, second = ({**registered(factor), "pack/main.py": unreached} for factor in (1, 2))
    assert digest(first) == digest(second)
    first, second = ({**registered(factor), "pack/main.py": for_effect} for factor in (1, 2))
    assert digest(first) != digest(second)


@pytest.mark.parametrize("main", ["return helper", "return getattr(helper, x)", "return helper.later(x)"])
def test_of_a_module_that_cannot_be_followed_everything_counts(digest: Digest, main: str) -> None:
    text = f"from pack import helper\n\ndef run(x):\n    {main}"
    before = digest({"pack/main.py": text, "pack/helper.py": HELPER})
    assert digest({"pack/main.py": text, "pack/helper.py": HELPER.replace("x * 2", "x * 3")}) != before


def test_an_entry_is_given_what_its_arguments_are_annotated_with(one: Callable[[str], str]) -> None:
    text = "class Given:\n    def f(self):\n        return {}\ndef run(x: Given):\n    return x.f()"
    assert one(text.format(1)) != one(text.format(2))


def test_what_is_put_aside_is_not_followed(digest: Digest) -> None:
    files = {"pack/main.py": MAIN, "pack/helper.py": HELPER}
    edited = {**files, "pack/helper.py": HELPER.replace("x + OFFSET", "x")}
    for aside in ("pack.helper", "pack.helper:used"):
        assert digest(files, aside=(aside,)) == digest(edited, aside=(aside,))
    assert digest(files, aside=("pack.help",)) != digest(edited, aside=("pack.help",))


def test_of_a_class_what_is_silent_does_not_count(tmp_path: Path) -> None:
    def digest(name: str, says: str) -> str:
        text = f"class A:\n    def {name}(self):\n        return {says!r}\ndef run():\n    return A()"
        package = tmp_path / f"{name}-{says}" / "pack"
        package.mkdir(parents=True)
        (package / "main.py").write_text(text)
        return Sources(package, silent=("words",)).digest("pack.main:run")

    assert digest("words", "one") == digest("words", "two")
    assert digest("other", "one") != digest("other", "two")


def test_sources_of_kernels_count_with_the_headers_that_they_include_and_without_comments(digest: Digest) -> None:
    files = {
        "pack/main.py": "NAME = 'fast.cu'\ndef run():\n    return NAME",
        "kernels/fast.cu": '#include "shared.cuh"\nint a = 1;  // one\n',
        "kernels/include/shared.cuh": "int b = 2;",
        "kernels/other.cu": "int c = 3;",
    }
    before = digest(files)
    assert digest({**files, "kernels/other.cu": "int c = 4;"}) == before
    assert digest({**files, "kernels/fast.cu": '/* A\nheader. */\n#include "shared.cuh"\nint a = 1;\n'}) == before
    assert digest({**files, "kernels/fast.cu": '#include "shared.cuh"\nint a = 2;\n'}) != before
    assert digest({**files, "kernels/include/shared.cuh": "int b = 3;"}) != before


def test_data_beside_a_module_that_is_reached_count(digest: Digest) -> None:
    files = {"pack/main.py": MAIN, "pack/helper.py": HELPER, "pack/page.jinja": "a", "pack/deep/other.css": "b"}
    before = digest(files)
    assert digest({**files, "pack/deep/other.css": "c"}) == before
    assert digest({**files, "pack/page.jinja": "c"}) != before


def test_an_entry_that_is_not_there_and_a_source_that_is_not_python_are_one_sentence(digest: Digest) -> None:
    with pytest.raises(ConfigError, match=r"pack.main:walk is not in the sources of"):
        digest({"pack/main.py": MAIN, "pack/helper.py": HELPER}, entry="pack.main:walk")
    with pytest.raises(ConfigError, match=r"helper.py is not valid Python \(line 1"):
        digest({"pack/main.py": MAIN, "pack/helper.py": "def used(x"})


def test_the_digest_is_the_same_for_every_python(one: Callable[[str], str]) -> None:
    """Pythons differ in how they read these forms: f-strings with nested formats, functions without type parameters."""
    text = """
    import functools

    @functools.cache
    def run(x: int, width: int = 8, /, *more: int) -> str:
        with open(x) as file, open(width):
            return f"{x!r:>{width}} {more[0]:{width}.{x}} {'a' 'b'}" + "".join(f"{y}" for y in file)
    """
    assert one(text) == "d58209caafa268ba"
