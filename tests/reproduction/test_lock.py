"""requirements.lock pins what results follow from, and installs on the oldest Python that is promised."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.specifiers import SpecifierSet

from reproduction.corpora.packages import PACKAGES
from tests.helpers.project import REPOSITORY


@pytest.fixture(scope="module")
def pinned() -> set[str]:
    """The names of the locked packages."""
    lock = (REPOSITORY / "requirements.lock").read_text()
    return {line.split("==")[0] for line in lock.splitlines() if "==" in line}


def test_every_package_whose_text_is_read_is_pinned(pinned: set[str]) -> None:
    named = {name for names in PACKAGES.values() for name in names}
    assert named <= pinned


def test_every_locked_package_that_is_installed_takes_python_3_11_2(pinned: set[str]) -> None:
    """Debian 12's, without the fixes that packages ask for by a later number."""
    refusing = []
    for name in pinned:
        with suppress(PackageNotFoundError):
            asked = metadata(name).get("Requires-Python") or ""
            refusing += [f"{name}: {asked}"] * ("3.11.2" not in SpecifierSet(asked))
    assert not refusing
