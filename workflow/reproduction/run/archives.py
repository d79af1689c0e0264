"""Results as Parquet files, one for each paper and kind: from a machine that computes to one that renders.

They hold every seed, window and item, no tensors and no places of a machine. Numbers of runs keep all digits. Samples,
of which pages show means and intervals, are multiples of a power of two with the same sum, which is smaller.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.identity.names import HISTORY_FILE, ROTATION_RECORD, WEIGHTS_RECORD, Results, key_in
from reproduction.identity.run import check_signed
from reproduction.run.plan import Plan
from reproduction.run.results import TASKS, read_result
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import atomic_path, check_regular, folder_beside, read_json, read_object, write_json
from rotquant.foundation.parsing import parse_json

#: Bits by which a sample is finer than a usual one of its run.
BITS = 12
#: Step of log-odds of items in nats, whose deviation over items is several.
LOG_ODDS_STEP = 2.0**-4
#: Most steps that are kept of a training's history.
LONGEST = 200
#: Metrics whose arrays are drawn as surfaces, and their digits.
_SURFACES, _DIGITS = ("magnitudes", "token_maxima"), 3
KINDS = ("runs", "weights", "rotations")
#: Parts of a record that a key is the hash of.
_HASHED = ("recipe", "identity")
#: The column of samples in a file.
_VALUES = "samples.list.element.values.list.element"


def is_archive(path: Path) -> bool:
    """Whether a file is one of these."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" and any(path.stem.endswith(f"-{kind}") for kind in KINDS)


def export(plan: Plan, tables: Iterable[str], folder: Path, partial: bool) -> tuple[list[Path], int, int]:
    """Write the results of tables below a folder; the files, how many runs they hold, and how many the tables have.

    Args:
        partial: whether runs may be missing.

    Raises:
        ResultError: one is missing or damaged, or there is none.
    """
    results, files, held, of = plan.results(), [], 0, 0
    for paper in dict.fromkeys(plan.tables[name].paper for name in tables):
        runs = dict.fromkeys(
            run for name in tables if plan.tables[name].paper == paper for run in plan.tables[name].runs
        )
        present = [key for key in runs if results.run(key).exists()]
        held, of = held + len(present), of + len(runs)
        if len(present) < len(runs) and not partial:
            missing = next(key for key in runs if key not in present)
            raise ResultError(
                f"{len(runs) - len(present)} runs of {paper} are not computed, such as {missing} "
                f"({plan.runs[missing].label}); --partial leaves them out."
            )
        weights = dict.fromkeys(key for run in present if (key := plan.runs[run].weights))
        rotations = dict.fromkeys(key for one in weights if (key := plan.weights[one].rotation))
        rows = {
            "runs": [_of_run(results.run(key)) for key in present],
            "weights": _learned(map(results.weights, weights), WEIGHTS_RECORD),
            "rotations": _learned(map(results.rotation, rotations), ROTATION_RECORD),
        }
        for kind, found in rows.items():
            if found:
                files.append(folder / f"{paper}-{kind}.parquet")
                _write(files[-1], found)
    if not held:
        raise ResultError("no run of these tables is computed here; `rotquant runs execute` computes them.")
    return files, held, of


