"""Fuzzing: 10,000 damaged or hostile files of every format that the project reads, each read as commands read it.

A reader returns or raises a `RotquantError` of one sentence, within 5 s and 2 GB; it opens and writes no file outside
of the case's folder, starts no program, reaches no network, unpickles nothing and runs no code of the file. Cases are
drawn by hypothesis from the trial's seed (`tests.trials.fuzz`), and a failing one is made small before it is printed.
"""

import math
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.trials import trial as trials
from tests.trials.fuzz.cases import Case, cases, shown
from tests.trials.fuzz.formats import Format
from tests.trials.fuzz.guarded import Outcome, Reader
from tests.trials.fuzz.readers import FUZZED
from tests.trials.trial import Trial

#: Where cases lie, each some files that are written and removed: on a disk that would take most of the time.
MEMORY = "/dev/shm"
WHOLE, QUICK = 10_000, 400
FORBIDDEN = ("started", "unpickled", "ran", "reached")
#: What each case is asked, by the kinds of outcome that deny it.
CHECKS = {
    "A reader answers with a result or with one sentence": ("traceback", "untidy"),
    "A reader answers within 5 s": ("hang",),
    "No input ends the process or takes more than 2 GB of memory": ("death",),
    "No file outside of an input's folder is read by its word, or written": ("outside",),
    "No input starts a program, is unpickled or run, or reaches the network": FORBIDDEN,
}


def all_formats(root: Path) -> dict[str, Format]:
    """Every format by name, with valid examples that are made below `root`."""
    from tests.trials.fuzz import caches, example, models, records, stored, texts, written

    for name in ("project", "others"):
        (root / name).mkdir()
    copy = example.make(root / "project")
    found = [*written.formats(copy.root), *records.formats(copy.root)]
    for part in (models, stored, texts, caches):
        found += part.formats(root / "others")
    return {form.name: form for form in found}


def body(trial: Trial) -> None:
    """Read all cases of all formats."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as place:
        os.environ["ROTQUANT_CACHE"] = f"{place}/cache"
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{place}/hypothesis"
        (Path(place) / "made").mkdir()
        formats = all_formats(Path(place) / "made")
        trial.say(f"{len(formats)} formats")
        named = {name for several in FUZZED.values() for name in several}
        trial.check("Every reader's formats are fuzzed", named <= formats.keys(), ", ".join(named - formats.keys()))
        (Path(place) / "read").mkdir()
        reader = Reader(Path(place) / "read/root", formats)
        try:
            _read_all(trial, reader, formats)
        finally:
            reader.close()


def _read_all(trial: Trial, reader: Reader, formats: dict[str, Format]) -> None:
    total, shares = QUICK if trial.quick else WHOLE, sum(form.share for form in formats.values())
    kinds: Counter[str] = Counter()
    slowest = (0.0, "")
    for form in formats.values():
        started = time.monotonic()
        whole = reader.outcome(form, {})
        trial.check("The valid example of every format is accepted", whole.kind == "accepted", f"{form.name}: {whole}")
        found = _read_format(trial, reader, form, max(4, math.ceil(total * form.share / shares)))
        kinds.update(one.kind for one in found)
        slowest = max(slowest, *((one.seconds, form.name) for one in found))
        counted = Counter(one.kind for one in found)
        trial.figure(f"cases of {form.name}", len(found))
        spent = f"in {time.monotonic() - started:.0f} s"
        trial.say(", ".join([*(f"{count} {kind}" for kind, count in counted.most_common()), spent]))
    trial.figure("cases", kinds.total())
    for kind in ("sentence", "accepted", "hang", "death", "traceback", "untidy", "outside"):
        trial.figure(kind, kinds[kind])
    trial.figure("slowest case", f"{slowest[0]:.2f} s, {slowest[1]}")


def _read_format(trial: Trial, reader: Reader, form: Format, count: int) -> list[Outcome]:
    """Read so many cases of a format; of each kind of failure one, made small, is printed."""
    found: list[Outcome] = []
    failed: dict[str, tuple[Case, Outcome]] = {}

    def read(case: Case) -> None:
        outcome = reader.outcome(form, case)
        found.append(outcome)
        if not outcome.held:
            failed.setdefault(outcome.where, (case, outcome))

    drive(form, count, trial.seed, read)
    for check, denied in CHECKS.items():
        worst = [outcome for _, outcome in failed.values() if outcome.kind in denied]
        trial.check(check, not worst, "; ".join(f"{form.name}: {one.kind}: {one.detail}" for one in worst))
    for case, outcome in failed.values():
        small = smallest(reader, form, case, outcome, count, trial.seed)
        trial.say(f"{form.name}: {outcome.kind} {outcome.detail}")
        trial.say(f"again: tests.trials.fuzzing.replay({form.name!r}, {shown(small)})")
    return found


def drive(form: Format, count: int, seed: int, read) -> None:
    """Call `read` with so many cases."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    quiet = settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    seeded(seed)(quiet(given(cases(form))(read)))()


def smallest(reader: Reader, form: Format, case: Case, outcome: Outcome, count: int, seed: int) -> Case:
    """The smallest case that hypothesis finds with the same failure; hangs, which take seconds each, stay as found."""
    from hypothesis import HealthCheck, Phase, find, settings

    if outcome.kind in ("hang", "death"):
        return case
    quiet = settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )

    def fails_alike(one: Case) -> bool:
        return reader.outcome(form, one).where == outcome.where

    try:
        return find(cases(form), fails_alike, settings=quiet, random=Random(seed))
    except Exception:  # drawn in another order, it was not met again
        return case


def replay(name: str, case: Case) -> None:
    """Read one case again, as a failed trial prints it, without any guard: its traceback is shown."""
    from tests.trials.fuzz.guarded import lay

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "made").mkdir()
        form = all_formats(Path(place) / "made")[name]
        folder = Path(place) / "read/case"
        folder.mkdir(parents=True)
        lay(folder, form, case)
        os.chdir(folder)
        form.read(folder)


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    trials.run("fuzzing", __doc__.partition("\n")[0], body)
