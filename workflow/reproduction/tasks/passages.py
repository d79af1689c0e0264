"""The held-out source modules as the shipped tasks read them: beginnings of functions, lexed, in the order of a hash.

Every choice of an item (which passage, where to cut it, which wrong answers, in which order) follows from hashes of the
text, so equal packages give equal items. Items of several tasks begin alike where they are of one passage, and an
evaluation computes what they share once.
"""

import ast
import hashlib
import io
import itertools
import keyword
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from reproduction.corpora import MODULES
from rotquant.recipes.corpus import Split
from rotquant.text import load_rows

T = TypeVar("T")

Item = dict[str, Any]
"""`{"context", "word"}` for last_word, `{"context", "summary"}` for summary, `{"context", "text"}` where text is
completed; `{"context", "choices", "answer"}` for the others, the answer being the index of the true choice. White space
before an answer belongs to it."""

#: Characters of a passage: its least, and its most.
_LENGTHS = (160, 360)
#: Names that say nothing about what a text is about.
_COMMON = frozenset({"self", "cls", "None", "True", "False", "args", "kwargs"})
_CALL = re.compile(r"(\.?)\b([A-Za-z_]\w{2,})\(")


class Lexeme(NamedTuple):
    """A lexical unit of Python: its kind (of `tokenize`), its text, where it begins."""

    kind: int
    text: str
    start: int

    @property
    def is_name(self) -> bool:
        """Whether it is an identifier of the text's own, of two letters or more."""
        own = self.kind == tokenize.NAME and self.text not in _COMMON and not keyword.iskeyword(self.text)
        return own and len(self.text) > 1


@dataclass(frozen=True, eq=False)
class Module:
    """A held-out module."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The module parsed; empty where this interpreter cannot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in other people's files are not ours to report.
            try:
                return ast.parse(self.text)
            except (SyntaxError, ValueError):
                return ast.Module([], [])

    @cached_property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.split("\n")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, level by level."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def by_depth(self) -> dict[int, frozenset[str]]:
        """The lines by how many spaces they begin with."""
        found: dict[int, set[str]] = {}
        for line in self.lines:
            found.setdefault(depth(line), set()).add(line)
        return {spaces: frozenset(lines) for spaces, lines in found.items()}

    @cached_property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """The names that are called, once each: those after a dot under ".", the others under ""."""
        found = {"": {}, ".": {}}
        for dot, name in _CALL.findall(self.text):
            if not keyword.iskeyword(name):
                found[dot].setdefault(name)
        return {dot: tuple(names) for dot, names in found.items()}

    def functions(self) -> "Iterator[Passage]":
        """The beginnings of the functions that are long enough."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ""
                for line in self.lines[node.lineno - 1 : node.end_lineno]:
                    if len(text) + len(line) > _LENGTHS[1]:
                        break
                    text += line + "\n"
                if len(text) >= _LENGTHS[0]:
                    yield Passage(text, self, node)


@dataclass(frozen=True, eq=False)
class Passage:
    """The beginning of a function as its module has it, whole lines."""

    text: str
    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @cached_property
    def seed(self) -> int:
        """What the draws from this passage follow from."""
        return number("passage", self.text)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's parameters but `self` and its like."""
        arguments = self.node.args
        given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return tuple(one.arg for one in given if one.arg not in _COMMON and len(one.arg) > 1)

    @cached_property
    def lexemes(self) -> tuple[Lexeme, ...]:
        """The passage's lexical units in order, white space left out but for ends of lines.

        An f-string is one, by every interpreter, though from Python 3.12 on `tokenize` takes it apart.
        """
        starts = [0, *itertools.accumulate(len(line) for line in self.text.splitlines(keepends=True))]
        found: list[Lexeme] = []
        opened: list[int] = []  # f-strings, one inside the other
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                (row, column), (last, end) = token.start, token.end
                start = starts[row - 1] + column
                kind = tokenize.tok_name[token.type]
                if kind == "FSTRING_START":
                    opened.append(start)
                elif kind == "FSTRING_END":
                    start = opened.pop()
                    if not opened:
                        found.append(Lexeme(tokenize.STRING, self.text[start : starts[last - 1] + end], start))
                elif not opened and kind not in ("INDENT", "DEDENT", "ENDMARKER"):
                    found.append(Lexeme(token.type, token.string, start))
        except (tokenize.TokenError, IndentationError):  # The passage ends inside brackets.
            pass
        return tuple(found)

    @cached_property
    def documentation(self) -> tuple[int, int]:
        """Where the function's documentation lies in the passage: an empty range before its body without one.

        The body is what comes after; it begins at the passage's end if its statements lie beyond.
        """
        documented = ast.get_docstring(self.node, clean=False) is not None
        lines = [statement.lineno - self.node.lineno for statement in self.node.body[: 1 + documented]]
        lines = [lines[0], (lines[1:] or [len(self.text)])[0]] if documented else lines * 2
        first, second = (sum(map(len, self.text.splitlines(keepends=True)[:line])) for line in lines)
        return first, second

    @property
    def body(self) -> int:
        """Where the function's statements begin, its documentation left out."""
        return self.documentation[1]

    @cached_property
    def names(self) -> "tuple[tuple[int, Lexeme, set[str]], ...]":
        """The identifiers of the body: place among the lexemes, the lexeme, and the identifiers before it."""
        before: set[str] = set()
        found = []
        for place, lexeme in enumerate(self.lexemes):
            if lexeme.is_name:
                if lexeme.start >= self.body:
                    found.append((place, lexeme, set(before)))
                before.add(lexeme.text)
        return tuple(found)


