"""What a code digest follows: one edit of a made-up package at a time, and the functions that real stages call."""

import ast
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from reproduction.benchmarks import cpu, registry
from reproduction.benchmarks.arguments import CpuTransformArguments
from reproduction.identity import code, syntax
from reproduction.identity.reach import Node, Reach
from reproduction.identity.run import Run, signed
from reproduction.run.stages.rotations import compute_rotations
from reproduction.run.stages.runs import measure_run
from reproduction.run.stages.weights import compute_weights
from rotquant.foundation.files import write_json
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model
from tests.helpers.project import REPOSITORY

ENTRY = '''"""An entry."""

from typing import TYPE_CHECKING

import rotquant.aside
from rotquant import shapes
from rotquant.deep.low import low
from rotquant.effects import used
from rotquant.itself import found
from rotquant.numbers import AREA as SIZE
from rotquant.numbers import Table, told
from rotquant.package import exported, inner
from rotquant.two import one as first, two as second

if TYPE_CHECKING:
    from rotquant.typing import Kind


def run(x: "Kind") -> int:
    from rotquant import lazily
    from rotquant.hub import slow

    first(lazily.used(), low(inner.used()), second(found("hidden")))
    return slow(told(exported(shapes.area(x)), Table()), SIZE, used, rotquant.aside.anything)


CALLED = "rotquant.called"
'''

