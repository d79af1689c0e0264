"""Facts of the reproduction that a change of its code must leave as they are: `python -m tests.frozen`.

`keys` are the keys of all runs, weights and learned rotations, what each is made from, and which rows use them.
`claims` are the verdicts on all claims, and `tables` the content of all CSV files, both from the runs in
docs/gallery/shipped/runs. `pages` are the sentences of their pages that are too long, of which there are none. Each
difference from tests/reproduction/frozen/ is printed by name, and the exit status is 1. With `--record` the files are
written anew.

Two things differ from a user's machine. Texts of installed packages have the digests that were recorded. Those runs of
RCP that the archives have only with the start of Eq. 6, taken literally, stand for the current start: the verdicts on
them freeze code, not science. Cells without any archived run are left out.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from huggingface_hub import constants

from reproduction.claims import claims, replays, unmeasured
from reproduction.claims.claims import Answer, Outcome, Verdict
from reproduction.frame import values
from reproduction.identity.run import Portion, Run, named
from reproduction.planning.expansion import make_plan
from reproduction.render.pages.markdown import markdown
from reproduction.sources import load_project, source_of
from reproduction.tables.project import Cells, Project
from reproduction.tables.rankings import Ranking
from reproduction.tables.speed.definitions import SpeedTable
from reproduction.tables.tables import RunTable, Table
from rotquant.foundation import hub
from rotquant.foundation.files import canonical_json, read_json, short_hash, write_text
from rotquant.text import UNREAD
from tests.helpers.sentences import long_sentences

REPOSITORY = Path(__file__).parents[1]
FROZEN = REPOSITORY / "tests/reproduction/frozen"
ARCHIVES = REPOSITORY / "docs/gallery/shipped/runs"
KINDS = ("keys", "tables", "claims", "pages")
CONFIGS = ("config", "paper")

#: RCP's start in the archived runs.
FORMER_START = {"start_target": "clipped", "start_rounding": "uniform"}
#: Relative tolerance of numbers, which have six digits in the files; other machines add in another order.
TOLERANCE = 2e-5
#: Significant digits of computed means of samples in a table's digest; all else is compared to the last digit.
DIGITS = 9

Facts = dict[str, Any]


def keys() -> Facts:
    """Runs by the weights and learned rotations that they need, and the runs of each row, for each configuration."""
    return {name: _keys([] if name == "config" else [f"config/{name}.yaml"]) for name in CONFIGS}


def _keys(overrides: list[str]) -> Facts:
    project = load_project(overrides, REPOSITORY)
    plan = make_plan(project, "", "")
    tasks: dict[str, list[str]] = {}
    made: dict[str, dict[str, list[str]]] = {}
    for key, run in sorted(plan.runs.items()):
        rotation = run.weights and plan.weights[run.weights].rotation
        made.setdefault(rotation or "-", {}).setdefault(run.weights or "-", []).append(key)
        if run.tasks:
            tasks.setdefault(run.tasks, []).append(key)
    rows: dict[str, dict[str, list[Any]]] = {}
    for table in project.of(RunTable):
        for cell in project.cells(table):
            uses = [cell.column, cell.called, [[run.seed, run.key] for run in cell.runs]]
            rows.setdefault(table, {}).setdefault(cell.row, []).append(uses)
    return {
        "rotations": {key: {one: " ".join(runs) for one, runs in sorted(made[key].items())} for key in sorted(made)},
        "tasks": {key: f"{len(runs)} runs, {short_hash(canonical_json(runs))}" for key, runs in sorted(tasks.items())},
        "rows": {
            table: {row: short_hash(canonical_json(one), 8) for row, one in of.items()} for table, of in rows.items()
        },
        "total": short_hash(canonical_json([made, tasks, rows])),
    }


def tables(project: Project) -> Facts:
    """Lines, and a digest of each column, of the CSV files of a project's tables."""
    found = {}
    for table in project.tables.values():
        frame = source_of(table).frame(collected(project, table.id))
        estimated = isinstance(table, Ranking)
        columns = {
            str(name): _digest(column, rounded=estimated or name == "standard_error") for name, column in frame.items()
        }
        whole = short_hash(canonical_json(columns), 64)
        found[table.id] = {"lines": len(frame), "columns": columns, "sha256": whole}
    return found


