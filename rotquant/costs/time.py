"""Time that quantizing a model takes, from recorded runs of its methods, scaled by stated rules.

`records.json` holds what was measured, each with its machine, commit and source. A method without a record has no time
here. From the record whose model is nearest in size follow

- of a method that learns by steps: a fixed part, and steps x tokens of a step x quantized parameters;
- of any other: quantized parameters, and tokens beyond the record's. Its time with fewer is not recorded, since what
  does not depend on the text (factorizing X^T X, searching scales) was not measured apart, so it counts as the whole.
"""

import functools
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

from rotquant.costs.memory import training_way
from rotquant.costs.work import Work, text_of
from rotquant.foundation.data import Frozen
from rotquant.foundation.files import read_json
from rotquant.qat.method import SelfDistillation
from rotquant.recipes.recipe import Method

FILE = Path(__file__).with_name("records.json")
#: The name under which the time of fusing a rotation is recorded.
ROTATION = "rotation"


class TimeRecord(Frozen):
    """A measured time.

    methods: whose time it is, together. rotated: whether of a rotated model, None where that does not matter.
    shape, quantized: the model's name and its number of quantized parameters.
    steps, seen: of learning, and tokens of a step; 0 of methods that take no steps. tokens: of the text.
    fixed: seconds that do not depend on the amount of work. seconds: all others, of all steps or tokens.
    without: what is part of the method and was not measured.
    machine, commit, date, source: where it comes from.
    """

    methods: tuple[str, ...]
    rotated: bool | None = None
    shape: str
    quantized: int
    steps: int = 0
    seen: int = 0
    tokens: int = 0
    fixed: float = 0.0
    seconds: float
    without: str = ""
    machine: str
    commit: str
    date: str
    source: str


class Duration(Frozen):
    """Time of a part of the work. seconds: None where nothing is recorded. follows: from what, in words.

    whole: whether all of the part was measured.
    """

    name: str
    seconds: float | None
    follows: str
    whole: bool = True


@functools.cache
def records() -> tuple[TimeRecord, ...]:
    """All measured times."""
    return tuple(map(TimeRecord.model_validate, read_json(FILE, "records")["records"]))


def durations(work: Work) -> list[Duration]:
    """Time of each part of the work; loading and saving the model are not in it."""
    recipe, found = work.recipe, []
    if recipe.rotation is not None:
        found.append(_duration(work, ROTATION, [ROTATION], None))
    waiting = dict(recipe.methods)
    while waiting:
        name, method = next(iter(waiting.items()))
        together = max((one.methods for one in _candidates(work, name)), key=len, default=(name,))
        titles = " and ".join(waiting.pop(one).title for one in together)
        found.append(_duration(work, titles, together, method))
    if recipe.weights is not None and not recipe.has_role("rounding"):
        found.append(_duration(work, "round-to-nearest", ["round-to-nearest"], None))
    return found


def _candidates(work: Work, name: str) -> Iterator[TimeRecord]:
    """Records in which a method takes part, and all of whose methods are the recipe's."""
    recipe = work.recipe
    known = {*recipe.methods, ROTATION}
    for record in records():
        rotated = record.rotated in (None, recipe.rotation is not None)
        if name in record.methods and rotated and known.issuperset(record.methods):
            yield record


def _duration(work: Work, name: str, methods: Any, method: Method | None) -> Duration:
    """The time of some methods together, from the record whose model is nearest in size."""
    if work.device != "cuda" or work.dtype == "float32":
        where = "on a CPU" if work.device != "cuda" else "in float32"
        return Duration(name=name, seconds=None, follows=f"nothing is recorded {where}")
    candidates = [one for one in _candidates(work, methods[0]) if set(one.methods) == set(methods)]
    if not candidates:
        return Duration(name=name, seconds=None, follows="nothing is recorded of this method")
    sizes = work.shapes.quantized_parameters
    record = min(candidates, key=lambda one: (abs(log(sizes / one.quantized)), -one.seconds))
    ratio, words = sizes / record.quantized, [f"{sizes / record.quantized:.3g} x the parameters"]
    if method is not None and record.steps:
        budget = method.budget(work.recipe)
        done = budget.steps * budget.seen / (record.steps * record.seen)
        ratio, words = ratio * done, [*words, f"{done:.3g} x the steps and their tokens"]
    text = None if method is None else text_of(method, work.recipe)
    if text is not None and record.tokens:
        more = max(1.0, text.samples * text.sequence_length / record.tokens)
        ratio, words = ratio * more, [*words, f"{more:.3g} x the tokens"]
    took = f"{record.fixed + record.seconds:.3g} s of {record.shape} on {record.machine} ({record.source})"
    missing = [record.without] if record.without else []
    if isinstance(method, SelfDistillation) and training_way(work, method).offloaded:
        missing.append("waiting for the host, where moments and teacher lie")
    lacking = f"; not recorded: {', '.join(missing)}" if missing else ""
    return Duration(
        name=name,
        seconds=record.fixed + ratio * record.seconds,
        follows=f"{took}, {', '.join(words)}{lacking}",
        whole=not missing,
    )
