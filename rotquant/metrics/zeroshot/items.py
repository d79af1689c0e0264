"""Items of the shipped tasks, made mechanically from the documentation strings of the held-out packages.

Every choice (which passage, where to cut it, which wrong answers, in which order) follows from hashes of the text, so
equal packages give equal items. Passages are cut where one space precedes a plain word, answers are frequent words (one
token in the vocabulary of the shipped models), and contexts are short: eight tasks together cost a small model seconds.
Examples of few-shot prompts are made in the same way and are never items.
"""

import ast
import hashlib
import inspect
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from rotquant.recipes.corpus import Split
from rotquant.text.packages import PACKAGES, package_files

Item = dict[str, Any]
"""`{"context", "word"}` for last_word, the word with the space before it, which lm-eval puts only before choices;
`{"context", "summary"}` for summary; `{"context", "choices", "answer"}` for the others, the answer being the index of
the true choice."""

EXAMPLES = 16
"""How many examples a task has at most."""

T = TypeVar("T")

_WORD = re.compile(r"(?<=[\w,`]) ([a-z]+)(?=[ .,\n]|$)")
_PARAMETER = re.compile(r"^(?::param |    )([a-z_]+)(?: \([^)\n]*\))?:\s+(\S.*(?:\n {5,}\S.*)*)", re.MULTILINE)
_PREPOSITIONS = ("as", "at", "by", "for", "from", "in", "of", "on", "to", "with")
_IRREGULAR = {"is": "are", "was": "were", "has": "have", "does": "do", "this": "these"}


@dataclass(frozen=True)
class Documented:
    """A documentation string, dedented; `function` is the name of the function that it belongs to, if it is one's."""

    text: str
    split: Split
    function: str | None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The held-out documentation strings, and what all tasks read of them."""

    strings: tuple[Documented, ...]

    @cached_property
    def validation(self) -> "Source":
        """The strings of the validation packages alone."""
        return Source(tuple(string for string in self.strings if string.split == "validation"))

    @cached_property
    def paragraphs(self) -> tuple[str, ...]:
        """Paragraphs of running prose, each once, of eight words or more."""
        texts = (text for string in self.strings for text in string.text.split("\n\n"))
        return tuple(dict.fromkeys(text for text in texts if _is_prose(text) and len(text.split()) >= 8))

    @cached_property
    def functions(self) -> tuple[Documented, ...]:
        """The strings that belong to functions."""
        return tuple(string for string in self.strings if string.function)

    @cached_property
    def frequencies(self) -> dict[str, int]:
        """How often each plain word follows a space in the paragraphs, the most frequent word first."""
        counts = Counter(word for text in self.paragraphs for word in re.findall(r"(?<= )[a-z]+(?=[ .,\n])", text))
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

    @cached_property
    def common(self) -> tuple[str, ...]:
        """Words of four letters or more that occur 30 times or more, the most frequent first."""
        return tuple(word for word, count in self.frequencies.items() if count >= 30 and len(word) >= 4)


def held_out() -> Source:
    """Parse the test and validation packages' files (a few seconds)."""
    strings: dict[tuple[str | None, str], Documented] = {}
    for split in ("test", "validation"):
        for _, path in package_files(PACKAGES[split]):
            for string in file_strings(path, split):
                strings.setdefault((string.function, string.text), string)
    return Source(tuple(strings.values()))