def _digest(column: pd.Series, *, rounded: bool) -> str:
    """Digest of a column by `repr` of its values; of estimates with fewer digits."""
    shown = [f"{one:.{DIGITS}g}" if rounded and isinstance(one, float) else repr(one) for one in column]
    told = ["" if one is pd.NA else text for one, text in zip(column, shown, strict=True)]
    return short_hash(canonical_json(told), 8)


def verdicts(project: Project) -> Facts:
    """The answers to each check of each claim, by table and the claim's text."""
    found: Facts = {}
    for table in project.tables.values():
        for outcome in decided(project, table):
            text, claims_of = outcome.claim.text, found.setdefault(table.id, {})
            again = sum(name.partition(" #")[0] == text for name in claims_of)
            claims_of[f"{text} #{again + 1}" if again else text] = _outcome(outcome)
    return found


def long_pages(project: Project) -> Facts:
    """The sentences that are too long, by table."""
    found = {}
    for table in project.tables.values():
        report = source_of(table).report(project, table, collected(project, table.id))
        if said := long_sentences(markdown(report)):
            found[table.id] = said
    return found


def decided(project: Project, table: Table) -> tuple[Outcome, ...]:
    """The claims of a table of any source, decided."""
    found = collected(project, table.id)
    if isinstance(table, RunTable):
        return claims.outcomes(project, table, *found)
    if isinstance(table, Ranking):
        return ()
    if isinstance(table, SpeedTable):
        return replays.outcomes(table, found.numbers, found.shown.record.gpu if found.shown else "")
    return unmeasured.outcomes(found)


def _outcome(outcome: Outcome) -> Facts:
    tested = {} if outcome.experiment is None else {"experiment": _verdict(outcome.experiment)}
    return {about: _answer(answer) for about, answer in outcome.answers.items()} | tested


def _answer(answer: Answer) -> Facts:
    second = {} if answer.second is None else {"second": _verdict(answer.second)}
    on = {} if answer.on is None else {"on": answer.on.name}
    return {"here": answer.here, **on, "ours": _verdict(answer.ours), **second, "paper": _verdict(answer.papers)}


def _verdict(verdict: Verdict) -> Facts:
    """The decision, and each comparison's with its effect and the ends of its interval."""
    found = {}
    for one in verdict.findings:
        effect = () if one.effect is None else (one.effect.size, one.effect.low, one.effect.high)
        numbers = effect[:1] if len({*effect}) == 1 else effect
        place = f"{one.device}, {one.place}" if one.device else one.place
        place = f"{place} #{len(found)}" if place in found else place
        found[place] = " ".join([one.decision, *(f"{number:.6g}" for number in numbers)])
    return {"is": verdict.decision, **found, **({"missing": [*verdict.missing]} if verdict.missing else {})}


@functools.cache
def collected(project: Project, name: str) -> Any:
    """A table's numbers, collected once."""
    return source_of(project.tables[name]).collect(project, project.tables[name])


def published(root: Path) -> Project:
    """The project as the archived runs were computed, in a folder with these."""
    for path in ("workflow", "config", "results/bench"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).symlink_to(REPOSITORY / path)
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(archive) as file:
            runs = [one for one in file.getmembers() if one.name.startswith("results/runs/")]
            file.extractall(root, runs, filter="data")
    return load_project([root / "config/thorough.yaml"], root, named={})  # archived runs have their keys as names


def archived(project: Project, expanded: Cells) -> Cells:
    """The cells whose runs are archived, some of them under the key of RCP's former start."""
    return Cells(
        tuple(cell for cell in expanded.cells if all(_is_here(project, run) for run in cell.runs)),
        expanded.impossible,
        expanded.adapted,
    )