@dataclass(frozen=True, eq=False)
class PassageSource:
    """Held-out modules, and what all tasks read of them."""

    modules: tuple[Module, ...]

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """The beginnings of functions, each text once, in the order of their hashes."""
        found = {passage.text: passage for module in self.modules for passage in module.functions()}
        return tuple(sorted(found.values(), key=lambda passage: passage.seed))

    @cached_property
    def common(self) -> tuple[str, ...]:
        """Plain words of four letters or more that follow a space in documentation 20 times or more, by frequency."""
        counts: Counter[str] = Counter()
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    counts.update(re.findall(r"(?<= )[a-z]+(?=[ .,\n])", ast.get_docstring(node, clean=False) or ""))
        known = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return tuple(word for word, count in known if count >= 20 and len(word) >= 4)

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The words of `common` and the place of each."""
        return {word: rank for rank, word in enumerate(self.common)}


def read(split: Split) -> PassageSource:
    """The modules of a split. Raises `CorpusError` where none of its packages is installed."""
    return PassageSource(tuple(Module(text) for text in load_rows(MODULES, split)))


def cut(text: str) -> tuple[str, str]:
    """A text without the white space at its end, and that white space."""
    context = text.rstrip()
    return context, text[len(context) :]


def depth(line: str) -> int:
    """How many characters of white space a line begins with."""
    return len(line) - len(line.lstrip())


def choice_item(task: str, context: str, true: str, others: Sequence[str], space: str = " ") -> Item:
    """An item whose true choice stands anywhere among the others, each after the same white space."""
    answer = number(task, context) % (len(others) + 1)
    choices = [space + choice for choice in (*others[:answer], true, *others[answer:])]
    return {"context": context, "choices": choices, "answer": answer}


def alike(task: str, context: str, true: str, others: Iterable[str], count: int) -> list[str] | None:
    """`count` of the others that are about as long as the true choice, drawn by hash; None where they are too few.

    How many of them are shorter is drawn, too, so that neither the shortest nor the middle one is the likeliest.
    """
    near = [one for one in others if one != true and 4 * abs(len(one) - len(true)) <= max(8, len(true))]
    seed = number(task + true, context)
    drawn = ordered(str(seed), near, str)
    shorter = seed % (count + 1)
    first = [one for one in drawn if len(one) <= len(true)][:shorter]
    second = [one for one in drawn if len(one) >= len(true) and one not in first][: count - shorter]
    found = list(dict.fromkeys([*first, *second, *drawn]))[:count]
    return ordered(f"again {seed}", found, str) if len(found) == count else None


def ordered(task: str, things: Iterable[T], text: Callable[[T], str]) -> list[T]:
    """Things in the order of the hashes of their texts."""
    return sorted(things, key=lambda thing: number(task, text(thing)))


def number(task: str, text: str) -> int:
    """A number that follows from task and text."""
    digest = hashlib.sha256(f"{task}:{text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:16], "big")
