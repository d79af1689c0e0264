"""What a statement at the top of a module says, apart from how it is written, and what it refers to.

Left out is what changes nothing that is computed: comments, docstrings, imports, annotations that nothing reads, blocks
for type checkers, `typing.cast`. The words are the same for every Python from 3.11 on.
"""

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Import(NamedTuple):
    """What an import binds a name to: a module, or a name in it."""

    module: str
    name: str | None = None


class Reference(NamedTuple):
    """A name of the module, or what an import in a function binds, with the attributes that are asked of it.

    place: of its word among the statement's, None for what is followed only.
    """

    root: str | Import
    attributes: tuple[str, ...] = ()
    place: int | None = None


@dataclass(eq=False)
class Statement:
    """A statement: its words, empty where a reference has its place, and the string constants in it."""

    module: str
    node: ast.stmt | None = None
    words: list[str] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    strings: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Scope:
    """What a function, class or comprehension binds names to: an import, or what is known when it runs (None)."""

    node: ast.AST | None = None
    outer: "_Scope | None" = None
    bound: dict[str, Import | None] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
#: Fields of syntax that say nothing of what is computed.
_SILENT = {"ctx", "kind", "type_comment", "type_params"}
_FIELDS = {
    node: tuple(name for name in node._fields if name not in _SILENT)
    for node in vars(ast).values()
    if isinstance(node, type) and issubclass(node, ast.AST)
}
#: Decorators that speak to type checkers only.
_UNHEARD = {"typing.final", "typing.override", "typing_extensions.override"}


