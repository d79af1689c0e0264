"""Installed packages that the corpora are read from, and the split of each.

All are pinned by requirements.lock, so that every installation has the same text. Left out are the standard library
(its version is the interpreter's), packages whose files differ between CPU and CUDA builds (torch, cupy, cuda-*,
nvidia-*, triton), installers, test code, and files written at build time.
"""

import csv
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path
from typing import TypeVar

from rotquant.foundation.errors import CorpusError, RotquantError
from rotquant.foundation.files import atomic_path, check_regular, read_json, short_hash
from rotquant.recipes.corpus import Split

T = TypeVar("T")

TEST_PACKAGES = ("click", "docutils", "flask", "fsspec", "jinja2", "joblib", "more-itertools", "werkzeug")
VALIDATION_PACKAGES = ("accelerate", "attrs", "docker", "google-auth", "gunicorn", "pyparsing")
_TRAIN_PACKAGES = """
    absl-py aiohttp alembic anyio argparse-dataclass black cachetools configargparse contourpy cryptography cycler
    databricks-sdk dataproperty datasets dill dpath evaluate fastapi filelock fonttools gitdb gitpython graphene
    graphql-core h11 httpcore httpx huey huggingface-hub humanfriendly hypothesis idna immutables importlib-metadata
    jsonschema jupyter-core kiwisolver lm-eval lxml mako markdown-it-py matplotlib mlflow mpmath multiprocess narwhals
    nbformat networkx nltk numpy opentelemetry-api opentelemetry-sdk packaging pandas pathspec pathvalidate pillow
    platformdirs pluggy portalocker prettytable protobuf psutil pulp pyarrow pyasn1 pycparser pydantic
    pydantic-core pygments pytablewriter pytest python-dateutil pytz referencing requests rich rouge-score sacrebleu
    safetensors scikit-learn scipy skops smart-open snakefmt snakemake snakemake-interface-common
    snakemake-interface-executor-plugins snakemake-interface-storage-plugins sortedcontainers sqlalchemy sqlmodel
    sqlparse starlette sympy tabledata tabulate tenacity threadpoolctl tqdm traitlets transformers typepy typer
    typing-inspection urllib3 uvicorn wcwidth wrapt yarl
    """
TRAIN_PACKAGES = tuple(_TRAIN_PACKAGES.split())
PACKAGES: dict[Split, tuple[str, ...]] = {
    "train": TRAIN_PACKAGES,
    "validation": VALIDATION_PACKAGES,
    "test": TEST_PACKAGES,
}
PRECEDENCE: tuple[Split, ...] = ("test", "validation", "train")
"""A text that several splits contain belongs to the first of these."""

CARRIED = "ROTQUANT_PACKAGES"
"""The environment variable with a folder of `rotquant pack`, whose packages are read in place of installed ones."""

GENERATED_FILES = frozenset({"__config__.py", "version.py", "_version.py"})
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_vendor", "_vendored_packages"})


def versions(split: Split) -> dict[str, str | None]:
    """The installed version of each package of a split; None where it is missing."""
    return {name: _version(name) for name in PACKAGES[split]}


@functools.cache
def _version(name: str) -> str | None:
    distribution = _distribution(name)
    return None if distribution is None else _read_metadata(distribution, lambda: distribution.version)


def _distribution(name: str) -> Distribution | None:
    """A package as it is installed or was carried here; None where it is missing.

    Raises:
        CorpusError: there is no such folder of packages.
    """
    carried = os.environ.get(CARRIED)
    if carried and not Path(carried).is_dir():
        raise CorpusError(f"{CARRIED} names {carried}, which is no folder; `rotquant pack` makes one.")
    found = Distribution.discover(name=name, path=[carried]) if carried else Distribution.discover(name=name)
    return next(iter(found), None)


@functools.cache
def package_files(packages: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """The packages' Python files as (name inside site-packages, path), ordered by a hash of the name."""
    files = {}
    for package in packages:
        distribution = _distribution(package)
        if distribution is None:
            continue
        place = str(distribution.locate_file(""))
        files |= {name: Path(place, name) for name in _installed(distribution) if _is_text(name)}
    return tuple(sorted(files.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()))


def _installed(distribution: Distribution) -> list[str]:
    """The names of a package's files; read from its record, whose lines `files` makes objects of for seconds."""
    record = _read_metadata(distribution, lambda: distribution.read_text("RECORD"))
    if record is None:
        return [file.as_posix() for file in distribution.files or ()]
    return _read_metadata(distribution, lambda: [line[0] for line in csv.reader(record.splitlines()) if line])


def _read_metadata(distribution: Distribution, read: Callable[[], T]) -> T:
    """Content of the files that describe a package.

    Raises:
        CorpusError: they are damaged, as in a folder that was carried here.
    """
    place = Path(str(distribution.locate_file("")), str(getattr(distribution, "_path", "")))
    for name in ("METADATA", "RECORD"):
        check_regular(place / name, CorpusError)
    try:
        return read()
    except (ValueError, LookupError, csv.Error) as error:
        raise CorpusError(f"the package in {place} is damaged ({error}); install or carry it again.") from None


def _is_text(name: str) -> bool:
    """Whether an installed file is a source file that counts."""
    *folders, file = name.split("/")
    return (
        file.endswith(".py")
        and file not in GENERATED_FILES
        and TEST_FOLDERS.isdisjoint(folders)
        and ".." not in folders
    )


def lists_of_files(split: Split) -> list[Path]:
    """The installed lists of files of the packages that decide a split: replaced with every other version."""
    names = {name for one in (*earlier(split), split) for name in PACKAGES[one]}
    found = (_distribution(name) for name in sorted(names))
    return [Path(str(one.locate_file("")), str(getattr(one, "_path", "")), "RECORD") for one in found if one]


def earlier(split: Split) -> tuple[Split, ...]:
    """The splits that a text goes to before this one."""
    return PRECEDENCE[: PRECEDENCE.index(split)]


def cached(
    corpus: str, split: Split, cache: str | Path, rules: Sequence[object], make: Callable[[], Iterable[str]]
) -> list[str]:
    """Load the files of a corpus's split, from `cache` when the same rules and packages made it.

    Args:
        rules: numbers by which `make` goes. make: finds it.

    Raises:
        CorpusError: none of the split's packages is installed.
    """
    file = Path(cache) / f"{corpus}-{split}-{_fingerprint(split, rules)}.json"
    with suppress(RotquantError):  # not there yet, or damaged: made again
        rows = read_json(file)
        if isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
            return rows
    found = [*make()]
    if not found:
        raise CorpusError(
            f"The corpus {corpus} has no {split} text: none of its packages is installed "
            f"({', '.join(PACKAGES[split])}); install requirements.lock or name another corpus."
        )
    with atomic_path(file) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")
    return found


def _fingerprint(split: Split, rules: Sequence[object]) -> str:
    """Identify what a split's text is made from: rules, versions, and the splits whose texts are taken out of it."""
    made_from = [*rules, {name: versions(name) for name in (*earlier(split), split)}]
    return short_hash(json.dumps(made_from, sort_keys=True))
