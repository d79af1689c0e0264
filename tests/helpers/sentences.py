"""Sentences of a rendered page, with the number of words that a reader is asked to take in at once."""

import re
from collections.abc import Iterator

#: Most words of a sentence.
MOST = 30

_END = re.compile(r"(?<!Eq\.)(?<!Sec\.)(?<!Fig\.)(?<=[.?!])\s+(?=\S)")
#: What is in nobody's words here: a paper's own, between quotation marks, and marks of Markdown.
_LEFT_OUT = re.compile(r"“[^”]*”|<[^>]+>|\*+")


def sentences(page: str) -> Iterator[str]:
    """Sentences of a page as Markdown, those in cells of tables too; lists of names and settings end without a stop."""
    for line in page.splitlines():
        for cell in re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line]:
            text = _LEFT_OUT.sub(" ", cell).strip(" -")
            yield from (sentence for sentence in _END.split(text) if sentence.endswith((".", "?", "!")))


def long_sentences(page: str) -> list[str]:
    """Sentences of more than `MOST` words."""
    return [sentence for sentence in sentences(page) if len(sentence.split()) > MOST]
