"""The numeric tests as other machines would compute them: `make test-machines`.

Which instructions a library takes, and how many threads share a sum, decides its last bits. Each setting is a process
of its own with the arithmetic of another machine, as far as this processor has it; the last one flips the last bit of
every inexact sum and function (`tests.last_bits`), as no machine does and any might. `--quick` runs what last bits can
break soonest: comparisons of quantized networks, learning and calibrated weights.
"""

import argparse
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

QUICK_TESTS = (
    "tests/decoder/test_parity.py",
    "tests/test_families.py",
    "tests/test_gptq.py",
    "tests/test_kv_cache.py",
    "tests/test_omniquant.py",
    "tests/test_spinquant.py",
    "tests/test_wrapping.py",
)
VECTORS = ("DEFAULT", "AVX2", "AVX512")
OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass(frozen=True)
class Setting:
    """Environment variables and options of pytest that stand for another machine."""

    environment: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    options: tuple[str, ...] = ()
    quick: bool = False

    @property
    def name(self) -> str:
        """As it would be typed before a command."""
        parts = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*parts, *self.options, f"OMP_NUM_THREADS={self.threads}"])

    @property
    def lacking(self) -> str:
        """Why it would change nothing here, or could not run; empty where it does."""
        vectors = self.environment.get("ATEN_CPU_CAPABILITY", "default").upper()
        if VECTORS.index(vectors) > VECTORS.index(processor_vectors()):
            return f"this processor has no {vectors}"
        alone = set(self.environment) == {"MKL_ENABLE_INSTRUCTIONS"}
        return "MKL heeds it on Intel's processors alone" if alone and not is_intel() else ""


SETTINGS = (
    Setting(),
    Setting(threads=2),
    *(Setting({"ATEN_CPU_CAPABILITY": vectors.lower()}) for vectors in VECTORS),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    Setting({"MKL_CBWR": "COMPATIBLE"}),
    Setting({"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Setting(AVX2),
    Setting(AVX2, threads=2),
    Setting(OLD, quick=True),
    Setting(OLD, threads=2),
    Setting(options=("--flip-last-bits",), quick=True),
)


@dataclass(frozen=True)
class Outcome:
    """Of one setting: how many tests passed, the names of those that did not, the time, and pytest's output."""

    passed: int
    failed: tuple[str, ...]
    seconds: float
    output: str


@cache
def processor_vectors() -> str:
    """The widest of ATen's instruction sets here, whatever this process was told to use."""
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    return answer if answer in VECTORS else "DEFAULT"


def is_intel() -> bool:
    """Whether Intel made the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    return "Intel" in (cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else platform.processor())


def run(setting: Setting, tests: tuple[str, ...]) -> Outcome:
    """Run tests in a process with the arithmetic of a setting."""
    threads = str(setting.threads)
    environment = {**os.environ, **setting.environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "numeric and not gpu", "--tb=short", f"--junit-xml={report}", *setting.options]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    if process.returncode and not names:
        names = ["pytest itself"]
    seconds = time.perf_counter() - started
    return Outcome(len(cases) - len(failed) - skipped, tuple(names), seconds, process.stdout)


def main() -> int:
    """Print a line per setting with what failed in it; the exit status says whether anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tests under few settings, as in CI")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("tests", nargs="*", help="files or tests; default: all that are numeric")
    arguments = parser.parse_args()
    tests = tuple(arguments.tests) or (QUICK_TESTS if arguments.quick else ("tests",))
    settings = [setting for setting in SETTINGS if setting.quick or not arguments.quick]
    print(f"{'passed':>6} {'failed':>6} {'seconds':>7}  setting", flush=True)
    # Threads that share a core wait for each other, so settings of as many threads run side by side as there are cores.
    by_threads = itertools.groupby(
        sorted(settings, key=lambda setting: setting.threads), lambda setting: setting.threads
    )
    failed = [run_together(list(alike), tests, max(1, arguments.jobs // threads)) for threads, alike in by_threads]
    return int(any(failed))


def run_together(settings: list[Setting], tests: tuple[str, ...], jobs: int) -> bool:
    """Run tests under settings, some at a time; print a line for each; whether any test failed."""
    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = [None if setting.lacking else pool.submit(run, setting, tests) for setting in settings]
        for setting, future in zip(settings, outcomes, strict=True):
            if future is None:
                print(f"{'skipped':>21}  {setting.name}: {setting.lacking}", flush=True)
                continue
            outcome = future.result()
            print(f"{outcome.passed:6} {len(outcome.failed):6} {outcome.seconds:7.0f}  {setting.name}", flush=True)
            if outcome.failed:
                print(*outcome.failed, outcome.output, sep="\n", flush=True)
                failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
