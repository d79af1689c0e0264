"""Cases drawn by hypothesis: the changed files of a format's example.

A case changes what a file says (`mutation.change`), its bytes (`mutation.bend`), or what stands in its place: nothing,
a folder, a pipe, a link that leads out, to itself or to nowhere.
"""

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from tests.trials.fuzz.documents import KINDS, decode, encode, texts_of
from tests.trials.fuzz.formats import Format
from tests.trials.fuzz.mutation import bend, change

#: In the place of a file: what `guarded.lay` makes there.
INSTEAD = ("nothing", "folder", "pipe", "link out", "link to itself", "link to nowhere", "link to a device")

Case = dict[str, bytes | str]
"""Content by path, or one of `INSTEAD`."""


@st.composite
def cases(draw: Any, form: Format) -> Case:
    """Changes of one or two files of a format's example."""

    def below(count: int) -> int:
        return draw(st.integers(0, max(count - 1, 0)))

    names = sorted(form.changed)
    chosen = {names[below(len(names))] for _ in range(1 + (below(4) == 3))}
    return {name: _changed(form, name, below) for name in sorted(chosen)}


def _changed(form: Format, name: str, below: Any) -> bytes | str:
    content, kind = form.files[name], form.changed[name]
    how = below(20)
    if how == 19:
        others = [one for one in INSTEAD if not (form.rewritten and one.startswith("link"))]
        return others[below(len(others))]
    if kind not in KINDS or how >= 14:
        for _ in range(1 + below(3)):
            content = bend(content, below)
        return content
    tree = _tree(kind, content)
    for _ in range(1 + below(3)):
        tree = change(tree, below, texts_of(kind))
    try:
        return encode(kind, tree, content)
    except (RecursionError, ValueError):  # a tree that no file of this kind holds
        return bend(content, below)


@lru_cache(256)
def _tree(kind: str, content: bytes) -> Any:
    return decode(kind, content)


def shown(case: Case) -> str:
    """A case as Python, short enough to be read; `fuzzing.replay` takes it."""
    return repr({name: what if len(what) <= 1500 else what[:1500] for name, what in case.items()})