FILES = {
    "rotquant/__init__.py": "",
    "rotquant/entry.py": ENTRY,
    "rotquant/shapes.py": "def area(x):\n    return x * x\n\n\ndef volume(x):\n    return x**3\n",
    "rotquant/effects.py": """from rotquant.registers import REGISTER, register

used = 1
NAMES = {}


@register
def registered():
    return 1


def plain():
    return 2


NAMES["here"] = plain
""",
    "rotquant/registers.py": "REGISTER = []\n\n\ndef register(f):\n    REGISTER.append(f)\n    return f\n",
    "rotquant/numbers.py": """import functools
import math
from rotquant import passed
from rotquant.dependent import depth as deep

AREA, UNUSED = 2, 3
OTHER = 4


def _default():
    return 5


@functools.cache
def told(x, table, most=_default()):
    most = [volume for volume in (x, most)]
    extra = most
    return math.floor(extra) + table.method(getattr(passed, "name"))


@functools.cache
def never(x):
    return x


class Table:
    field: "Row" = None

    def method(self, x):
        return deep(x)


class Row:
    width = 1


def volume():
    return "no one's"


def extra(table):
    return "nobody's"
""",
    "rotquant/passed.py": "def name():\n    return 0\n",
    "rotquant/dependent.py": "def depth(x):\n    return x\n",
    "rotquant/package/__init__.py": """from rotquant.package import inner
from rotquant.package.inner import exported, other
""",
    "rotquant/package/inner.py": """def exported(x):
    return x


def other(x):
    return x


def used():
    return 1
""",
    "rotquant/package/page.jinja": "text",
    "rotquant/deep/__init__.py": "",
    "rotquant/deep/low.py": "def low(x):\n    return x\n",
    "rotquant/itself.py": "def found(name):\n    return globals()[name]\n\n\ndef hidden():\n    return 1\n",
    "rotquant/two.py": "def one(x, y):\n    return x, y\n\n\ndef two(x):\n    return x\n",
    "rotquant/lazily.py": "def used():\n    return 1\n\n\ndef unused():\n    return 2\n",
    "rotquant/hub.py": "from rotquant.late import slow\n",
    "rotquant/late.py": """FILE = "some.cu"
SCRIPT = "beside.py"


def slow(*values):
    return FILE, SCRIPT, values


def unused():
    return "other.cu"
""",
    "rotquant/beside.py": "def main():\n    return 1\n",
    "rotquant/called.py": "def by_name():\n    return 1\n",
    "rotquant/typing.py": "class Kind:\n    width = 1\n",
    "rotquant/aside.py": "anything = 1\n",
    "rotquant/kernels/sources/some.cu": '#include "values/shared.cuh"\nint kernel() { return 1; }\n',
    "rotquant/kernels/sources/other.cu": "int other() { return 1; }\n",
    "rotquant/kernels/sources/include/values/shared.cuh": "int shared() { return 1; }\n",
    "reproduction/__init__.py": "",
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The made-up package."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code, "PACKAGES", {name: tmp_path / name for name in code.PACKAGES})
    yield tmp_path
    monkeypatch.undo()
    code.forget()


def digest() -> str:
    code.forget()
    return code.code_digest("rotquant.entry", aside=("rotquant.aside",))


def edit(root: Path, name: str, old: str, new: str) -> None:
    text = (root / "rotquant" / name).read_text()
    assert old in text
    (root / "rotquant" / name).write_text(text.replace(old, new))


#: By rule: a file, a text in it, and what stands in its place.
COUNTS = {
    "a function of the entry": ("entry.py", "return slow(", "return 2 * slow("),
    "a function that nothing calls, of the entry": ("entry.py", "CALLED =", "def more():\n    pass\n\n\nCALLED ="),
    "a function of a module, by attribute": ("shapes.py", "x * x", "x + x"),
    "what a re-export stands for": ("package/inner.py", "def exported(x):\n    return x", "def exported(x):\n    pass"),
    "which of two names is imported": ("package/__init__.py", "exported, other", "other as exported"),
    "a function behind a lazy import": ("late.py", "return FILE,", "return"),
    "a method of a class": ("numbers.py", "return deep(x)", "return 2 * deep(x)"),
    "a default": ("numbers.py", "return 5", "return 6"),
    "a constant": ("numbers.py", "AREA, UNUSED = 2", "AREA, UNUSED = 1"),
    "what an imported name is of another package": ("numbers.py", "import math", "import cmath as math"),
    "a field's type, in quotation marks": ("numbers.py", "width = 1", "width = 2"),
    "what only a reached method calls": ("dependent.py", "return x", "return -x"),
    "what a module has that is passed along": ("passed.py", "return 0", "return 1"),
    "a definition whose decorator registers it": ("effects.py", "return 1", "return 3"),
    "what an assignment to a part of an object registers": ("effects.py", "return 2", "return 3"),
    "a registering function": ("registers.py", "REGISTER.append(f)", "REGISTER.insert(0, f)"),
    "a call at a module's top": ("shapes.py", "def volume", "print()\n\n\ndef volume"),
    "which import is which": ("entry.py", "one as first, two", "two as first, one"),
    "a function of a module that a package imports from itself": ("package/inner.py", "return 1", "return 2"),
    "a call at the top of a package around a module": ("deep/__init__.py", "", "print()\n"),
    "a call at the top of a module that a lazy import goes through": ("hub.py", "from", "print()\nfrom"),
    "what a function finds among the names of its module": ("itself.py", "return 1", "return 2"),
    "a call at a package's top": ("package/__init__.py", "import inner\n", "import inner\nprint()\n"),
    "a function of a module that is imported lazily": ("lazily.py", "return 1", "return 3"),
    "a module named by a text": ("called.py", "return 1", "return 2"),
    "a script named by a text": ("beside.py", "return 1", "return 2"),
    "a kernel's name": ("late.py", '"some.cu"', '"other.cu"'),
    "a kernel": ("kernels/sources/some.cu", "return 1", "return 2"),
    "a header": ("kernels/sources/include/values/shared.cuh", "return 1", "return 2"),
    "a template beside a package": ("package/page.jinja", "text", "other text"),
}  # fmt: skip
SAYS_NOTHING = {
    "another function of an imported module": ("shapes.py", "x**3", "x**4"),
    "another function that is exported again": ("package/inner.py", "other(x):\n    return x", "other(x):\n    pass"),
    "another constant": ("numbers.py", "OTHER = 4", "OTHER = 5"),
    "a function of a local variable's name": ("numbers.py", "no one's", "another's"),
    "a function of a local name": ("numbers.py", "nobody's", "somebody's"),
    "a function that is only cached": ("numbers.py", "def never(x):\n    return x", "def never(x):\n    pass"),
    "a function beside one that is imported lazily": ("late.py", '"other.cu"', '"no.cu"'),
    "another function of a module that is imported lazily": ("lazily.py", "return 2", "return 3"),
    "a kernel that only others name": ("kernels/sources/other.cu", "return 1", "return 2"),
    "what is for type checkers": ("typing.py", "width = 1", "width = 2"),
    "what is left aside": ("aside.py", "anything = 1", "anything = 2"),
    "a docstring": ("entry.py", "An entry.", "Another one."),
    "a comment": ("shapes.py", "    return x * x", "    # a square\n    return (x * x)"),
    "an import that nothing uses": ("shapes.py", "def area", "import math\n\n\ndef area"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_an_edit_of_what_is_reached_is_another_digest(made: Path, name: str) -> None:
    before = digest()
    edit(made, *COUNTS[name])
    assert digest() != before


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_an_edit_of_anything_else_is_none(made: Path, name: str) -> None:
    before = digest()
    edit(made, *SAYS_NOTHING[name])
    assert digest() == before


def test_moving_and_reordering_definitions_is_the_same_digest(made: Path) -> None:
    before = digest()
    moved = "def area(x):\n    return x * x\n"
    edit(made, "shapes.py", f"{moved}\n\n", "from rotquant.moved import area\n\n\n")
    (made / "rotquant/moved.py").write_text(moved)
    assert digest() == before
    depth = FILES["rotquant/dependent.py"]
    edit(
        made, "numbers.py", "from rotquant.dependent import depth as deep", "from rotquant.shapes import depth as deep"
    )
    edit(made, "shapes.py", "def volume", f"{depth}\n\ndef volume")
    edit(made, "dependent.py", depth, "")
    assert digest() == before
    edit(made, "entry.py", "from rotquant.hub import slow", "from rotquant.late import slow")
    assert digest() == before
    edit(made, "late.py", 'FILE = "some.cu"\nSCRIPT = "beside.py"', 'SCRIPT = "beside.py"\nFILE = "some.cu"')
    assert digest() == before


@pytest.mark.parametrize(
    "line", ["import rotquant.shapes\n", "from rotquant import shapes\n", "from rotquant.shapes import *\n"]
)
def test_what_is_imported_for_nothing_else_than_its_import_counts_whole(made: Path, line: str) -> None:
    edit(made, "late.py", "    return FILE", f"    {line}    return FILE" if "*" not in line else "    return FILE")
    if "*" in line:  # which a function cannot say
        edit(made, "late.py", "FILE =", f"{line}FILE =")
    before = digest()
    edit(made, "shapes.py", "x**3", "x**4")
    assert digest() != before


def test_what_a_method_of_another_package_imports_of_ours_is_reached(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "another").mkdir()
    text = "def apply(x):\n    from rotquant.shapes import volume\n\n    return volume(x)\n"
    (made / "another/foreign_method.py").write_text(text)
    monkeypatch.syspath_prepend(str(made / "another"))

    def both() -> str:
        code.forget()
        return code.code_digest("rotquant.entry", "foreign_method")

    before = both()
    edit(made, "shapes.py", "x**3", "x**4")
    changed = both()
    (made / "another/foreign_method.py").write_text(text.replace("(x)\n", "(-x)\n"))
    assert len({before, changed, both()}) == 3


def test_a_circle_of_imports_ends(made: Path) -> None:
    edit(made, "dependent.py", "def depth", "from rotquant.numbers import deep\n\n\ndef depth")
    edit(made, "dependent.py", "return x", "return deep(x)")
    before = digest()
    edit(made, "dependent.py", "return deep(x)", "return -deep(x)")
    assert digest() != before


def test_files_are_those_with_a_statement_that_counts(made: Path) -> None:
    files = code.code_files("rotquant.entry", aside=("rotquant.aside",))
    names = {path.relative_to(made / "rotquant").as_posix() for path in files}
    assert names >= {"entry.py", "shapes.py", "package/inner.py", "package/page.jinja", "kernels/sources/some.cu"}
    assert not names & {"typing.py", "aside.py", "__init__.py", "package/__init__.py", "kernels/sources/other.cu"}


def test_what_is_kept_of_a_file_and_is_damaged_is_read_anew(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTQUANT_CACHE", str(made / "cache"))
    before = digest()
    kept = [*(made / "cache/syntax").iterdir()]
    assert digest() == before
    for path in kept:
        path.write_text('[[["", []]], 1]')
    assert kept
    assert digest() == before


def test_digests_import_neither_torch_nor_what_they_follow() -> None:
    command = (
        "import sys; from reproduction.identity.code import stage_digest; stage_digest('runs');"
        "sys.exit(bool({'torch', 'rotquant.weights.build', 'reproduction.run.stages.runs'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", command], cwd=REPOSITORY, check=False).returncode == 0


class Executed:
    """The functions of our packages that run, each with the statements at import that call it."""

    def __init__(self) -> None:
        self._folders = {name: f"{folder}/" for name, folder in code.PACKAGES.items()}
        self._statements: dict[str, list[tuple[range, Node]]] = {}
        self._found: dict[CodeType, list[Node | None]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs inside."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        called, known = frame.f_code, self._found.get(frame.f_code)
        if event != "call" or known == [] or not called.co_filename.startswith(tuple(self._folders.values())):
            return
        importing, above = list[Node | None](), frame.f_back
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(
                tuple(self._folders.values())
            ):
                importing.append(self._at(above.f_code.co_filename, above.f_lineno))
            above = above.f_back
        self._found[called] = importing

    def _at(self, file: str, line: int) -> Node | None:
        """The statement of a line; None for an import."""
        if file not in self._statements:
            package, folder = next(pair for pair in self._folders.items() if file.startswith(pair[1]))
            parts = Path(file.removeprefix(folder)).with_suffix("").parts
            module = ".".join((package, *(part for part in parts if part != "__init__")))
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            nodes = [one for one in syntax.running(tree.body) if not isinstance(one, ast.Import | ast.ImportFrom)]
            first = [min([one.lineno, *(_.lineno for _ in getattr(one, "decorator_list", []))]) for one in nodes]
            lines = [range(start, (one.end_lineno or start) + 1) for start, one in zip(first, nodes, strict=True)]
            self._statements[file] = [(of, Node(module, place)) for place, of in enumerate(lines)]
        return next((node for lines, node in self._statements[file] if line in lines), None)

    def statements(self, reached: set[Node]) -> set[Node]:
        """The statements that ran, but for those that imports called from statements that are not reached."""
        ran = [
            one for one, importing in self._found.items() if one.co_name != "<module>" and reached.issuperset(importing)
        ]
        found = {self._at(one.co_filename, one.co_firstlineno) for one in ran}
        return {one for one in found if one is not None and not one.module.startswith(code.NEUTRAL)}


def named(nodes: set[Node]) -> set[str]:
    reach = Reach(code.PACKAGES, code.NEUTRAL)
    return {f"{node.module}.{'/'.join(reach.statement(node).binds)}" for node in nodes}


def checked(run: Callable[[], Any], entries: tuple[str, ...], aside: tuple[str, ...] = ()) -> set[str]:
    """Call a function; the statements that then ran, all of which are reached but for modules left aside."""
    executed = Executed()
    with executed.recorded():
        run()
    reached = Reach(code.PACKAGES, code.NEUTRAL).reached(entries)
    ran = executed.statements(reached)
    assert named({one for one in ran - reached if not one.module.startswith(aside or "none")}) == set()
    return named(ran)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a text."""
    root = tmp_path_factory.mktemp("stages")
    tiny_model(dtype=torch.float32).save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    words = random.Random(0).choices([f"w{number}" for number in range(3, 60)], k=4000)
    (root / "text").mkdir()
    for split in ("train", "test"):
        (root / "text" / f"{split}.txt").write_text("\n".join(words))
    return root


def run_of(root: Path, recipe: Recipe) -> Run:
    text = {"name": "wikitext2", "source": "local", "path": str(root / "text")}
    metric = {"kind": "perplexity", "corpus": "wikitext2", "sequence_length": 16, "max_windows": 4}
    fields = {
        "checkpoint": str(root / "model"),
        "checkpoint_digest": "0",
        "metric": metric,
        "corpora": {"wikitext2": text},
    }
    return Run.model_validate({**fields, "recipe": recipe.model_dump(mode="json")})


def test_every_function_that_a_stage_calls_is_reached(model: Path) -> None:
    """Static reach holds what really runs, of learning, rounding and measuring a small model."""
    short = {"samples": 4, "sequence_length": 16}
    settings = {"methods": {"spinquant": {"steps": 2, "batch_size": 2, "text": short}}, "calibration": short}
    recipe = override(preset("spinquant-hard"), settings, "test")
    run, checkpoint, learned = run_of(model, recipe), str(model / "model"), model / "rotation"

    def learn() -> None:
        told = compute_rotations(run, checkpoint, learned, "cpu", "0")
        write_json(learned / "rotation.json", signed(told, run.rotation_identity() or {}))

    stages = {
        "rotations": (learn, "rotquant.methods.spinquant.cayley_training.learn_rotations"),
        "weights": (
            lambda: compute_weights(run, checkpoint, model / "weights", "cpu", "0", learned),
            "rotquant.methods.gptq.columns.apply",
        ),
        "runs": (
            lambda: measure_run(run, checkpoint, model / "weights", "cpu", 2, "0"),
            "rotquant.metrics.perplexity.perplexity",
        ),
    }
    data = tuple(type(method).__module__ for method in recipe.methods.values())  # which check a recipe that is read
    for stage, (compute, called) in stages.items():
        assert called in checked(compute, code.stage_entries(stage, recipe), data)


def test_every_function_that_a_benchmark_calls_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CALLS", 2)
    argument = CpuTransformArguments(rows=2, features=64)
    ran = checked(lambda: cpu.cpu_transform(argument), ("reproduction.benchmarks.cpu",), registry._NOT_TIMED)
    assert "reproduction.benchmarks.timing.time_cpu" in ran
