"""The default corpus: the documentation strings of the installed packages of requirements.lock, extracted with `ast`.

Real English prose that every installation has, so no download and no copy in the repository. Modules are never
imported, only parsed. Left out are the standard library (its version is the interpreter's), packages whose files
differ between CPU and CUDA builds (torch, cupy, cuda-*, nvidia-*, triton), installers, test code, and files written at
build time.
"""

import ast
import hashlib
import importlib.metadata
import inspect
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from rotquant.foundation.errors import CorpusError
from rotquant.foundation.files import atomic_path, short_hash
from rotquant.foundation.progress import task
from rotquant.recipes.corpus import Split

EXTRACTION_VERSION = 1
"""Raised when the rules below change, so that no stale cache file is read."""

MINIMUM_CHARACTERS = 40
"""Shorter documentation strings ("Return the name.") are labels, not prose."""

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

GENERATED_FILES = frozenset({"__config__.py", "version.py", "_version.py"})
TEST_FOLDERS = frozenset({"test", "tests", "testing", "_vendor", "_vendored_packages"})


def docstring_rows(split: Split, cache: str | Path, max_characters: int | None = None) -> list[str]:
    """Return the documentation strings of one split, read from a file under `cache` when the same packages made it.

    Files come in the order of a hash of their names, strings in source order, so that the head of a split (up to
    `max_characters`) is a fair sample of it and is found without parsing the rest.

    Raises:
        CorpusError: none of the split's packages is installed.
    """
    file = Path(cache) / f"docstrings-{split}-{_fingerprint(split, max_characters)}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        pass
    rows = _extract(split, cache, max_characters)
    if not rows:
        raise CorpusError(
            f"The docstring corpus has no {split} text: none of its packages is installed "
            f"({', '.join(PACKAGES[split])}); install requirements.lock or name another corpus."
        )
    with atomic_path(file) as temporary:
        temporary.write_text(json.dumps(rows), encoding="utf-8")
    return rows


def versions(split: Split) -> dict[str, str | None]:
    """The installed version of each package of a split; None where it is missing."""
    return {name: _version(name) for name in PACKAGES[split]}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fingerprint(split: Split, max_characters: int | None) -> str:
    """Identify what a split's text is made from, including the splits whose texts are taken out of it."""
    earlier = PRECEDENCE[: PRECEDENCE.index(split) + 1]
    made_from = [EXTRACTION_VERSION, MINIMUM_CHARACTERS, max_characters, {name: versions(name) for name in earlier}]
    return short_hash(json.dumps(made_from, sort_keys=True))


def _extract(split: Split, cache: str | Path, max_characters: int | None) -> list[str]:
    """Parse the split's files in order, leaving out texts seen before here or in a split that goes first."""
    seen: set[bytes] = set()
    for earlier in PRECEDENCE[: PRECEDENCE.index(split)]:
        seen.update(_digest(row) for row in docstring_rows(earlier, cache))
    rows: list[str] = []
    characters = 0
    files = package_files(PACKAGES[split])
    # How many files a head of the split takes is not known before they are read.
    total = len(files) if max_characters is None else None
    with task(f"reading documentation strings ({split})", "file", total) as under_way:
        for _, path in files:
            for row in file_docstrings(path):
                digest = _digest(row)
                if len(row) < MINIMUM_CHARACTERS or digest in seen:
                    continue
                seen.add(digest)
                rows.append(row)
                characters += len(row)
                if max_characters is not None and characters >= max_characters:
                    return rows
            under_way.advance()
    return rows


def _digest(row: str) -> bytes:
    """Equal for texts that differ in white space and case only, so that re-wrapped copies count as duplicates."""
    return hashlib.sha256(" ".join(row.split()).lower().encode("utf-8", errors="surrogatepass")).digest()


def package_files(packages: tuple[str, ...]) -> list[tuple[str, Path]]:
    """List the packages' Python files as (name inside site-packages, path), ordered by a hash of the name."""
    files = {}
    for package in packages:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in distribution.files or ():
            folders = set(entry.parts[:-1])
            if entry.suffix != ".py" or entry.name in GENERATED_FILES or folders & TEST_FOLDERS or ".." in folders:
                continue
            files[entry.as_posix()] = Path(str(distribution.locate_file(entry)))
    return sorted(files.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def file_docstrings(path: Path) -> Iterator[str]:
    """Yield the documentation strings of one source file in source order, dedented; nothing if it cannot be parsed."""
    try:
        source = path.read_bytes()
    except OSError:
        return
    if b'"""' not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in other people's files are not ours to report.
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # Templates, or syntax newer than this interpreter.
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text).strip()
        body = getattr(node, "body", None)
        if isinstance(body, list):
            pending.extend(reversed(body))