def _is_here(project: Project, run: Run) -> bool:
    path = project.results.run(run.key)
    if path.exists() or "rcp" not in run.recipe.methods:
        return path.exists()
    data = run.model_dump(mode="json")
    data["recipe"]["methods"]["rcp"] |= FORMER_START
    former = project.results.run(Run.model_validate(data).key)
    if not former.exists():
        return False
    told = {"key": run.key, "weights_key": run.weights_key, "run": run.model_dump(mode="json")}
    write_text(path, json.dumps({**read_json(former), **told}))
    return True


def differences(before: object, after: object, where: str = "") -> Iterator[str]:
    """What differs between two facts, a line for each difference."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            place = f"{where}: {name}" if where else str(name)
            if name not in after:
                yield f"{place}: gone, was {_short(before[name])}"
            elif name not in before:
                yield f"{place}: new, {_short(after[name])}"
            else:
                yield from differences(before[name], after[name], place)
    elif isinstance(before, str) and isinstance(after, str):
        gone, new = before.split(), after.split()
        if len(gone) > 10 and gone != new:  # keys of runs
            yield f"{where}: gone {sorted({*gone} - {*new})}, new {sorted({*new} - {*gone})}"
        elif len(gone) != len(new) or not all(map(_equal, gone, new)):
            yield f"{where}: was {before}, is {after}"
    elif before != after:
        yield f"{where}: was {before}, is {after}"


def _equal(before: str, after: str) -> bool:
    try:
        one, other = float(before), float(after)
    except ValueError:
        return before == after
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12) or repr(one) == repr(other)


def _short(fact: object) -> str:
    text = json.dumps(fact)
    return text if len(text) < 200 else f"{text[:200]}..."


@contextmanager
def machine(record: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """Any machine looks alike: texts have the recorded digests, and no hub's model or data set is here.

    Args:
        record: whether the digests of further texts are added.
    """
    path = FROZEN / "texts.json"
    known: dict[str, str] = read_json(path) if path.exists() else {}
    read = Project.text

    def text(project: Project, portion: Portion) -> str:
        corpus = project.config.corpora[portion[0]]
        if any(part.source == "hub" for part in corpus.sources):
            return UNREAD
        name = f"{named(*portion)} of {short_hash(canonical_json(corpus.model_dump(mode='json')), 8)}"
        if record and name not in known:
            known[name] = read(project, portion)
            write_text(path, json.dumps(known, indent=1))
        return known[name]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Project, "text", text)
        patch.setattr(constants, "HF_HUB_CACHE", folder)
        hub.commit_of.cache_clear()
        yield patch
    hub.commit_of.cache_clear()


def of_archives(what: Collection[str], patch: pytest.MonkeyPatch) -> Iterator[tuple[str, Facts]]:
    """The facts that follow from the archived runs, by their kind."""
    read = functools.cache(values.read_result)
    patch.setattr(values, "read_result", read)
    patch.setattr(claims, "read_result", read)
    expand = Project.expanded
    patch.setattr(Project, "expanded", functools.cache(lambda project, name: archived(project, expand(project, name))))
    with tempfile.TemporaryDirectory() as folder:
        project = published(Path(folder))
        for name, find in (("tables", tables), ("claims", verdicts), ("pages", long_pages)):
            if name in what:
                yield name, find(project)


def compared(name: str, facts: Facts) -> list[str]:
    """What differs from the recorded facts of a kind."""
    path = FROZEN / f"{name}.json"
    return list(differences(read_json(path) if path.exists() else {}, facts))


def main() -> int:
    """Compare or record; the exit status says whether something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the files anew")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=KINDS)
    told = parser.parse_args()
    differ, started = False, time.perf_counter()
    with machine(told.record) as patch:
        found = [("keys", keys())] if "keys" in told.what else []
        for name, facts in itertools.chain(found, of_archives(told.what, patch)):
            lines = compared(name, facts)
            differ = differ or bool(lines)
            print(*(f"{name}: {line}" for line in lines), sep="\n", end="\n" * bool(lines))
            print(f"{name}: {len(lines)} differences, {time.perf_counter() - started:.0f} s so far")
            if told.record and facts:
                write_text(FROZEN / f"{name}.json", json.dumps(facts, indent=0, ensure_ascii=False) + "\n")
    return int(differ and not told.record)


if __name__ == "__main__":
    sys.exit(main())
