"""Items of the shipped tasks whose answer is written: the rest of a line, of an import, of a return; a summary.

A text to complete is short, and where it has names, the passage has them before it: it can be known.
"""

import ast
import builtins
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

from reproduction.tasks.passages import Item, Lexeme, Module, Passage, PassageSource, cut, number, ordered

LONGEST = 24
"""Characters of the longest text to complete."""

#: What a completion may name without its having been named before.
_KNOWN = frozenset({*dir(builtins), *keyword.kwlist, "self", "cls"})
_IMPORT = re.compile(r"(from [\w.]+ import|import)( [\w, .]+)")
#: Characters of the lines that are shown above an import or a return, at most.
_ABOVE = 400
#: No import is more than this many of the items.
_SAME = 30


def complete_line(source: PassageSource) -> Iterator[Item]:
    """A function up to the middle of a line of code; the rest of the line, of two lexical units or more."""
    for passage in source.passages:
        found = [
            (line[cut].start, line[-1])
            for line in _lines(passage)
            for cut in range(1, len(line) - 1)
            if _known(passage, line[cut:])
        ]
        if found:
            start, last = found[number("complete_line", passage.text) % len(found)]
            context, _ = cut(passage.text[:start])
            yield {"context": context, "text": passage.text[len(context) : last.start + len(last.text)]}


def complete_return(source: PassageSource) -> Iterator[Item]:
    """A function, or the lines of it above, up to what it returns; that."""
    found = {context: text for module in source.modules for context, text in _returns(module)}
    for context in ordered("return", found, str):
        yield {"context": context, "text": found[context]}


def complete_import(source: PassageSource) -> Iterator[Item]:
    """A module's lines up to what it imports; that. Several modules have the same line."""
    lines = Counter(line for module in source.modules for line in set(module.lines) if _IMPORT.fullmatch(line))
    taken: Counter[str] = Counter()
    found: list[Item] = []
    for module in ordered("module", source.modules, lambda module: module.text):
        start = 0
        for line in module.lines:
            match = _IMPORT.fullmatch(line)
            if match and lines[line] > 1 and len(match[2]) <= LONGEST and taken[line] < _SAME and start > 40:
                taken[line] += 1
                found.append({"context": _above(module.text[:start]) + match[1], "text": match[2]})
            start += len(line) + 1
    yield from ordered("import", found, lambda item: item["context"])


def summary(source: PassageSource) -> Iterator[Item]:
    """A function's or class's name and the prose below the first line of its documentation; that line, 3 to 15 words.

    The summary is asked for in the form in which documentation lists what it describes, one line each.
    """
    nodes = (
        node
        for module in source.modules
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[:2] != "__"
    )
    found = dict.fromkeys((node.name.lstrip("_"), (ast.get_docstring(node) or "").strip()) for node in nodes)
    for name, text in ordered("summary", found, " ".join):
        line, *paragraphs = text.split("\n\n")
        body = " ".join(" ".join(text for text in paragraphs if _is_prose(text)).split())
        if "\n" not in line and 3 <= len(line.split()) <= 15 and 8 <= len(body.split()) <= 120:
            yield {"context": f"{name}: {body}\n\nAttributes:\n    {name}:", "summary": line}


def _above(text: str) -> str:
    """The last whole lines of a text, within `_ABOVE` characters."""
    return text if len(text) <= _ABOVE else text[text.index("\n", len(text) - _ABOVE) + 1 :]


def _returns(module: Module) -> Iterator[tuple[str, str]]:
    """What the functions of a module return in one line, by the text before it, which names all that it names."""
    for function in module.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None and node.lineno - function.lineno > 2:
                head, keyword, rest = module.lines[node.lineno - 1].partition("return")
                above = "\n".join([*module.lines[function.lineno - 1 : node.lineno - 1], ""])
                context = _above(above) + head + keyword
                names = set(re.findall(r"[^\W\d]\w*", rest))
                plain = not head.strip() and not set(rest) & set("#\"'\\") and not rest.endswith(("(", "[", "{"))
                if plain and names and names <= _KNOWN | set(re.findall(r"\w+", context)) and 3 < len(rest) <= LONGEST:
                    yield context, rest


def _lines(passage: Passage) -> Iterator[list[Lexeme]]:
    """The logical lines of the function's body that are one line of text, without comments."""
    line: list[Lexeme] = []
    for lexeme in passage.lexemes:
        if lexeme.kind != tokenize.NEWLINE:
            line.append(lexeme)
            continue
        kinds = {one.kind for one in line}
        if line and line[0].start >= passage.body and not kinds & {tokenize.COMMENT, tokenize.NL}:
            yield line
        line = []


def _known(passage: Passage, rest: list[Lexeme]) -> bool:
    """Whether the rest of a line is short, and all that it names is named before it."""
    length = rest[-1].start + len(rest[-1].text) - rest[0].start
    before = {lexeme.text for lexeme in passage.lexemes if lexeme.start < rest[0].start}
    names = {lexeme.text for lexeme in rest if lexeme.kind == tokenize.NAME}
    plain = all(lexeme.kind in (tokenize.NAME, tokenize.OP, tokenize.NUMBER) for lexeme in rest)
    return 3 <= length <= LONGEST and plain and bool(names) and names <= before | _KNOWN


def _is_prose(text: str) -> bool:
    """Whether a paragraph is running prose: no list, code, field list or heading."""
    return re.match(r"[A-Z`*]", text) is not None and re.search(r">>>|::|\n[ \-:=*#]", text) is None
