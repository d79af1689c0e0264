"""scripts/sanitize refuses in a sentence what it cannot check, and is clean only where every tool says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.library.kernels import owners, sanitize


def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    folder = Path(sys.executable).parent
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sanitize.REPOSITORY / "scripts/sanitize"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "scripts/sanitize needs an NVIDIA GPU, and this machine has none that torch can use."
    ]


def test_without_the_tool_it_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    assert sanitize.main([]) == 2
    assert "compute-sanitizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("summary", "passed", "status"),
    [
        ("========= ERROR SUMMARY: 0 errors", "3 passed", 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "3 passed", 0),
        ("========= ERROR SUMMARY: 1 error", "3 passed", 1),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", "3 passed", 1),
        ("========= ERROR SUMMARY: 0 errors", "3 skipped", 1),  # nothing was checked
        ("", "3 passed", 1),  # the tool said nothing
    ],
)
def test_a_family_is_clean_if_the_tool_says_so(
    summary: str, passed: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{passed}'\necho '{summary}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sanitize.main(["gemv", "--tool", "memcheck"]) == status


def test_passed_tests_are_counted_by_the_settings_of_this_project(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): pass\ndef test_left_out(): pass\n")
    settings = ("-c", str(sanitize.REPOSITORY / "pyproject.toml"))
    done = subprocess.run([*sanitize.PYTEST, *settings, file], capture_output=True, text=True, check=False)
    assert sanitize.passed_in(done.stdout) == 1, done.stdout


def test_every_owner_of_kernels_has_a_family() -> None:
    """By name: `products.gemv` has test_gemv.py."""
    assert {name.rpartition(".")[2] for name in owners()} - {"launch", "operator"} <= set(sanitize.families())
