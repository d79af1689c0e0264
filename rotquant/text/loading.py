"""Reading a corpus: a hub dataset, a local folder or one text file.

The papers' protocol joins the rows with a blank line (GPTQ's `datautils.py`, used by every paper here). Only data files
are read, no dataset script runs. Those of the hub go through the `datasets` library. Local ones do not: it tells the
hub of each file that it opens, and a damaged JSON file can crash its parser with the process.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatch
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.files import canonical_json, check_regular, short_hash
from rotquant.foundation.hub import commit_of
from rotquant.foundation.parsing import broken_line, parse_json
from rotquant.foundation.progress import at_terminal, downloading, task
from rotquant.recipes.corpus import SPLITS, WIKITEXT2, CorpusSpec, Split, content_hash, portion

_SUFFIXES = (".parquet", ".json", ".jsonl", ".txt")
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

#: Names of the hub's that resemble `wikitext2`.
_ALIKE = ("wikitext",)

#: In the place of a digest where a text cannot be read; nothing is computed under it.
UNREAD = "unread"
#: A dataset of the hub, with its configuration; anything else that a user names is a path.
_HUB_DATASET = re.compile(r"(?P<path>[\w-][\w.-]*(/[\w.-]+)?)(:(?P<subset>[\w.-]+))?")


def corpus_spec(text: str) -> CorpusSpec:
    """The corpus that a user names: `wikitext2`, a folder, a file, or a dataset of the hub with its configuration.

    Raises:
        CorpusError: the name resembles `wikitext2`, and is none of the others.
    """
    path = Path(text).expanduser()
    hub = _HUB_DATASET.fullmatch(text)
    if hub is None or path.exists() or path.suffix in _SUFFIXES:
        return CorpusSpec(name=path.stem, source="local", path=str(path))
    if text == WIKITEXT2.name:
        return WIKITEXT2
    if text not in _ALIKE and difflib.get_close_matches(text, [WIKITEXT2.name], cutoff=0.8):
        raise CorpusError(f"unknown corpus {text!r}; nearest: {WIKITEXT2.name}.")
    return CorpusSpec(name=hub["path"].split("/")[-1], source="hub", path=hub["path"], subset=hub["subset"])


@singledispatch
def load_rows(spec: CorpusSpec, split: Split, *, max_characters: int | None = None) -> list[str]:
    """Return the rows (texts) of one split, or as many first rows as reach `max_characters`.

    A plain text file has one row per line with its line end kept and blank lines empty, as the hub's WikiText has them.
    Another package registers how its own kinds of corpora, classes below `CorpusSpec`, are read.

    Raises:
        CorpusError: unknown split, hub unreachable, missing folder, file, split or text field, or no text.
    """
    if split not in SPLITS:
        raise CorpusError(f"Corpus {spec.name}: no split {split!r}; the splits are {', '.join(SPLITS)}.")
    rows = _hub_rows(spec, split, max_characters) if spec.source == "hub" else _local_rows(spec, split)
    with task(f"reading {spec.name} ({split})"):
        selected = _head(rows, max_characters)
    if not any(selected):
        share = _share(spec, split)
        cut = f" ({share}: give ten or more, or a folder with a file for each split)" if share else ""
        raise CorpusError(f"Corpus {spec.name}: split {split!r} of {spec.path} holds no text{cut}.")
    return selected


def load_text(spec: CorpusSpec, split: Split, *, max_characters: int | None = None) -> str:
    """Return one split as one text: its rows joined by `spec.separator`. Raises as `load_rows` does."""
    return spec.separator.join(load_rows(spec, split, max_characters=max_characters))


def text_digest(spec: CorpusSpec, split: Split, characters: int | None = None, text: str | None = None) -> str:
    """Digest that identifies a split, or its head: 16 hexadecimal digits, or `unread`.

    It covers the content of what is read; of a hub's dataset its commit.

    Args:
        text: what was read, where it was.
    """
    if any(part.source == "hub" for part in spec.sources):
        commits = [commit_of("dataset", part.path) for part in spec.sources if part.source == "hub"]
        identity = [spec.model_dump(mode="json"), commits, portion(split, characters)]
        return UNREAD if None in commits else short_hash(canonical_json(identity))
    try:
        return content_hash(load_text(spec, split, max_characters=characters) if text is None else text)[:16]
    except CorpusError:
        return UNREAD  # whose sentence comes from the job that needs it


def corpus_identity(
    spec: CorpusSpec,
    splits: Iterable[Split] = ("test",),
    *,
    max_characters: int | None = None,
    texts: Mapping[Split, str] | None = None,
) -> dict:
    """Provenance of a run's text: the specification and, per split, length, content hash and `split_source`.

    `texts` are those of the splits that have been read already.
    """
    known = texts or {}
    identity: dict = {**spec.model_dump(), "splits": {}}
    for split in splits:
        text = known.get(split) or load_text(spec, split, max_characters=max_characters)
        entry = {"characters": len(text), "sha256": content_hash(text), **split_source(spec, split)}
        identity["splits"][portion(split, max_characters)] = entry
    return identity


@singledispatch
def split_source(spec: CorpusSpec, split: Split) -> dict[str, Any]:
    """What a split's text was read from, as entries of its provenance: `share`, the part of a single file."""
    share = _share(spec, split)
    return {"share": share} if share else {}


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
        with downloading(spec.path), _bars_at_terminals():
            streaming: Any = max_characters is not None  # the library declares True and False apart
            commit = commit_of("dataset", spec.path)
            data = load_dataset(spec.path, spec.subset, split=split, streaming=streaming, revision=commit)
    except Exception as error:  # The hub client has many failure types, some from libraries below it.
        reason = str(error).strip().split("\n")[0][:200]
        raise CorpusError(
            f"Corpus {spec.name}: split {split!r} of hub dataset {spec.path} could not be read "
            f"({type(error).__name__}: {reason}); without access to the hub, give the path of a local copy (in a "
            "configuration with `source: local`): a folder with its parquet, json, jsonl or txt files."
        ) from error
    return _column(spec, data, spec.path)


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
    if not corpus_root(spec).is_file() or _splits_named(Path(corpus_root(spec).name)):
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


