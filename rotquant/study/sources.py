"""Which definitions of a package something uses, and a digest of what they say.

From entries such as `package.module:function` the names that a definition loads are followed, through imports of every
form, to the statements that define them. The digest is of these statements alone: it knows no module and no file, so
moving a definition changes nothing, and editing one changes the digests of what uses it and no others. Where a name
cannot be followed, all of a module counts. Nothing is imported.
"""

import ast
import functools
import gc
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from rotquant.foundation.errors import ConfigError
from rotquant.study.statements import Import, Reader, Reference, Statement, chain

#: How kernels include headers of ours: those beside them and those of kernels/include.
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)

#: A comment of C++, or a string or character in which there is none.
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')""", re.DOTALL)

#: Where decorators come from that only change what they decorate.
_QUIET = sys.stdlib_module_names | {"torch", "pydantic"}


class Found(NamedTuple):
    """What a name with attributes leads to: its own name, without the way there, and the statements that define it.

    outside: it belongs to another package or to Python.
    """

    text: str
    statements: tuple[Statement, ...] = ()
    outside: bool = False


@dataclass(eq=False)
class _File:
    """A module: its statements, those that define a name, and what its imports bind. stars: what it imports all of."""

    source: str
    mentions: Counter[str]
    reader: Reader
    importing: Statement
    statements: list[Statement] = field(default_factory=list)
    defined: dict[str, list[Statement]] = field(default_factory=dict)
    imported: dict[str, Import] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


