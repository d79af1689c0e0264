"""Archives: the results of one job as one tar file, for machines without a shared file system (workflow/storage.smk).

An archive's name contains a digest of everything that determines its content: runs and code. So an existing archive is
current and never replaced, and several configurations, projects and people may share one storage.

Archives hold files of `results/` by their paths, data before the record that identifies it. The archive of a table's
part has everything that pages need: runs, tasks, and weights and rotations without the tensors. An export holds the
same for whole tables in one compressed file of any name, with fewer digits (`rounding`): its runs identify themselves.
"""

import filecmp
import io
import lzma
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from reproduction.run.plan import Plan
from reproduction.run.results import (
    HISTORY_FILE,
    ROTATION_RECORD,
    ROTATIONS_FILE,
    WEIGHTS_RECORD,
    part_path,
    read_result,
    rotation_path,
    run_path,
    task_set_path,
    weights_path,
)
from reproduction.run.rounding import rounded
from reproduction.run.stages import jobs
from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.foundation.files import atomic_path, canonical_json, check_regular, folder_beside, short_hash

#: The folders of `results/` that hold an archive's files, and the record files there.
_RECORDS = {"rotations": ROTATION_RECORD, "weights": WEIGHTS_RECORD, "runs": None, "tasks": None}
_KINDS = ("rotations", "weights", "measured")


def archive_of(plan: Plan, kind: str, key: str) -> str:
    """The name of an archive, a path relative to the storage of archives.

    Args:
        kind: rotations, weights or measured. key: the key of rotations or weights, or the part of a table.

    Raises:
        ConfigError: the plan has no such thing.
    """
    basis: list[object] = []
    if kind == "rotations":
        basis = [plan.rotation(key).code]
    elif kind == "weights":
        basis = [plan.stored(key).code]
    else:
        part = plan.part(key)
        basis = [plan.codes["tasks"], [[run, plan.planned(run).code] for run in part.runs]]
    return f"{kind}/{key}-{short_hash(canonical_json([basis, archives_needed(plan, kind, key)]), 8)}.tar"


def archives_needed(plan: Plan, kind: str, key: str) -> list[str]:
    """The archives that a job needs: rotations for weights, weights for the part of a table.

    Raises:
        ConfigError: the plan has no such thing.
    """
    if kind == "weights":
        rotation = plan.stored(key).rotation
        return [] if rotation is None else [archive_of(plan, "rotations", rotation)]
    if kind == "measured":
        keys = dict.fromkeys(plan.planned(run).weights for run in plan.part(key).runs)
        return [archive_of(plan, "weights", weights) for weights in keys if weights]
    return []


def target_of(plan: Plan, archive: str) -> str:
    """The target of `rotquant runs execute` for an archive.

    Raises:
        ConfigError: the archive's name is not in this plan, for example because another machine has other code.
    """
    kind, _, name = archive.rpartition("/")
    kind, key = PurePosixPath(kind).name, name.removesuffix(".tar").rpartition("-")[0]
    if kind not in _KINDS:
        raise ConfigError(f"the archive {archive!r} is not in a folder called {', '.join(_KINDS)}.")
    if archive_of(plan, kind, key) != f"{kind}/{name}":
        raise ConfigError(
            f"the archive {kind}/{name} is of other code or settings than this machine has, whose is "
            f"{archive_of(plan, kind, key)}: have the same commit and configuration on all machines."
        )
    return key


def pack(plan: Plan, archive: Path) -> None:
    """Write the archive of that name from the local results.

    Raises:
        ConfigError: the name is not in this plan.
        ResultError: a part of it is missing.
    """
    key = target_of(plan, archive.as_posix())
    _write(archive, _files(plan, archive.parent.name, key))


def tables_of(plan: Plan, names: Sequence[str]) -> list[str]:
    """Find tables by their names or those of their papers; without names all tables whose runs are here.

    Raises:
        ResultError: without names, none is here.
    """
    if not names:
        names = [name for name, table in plan.of_runs.items() if all(received(plan, part) for part in table.parts)]
        if not names:
            raise ResultError("no table's runs are all here; `snakemake` or `rotquant runs execute` computes them.")
    papers = {name: [one for one, table in plan.of_runs.items() if table.paper == name] for name in names}
    return [table for name in names for table in papers[name] or [name]]


