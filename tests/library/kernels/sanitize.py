"""Every family's GPU tests under NVIDIA's compute-sanitizer: memcheck, racecheck and synccheck.

    scripts/sanitize [--every N] [--tool TOOL ...] [FAMILY ...]

A family is a file of tests in this folder, such as `gemv` for test_gemv.py, or `fp8_operators`. The exit status is 1
where a tool reports an error or a test fails, and 2 without a GPU or the tool.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
TOOLS = ("memcheck", "racecheck", "synccheck")
#: Runs tests that have a GPU and need no graph; pyproject.toml makes it quiet, and quieter it would count nothing.
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu and not captures", "-p", "no:cacheprovider")
_FOLDERS = ("tests/library/kernels", "tests/reproduction")
#: Last lines of memcheck and synccheck, then of racecheck, whose warnings are counted too: of each process that ended.
_SUMMARY = re.compile(r"=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_PASSED = re.compile(r"(\d+) passed")


@dataclass(frozen=True)
class Outcome:
    """What a tool found in a family's tests. errors: None if it said nothing. passed: tests. status: pytest's."""

    family: str
    tool: str
    errors: int | None
    passed: int
    status: int
    seconds: float

    @property
    def clean(self) -> bool:
        return self.errors == 0 and self.status == 0 and self.passed > 0


def families() -> dict[str, Path]:
    """The files with GPU tests of kernels, by family."""
    files = (*(REPOSITORY / _FOLDERS[0]).glob("test_*.py"), REPOSITORY / _FOLDERS[1] / "test_fp8_operators.py")
    return {file.stem.removeprefix("test_"): file for file in sorted(files) if "pytest.mark.gpu" in file.read_text()}


def missing() -> str | None:
    """In one sentence what this machine lacks; None if it has a GPU and the tool."""
    import torch

    if not torch.cuda.is_available():
        return "scripts/sanitize needs an NVIDIA GPU, and this machine has none that torch can use."
    if shutil.which("compute-sanitizer") is None:
        return "scripts/sanitize needs compute-sanitizer of the CUDA toolkit, and it is not on the PATH."
    return None


def check(family: str, file: Path, tool: str, every: int) -> Outcome:
    """Run a family's tests under a tool; what both say is printed where it is not clean."""
    # cuda-bindings asks an older driver for functions that it lacks, which is no error of a kernel.
    command = ("compute-sanitizer", "--tool", tool, *(("--report-api-errors", "no") if tool == "memcheck" else ()))
    # Without the caching allocator every tensor has its own bounds, and no graph can be captured.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    done = subprocess.run(
        (*command, *PYTEST, "--every", str(every), str(file)),
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    outcome = Outcome(family, tool, errors_in(text), passed_in(text), done.returncode, time.monotonic() - start)
    if not outcome.clean:
        print(text)
    return outcome


def errors_in(text: str) -> int | None:
    """The errors or hazards that a tool's summaries count; None without a summary."""
    found = [int(errors or hazards) for errors, hazards in _SUMMARY.findall(text)]
    return sum(found) if found else None


def passed_in(text: str) -> int:
    """The tests that pytest says have passed."""
    found = _PASSED.search(text)
    return int(found[1]) if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Check what is asked for and print a table."""
    known = families()
    parser = argparse.ArgumentParser(prog="scripts/sanitize", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", nargs="*", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--every", type=int, default=1, help="of each test's cases only every so manieth")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.family) - known.keys():
        parser.error(f"no family of kernels: {', '.join(sorted(unknown))}")
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    outcomes = [
        check(family, known[family], tool, asked.every) for family in asked.family or known for tool in asked.tool
    ]
    print(f"{'family':20} {'tool':10} {'tests':>6} {'errors':>7} {'seconds':>8}")
    for o in outcomes:
        errors = "unknown" if o.errors is None else o.errors
        failed = "" if o.clean else "  not clean"
        print(f"{o.family:20} {o.tool:10} {o.passed:6} {errors:>7} {o.seconds:8.0f}{failed}")
    return 0 if all(o.clean for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