class Sources:
    """The sources of a package, each read once and when it is asked for. Those of kernels lie beside the package.

    aside: modules, packages with all of theirs, and `module:name`, that never count and are not followed.
    silent: names of methods that do not count in any class.
    """

    def __init__(self, package: Path, aside: Iterable[str] = (), silent: Iterable[str] = ()) -> None:
        self.package, self.kernels = package, package.parent / "kernels"
        self.aside, self.silent = frozenset(aside), frozenset(silent)
        self._files: dict[str, _File | None] = {}
        self._targets: dict[Statement, list[Found]] = {}
        self._contents: dict[Statement, str] = {}
        self._path = functools.cache(self._find_path)
        self._text = functools.cache(self._find_text)
        self._digest = functools.cache(self._find_digest)
        self._modules = functools.cache(self._find_modules)
        self._counting = functools.cache(self._find_counting)
        self._acting = functools.cache(self._find_acting)

    def digest(self, *entries: str, aside: frozenset[str] = frozenset()) -> str:
        """Digest of what entries use: 16 hexadecimal digits.

        Args:
            entries: `module:name`, or a module, for all that it defines.
            aside: more that does not count.

        Raises:
            ConfigError: there is no such entry, or a source is not valid Python.
        """
        return self._digest(entries, aside)

    def _find_digest(self, entries: tuple[str, ...], aside: frozenset[str]) -> str:
        with _uncollected():
            found = self.reached(*entries, aside=aside)
        texts = [self._identity(one, found) for one in found if self._content(one)]
        texts += [_hash(self._text(path)) for path in (*self.kernel_sources(found), *self._data(found))]
        return _hash("\n".join(sorted(texts)))[:16]

    def contents(self, *entries: str, aside: frozenset[str] = frozenset()) -> dict[str, set[str]]:
        """Digests of what entries use, definition by definition, each with the names that it binds or the file's."""
        found = self.reached(*entries, aside=aside)
        paths = (*self.kernel_sources(found), *self._data(found))
        return {self._content(one): self._names(one) for one in found if self._content(one)} | {
            _hash(self._text(path)): {path.name} for path in paths
        }

    def _names(self, one: Statement) -> set[str]:
        file = self._file(one.module)
        if file is None or one.node is None:
            return set()
        return {name for name, target in file.reader.bound(one.node) if target is None} or {ast.unparse(one.node)}

    def modules(self, *entries: str, aside: frozenset[str] = frozenset()) -> frozenset[str]:
        """The modules that hold what entries use."""
        return self._modules(entries, aside)

    def _find_modules(self, entries: tuple[str, ...], aside: frozenset[str]) -> frozenset[str]:
        return frozenset(one.module for one in self.reached(*entries, aside=aside))

    def reached(self, *entries: str, aside: frozenset[str] = frozenset()) -> set[Statement]:
        """The statements that entries use, directly or not, and what runs where a module of theirs is imported."""
        counts = self._counting(self.aside | aside)
        found: set[Statement] = set()
        waiting = [one for entry in entries for one in self._entry(entry)]
        while waiting:
            one = waiting.pop()
            if one not in found and counts(one):
                found.add(one)
                waiting += self._acting(one.module)
                waiting += (target for way in self._ways(one) for target in way.statements)
        return found

    def kernel_sources(self, statements: Iterable[Statement]) -> list[Path]:
        """The sources of kernels that statements name, and what these include, sorted."""
        texts = {text for one in statements for text in one.strings if text.endswith((".cu", ".cpp"))}
        waiting = [self.kernels / text for text in texts if (self.kernels / text).is_file()]
        found: set[Path] = set()
        while waiting:
            path = waiting.pop()
            if path not in found:
                found.add(path)
                for name in _INCLUDE.findall(self._text(path)):
                    beside = path.parent / name
                    waiting.append(beside if beside.is_file() else self.kernels / "include" / name)
        return sorted(found)

    def _data(self, statements: Iterable[Statement]) -> list[Path]:
        """What lies beside the modules of statements and is read by them: templates, styles, scripts."""
        paths = map(self._path, {one.module for one in statements})
        folders = {path.parent for path in paths if path is not None}
        beside = (path for folder in folders for path in folder.iterdir() if path.is_file())
        return sorted(path for path in beside if path.suffix not in (".py", ".pyc") and path.name != "py.typed")

    def _find_text(self, path: Path) -> str:
        """What a file says; of a kernel without its comments and the lines that these leave empty."""
        text = path.read_text(encoding="utf-8")
        if not path.is_relative_to(self.kernels):
            return text
        lines = _COMMENT.sub(lambda match: match[1] or " ", text).splitlines()
        return "\n".join(filter(None, map(str.strip, lines)))

    def _identity(self, one: Statement, found: Collection[Statement]) -> str:
        """Digest of a statement and of those that it uses, which tells apart two definitions of one name."""
        used = [
            self._content(target) for way in self._ways(one) if way.text for target in way.statements if target in found
        ]
        return hashlib.sha256("\n".join([self._content(one), *used]).encode()).hexdigest()

    def _content(self, one: Statement) -> str:
        """Digest of what a statement says, names being their own at home; empty for one that only imports."""
        if one not in self._contents:
            words, ways = list(self._read(one).words), self._ways(one)
            for reference, way in zip(one.references, ways, strict=True):
                if reference.place is not None:
                    words[reference.place] = way.text
            self._contents[one] = _hash(" ".join(words)) if words else ""
        return self._contents[one]

    def _read(self, one: Statement) -> Statement:
        file = self._file(one.module)
        if file is not None:
            file.reader.read(one)
        return one

    def _ways(self, one: Statement) -> list[Found]:
        """Where a statement's references lead, in their order."""
        if one not in self._targets:
            self._targets[one] = [self._followed(one.module, reference) for reference in self._read(one).references]
        return self._targets[one]

    def _followed(self, module: str, reference: Reference) -> Found:
        if isinstance(reference.root, Import):
            return self._member(reference.root.module, (*filter(None, reference.root[1:]), *reference.attributes))
        return self._name(module, (reference.root, *reference.attributes))

    def _name(self, module: str, names: tuple[str, ...]) -> Found:
        """What a name means in a module, with attributes."""
        file = self._file(module)
        known = file is None or file.stars or names[0] in file.defined or names[0] in file.imported
        return self._member(module, names) if known else Found(".".join(names), outside=True)

    def _member(self, module: str, names: tuple[str, ...], seen: frozenset[tuple[str, str]] = frozenset()) -> Found:
        """What attributes of a module mean; all of the module where there are none or they are not to be found."""
        file = self._file(module)
        if file is None:
            return Found(".".join([module, *names]), outside=True)
        if not names:
            return Found("", self._all(module))
        name, rest = names[0], names[1:]
        if name in file.defined:
            return Found(".".join(names), tuple(file.defined[name]))
        if name in file.imported and (module, name) not in seen:
            target = file.imported[name]
            return self._member(target.module, (*filter(None, target[1:]), *rest), seen | {(module, name)})
        if self._file(f"{module}.{name}"):
            return self._member(f"{module}.{name}", rest)
        return Found(".".join(names), self._all(module))

    def _all(self, module: str) -> tuple[Statement, ...]:
        """All statements of a module, and one that stands for its imports."""
        file = self._file(module)
        if file is None:
            return ()
        targets = [*file.imported.values(), *map(Import, file.stars)]
        file.importing.references = [Reference(target) for target in targets if self._path(target.module)]
        return (*file.statements, file.importing)

    def _entry(self, entry: str) -> list[Statement]:
        """The statements of an entry. A function is given what its arguments are annotated with, so that counts too."""
        module, _, name = entry.partition(":")
        file = self._file(module)
        if file is None or (name and name not in file.defined and name not in file.imported):
            raise ConfigError(f"{entry} is not in the sources of {self.package}.")
        found = list(self._member(module, (name,) if name else ()).statements)
        functions = [one for one in found if name and isinstance(one.node, ast.FunctionDef)]
        for one in functions:
            annotations = (
                part.annotation for part in ast.walk(cast(ast.FunctionDef, one.node).args) if isinstance(part, ast.arg)
            )
            for said in (Statement(one.module, ast.Expr(node)) for node in annotations if node is not None):
                references = [reference._replace(place=None) for reference in self._read(said).references]
                found.append(Statement(one.module, references=references))
        return found

    def _find_counting(self, aside: frozenset[str]) -> Callable[[Statement], bool]:
        modules = tuple(f"{entry}." for entry in aside if ":" not in entry)
        named = {one for entry in aside if ":" in entry for one in self._entry(entry)}
        return lambda one: one not in named and not f"{one.module}.".startswith(modules)

    def _find_acting(self, module: str) -> list[Statement]:
        """What does more than to define names where a module is imported, and with it its packages."""
        package = module.rpartition(".")[0]
        found = list(self._acting(package)) if package else []
        file = self._file(module)
        if file is not None:
            found += (one for one in file.statements if self._acts(module, one.node))
            ours = ((name, target) for name, target in file.imported.items() if self._path(target.module))
            # An import whose name is nowhere else in the file is there for what importing does.
            unused = [target for name, target in ours if file.mentions[name] == 1 or file.source.count(name) == 1]
            if unused:
                found.append(Statement(module, references=[Reference(target) for target in unused]))
        return found

    def _acts(self, module: str, node: ast.stmt | None) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return any(self._registers(module, decorator) for decorator in node.decorator_list)
        if isinstance(node, ast.Assign):
            return not all(isinstance(one, ast.Name | ast.Tuple) for one in node.targets)
        return not isinstance(node, ast.AnnAssign)

    def _registers(self, module: str, decorator: ast.expr) -> bool:
        """Whether a decorator may keep what it decorates where others find it."""
        names = chain(decorator.func if isinstance(decorator, ast.Call) else decorator)
        found = self._name(module, names) if names else Found("")
        if found.outside:  # a name without a dot is Python's own
            return "." in found.text and found.text.partition(".")[0] not in _QUIET
        return not found.statements or any(map(self._counting(self.aside), found.statements))

    def _origin(self, module: str, node: ast.expr) -> str:
        """The dotted name of what an expression names or calls in another package, else ""."""
        names = chain(node.func if isinstance(node, ast.Call) else node)
        found = self._name(module, names) if names else Found("")
        return found.text if found.outside else ""

    def _fields_count(self, module: str, node: ast.ClassDef) -> bool:
        """Whether something may read the annotations of a class: not of one that is torch's, an error or plain."""
        if node.decorator_list:
            return True
        for base in node.bases:
            found = self._name(module, chain(base)) if chain(base) else Found("")
            if found.outside:
                counts = "." in found.text and not found.text.startswith("torch.")
            else:
                classes = [(one.module, one.node) for one in found.statements]
                counts = any(
                    not isinstance(one, ast.ClassDef) or self._fields_count(home, one) for home, one in classes
                )
            if counts or not (found.outside or found.statements):
                return True
        return False

    def _find_path(self, module: str) -> Path | None:
        """The file of a module of the package, None for another's."""
        base = self.package.parent.joinpath(*module.split("."))
        paths = (base / "__init__.py", base.with_suffix(".py")) if base.is_relative_to(self.package) else ()
        return next((path for path in paths if path.is_file()), None)

    def _file(self, module: str) -> _File | None:
        if module not in self._files:
            path = self._path(module)
            self._files[module] = None if path is None else self._parsed(module, path)
        return self._files[module]

    def _parsed(self, module: str, path: Path) -> _File:
        source, tree = _tree(path)
        origin, count = functools.partial(self._origin, module), functools.partial(self._fields_count, module)
        reader = Reader(module, path.name == "__init__.py", origin, count, self.silent)
        self._files[module] = file = _File(source, Counter(re.findall(r"\w+", source)), reader, Statement(module))
        for node in reader.body(tree.body):
            if isinstance(node, ast.If) and chain(getattr(node.test, "left", node.test)) == ("__name__",):
                continue  # runs where the module is a program
            bound = list(reader.bound(node))
            file.imported.update((name, target) for name, target in bound if target is not None and name != "*")
            file.stars += (target.module for name, target in bound if target is not None and name == "*")
            if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.AnnAssign) and not node.value):
                continue
            file.statements.append(Statement(module, node))
            for name in {name for name, target in bound if target is None}:
                file.defined.setdefault(name, []).append(file.statements[-1])
        return file


@functools.cache
def _tree(path: Path) -> tuple[str, ast.Module]:
    source = path.read_text(encoding="utf-8")
    try:
        return source, ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python (line {error.lineno}: {error.msg}).") from None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Syntax trees are many objects of which none is garbage: looking for some takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
