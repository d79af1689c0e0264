"""What the tests of the reproduction share."""

import pytest

from reproduction.tables.project import Project
from tests.helpers.project import shipped_project


@pytest.fixture(scope="session")
def project() -> Project:
    """This repository's project; files whose tests change one have their own."""
    return shipped_project()
