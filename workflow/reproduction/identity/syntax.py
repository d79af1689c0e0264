"""Python files as statements at their top, each with what it names, for digests of code.

Syntax is told without docstrings and without the modules that our own names are imported from, so comments, formatting
and names of modules do not count. It is equal for every Python from 3.11 on.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rotquant.foundation.errors import ConfigError, RotquantError
from rotquant.foundation.files import cache_folder, short_hash, write_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: The packages whose code decides results.
OURS = ("rotquant", "reproduction")

#: Names by which a statement may read any other of its module.
ITSELF = frozenset({"__name__", "globals"})

_MODULE = re.compile(rf"({'|'.join(OURS)})(\.\w+)+")
#: Syntax fields that do not affect what is computed; Python 3.11 lacks the last.
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_params"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Import = ast.Import | ast.ImportFrom


class Import(NamedTuple):
    """A name that an import binds, the dotted place that it stands for, and the place that is imported.

    The two places differ in `import a.b` alone, which binds `a`. `*` is bound by `from a import *`.
    """

    bound: str
    place: str
    imported: str


class TopStatement(NamedTuple):
    """A statement at the top of a module.

    digest: of its syntax. binds: the names that it defines. uses: the module's names that it reads, with the attributes
    that follow. imports: those inside it. texts: strings that name modules of ours or kernels. acts: whether it does
    more than to bind names. decorators: as names with attributes, "" where one is something else.
    """

    digest: str
    binds: tuple[str, ...]
    uses: tuple[str, ...]
    imports: tuple[Import, ...]
    texts: tuple[str, ...]
    acts: bool
    decorators: tuple[str, ...]

    def of_names(self, known: Collection[str]) -> "TopStatement":
        """The same without the builtins that it uses, given the names of its module."""
        all_known = {*known, *(one.bound for one in self.imports)}
        return self._replace(uses=tuple(name for name in self.uses if name.partition(".")[0] in all_known))


class ModuleSyntax(NamedTuple):
    """The statements of a module, and the imports that run when it is imported, without those for type checkers."""

    statements: tuple[TopStatement, ...]
    imports: tuple[Import, ...]

    def places(self) -> Iterator[str]:
        """What all its imports import, those in functions too."""
        inside = (one for statement in self.statements for one in statement.imports)
        return (one.imported for one in (*self.imports, *inside))


@functools.cache
def read_module(path: Path) -> ModuleSyntax:
    """The statements of a Python file, cached for the user by the file's content: parsing takes some ms.

    Raises:
        ConfigError: it is not valid Python.
    """
    source = path.read_bytes()
    kept = cache_folder("syntax") / hashlib.sha256(source + rules()).hexdigest()
    with suppress(OSError, ValueError):
        return _form().validate_json(kept.read_bytes())
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python (line {error.lineno}: {error.msg}).") from None
    top = [*running(tree.body)]
    imports = tuple(one for node in top for one in _at_import(node))
    statements = [_statement(node) for node in top if not isinstance(node, _Import)]
    known = {name for one in statements for name in one.binds} | {one.bound for one in imports} | ITSELF
    module = ModuleSyntax(tuple(one.of_names(known) for one in statements), imports)
    with suppress(RotquantError):
        write_text(kept, _form().dump_json(module).decode())
    return module


@functools.cache
def _form() -> "TypeAdapter[ModuleSyntax]":
    """The form of kept syntax."""
    from pydantic import TypeAdapter  # which takes time to load, and most readers of a plan need no digest

    return TypeAdapter(ModuleSyntax)


@functools.cache
def rules() -> bytes:
    """The bytes of this file, on which cached syntax depends too."""
    return Path(__file__).read_bytes()


def running(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run: no texts, and nothing for type checkers."""
    for node in body:
        if isinstance(node, ast.If) and _chain(node.test) in (["TYPE_CHECKING"], ["typing", "TYPE_CHECKING"]):
            yield from running(node.orelse)
        elif not _is_text(node):
            yield node


def _at_import(node: ast.AST) -> Iterator[Import]:
    """The imports that run with a statement, in blocks too, but not those in a function or a class."""
    if isinstance(node, _Import):
        yield from _imports(node)
    elif not isinstance(node, _Definition | ast.expr):
        for inner in ast.iter_child_nodes(node):
            yield from _at_import(inner)


def _imports(node: _Import) -> Iterator[Import]:
    """The names that an import statement binds."""
    for one in node.names:
        if isinstance(node, ast.ImportFrom):
            place = node.module or "" if one.name == "*" else f"{node.module}.{one.name}"
            yield Import(one.asname or one.name, place, place)
        elif one.asname:
            yield Import(one.asname, one.name, one.name)
        else:
            first = one.name.partition(".")[0]
            yield Import(first, first, one.name)