def split_of_file(spec: CorpusSpec) -> Split:
    """The split to measure on where none is asked for: test, or validation for a single file that is named for it."""
    alone = spec.source == "local" and corpus_root(spec).is_file()
    return "validation" if alone and _splits_named(Path(corpus_root(spec).name)) == {"validation"} else "test"


def _share(spec: CorpusSpec, split: Split) -> str | None:
    """Which rows of a single local file are a split, and of how many shards it is one; None for other corpora."""
    if spec.source != "local" or not corpus_root(spec).is_file():
        return None
    shard = _SHARD.fullmatch(corpus_root(spec).name)
    if _splits_named(Path(corpus_root(spec).name)):
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


def corpus_root(spec: CorpusSpec) -> Path:
    """The folder or file of a local corpus."""
    root = Path(spec.path).expanduser()
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
    root = corpus_root(spec)
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


def data_rows(file: Path) -> Iterator[Any]:
    """The rows of a file of JSON (a list, or a row on each line) or Parquet.

    Raises:
        ValueError: it is damaged; what is wrong, as the end of a sentence.
        OSError: it cannot be read.
    """
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    with file.open("rb") as lines:
        if lines.read(1 << 16).lstrip().startswith(b"["):
            lines.seek(0)
            rows = parse_json(lines.read())
            if not isinstance(rows, list):
                raise ValueError("it holds no list of rows")
            yield from rows
            return
        lines.seek(0)
        for line in filter(bytes.strip, lines):
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(broken_line(file) or str(error)) from None
            yield row


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())[:200].rstrip(".")) from None