def chain(node: ast.AST, inner: Callable[[ast.AST], ast.AST] = lambda node: node) -> tuple[str, ...]:
    """("a", "b", "c") of `a.b.c`, nothing of another expression; `inner` says what a part of it stands for."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = inner(node.value)
    return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else ()


class Reader:
    """Reads the statements of one module."""

    def __init__(
        self,
        module: str,
        is_package: bool,
        origin: Callable[[ast.expr], str],
        fields_count: Callable[[ast.ClassDef], bool],
        silent: frozenset[str] = frozenset(),
    ) -> None:
        """Set up for a module.

        Args:
            origin: the dotted name of what an expression names in another package, else "".
            fields_count: whether something reads the annotations of a class.
            silent: names of methods that say nothing.
        """
        self.module, self.is_package = module, is_package
        self.origin, self.fields_count, self.silent = origin, fields_count, silent
        self._scope = _Scope()

    def body(self, nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements of a body that do something."""
        for node in nodes:
            if isinstance(node, ast.If) and self.origin(node.test) == "typing.TYPE_CHECKING":
                yield from self.body(node.orelse)
            elif isinstance(node, _FUNCTIONS) and self._is_silent(node):
                continue
            elif not isinstance(node, ast.Pass) and not (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                yield node

    def _is_silent(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        if node.name in self.silent and isinstance(self._scope.node, ast.ClassDef):
            return True
        return "typing.overload" in map(self.origin, node.decorator_list)

    def imports(self, node: ast.AST) -> Iterator[tuple[str, Import]]:
        """The names that an import statement binds, each with what it stands for; nothing of other statements."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, Import(alias.name if alias.asname else first)
                if first != alias.name and not alias.asname:
                    yield alias.name, Import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            parts = self.module.split(".")
            package = parts[: len(parts) - node.level + self.is_package] if node.level else []
            source = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                yield alias.asname or alias.name, Import(source, alias.name)

    def bound(self, node: ast.AST) -> Iterator[tuple[str, Import | None]]:
        """The names that a statement at the top of the module binds, with what stands behind those of imports."""
        yield from self.imports(node)
        if isinstance(node, _FUNCTIONS | ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, None
        elif not isinstance(node, ast.Lambda | _COMPREHENSIONS):
            for part in ast.iter_child_nodes(node):
                yield from self.bound(part)

    def read(self, statement: Statement) -> Statement:
        """Fill in a statement's words, references and strings, once."""
        if statement.node is None or statement.words:
            return statement
        self._statement, self._words, self._scope = statement, statement.words, _Scope()
        self._names: list[tuple[int, tuple[str, ...], _Scope]] = []
        self._imports: list[Import] = []
        self._node(statement.node)
        for place, (root, *attributes), scope in self._names:
            target = _lookup(root, scope)
            if target is None:
                self._words[place] = ".".join([root, *attributes])
            else:
                statement.references.append(Reference(target, tuple(attributes), place))
        used = {reference.root for reference in statement.references}
        statement.references += (Reference(target) for target in self._imports if target not in used)
        return statement

    def _node(self, node: ast.AST) -> None:
        _READ.get(type(node), Reader._plain)(self, node)

    def _plain(self, node: ast.AST) -> None:
        self._words.append(type(node).__name__)
        for name in _FIELDS[type(node)]:
            self._value(getattr(node, name, None))

    def _value(self, value: Any) -> None:
        if type(value) in _FIELDS:
            self._node(value)
        elif isinstance(value, list):
            self._words.append("[")
            for one in self.body(value) if value and isinstance(value[0], ast.stmt) else value:
                self._value(one)
            self._words.append("]")
        else:
            self._words.append(repr(value))

    def _within(self, node: ast.AST, *values: Any, bound: Iterable[str] = ()) -> None:
        """Read parts of a node that have a scope of their own."""
        self._scope = outer = self._scope
        self._scope = _Scope(node, outer, dict.fromkeys(bound))
        for value in values:
            self._value(value)
        self._scope = outer

    def _bind(self, name: str | None, target: Import | None = None) -> None:
        scope = self._scope
        while isinstance(scope.node, _COMPREHENSIONS) and name not in scope.bound and scope.outer:
            scope = scope.outer  # `:=` binds a name beyond the comprehension that it stands in
        if name and scope.node and name not in scope.elsewhere:
            scope.bound[name] = target if scope.bound.get(name, target) == target else None

    def _name(self, node: ast.Name | ast.Attribute) -> None:
        names = chain(node, self._uncast)
        if not names:
            self._plain(node)
            return
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self._bind(node.id)
        self._names.append((len(self._words), names, self._scope))
        self._words.append("")

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._statement.strings.add(node.value)
        self._words.append(repr(node.value))

    def _formatted(self, node: ast.JoinedStr) -> None:
        self._words.append("JoinedStr")  # Python 3.12 adds an empty text behind a nested format
        self._value([one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")])

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, target in self.imports(node):
            self._bind(name, target)
            self._imports.append(target)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._words.append(type(node).__name__)
        if not isinstance(node, ast.Lambda):
            self._bind(node.name)
            self._words.append(node.name)
            self._value([one for one in node.decorator_list if self.origin(one) not in _UNHEARD])
        given = node.args
        self._value([given.defaults, given.kw_defaults])
        groups = [given.posonlyargs, given.args, [given.vararg], given.kwonlyargs, [given.kwarg]]
        names = [[one.arg for one in group if one] for group in groups]
        self._within(node, names, node.body, bound=itertools.chain(*names))

    def _class(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        self._words += ("ClassDef", node.name)
        self._value([one for one in node.decorator_list if self.origin(one) not in _UNHEARD])
        self._value([node.bases, node.keywords])
        self._within(node, node.body)

    def _annotated(self, node: ast.AnnAssign) -> None:
        inside = self._scope.node
        if isinstance(inside, ast.ClassDef) and self.fields_count(inside):
            self._plain(node)
            for one in ast.walk(node.annotation):  # a text is of a class that is named before it is there
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    self._statement.references += map(Reference, re.findall(r"\w+", one.value))
        elif node.value is not None:
            self._node(ast.Assign([node.target], node.value))
        elif isinstance(node.target, ast.Name):
            self._bind(node.target.id)

    def _comprehension(self, node: Any) -> None:
        parts = node.generators
        self._words.append(type(node).__name__)
        self._node(parts[0].iter)
        bound = {one.id for part in parts for one in ast.walk(part.target) if isinstance(one, ast.Name)}
        result = [node.key, node.value] if isinstance(node, ast.DictComp) else node.elt
        rest = [[part.target, part.iter if part is not parts[0] else None, part.ifs, part.is_async] for part in parts]
        self._within(node, rest, result, bound=bound)

    def _binding(self, node: Any) -> None:
        self._bind(node.rest if isinstance(node, ast.MatchMapping) else node.name)
        self._plain(node)

    def _elsewhere(self, node: ast.Global | ast.Nonlocal) -> None:
        self._scope.elsewhere.update(node.names)
        self._plain(node)

    def _call(self, node: ast.Call) -> None:
        plain = self._uncast(node)
        self._plain(node) if plain is node else self._node(plain)

    def _uncast(self, node: ast.AST) -> ast.AST:
        """What `typing.cast` is given, and that alone."""
        while isinstance(node, ast.Call) and len(node.args) == 2 and self.origin(node.func) == "typing.cast":
            node = node.args[1]
        return node

    def _subscript(self, node: ast.Subscript) -> None:
        """`Path(__file__).resolve().parents[2]` in a module is `parents[3]` of the same module one folder deeper."""
        parents, level = node.value, self.module.count(".") + self.is_package
        names = {one.id for one in ast.walk(parents) if isinstance(one, ast.Name)}
        if "__file__" in names and ast.unparse(node).endswith(f".parents[{level}]"):
            self._words.append("beside the package")
            self._node(parents)
        else:
            self._plain(node)


#: How syntax is read that says something else than its parts do one by one.
_READ: dict[type[ast.AST], Callable[[Reader, Any], None]] = {
    kind: method
    for method, *kinds in (
        (Reader._name, ast.Name, ast.Attribute),
        (Reader._constant, ast.Constant),
        (Reader._formatted, ast.JoinedStr),
        (Reader._import, ast.Import, ast.ImportFrom),
        (Reader._function, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
        (Reader._class, ast.ClassDef),
        (Reader._annotated, ast.AnnAssign),
        (Reader._comprehension, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
        (Reader._binding, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping),
        (Reader._elsewhere, ast.Global, ast.Nonlocal),
        (Reader._call, ast.Call),
        (Reader._subscript, ast.Subscript),
    )
    for kind in kinds
}


def _lookup(name: str, scope: _Scope) -> str | Import | None:
    """The name itself where the module binds it, what an import of a function binds, or None for a variable."""
    first, one = scope, scope
    while one is not None:
        if name in one.bound and (one is first or not isinstance(one.node, ast.ClassDef)):
            return one.bound[name]
        one = one.outer
    return name
