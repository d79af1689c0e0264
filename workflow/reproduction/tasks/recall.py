"""Items of the shipped tasks of long context, where a name is used far after its definition, and of arithmetic."""

import ast
import functools
import itertools
import re
from collections.abc import Iterator

from reproduction.tasks.passages import Item, Module, PassageSource, alike, choice_item, cut, number, ordered

#: Lines of a definition that are shown, and lines before the use of its name.
_DEFINED, _BEFORE = 6, 3
#: Solved sums before each that is asked.
_SOLVED = 4
#: What a byte-level tokenizer of some thousand entries makes about one token of, in ASCII text.
_PIECE = re.compile(r"[a-zA-Z]{1,5}|\d|\n\s*| {2,}|[^\w\s]|_")
#: Pieces for each token that an item may have, so that none has more.
_PIECES = 0.83


def recall(tokens: int, source: PassageSource) -> Iterator[Item]:
    """A definition, then lines of other modules, then lines of its own up to its name; that name among four.

    The four are names that held-out modules define, functions or classes alike; the text shows one of them alone.
    """
    definitions = [one for module in source.modules for one in _definitions(module)]
    names = {kind: sorted({name for name, of, *_ in definitions if of == kind}) for kind in ("function", "class")}
    plain = [module for module in source.modules if module.text.isascii()]
    modules = ordered(f"filler {tokens}", plain, lambda module: module.text)
    drawn = ordered(f"recall {tokens}", definitions, lambda one: one[2] + one[3])
    for place, (name, kind, shown, used, module) in enumerate(drawn):
        room = int(tokens * _PIECES) - _pieces(shown + used) - 8
        filler = _filler(modules, place, module, name, room)
        context, space = cut(f"{shown}\n\n\n{filler}\n\n\n{used}")
        words = set(re.findall(r"\w+", context[len(shown) :]))
        others = [other for other in names[kind] if other not in words]
        if name not in words and (wrong := alike("recall", context, name, others, 3)):
            yield choice_item("recall", context, name, wrong, space)


def arithmetic(source: PassageSource) -> Iterator[Item]:
    """Sums of numbers of one or two digits in an interpreter's session, four of them solved; the result among four.

    Wrong results are off by one, by ten, or have their digits exchanged. No text takes part in it, but for its hash:
    examples are other sums.
    """
    seed = str(number("arithmetic", source.modules[0].text))
    pairs = [(one, other) for one in range(2, 100) for other in range(2, 100)]
    drawn = ordered(seed, pairs, str)
    for place in range(0, len(drawn) - _SOLVED, _SOLVED + 1):
        *solved, (one, other) = drawn[place : place + _SOLVED + 1]
        context = "".join(f">>> {first} + {second}\n{first + second}\n" for first, second in solved)
        context += f">>> {one} + {other}"
        total = one + other
        wrong = {total - 1, total + 1, total - 10, total + 10, int(str(total)[::-1])} - {total}
        near = [f"\n{result}" for result in wrong if result > 0 and len(str(result)) == len(str(total))]
        if len(near) >= 3:
            yield choice_item("arithmetic", context, f"\n{total}", ordered(context, near, str)[:3], "")


@functools.cache
def _definitions(module: Module) -> tuple[tuple[str, str, str, str, Module], ...]:
    """A module's own functions and classes that it uses further below: name, kind, definition, use, module.

    A use is some lines of code up to the name; of each name there are two at most.
    """
    found = []
    for node in module.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or len(node.name) < 4 or node.end_lineno is None:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        shown = "\n".join(module.lines[node.lineno - 1 : min(node.end_lineno, node.lineno - 1 + _DEFINED)])
        uses = (_use(module, line, node) for line in range(node.end_lineno + _BEFORE, len(module.lines)))
        for used in itertools.islice(filter(None, uses), 2):
            if (shown + used).isascii():
                found.append((node.name, kind, shown, used, module))
    return tuple(found)


def _use(module: Module, line: int, node: ast.FunctionDef | ast.ClassDef) -> str | None:
    """The lines up to a name that code has in a line, unless they have it before."""
    text = module.lines[line]
    if node.name not in text:  # most lines, and searching takes far longer
        return None
    match = re.search(rf"(?<![\w\"'`.]){node.name}\b(?=[(,):\]]|$)", text)
    before = module.lines[line - _BEFORE : line]
    named = any(re.search(rf"\b{node.name}\b", one) for one in before)
    if match is None or named or re.search(r"#|@|\bdef |\bclass ", text):
        return None
    return "\n".join([*before, text[: match.start()]])


def _filler(modules: list[Module], place: int, own: Module, name: str, room: int) -> str:
    """Whole lines of modules that do not have a name, of so many pieces."""
    lines: list[str] = []
    first = place % len(modules)
    others = (one for one in (*modules[first:], *modules[:first]) if one is not own and name not in one.text)
    for line in (line for module in others for line in module.lines):
        room -= _pieces(line + "\n")
        if room < 0:
            break
        lines.append(line)
    return "\n".join(lines)


@functools.lru_cache(maxsize=100_000)
def _pieces(text: str) -> int:
    return len(_PIECE.findall(text))