def export(plan: Plan, tables: Iterable[str], archive: Path, partial: bool = False) -> tuple[int, int]:
    """Write everything that tables' pages need to one compressed file; return the numbers of its runs and of all.

    Args:
        partial: leave out runs that are missing or not current, so that another machine continues with the others.

    Raises:
        ConfigError: there is no such table.
        ResultError: one of their runs is missing or not current; with `partial`, all are.
    """
    parts = [part for table in tables for part in plan.table(table).parts]
    runs = list(dict.fromkeys(run for part in parts for run in plan.part(part).runs))
    missing = {run: None for run in runs if jobs.result_current(plan, run) is None}
    here = [run for run in runs if run not in missing]
    if missing and not (partial and here):
        raise ResultError(
            f"{len(missing)} of {len(runs)} runs are not here or not current, among them {next(iter(missing))}: "
            "`rotquant runs execute` with the names of the tables makes them."
            + (" --partial exports the others." if here else "")
        )
    _write(archive, _measured(plan, here), rounded)
    return len(here), len(runs)


def is_archive(path: Path) -> bool:
    """Whether a file is an archive that was written here: its first member is a result."""
    with suppress(Exception), tarfile.open(path) as file:  # of what is no archive, or a damaged one, any error comes
        first = file.next()
        return first is not None and first.name.startswith("results/")
    return False


def _write(archive: Path, paths: Iterable[Path], content: Callable[[Path], bytes] | None = None) -> None:
    """Write files to an archive; with `content`, which yields what is written of each, to a compressed one."""
    with (
        atomic_path(archive) as temporary,
        # preset 9 finds what result files share within 64 MiB
        tarfile.open(temporary, "w:xz", preset=9) if content else tarfile.open(temporary, "w") as file,
    ):
        for path in paths:
            if not path.is_file():
                raise ResultError(f"{archive} cannot be written: {path} is not here.")
            if content is None:
                file.add(path, arcname=path.as_posix(), recursive=False, filter=_nobodys)
            else:
                member, written = _nobodys(file.gettarinfo(path, path.as_posix())), content(path)
                member.size = len(written)
                file.addfile(member, io.BytesIO(written))


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner from an archive member."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _files(plan: Plan, kind: str, key: str) -> list[Path]:
    """The files of an archive in order: each record after its data."""
    if kind == "rotations":
        return [rotation_path(key) / name for name in (ROTATIONS_FILE, HISTORY_FILE, ROTATION_RECORD)]
    if kind == "weights":
        return [*_learned(plan, [key]), *_stored(key, tensors=True)]
    return _measured(plan, plan.part(key).runs)


def _measured(plan: Plan, runs: Sequence[str]) -> list[Path]:
    """The files that pages need of runs, theirs last."""
    planned = [plan.planned(run) for run in runs]
    weights = [one for one in dict.fromkeys(run.weights for run in planned) if one]
    tasks = [one for one in dict.fromkeys(run.tasks for run in planned) if one]
    stored = [path for one in weights for path in _stored(one, tensors=False)]
    return [*_learned(plan, weights), *stored, *map(task_set_path, tasks), *map(run_path, runs)]


def _learned(plan: Plan, weights: Iterable[str]) -> list[Path]:
    """The files that pages need of the rotations used for weights."""
    keys = dict.fromkeys(key for one in weights if (key := plan.stored(one).rotation))
    return [rotation_path(key) / name for key in keys for name in (HISTORY_FILE, ROTATION_RECORD)]


def _stored(key: str, tensors: bool) -> list[Path]:
    """The files of stored weights, their record last."""
    folder = weights_path(key)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != WEIGHTS_RECORD]
    kept = [path for path in files if tensors or path.suffix != ".safetensors"]
    return [*kept, folder / WEIGHTS_RECORD]


