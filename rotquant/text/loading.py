"""Reading a corpus: what every installation has, a hub dataset, a local folder or one text file.

The papers' protocol joins the rows with a blank line (GPTQ's `datautils.py`, used by every paper here). Only data files
are read, those of the hub through the `datasets` library: no dataset script runs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.files import cache_folder, check_regular
from rotquant.foundation.hub import commit_of
from rotquant.foundation.progress import at_terminal, downloading, task
from rotquant.recipes.corpus import INSTALLED, SPLITS, CorpusSpec, Split, content_hash, portion
from rotquant.text.docstrings import docstring_rows
from rotquant.text.modules import module_names, module_rows
from rotquant.text.packages import PACKAGES, lists_of_files, package_files, versions
from rotquant.text.rows import SUFFIXES, data_rows

_SUFFIXES = (*SUFFIXES, ".txt")
#: Words that name a split, as the `datasets` library knows them.
_SPLIT_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
#: Splits for which a single file that is named for other ones is read too: validation text may calibrate.
_ALSO_NAMED: dict[str, set[str]] = {"train": {"validation"}, "validation": set(), "test": set()}
#: A file that is one of several of a split, as the hub's libraries name them.
_SHARD = re.compile(r"(?P<before>.*-)(?P<index>\d{5})-of-(?P<count>\d{5})(?P<after>.*)")
#: Which tenths of the rows of a single file are which split: where the first begins, where the last ends.
_TENTHS = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}


def load_rows(
    spec: CorpusSpec, split: Split, *, max_characters: int | None = None, cache: str | Path | None = None
) -> list[str]:
    """Return the rows (texts) of one split, or as many first rows as reach `max_characters`.

    A plain text file has one row per line with its line end kept and blank lines empty, as the hub's WikiText has them.
    `cache`, the user's by default, keeps what was read from installed packages.

    Raises:
        CorpusError: unknown split, hub unreachable, missing folder, file, split or text field, or no text.
    """
    if split not in SPLITS:
        raise CorpusError(f"Corpus {spec.name}: no split {split!r}; the splits are {', '.join(SPLITS)}.")
    if spec.source == "mixed":
        share = None if max_characters is None else -(-max_characters // len(spec.parts))
        return [row for part in spec.parts for row in load_rows(part, split, max_characters=share, cache=cache)]
    if spec.source == "modules":
        return module_rows(split, cache or cache_folder("corpora"), max_characters)
    if spec.source == "docstrings":
        return docstring_rows(split, cache or cache_folder("corpora"), max_characters)
    rows = _hub_rows(spec, split, max_characters) if spec.source == "hub" else _local_rows(spec, split)
    with task(f"reading {spec.name} ({split})"):
        selected = _head(rows, max_characters)
    if not any(selected):
        share = _share(spec, split)
        cut = f" ({share}: give ten or more, or a folder with a file for each split)" if share else ""
        raise CorpusError(f"Corpus {spec.name}: split {split!r} of {spec.path} holds no text{cut}.")
    return selected


def text_files(
    spec: CorpusSpec, split: Split, *, max_characters: int | None = None, cache: str | Path | None = None
) -> list[Path]:
    """The files of this machine, or the folder, that decide what `load_rows` reads of a split.

    Of installed packages also their lists of files, which change with the version. A mixed or hub corpus has none of
    its own. Raises as `load_rows` does.
    """
    if spec.source == "modules":
        names = module_names(split, cache or cache_folder("corpora"), max_characters)
        installed = dict(package_files(PACKAGES[split]))
        return [*(installed[name] for name in names), *lists_of_files(split)]
    if spec.source == "docstrings":
        return lists_of_files(split)
    return [_root(spec)] if spec.source == "local" else []


def load_text(
    spec: CorpusSpec, split: Split, *, max_characters: int | None = None, cache: str | Path | None = None
) -> str:
    """Return one split as one text: its rows joined by `spec.separator`. Raises as `load_rows` does."""
    return spec.separator.join(load_rows(spec, split, max_characters=max_characters, cache=cache))


def corpus_identity(
    spec: CorpusSpec,
    splits: Iterable[Split] = ("test",),
    *,
    max_characters: int | None = None,
    cache: str | Path | None = None,
    texts: Mapping[Split, str] | None = None,
) -> dict:
    """Provenance of a run's text: the specification and, per split, length and content hash.

    For a corpus of installed packages each split also has the package versions it was read from; for a single file,
    which part of it the split is. `texts` are those of the splits that have been read already.
    """
    known = texts or {}
    identity: dict = {**spec.model_dump(), "splits": {}}
    for split in splits:
        text = known.get(split) or load_text(spec, split, max_characters=max_characters, cache=cache)
        entry: dict = {"characters": len(text), "sha256": content_hash(text)}
        if spec.source in INSTALLED:
            entry["packages"] = versions(split)
        if share := _share(spec, split):
            entry["share"] = share
        identity["splits"][portion(split, max_characters)] = entry
    return identity


def _head(rows: Iterable[str], max_characters: int | None) -> list[str]:
    selected: list[str] = []
    characters = 0
    for row in rows:
        selected.append(row)
        characters += len(row)
        if max_characters is not None and characters >= max_characters:
            break
    return selected


def _hub_rows(spec: CorpusSpec, split: Split, max_characters: int | None) -> Iterable[str]:
    """Rows of a hub dataset; streamed when only its head is wanted, as C4 and Pile are too large to download."""
    from datasets import load_dataset

    try:
        with downloading(str(spec.path)), _bars_at_terminals():
            streaming: Any = max_characters is not None  # the library declares True and False apart
            commit = commit_of("dataset", str(spec.path))
            data = load_dataset(str(spec.path), spec.subset, split=split, streaming=streaming, revision=commit)
    except Exception as error:  # The hub client has many failure types, some from libraries below it.
        reason = str(error).strip().split("\n")[0][:200]
        raise CorpusError(
            f"Corpus {spec.name}: split {split!r} of hub dataset {spec.path} could not be read "
            f"({type(error).__name__}: {reason}); without access to the hub, give the path of a local copy (in a "
            "configuration with `source: local`): a folder with its parquet, json, jsonl or txt files."
        ) from error
    return _column(spec, data, str(spec.path))


@contextmanager
def _bars_at_terminals() -> Iterator[None]:
    """Keep bars of the `datasets` library, which draws them into logs too, to terminals."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if at_terminal() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _column(spec: CorpusSpec, data: Iterable[Any], where: str) -> Iterable[str]:
    """The text of each row."""
    for number, row in enumerate(_whole(spec, data, where)):
        for name in spec.columns:
            if number == 0 and isinstance(row, dict) and name not in row:
                fields = ", ".join(map(str, row))
                raise CorpusError(f"Corpus {spec.name}: {where} has no field {name!r}; its fields: {fields}.")
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise CorpusError(f"Corpus {spec.name}: a row of {where} has no text in its field {name!r}.")
        yield row[spec.text_field] if spec.text_field in row else spec.text_field.format_map(row)