def _statement(node: ast.stmt) -> TopStatement:
    walked = [*ast.walk(node)]
    imports = {one for inner in walked if isinstance(inner, _Import) for one in _imports(inner)}
    texts = {inner.value for inner in walked if isinstance(inner, ast.Constant) and isinstance(inner.value, str)}
    decorators = [_undecorated(one) for one in node.decorator_list] if isinstance(node, _Definition) else []
    return TopStatement(
        digest=short_hash(repr(words(node)), 64),
        binds=tuple(sorted({node.name} if isinstance(node, _Definition) else _stored(walked))),
        uses=tuple(sorted(set(_uses(node, frozenset())))),
        imports=tuple(sorted(imports)),
        texts=tuple(sorted(text for text in texts if text.endswith((".cu", ".cpp", ".py")) or _MODULE.fullmatch(text))),
        acts=not isinstance(node, _Definition) and not _assigns(node),
        decorators=tuple(decorators),
    )


def _undecorated(decorator: ast.expr) -> str:
    """A decorator's name, without its arguments."""
    return ".".join(_chain(decorator.func if isinstance(decorator, ast.Call) else decorator) or ())


def _assigns(node: ast.stmt) -> bool:
    """Whether a statement is an assignment to names alone."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    inner = (one for target in targets if target for one in ast.walk(target))
    plain = all(isinstance(one, ast.Name | ast.Tuple | ast.List | ast.Starred | ast.expr_context) for one in inner)
    return isinstance(node, ast.Assign | ast.AnnAssign) and plain


def _uses(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """The names that syntax reads and that are not its function's `own`, with the attributes that follow.

    Names that an import in a function binds are not its own: they may be the module's too.
    """
    if chain := _chain(node):
        if chain[0] not in own and not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            yield ".".join(chain)
    elif isinstance(node, _Function):
        inner = _inside(node, own)
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        yield from (name for one in body for name in _uses(one, inner))
        yield from (name for one in ast.iter_child_nodes(node) if one not in body for name in _uses(one, own))
    elif isinstance(node, _Comprehension):
        first, inner = node.generators[0].iter, own | _stored([*_scope(one.target for one in node.generators)])
        yield from _uses(first, own)
        parts = (part for one in node.generators for part in ast.iter_child_nodes(one) if part is not first)
        results = (part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.comprehension))
        yield from (name for part in (*parts, *results) for name in _uses(part, inner))
    else:
        yield from (name for one in ast.iter_child_nodes(node) for name in _uses(one, own))
    if isinstance(node, ast.AugAssign) and (chain := _chain(node.target)):
        yield ".".join(chain)
    for field in ("annotation", "returns"):
        if quoted := getattr(node, field, None):
            yield from _quoted(quoted, own)


def _quoted(annotation: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """The names in the texts of an annotation."""
    for one in ast.walk(annotation):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            with suppress(SyntaxError, ValueError):
                yield from _uses(ast.parse(one.value, mode="eval"), own)


def _chain(node: ast.AST | None) -> list[str] | None:
    """A name and the attributes that follow it, where syntax is that."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)):
        return [*before, node.attr]
    return None


def _inside(function: _Function, own: frozenset[str]) -> frozenset[str]:
    """The names that are not the module's in a function: its parameters, what it binds, and `own` of those around."""
    arguments = {one.arg for one in ast.iter_child_nodes(function.args) if isinstance(one, ast.arg)}
    if isinstance(function, ast.Lambda):
        return own | arguments
    inside = [*_scope(function.body)]
    shared = {name for one in inside if isinstance(one, ast.Global) for name in one.names}
    return (own | arguments | _stored(inside)) - shared


def _stored(nodes: Collection[ast.AST]) -> set[str]:
    """The names that some nodes bind, otherwise than by an import."""
    names = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names | {one.name for one in nodes if isinstance(one, _Definition)}


def _scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Syntax without what is inside of the functions, classes and comprehensions in it."""
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _Definition | ast.Lambda | _Comprehension):
            waiting += ast.iter_child_nodes(node)


def words(value: Any) -> Any:
    """Syntax as plain data, equal for every Python from 3.11 on; string statements are left out as docstrings."""
    if isinstance(value, list):
        told = [words(one) for one in value if not _is_text(one)]
        imports = [one for one in told if isinstance(one, list) and one[:1] == ["OurImport"]]
        return [*(one for one in told if one not in imports), *sorted(imports)] if imports else told
    if isinstance(value, ast.JoinedStr):  # Python 3.12 adds an empty text after a nested format
        return ["JoinedStr", *(words(one) for one in value.values if getattr(one, "value", None) != "")]
    if isinstance(value, ast.ImportFrom) and is_ours(value.module or ""):
        return ["OurImport", sorted((one.name, one.asname or "") for one in value.names)]
    if isinstance(value, ast.AST):
        fields = ((name, one) for name, one in ast.iter_fields(value) if name not in _SILENT)
        return [type(value).__name__, *(words(one) for _, one in fields)]
    return value


def is_ours(module: str) -> bool:
    """Whether a module is of our packages."""
    return module.partition(".")[0] in OURS


def _is_text(node: Any) -> bool:
    """Whether a statement is only a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