def file_strings(path: Path, split: Split) -> Iterator[Documented]:
    """Yield the documentation strings of a split's file with the functions' names; nothing if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in other people's files are not ours to report.
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
        if not text:
            continue
        if isinstance(node, ast.Module | ast.ClassDef):
            yield Documented(text, split, None)
        elif not node.name.startswith("__"):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield Documented(text, split, node.name.lstrip("_"), tuple(argument.arg for argument in arguments))


def last_word(source: Source) -> Iterator[Item]:
    """A passage whose last word, none of the sixty most frequent ones, occurs earlier in it."""
    frequent = set(list(source.frequencies)[:60])

    def repeated(cut: Cut) -> bool:
        return (
            len(cut.word) >= 4 and cut.word not in frequent and re.search(rf"\b{cut.word}\b", cut.context) is not None
        )

    for cut in _cuts("last_word", source.paragraphs, range(6, 23), repeated):
        yield {"context": cut.context, "word": " " + cut.word}


def next_word(source: Source) -> Iterator[Item]:
    """A beginning of 4 to 10 words; the true next word among four of similar frequency."""
    common = set(source.common)
    for cut in _cuts("next_word", source.paragraphs, range(4, 11), lambda cut: cut.word in common):
        yield _word_item("next_word", source, cut.context, cut.word)


def continuation(source: Source) -> Iterator[Item]:
    """A beginning of 5 or 6 words; its next three words, or those of the passage that comes after it by hash."""
    three_words = re.compile(r"[a-z]+ [a-z]+ [a-z]+(?=[ .,\n]|$)")

    def plain(cut: Cut) -> bool:
        return three_words.match(cut.rest) is not None

    cuts = list(_cuts("continuation", source.paragraphs, range(5, 7), plain))
    phrases = [found[0] for cut in cuts if (found := three_words.match(cut.rest))]
    for cut, phrase, other in zip(cuts, phrases, phrases[1:] + phrases[:1], strict=True):
        if other != phrase:
            yield _choice_item("continuation", cut.context, phrase, [other])


def grammar(source: Source) -> Iterator[Item]:
    """A beginning of 3 to 10 words; the next word in singular or plural form, the true one and the other."""
    known = {word for word, count in source.frequencies.items() if count >= 15}
    forms = {word: word + "s" for word in known if len(word) > 2 and word + "s" in known} | _IRREGULAR
    forms |= {plural: singular for singular, plural in forms.items()}
    for cut in _cuts("grammar", source.paragraphs, range(3, 11), lambda cut: cut.word in forms):
        yield _choice_item("grammar", cut.context, cut.word, [forms[cut.word]])


def preposition(source: Source) -> Iterator[Item]:
    """A beginning of 4 to 10 words; the preposition that comes next among three."""
    for cut in _cuts("preposition", source.paragraphs, range(4, 11), lambda cut: cut.word in _PREPOSITIONS):
        others = [other for other in _PREPOSITIONS if other != cut.word]
        yield _choice_item("preposition", cut.context, cut.word, _ordered(cut.context, others, str)[:2])


def mentioned(source: Source) -> Iterator[Item]:
    """A passage of 8 to 22 words; the word that comes next, and another one, both of which occur in it."""
    common = set(source.common)

    def words_before(cut: Cut) -> set[str]:
        return common & set(re.findall(r"[a-z]+", cut.context))

    def wanted(cut: Cut) -> bool:
        before = words_before(cut)
        return cut.word in before and len(before) >= 2

    for cut in _cuts("mentioned", source.paragraphs, range(8, 23), wanted):
        others = words_before(cut) - {cut.word}
        yield _choice_item("mentioned", cut.context, cut.word, _ordered(cut.context, others, str)[:1])


def function_name(source: Source) -> Iterator[Item]:
    """A function's name and the beginning of its documentation, up to a word of the name."""
    for function in _ordered("function_name", source.functions, lambda string: f"{string.function} {string.text}"):
        summary = function.text.split("\n\n")[0]
        name = cast(str, function.function)
        yield from _named_item("function_name", source, name, summary, "{name}: {text}", range(2, 11))


def parameter(source: Source) -> Iterator[Item]:
    """A parameter's name and the beginning of its description, up to a word of the name."""
    for function in _ordered("parameter", source.functions, lambda string: f"{string.function} {string.text}"):
        for name, description in _PARAMETER.findall(function.text):
            if name in function.parameters:
                text = " ".join(description.split())
                yield from _named_item("parameter", source, name, text, ":param {name}: {text}", range(1, 11))