def import_(plan: Plan, paths: Sequence[Path], any_code: bool = False) -> tuple[list[str], list[str]]:
    """Take results out of files, but for those that are here; the keys of runs of this plan, and the names of others.

    Args:
        paths: files, and folders of files.
        any_code: whether what other code computed counts as what the present code would compute.

    Raises:
        ResultError: a file is none of these, or damaged, or a folder has none.
    """
    results, ours, others = plan.results(), [], []
    for path in (file for given in paths for file in (_files_in(given) if given.is_dir() else [given])):
        kind = path.stem.rpartition("-")[2]
        if kind not in KINDS:
            raise ResultError(
                f"{path} is no file of `rotquant runs export`: its name ends in none of {', '.join(KINDS)}."
            )
        for row in _read(path, kind):
            name = str(row["name"])
            key = key_in(name)
            if key not in getattr(plan, kind) or not (any_code or plan.names[key] == name):
                others += [name] * (kind == "runs")
                continue
            ours += [key] * (kind == "runs")
            try:
                _PLACED[kind](results, key, row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ResultError(f"{path} is damaged at {name} ({type(error).__name__}: {error}).") from None
    return [*dict.fromkeys(ours)], [*dict.fromkeys(others)]  # papers share runs, such as those in full precision


def _files_in(folder: Path) -> list[Path]:
    found = [file for kind in KINDS for file in sorted(folder.glob(f"*-{kind}.parquet"))]
    if not found:
        raise ResultError(f"{folder} has no file of `rotquant runs export`.")
    return found


def _of_run(path: Path) -> dict[str, Any]:
    read_result(path)  # refuses what is damaged
    data = read_object(path, "run file")
    _name_files(data["provenance"].get("tasks") or {})
    samples = data.pop("samples", {})
    kind = data["run"]["metric"]["kind"]
    if kind in _SURFACES and "arrays" in data:
        data["arrays"] = _digits(data["arrays"], _DIGITS)
    packed = []
    for quantity, values in samples.items():
        if isinstance(values, str):
            packed.append({"quantity": quantity, "answers": values, "values": None})
        else:
            step = LOG_ODDS_STEP if kind == "zero_shot" else _step(values)
            packed.append({"quantity": quantity, "answers": None, "values": mean_kept(values, step)})
    return {"name": path.stem, "record": _text(_without_places(data)), "samples": packed}


def _without_places(data: Any) -> Any:
    """Data whose checkpoints, local texts and tasks have their names in place of absolute paths.

    What a key is the hash of stays as it is.
    """
    if isinstance(data, list):
        return [_without_places(one) for one in data]
    if not isinstance(data, dict):
        return data
    named = {key: value for key, value in data.items() if key in ("checkpoint", "path") and isinstance(value, str)}
    named = {key: Path(value).name for key, value in named.items() if Path(value).is_absolute()}
    others = {key: value if key in _HASHED else _without_places(value) for key, value in data.items()}
    return others | named


def _name_files(tasks: dict[str, Any]) -> None:
    """Name the files of tasks by their places in a project, or by their names alone."""
    for task in tasks.get("tasks", {}).values():
        if "file" in task:
            _, inside, name = task["file"].rpartition(f"{TASKS.as_posix()}/")
            task["file"] = f"{inside}{name}" if inside else Path(name).name


def _learned(folders: Iterable[Path], record: str) -> list[dict[str, Any]]:
    """Records and histories of what is there."""
    there = [folder for folder in folders if (folder / record).exists() and (folder / HISTORY_FILE).exists()]
    return [
        {
            "name": folder.name,
            "record": _text(_without_places(read_object(folder / record, "record"))),
            "history": _text(_digits(thinned(read_json(folder / HISTORY_FILE, "history")), 5)),
        }
        for folder in there
    ]


def _place_run(results: Results, key: str, row: Mapping[str, Any]) -> None:
    data = _data(row["record"])
    if samples := {one["quantity"]: one["answers"] or list(one["values"]) for one in row["samples"]}:
        data["samples"] = samples
    place = results.run(key)
    if place.exists():
        return
    with folder_beside(place) as temporary:
        write_json(temporary / place.name, data)
        read_result(temporary / place.name)  # its key is of what it says
        (temporary / place.name).rename(place)


def _placed(of: Callable[[Results, str], Path], record: str) -> Callable[[Results, str, Mapping[str, Any]], None]:
    def place(results: Results, key: str, row: Mapping[str, Any]) -> None:
        folder, data = of(results, key), _data(row["record"])
        if not (folder / record).exists():
            check_signed(data, folder / record)
            write_json(folder / HISTORY_FILE, _data(row["history"]))
            write_json(folder / record, data)

    return place


_PLACED = {
    "runs": _place_run,
    "weights": _placed(Results.weights, WEIGHTS_RECORD),
    "rotations": _placed(Results.rotation, ROTATION_RECORD),
}


def mean_kept(values: Sequence[float], step: float) -> list[float]:
    """Values rounded to multiples of a step but for the last, each taking up what the one before lost."""
    found, lost = [], 0.0
    for value in values[:-1]:
        found.append(step * round((value + lost) / step))
        lost += value - found[-1]
    return [*found, *(value + lost for value in values[-1:])]


def _step(values: Sequence[float]) -> float:
    """A power of two below a usual one of the values by `BITS`."""
    usual = fmean(map(abs, values))
    return 2.0 ** (math.floor(math.log2(usual)) - BITS) if usual else 1.0


def thinned(steps: Sequence[Any]) -> list[Any]:
    """Evenly spaced steps, the last one among them."""
    every = -(-len(steps) // LONGEST) or 1
    return [*steps[(len(steps) - 1) % every :: every]]


def _digits(data: Any, count: int) -> Any:
    """Data whose floats have so many significant digits."""
    if isinstance(data, float):
        return float(f"{data:.{count}g}")
    if isinstance(data, list):
        return [_digits(one, count) for one in data]
    return {name: _digits(one, count) for name, one in data.items()} if isinstance(data, dict) else data


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _data(text: str) -> Any:
    return parse_json(text.encode())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    sample = pa.struct([("quantity", pa.string()), ("answers", pa.string()), ("values", pa.list_(pa.float64()))])
    fields = {"name": pa.string(), "record": pa.string(), "history": pa.string(), "samples": pa.list_(sample)}
    schema = pa.schema([(name, kind) for name, kind in fields.items() if name in rows[0]])
    table = pa.Table.from_pylist(rows, schema)
    split: Any = [_VALUES] if "samples" in rows[0] else False
    with atomic_path(path) as temporary:
        parquet.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
            use_byte_stream_split=split,
        )


def _read(path: Path, kind: str) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    check_regular(path)
    try:
        found = parquet.read_table(path)
        if lacking := {"name", "record", "samples" if kind == "runs" else "history"}.difference(found.column_names):
            raise ResultError(f"{path} is no Parquet file of results (it lacks the column {min(lacking)}).")
        return found.to_pylist()
    except FileNotFoundError:
        raise ResultError(f"there is no file {path}.") from None
    except (pa.ArrowException, OSError) as error:
        raise ResultError(f"{path} is no Parquet file of results ({str(error).splitlines()[0]}).") from None
