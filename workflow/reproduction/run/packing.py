"""Copies of the source files that the corpora of installed packages are read from, for a machine that has not these
packages: one with a GPU and no network, where tables are computed and nothing is rendered.
"""

import shutil
from pathlib import Path

from reproduction.corpora.docstrings import docstring_rows, file_docstrings
from reproduction.corpora.modules import module_names
from reproduction.corpora.packages import PACKAGES, package_files, versions
from rotquant.foundation.files import atomic_directory, write_text
from rotquant.recipes.corpus import SPLITS, Split

Files = tuple[tuple[str, Path], ...]


def pack(folder: Path, cache: Path, characters: int) -> int:
    """Write the files of the splits and what their packages' versions are; `ROTQUANT_PACKAGES` says where to read them.

    Args:
        cache: see `load_rows`.
        characters: of the train split only the head is taken, of so many characters of each corpus.

    Returns:
        How many files there are.

    Raises:
        CorpusError: none of a split's packages is installed.
    """
    count = 0
    with atomic_directory(folder) as new:
        for split in SPLITS:
            files = package_files(PACKAGES[split])
            if split == "train":
                files = files[: max(_of_modules(files, cache, characters), _of_docstrings(files, cache, characters))]
            _write(new, split, files)
            count += len(files)
    return count


def _of_modules(files: Files, cache: Path, characters: int) -> int:
    """How many of the first files the head of the corpus `modules` is of."""
    names = set(module_names("train", cache, characters))
    return max(place for place, (name, _) in enumerate(files, start=1) if name in names)


def _of_docstrings(files: Files, cache: Path, characters: int) -> int:
    """How many of the first files the head of the corpus `docstrings` is of."""
    missing = set(docstring_rows("train", cache, characters))
    for place, (_, path) in enumerate(files, start=1):
        missing.difference_update(file_docstrings(path))
        if not missing:
            return place
    return len(files)


def _write(folder: Path, split: Split, files: Files) -> None:
    """Copy files to where packages are installed, with records by which they are found there."""
    for name, path in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    taken = {name for name, _ in files}
    for package, version in versions(split).items():
        if version is None:
            continue
        record = folder / f"{package.replace('-', '_')}-{version}.dist-info"
        own = [name for name, _ in package_files((package,)) if name in taken]
        write_text(record / "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        write_text(record / "RECORD", "".join(f"{name},,\n" for name in own))