def _whole(spec: CorpusSpec, data: Iterable[Any], where: str) -> Iterable[Any]:
    """Yield the rows; a reader that fails on the way (damaged file, lost connection) becomes a `CorpusError`."""
    try:
        yield from data
    except ValueError as error:  # of `data_rows`, which says what is wrong, or one of the hub's
        raise CorpusError(f"Corpus {spec.name}: {where} could not be read to its end ({error}).") from error
    except Exception as error:  # The hub's readers' failures have no common type.
        why = type(error).__name__
        raise CorpusError(f"Corpus {spec.name}: {where} could not be read to its end ({why}).") from error


def _local_rows(spec: CorpusSpec, split: Split) -> Iterable[str]:
    files = _split_files(spec, split)
    if not _root(spec).is_file() or _splits_named(Path(_root(spec).name)):
        return chain.from_iterable(_file_rows(spec, file) for file in files)
    (file,) = files
    count = sum(1 for _ in _file_rows(spec, file))
    start, stop = (count * tenth // 10 for tenth in _TENTHS[split])
    return islice(_file_rows(spec, file), start, stop)


def check_split(spec: CorpusSpec, split: Split) -> None:
    """Refuse a corpus of this machine that is not there or has no file of a split, without reading any.

    Raises:
        CorpusError: it says what is missing.
    """
    if spec.source == "local":
        _split_files(spec, split)
    for part in spec.parts:
        check_split(part, split)


def split_of_file(spec: CorpusSpec) -> Split:
    """The split to measure on where none is asked for: test, or validation for a single file that is named for it."""
    alone = spec.source == "local" and _root(spec).is_file()
    return "validation" if alone and _splits_named(Path(_root(spec).name)) == {"validation"} else "test"


def _share(spec: CorpusSpec, split: Split) -> str | None:
    """Which rows of a single local file are a split, and of how many shards it is one; None for other corpora."""
    if spec.source != "local" or not _root(spec).is_file():
        return None
    shard = _SHARD.fullmatch(_root(spec).name)
    if _splits_named(Path(_root(spec).name)):
        return f"shard {int(shard['index']) + 1} of {int(shard['count'])}" if shard else None
    start, stop = _TENTHS[split]
    return f"rows from {10 * start} to {10 * stop} % of the file"


def _file_rows(spec: CorpusSpec, file: Path) -> Iterable[str]:
    check_regular(file, CorpusError)
    return _text_lines(spec, file) if file.suffix == ".txt" else _column(spec, data_rows(file), str(file))


def _text_lines(spec: CorpusSpec, file: Path) -> Iterable[str]:
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as lines:
            for line in lines:
                if "\0" in line:  # which UTF-16 has in each letter of English
                    raise UnicodeError("it has NUL characters")
                yield line if line.strip() else ""
    except UnicodeError as error:
        raise CorpusError(
            f"Corpus {spec.name}: {file} is not UTF-8 text ({error}); `iconv -f UTF-16 -t UTF-8` converts what is "
            "UTF-16."
        ) from None


def _root(spec: CorpusSpec) -> Path:
    """The folder or file of a local corpus."""
    root = Path(str(spec.path)).expanduser()
    return root / spec.subset if spec.subset is not None and (root / spec.subset).is_dir() else root


def _splits_named(path: Path) -> set[str]:
    """The splits whose name is a word of a path."""
    words = set(re.split(r"[^a-z]+", path.as_posix().lower()))
    return {split for split, names in _SPLIT_NAMES.items() if words & names}


def _split_files(spec: CorpusSpec, split: Split) -> list[Path]:
    """The files of one split in name order: those with the split's name as a word of their path inside the folder.

    A single file is all of the splits that it is named for, and where it is named for none, each split is a part of it
    (`_TENTHS`).
    """
    root = _root(spec)
    if root.is_file():
        if root.suffix not in _SUFFIXES:
            raise CorpusError(f"Corpus {spec.name}: {root} is not a parquet, json, jsonl or txt file.")
        named = _splits_named(Path(root.name))
        if named and not named & {split, *_ALSO_NAMED[split]}:
            raise CorpusError(
                f"Corpus {spec.name}: {root} is the {' and '.join(sorted(named))} split by its name, and the {split} "
                "split is asked for; name a folder that has a file for each."
            )
        return [root]
    if not root.is_dir():
        raise CorpusError(f"Corpus {spec.name}: there is no folder or file {root}.")
    known = sorted(file for file in root.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    chosen = [file for file in known if split in _splits_named(file.relative_to(root))]
    if not chosen:
        found = ", ".join(file.relative_to(root).as_posix() for file in known[:5]) or "none"
        raise CorpusError(
            f"Corpus {spec.name}: folder {root} has no parquet, json, jsonl or txt file named for the {split} split; "
            f"data files there: {found}."
        )
    _check_shards(spec, chosen)
    return chosen


def _check_shards(spec: CorpusSpec, files: list[Path]) -> None:
    """Refuse files that are numbered shards of a split, some of which are not there."""
    found: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        if shard := _SHARD.fullmatch(file.name):
            key = (file.parent, shard["before"], shard["count"], shard["after"])
            found.setdefault(key, set()).add(int(shard["index"]))
    for (folder, before, count, after), indices in found.items():
        missing = [index for index in range(int(count)) if index not in indices]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CorpusError(
                f"Corpus {spec.name}: {folder} lacks {before}{missing[0]:05d}-of-{count}{after}{more} of {int(count)} "
                "shards; copy what is missing, or name one file to read it alone."
            )
