"""The commit of a result is that of the code that computed it, wherever it was computed."""

import subprocess
from pathlib import Path

import pytest

from rotquant.foundation.environment import CODE, environment, git_commit, git_dirty


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one tracked file, and one of an installed package that git does not have."""
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    installed = tmp_path / ".venv/lib"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("a = 1\n")
    return tmp_path


def test_the_commit_is_that_of_the_codes_checkout_in_any_working_folder(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert git_commit(checkout / "code.py") == git(checkout, "rev-parse", "HEAD")
    assert git_dirty(checkout / "code.py") is False
    (checkout / "code.py").write_text("a = 2\n")
    assert environment(checkout / "code.py")["git_dirty"] is True


def test_an_installed_package_has_no_commit_of_the_project_around_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.chdir(checkout)
    installed = checkout / ".venv/lib/code.py"
    assert (git_commit(installed), git_dirty(installed)) == (None, None)
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert git_commit(installed) == "abc"


def test_the_default_is_this_package() -> None:
    assert CODE.name == "environment.py"
    assert CODE.is_file()
