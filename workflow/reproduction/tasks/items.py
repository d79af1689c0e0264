"""Items of the shipped tasks of multiple choice, made mechanically from the beginnings of held-out functions.

Wrong answers are of the same module or of the same kind, and about as long as the right one. A task takes two items of
a passage at most, and all tasks take them from the same passages first: those that have most to ask for their length.
"""

import itertools
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache, partial
from typing import TypeVar

from reproduction.tasks import completion, recall
from reproduction.tasks.passages import Item, Lexeme, Passage, PassageSource, alike, choice_item, cut, depth, ordered

T = TypeVar("T", bound=tuple[object, ...])

EXAMPLES = 16
"""How many examples a task has at most."""

ITEMS = 1200
"""How many items a task has at most: the standard error of an accuracy of 80 % is 1.2 points."""

_AT_MOST = 2
_WORD = re.compile(r"(?<=[\w,`]) ([a-z]+)(?=[ .,\n])")
_PREPOSITIONS = frozenset({"as", "at", "by", "for", "from", "in", "of", "on", "to", "with"})
_MARKS = (")", "]", ",", ":")
_END = (tokenize.NEWLINE, tokenize.NL)


def last_word(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to the last name of a line, which occurs earlier in it."""
    for place, lexeme, before in _drawn("last_word", passage, passage.names):
        if lexeme.text in before and len(lexeme.text) > 2 and _next(passage, place).kind in _END:
            context, space = cut(passage.text[: lexeme.start])
            yield {"context": context, "word": space + lexeme.text}


def mentioned(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a name that occurs earlier in it; that name, and another one that does."""
    for _, lexeme, before in _drawn("mentioned", passage, passage.names):
        if lexeme.text in before:
            yield from _name_item("mentioned", passage, lexeme, before, count=1)


def parameter(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a parameter in its body; that parameter, and another one."""
    names = set(passage.parameters)
    for _, lexeme, _ in _drawn("parameter", passage, passage.names):
        if lexeme.text in names:
            yield from _name_item("parameter", passage, lexeme, names, count=1)


def function_name(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a call; the name that is called among four that its module calls."""
    for place, lexeme, _ in _drawn("function_name", passage, passage.names):
        if len(lexeme.text) > 2 and _next(passage, place).text == "(":
            calls = passage.module.calls["." if passage.lexemes[place - 1].text == "." else ""]
            true = Lexeme(lexeme.kind, lexeme.text + "(", lexeme.start)
            yield from _name_item("function_name", passage, true, {f"{name}(" for name in calls}, count=3)


def continuation(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """Whole lines of a function; the next one among four of the module's, equally deep and about as long."""
    lines = passage.text.splitlines()
    for place, line in _drawn("continuation", passage, enumerate(lines)):
        if place > 2 and 10 <= len(line.strip()) <= 30 and _is_code(passage, place, line):
            context = "\n".join(lines[:place]).rstrip()
            others = passage.module.by_depth[depth(line)].difference(lines)
            if wrong := alike("continuation", context, line, others, 3):
                yield choice_item("continuation", context, line, wrong, "\n")


def grammar(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a closing bracket, comma or colon; which of these comes next."""
    first: dict[str, Lexeme] = {}
    for _, lexeme, *_ in _drawn("grammar", passage, enumerate(passage.lexemes)):
        if lexeme.text in _MARKS and lexeme.start >= passage.body:
            first.setdefault(lexeme.text, lexeme)
    for mark, lexeme in first.items():
        context, space = cut(passage.text[: lexeme.start])
        others = ordered("grammar" + context, [other for other in _MARKS if other != mark], str)
        yield choice_item("grammar", context, mark, others, space)


def next_word(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a word of its documentation; that word among four of similar frequency."""
    for context, word in _prose("next_word", passage, source.ranks):
        rank = source.ranks[word]
        near = source.common[max(0, rank - 25) : rank + 26]
        others = [f" {other}" for other in near if other[:4] != word[:4]]
        if wrong := alike("next_word", context, f" {word}", others, 3):
            yield choice_item("next_word", context, f" {word}", wrong, "")


def preposition(source: PassageSource, passage: Passage) -> Iterator[Item]:
    """A function up to a preposition of its documentation; which of three it is."""
    for context, word in _prose("preposition", passage, _PREPOSITIONS):
        others = ordered(context, [f" {other}" for other in _PREPOSITIONS if other != word], str)
        yield choice_item("preposition", context, f" {word}", others[:2], "")


CHOICES: dict[str, Callable[[PassageSource, Passage], Iterator[Item]]] = {
    "last_word": last_word,
    "next_word": next_word,
    "continuation": continuation,
    "function_name": function_name,
    "parameter": parameter,
    "grammar": grammar,
    "preposition": preposition,
    "mentioned": mentioned,
}
"""Per task the items of one passage, in the order of a hash."""

OTHERS: dict[str, Callable[[PassageSource], Iterator[Item]]] = {
    "complete_line": completion.complete_line,
    "complete_import": completion.complete_import,
    "complete_return": completion.complete_return,
    "recall_512": partial(recall.recall, 512),
    "recall_1024": partial(recall.recall, 1024),
    "recall_2048": partial(recall.recall, 2048),
    "arithmetic": recall.arithmetic,
    "summary": completion.summary,
}
"""Per task all its items."""


def task_items(task: str, source: PassageSource) -> list[Item]:
    """The first items of a task, no context twice."""
    items: dict[str, Item] = {}
    for item in _items(task, source):
        items.setdefault(item["context"], item)
        if len(items) == ITEMS:
            break
    return list(items.values())


def task_examples(task: str, items: list[Item], validation: PassageSource) -> list[Item]:
    """The first items of a task from the validation modules that are none of the `items`."""
    known = {item["context"] for item in items}
    others = (item for item in _items(task, validation) if item["context"] not in known)
    return list(itertools.islice(others, EXAMPLES))


def _items(task: str, source: PassageSource) -> Iterator[Item]:
    if task in OTHERS:
        return OTHERS[task](source)
    found = itertools.chain.from_iterable(items[task] for items in _by_passage(source))
    return _balanced(found) if task == "grammar" else found


@cache
def _by_passage(source: PassageSource) -> list[dict[str, list[Item]]]:
    """The items of each passage by task, those passages first that have most for their length."""
    found = [
        (passage, {task: list(itertools.islice(make(source, passage), _AT_MOST)) for task, make in CHOICES.items()})
        for passage in source.passages
    ]
    found.sort(key=lambda one: -sum(map(len, one[1].values())) / len(one[0].text))
    return [items for _, items in found]


def _balanced(items: Iterable[Item]) -> Iterator[Item]:
    """Items whose answers are about equally often each of the choices; the others are left out."""
    counts: Counter[str] = Counter()
    for item in items:
        mark = item["choices"][item["answer"]].strip()
        if counts[mark] <= min(counts[one] for one in _MARKS):
            counts[mark] += 1
            yield item


def _drawn(task: str, passage: Passage, units: Iterable[T]) -> list[T]:
    """Things of a passage, each of which begins with its place, in the order of a hash."""
    return ordered(task, units, lambda unit: f"{unit[0]} {passage.seed}")


def _name_item(task: str, passage: Passage, true: Lexeme, names: set[str], count: int) -> Iterator[Item]:
    """A choice between a name and `count` others; none where these are too few."""
    context, space = cut(passage.text[: true.start])
    if wrong := alike(task, context, true.text, sorted(names), count):
        yield choice_item(task, context, true.text, wrong, space)


def _next(passage: Passage, place: int) -> Lexeme:
    """The lexeme after one; the end of a line at the end."""
    return (*passage.lexemes, Lexeme(tokenize.NEWLINE, "\n", len(passage.text)))[place + 1]


def _is_code(passage: Passage, place: int, line: str) -> bool:
    """Whether a line begins with code: no comment, no part of a string."""
    start = sum(len(text) + 1 for text in passage.text.splitlines()[:place]) + depth(line)
    kinds = {lexeme.start: lexeme.kind for lexeme in passage.lexemes}
    return start >= passage.body and kinds.get(start) in (tokenize.NAME, tokenize.OP)


def _prose(task: str, passage: Passage, wanted: Container[str]) -> Iterator[tuple[str, str]]:
    """A passage cut before a wanted word of its documentation: the text before the word, the word."""
    start, end = passage.documentation
    found = [(match.start(), match[1]) for match in _WORD.finditer(passage.text, start, end) if match[1] in wanted]
    for place, word in _drawn(task, passage, found):
        if passage.text.count(" ", start, place) > 6:
            yield passage.text[:place], word
