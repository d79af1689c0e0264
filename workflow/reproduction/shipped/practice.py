"""Questions of the shipped tasks with their answers, from training modules: what domain models are fine-tuned on.

No module of the test or validation split has a part in it, and no sum that the task `arithmetic` asks.
"""

import re
from collections.abc import Iterator, Sequence

from reproduction.tasks.items import task_items
from reproduction.tasks.passages import Module, PassageSource, number, ordered, read
from rotquant.text import MODULES, load_rows

_SUM = re.compile(r">>> (\d+) \+ (\d+)\Z")
#: Sums of a session, as many as the task shows and asks.
_SUMS = 5


def practice(tasks: Sequence[str], modules: int, items: int) -> list[tuple[tuple[str, str], ...]]:
    """Texts of questions and answers that follow each other, task by task; most are of one.

    Args:
        modules: how many of the training modules are read, in the order of a hash. items: of each task, at most.

    Raises:
        CorpusError: none of the packages is installed.
    """
    texts = ordered("practice", load_rows(MODULES, "train"), str)[:modules]
    source = PassageSource(tuple(map(Module, texts)))
    found: list[tuple[tuple[str, str], ...]] = []
    for task in tasks:
        if task == "arithmetic":
            found += _sums(items)
            continue
        for item in task_items(task, source, items):
            context, *_, answer = item.values()  # without choices it is the last one
            found.append(((context, item["choices"][answer] if "choices" in item else answer),))
    return found


def _sums(count: int) -> Iterator[tuple[tuple[str, str], ...]]:
    """Sessions of sums as the task has them, none of which is asked there, in either order."""
    found = (_SUM.search(item["context"]) for item in task_items("arithmetic", read("test")))
    asked = {frozenset(map(int, match.groups())) for match in found if match}
    pairs = [(one, other) for one in range(2, 100) for other in range(2, 100) if {one, other} not in asked]
    for place in range(count):
        drawn = [pairs[number(f"sum {place}", str(turn)) % len(pairs)] for turn in range(_SUMS)]
        yield tuple((f">>> {one} + {other}", f"\n{one + other}") for one, other in drawn)