def unpack(plan: Plan, archives: Sequence[Path]) -> dict[str, bool]:
    """Extract the files of archives into the results, except those that are current here or not in this plan.

    The record of a folder is removed before its data is written, and written last, so that an interrupted folder does
    not look complete.

    Returns:
        The archives' runs, each with whether it is in this plan, with its settings and code.

    Raises:
        ResultError: an archive is damaged or holds a file that is no result, or the disk is full.
    """
    runs: dict[str, bool] = {}
    for archive in archives:
        check_regular(archive)
        with folder_beside(Path("results/received")) as folder:
            try:
                with tarfile.open(archive) as file:
                    members = file.getmembers()
                    for member in members:
                        _check(archive, member)
                    file.extractall(folder, members, filter="data")
            except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
                raise ResultError(f"the archive {archive} is damaged ({error}); delete it and make it anew.") from None
            names = [Path(member.name) for member in members]
            found = {path.stem: _is_planned(plan, folder, path) for path in names if path.parts[1] == "runs"}
            behind = {key for run, planned in found.items() if planned for key in _behind(plan, run)}
            wanted = [path for path in names if not found or Path(path.parts[2]).stem in behind]
            for path in [path for path in wanted if not _is_here(plan, path)]:
                _place(folder / path, path)
            runs |= found
    return runs


def record_whole(plan: Plan, part: str) -> bool:
    """Record a part of a table if all of its runs are here and current; return whether they are."""
    results = {run: jobs.result_current(plan, run) for run in plan.part(part).runs}
    found = {run: result.value for run, result in results.items() if result is not None}
    if len(found) == len(results):
        jobs.record_part(plan, part, found)
    return len(found) == len(results)


def received(plan: Plan, part: str) -> bool:
    """Whether a part's runs are all here, current and recorded."""
    return part_path(part).exists() and all(jobs.result_current(plan, run) for run in plan.part(part).runs)


def _check(archive: Path, member: tarfile.TarInfo) -> None:
    parts = PurePosixPath(member.name).parts
    inside = parts[:1] == ("results",) and len(parts) > 2 and parts[1] in _RECORDS and ".." not in parts
    if not (inside and member.isfile()):
        raise ResultError(f"the archive {archive} holds {member.name[:100]!r}, which is no result's file.")


def _is_planned(plan: Plan, folder: Path, path: Path) -> bool:
    """Whether an unpacked run is in the plan, by its settings and its code.

    Raises:
        ResultError: it is damaged.
    """
    result = read_result(folder / path)
    if (planned := plan.runs.get(path.stem)) is None:
        return False
    made = [(result.provenance, planned.code)]
    if planned.weights is not None:
        stored = plan.stored(planned.weights)
        made.append((result.weights or {}, stored.code))
        if stored.rotation is not None:
            made.append((result.rotation or {}, plan.rotation(stored.rotation).code))
    return all(record.get("code_digest") == code for record, code in made)


def _behind(plan: Plan, run: str) -> list[str]:
    """The keys of a run and of the weights, learned rotations and tasks that it was measured with."""
    planned = plan.planned(run)
    rotation = None if planned.weights is None else plan.stored(planned.weights).rotation
    return [key for key in (run, planned.weights, rotation, planned.tasks) if key is not None]


def _is_here(plan: Plan, path: Path) -> bool:
    """Whether the result that a file belongs to is here and current, hence is kept."""
    kind, key = path.parts[1], Path(path.parts[2]).stem
    if kind == "runs":
        return key in plan.runs and jobs.result_current(plan, key) is not None
    if kind == "weights":
        return (
            key in plan.weights
            and jobs.weights_current(plan, key)
            and (path.suffix != ".safetensors" or jobs.weights_at_hand(key))
        )
    if kind == "rotations":
        return key in plan.rotations and jobs.rotation_current(plan, key, at_hand=path.name == ROTATIONS_FILE)
    return False


def _place(source: Path, path: Path) -> None:
    """Move an unpacked file to its place, unless an equal file is there."""
    if path.is_file() and filecmp.cmp(source, path, shallow=False):
        return
    if record := _RECORDS[path.parts[1]]:
        (Path(*path.parts[:3]) / record).unlink(missing_ok=True)
    with atomic_path(path) as temporary:
        shutil.move(source, temporary)