def summary(source: Source) -> Iterator[Item]:
    """A function's name and the prose below the first line of its documentation; that line, 4 to 15 words.

    The summary is asked for in the form in which documentation lists what it describes, one line each.
    """
    for function in _ordered("summary", source.functions, lambda string: f"{string.function} {string.text}"):
        line, *paragraphs = function.text.split("\n\n")
        body = " ".join(" ".join(text for text in paragraphs if _is_prose(text)).split())
        if "\n" not in line and 4 <= len(line.split()) <= 15 and 12 <= len(body.split()) <= 80:
            name = function.function
            yield {"context": f"{name}: {body}\n\nAttributes:\n    {name}:", "summary": line}


TASK_ITEMS: dict[str, tuple[Callable[[Source], Iterator[Item]], int]] = {
    "last_word": (last_word, 740),
    "next_word": (next_word, 900),
    "continuation": (continuation, 750),
    "function_name": (function_name, 600),
    "parameter": (parameter, 500),
    "grammar": (grammar, 650),
    "preposition": (preposition, 900),
    "mentioned": (mentioned, 900),
    "summary": (summary, 300),
}
"""Per task the function that makes its items and how many are kept: as many as bring the standard error of the shipped
models' accuracy below 1.5 points, sqrt(p (1 - p) / n), and that of ROUGE-L below 1."""


def task_items(task: str, source: Source) -> list[Item]:
    """The first items of a task, no context twice."""
    make, wanted = TASK_ITEMS[task]
    items: dict[str, Item] = {}
    for item in make(source):
        items.setdefault(item["context"], item)
        if len(items) == wanted:
            break
    return list(items.values())


def task_examples(task: str, source: Source) -> list[Item]:
    """The first items of a task from the validation packages alone that are not among `task_items`."""
    items = {item["context"] for item in task_items(task, source)}
    make, _ = TASK_ITEMS[task]
    others = (item for item in make(source.validation) if item["context"] not in items)
    return list(itertools.islice(others, EXAMPLES))


class Cut(NamedTuple):
    """A text cut before a plain word: the context, the word, and all that follows the space between them."""

    context: str
    word: str
    rest: str


def _cuts(task: str, texts: Iterable[str], words: range, wanted: Callable[[Cut], bool]) -> Iterator[Cut]:
    """One cut of each text that has a wanted one with as many words before it as `words` allows."""
    for text in _ordered(task, texts, str):
        found = []
        for match in _WORD.finditer(text):
            cut = Cut(text[: match.start()], match[1], text[match.start() + 1 :])
            count = len(cut.context.split())
            if count >= words.stop:
                break
            if count >= words.start and wanted(cut):
                found.append(cut)
        if found:
            yield found[_hash(task, text) % len(found)]


def _named_item(task: str, source: Source, name: str, text: str, template: str, words: range) -> Iterator[Item]:
    """An item whose true word is one of the words that `name` is made of; none when `text` has no such word."""
    parts = {part for part in name.split("_") if part in source.common}
    for cut in _cuts(task, [text], words, lambda cut: cut.word in parts):
        yield _word_item(task, source, template.format(name=name, text=cut.context), cut.word, parts)


def _word_item(task: str, source: Source, context: str, word: str, taken: Iterable[str] = ()) -> Item:
    """A choice among `word` and three of the fifty words nearest to it in frequency that begin differently."""
    rank = source.common.index(word)
    near = source.common[max(0, rank - 25) : rank + 26]
    others = [other for other in near if other[:4] != word[:4] and other not in taken]
    return _choice_item(task, context, word, list(_ordered(task + context, others, str))[:3])


def _choice_item(task: str, context: str, true: str, others: list[str]) -> Item:
    answer = _hash(task, context) % (len(others) + 1)
    return {"context": context, "choices": [*others[:answer], true, *others[answer:]], "answer": answer}


def _is_prose(text: str) -> bool:
    """Whether a paragraph is running prose: no list, code, field list or heading."""
    return re.match(r"[A-Z`*]", text) is not None and re.search(r">>>|::|\n[ \-:=*#]", text) is None


def _ordered(task: str, things: Iterable[T], text: Callable[[T], str]) -> list[T]:
    return sorted(things, key=lambda thing: _hash(task, text(thing)))


def _hash(task: str, text: str) -> int:
    digest = hashlib.sha256(f"{task}:{text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:16], "big")
