"""What a module's code reaches: the statements, of all our modules, that decide what it computes.

Nothing is imported: names are followed from statement to statement, and in doubt more is reached. Statements are those
at the top of a module; a class is one.

- Of an entry, all is reached. A statement reaches what each of its names is: definitions of its module, and through
  imports, also those in functions and through re-exports, definitions of others. `module.name` is that name; a module
  that is used otherwise is reached whole, and so is one that an import names and nothing uses.
- A string that is a module's dotted name, or the name of a Python file beside the module, reaches it whole; so does
  `__name__` its own. What is built from parts is not followed: a recipe's methods and a benchmark's module are entries
  for that reason.
- Importing a module runs it. Whatever reaches a statement thereby reaches, in its module, in the packages around it and
  in all that these import at their tops, the statements that act: calls, blocks, assignments to parts of objects, and
  definitions whose decorator may register them. It reaches nothing else of what is only imported: an assignment of a
  name that nobody reads decides nothing.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reproduction.identity.syntax import ITSELF, Import, ModuleSyntax, TopStatement, is_ours, read_module
from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import short_hash

#: Decorators that register nothing.
_PLAIN = frozenset(
    {
        *("dataclasses.dataclass", "contextlib.contextmanager", "typing.overload", "typing.runtime_checkable"),
        *("functools.cache", "functools.lru_cache", "functools.wraps", "functools.singledispatch"),
        *("torch.no_grad", "torch.inference_mode"),
    }
)


class Node(NamedTuple):
    """A statement of a module by its place, or `WHOLE` for the whole module, or `RUN` for its import."""

    module: str
    place: int


WHOLE, RUN = -1, -2

Meaning = tuple[Node | str, ...]
"""What a name is: statements, whole modules, or places in other packages."""


class Reach:
    """What is reached in our packages, found out once for all entries.

    Args:
        packages: their folders by name. neutral: modules of which, with all below them, nothing is ever reached.
    """

    def __init__(self, packages: Mapping[str, Path], neutral: Iterable[str]) -> None:
        self._packages = packages
        self._neutral = prefixes(neutral)
        self._meanings: dict[tuple[str, str], Meaning] = {}
        self.file = functools.cache(self._file)
        self._module = functools.cache(self._read)
        self._bound = functools.cache(self._find_bound)
        self._names = functools.cache(self._find_names)
        self._next = functools.cache(lambda node: [one for one in self._after(node) if not self._left(one.module)])
        self.digest = functools.cache(self._digest)

    def reached(self, entries: Iterable[str], aside: Iterable[str] = ()) -> set[Node]:
        """The statements that some entries reach, with the modules that are imported and those reached whole.

        Args:
            entries: modules of ours, or dotted places in them. aside: modules of which, with all
                below them, nothing is reached.
        """
        found, left = set[Node](), (*self._neutral, *prefixes(aside))
        waiting = [node for one in entries for node in ([Node(one, WHOLE)] if self.file(one) else self._at(one))]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Node) and node not in found and not f"{node.module}.".startswith(left):
                found.add(node)
                waiting += self._next(node)
        return found

    def statement(self, node: Node) -> TopStatement:
        """The statement of a node that is one."""
        return self._module(node.module).statements[node.place]

    def _digest(self, node: Node, aside: tuple[str, ...] = ()) -> str:
        """Digest of a statement and of what its names are, since imports say that elsewhere."""
        said, left = [self.statement(node).digest], (*self._neutral, *prefixes(aside))
        for name, meaning in self._names(node):
            for one in meaning:
                if isinstance(one, str):
                    said.append(f"{name} {one}")
                elif one.place != WHOLE and not f"{one.module}.".startswith(left):
                    said.append(f"{name} {self.statement(one).digest}")
        return short_hash("\n".join(said), 64)

    def _file(self, module: str) -> Path | None:
        """The file of a module of ours; None where there is none."""
        package, *parts = module.split(".")
        place = self._packages[package].joinpath(*parts)
        return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)

    def _read(self, module: str) -> ModuleSyntax:
        file = self.file(module)
        if file is None:
            raise ConfigError(f"there is no module {module}.")
        return read_module(file)

    def _left(self, module: str) -> bool:
        return f"{module}.".startswith(self._neutral)

    def _after(self, node: Node) -> Iterator[Node]:
        """What a node reaches at once."""
        name, place = node
        module, above = self._module(name), name.rpartition(".")[0]
        if place == RUN:
            yield from [Node(above, RUN)] if above else []
            yield from self._run(module.imports)
            yield from (Node(name, at) for at, one in enumerate(module.statements) if self._acts(name, one))
            return
        yield Node(name, RUN)
        if place == WHOLE:
            yield from (Node(name, at) for at in range(len(module.statements)))
            yield from self._unused(module.imports, {use for one in module.statements for use in one.uses})
            return
        statement = module.statements[place]
        yield from (one for _, meaning in self._names(node) for one in meaning if isinstance(one, Node))
        yield from self._run(statement.imports)
        yield from self._unused(statement.imports, set(statement.uses))
        for text in statement.texts:
            named = f"{above}.{text.removesuffix('.py')}" if text.endswith(".py") else text
            yield from [Node(named, WHOLE)] if is_ours(named) and self.file(named) else []
        yield from [] if ITSELF.isdisjoint(statement.uses) else [Node(name, WHOLE)]

    def _run(self, imports: Iterable[Import]) -> Iterator[Node]:
        """The modules that imports run; what `*` binds is not told apart."""
        for one in imports:
            place = one.imported
            while is_ours(place) and not self.file(place):
                place = place.rpartition(".")[0]
            if is_ours(place):
                yield Node(place, WHOLE if one.bound == "*" else RUN)

    def _unused(self, imports: Iterable[Import], uses: Collection[str]) -> Iterator[Node]:
        """What imports name and nothing uses."""
        for one in imports:
            name = one.bound if one.place == one.imported else one.imported
            if not any(f"{use}.".startswith(f"{name}.") for use in uses):
                yield from (meant for meant in self._at(one.imported) if isinstance(meant, Node))

    def _acts(self, module: str, statement: TopStatement) -> bool:
        """Whether a statement may do more, when its module is imported, than to bind names."""
        return statement.acts or not all(self._is_plain(module, name) for name in statement.decorators)

    def _is_plain(self, module: str, decorator: str) -> bool:
        """Whether a decorator registers nothing: a known one, or a neutral one of ours."""
        first, dot, rest = decorator.partition(".")
        places = [one.place + dot + rest for one in self._bound(module)[0].get(first, ())]
        return bool(places) and all(place in _PLAIN or (is_ours(place) and self._left(place)) for place in places)

    def _find_bound(self, module: str) -> tuple[Mapping[str, list[Import]], Mapping[str, list[Node]]]:
        """The imports, and the statements, that bind each name of a module."""
        imports: dict[str, list[Import]] = {}
        statements: dict[str, list[Node]] = {}
        for one in self._module(module).imports:
            imports.setdefault(one.bound, []).append(one)
        for place, statement in enumerate(self._module(module).statements):
            for name in statement.binds:
                statements.setdefault(name, []).append(Node(module, place))
        return imports, statements

    def _find_names(self, node: Node) -> list[tuple[str, Meaning]]:
        """What each name is that a statement uses."""
        inside: dict[str, list[Import]] = {}
        for one in self.statement(node).imports:
            inside.setdefault(one.bound, []).append(one)
        found = []
        for name in self.statement(node).uses:
            first, dot, rest = name.partition(".")
            lazily = (meant for one in inside.get(first, ()) for meant in self._at(one.place + dot + rest))
            found.append((name, (*self._in(node.module, name), *lazily)))
        return found

    def _in(self, module: str, name: str) -> Meaning:
        """What a module's name is, with the attributes that follow it."""
        key = (module, name)
        if key not in self._meanings:
            self._meanings[key] = ()  # what a name means by itself: nothing, or a submodule
            first, dot, rest = name.partition(".")
            imports, statements = self._bound(module)
            imported = (meant for one in imports.get(first, ()) for meant in self._at(one.place + dot + rest))
            self._meanings[key] = (*statements.get(first, ()), *imported)
        return self._meanings[key]

    def _at(self, place: str) -> Meaning:
        """What a dotted place is: the name that a module binds, the module, or in doubt the last module before it."""
        if not is_ours(place):
            return (place,)
        module, *rest = place.split(".")
        while rest and not self._left(module):
            if found := self._in(module, ".".join(rest)):
                return found
            if not self.file(f"{module}.{rest[0]}"):
                break
            module = f"{module}.{rest.pop(0)}"
        return (Node(module, WHOLE),)


def prefixes(modules: Iterable[str]) -> tuple[str, ...]:
    """What the names of some modules, and of all below them, begin with, when a dot follows them."""
    return tuple(f"{module}." for module in modules)
