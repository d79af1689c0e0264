"""The numeric tests as other machines would compute them: `make test-machines`.

Which instructions a library takes, and how many threads share a sum, decides its last bits. Each setting is a process
of its own with the arithmetic of another machine, as far as this processor has it; the last one flips the last bit of
every inexact sum and function (`tests.helpers.last_bits`), as no machine does and any might. `--quick` runs what last
bits can break soonest: of comparisons of quantized networks, learning and calibrated weights every fifteenth case.
"""

import argparse
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from rotquant.foundation.progress import ProgressTask, task

#: Of each test's cases `--quick` takes every fifteenth.
QUICK_EVERY = 15
QUICK_TESTS = (
    "tests/library/decoder/test_parity.py",
    "tests/library/test_families.py",
    "tests/library/test_gptq.py",
    "tests/library/test_kv_cache.py",
    "tests/library/test_omniquant.py",
    "tests/library/test_spinquant.py",
    "tests/library/test_runtime.py",
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


def run(setting: Setting, options: Sequence[str], under_way: ProgressTask, settings: int) -> Outcome:
    """Run pytest with options in a process with the arithmetic of a setting, one of so many in the task."""
    threads = str(setting.threads)
    environment = {**os.environ, **setting.environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        own = ["-vv", "-m", "numeric and not gpu", "--tb=short", f"--junit-xml={report}", *setting.options]
        command = [sys.executable, "-m", "pytest", *own, *options]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            output = [line for line in process.stdout or () if not _is_progress(line, under_way, settings)]
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    if process.returncode and not names:
        names = ["pytest itself"]
    seconds = time.perf_counter() - started
    return Outcome(len(cases) - len(failed) - skipped, tuple(names), seconds, "".join(output))


def _is_progress(line: str, under_way: ProgressTask, settings: int) -> bool:
    """Whether a line of pytest says how far it is, which the task then shows, and no more."""
    collected = re.search(r"collected (?:.* (?=\d+ selected))?(\d+)", line)
    if collected:
        under_way.total = settings * int(collected[1])
    elif line.endswith("%]\n"):
        under_way.advance()
    return bool(collected) or line.endswith("%]\n")


def main() -> int:
    """Print a line per setting with what failed in it; the exit status says whether anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tests under few settings, as in CI")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("tests", nargs="*", help="files or tests; default: all that are numeric")
    arguments = parser.parse_args()
    options = arguments.tests or (QUICK_TESTS if arguments.quick else ("tests",))
    options = [f"--every={QUICK_EVERY if arguments.quick else 1}", *options]
    settings = [setting for setting in SETTINGS if setting.quick or not arguments.quick]
    print(f"{'passed':>6} {'failed':>6} {'seconds':>7}  setting", flush=True)
    for setting in settings:
        if setting.lacking:
            print(f"{'skipped':>21}  {setting.name}: {setting.lacking}", flush=True)
    settings = sorted((s for s in settings if not s.lacking), key=lambda setting: setting.threads)
    failed = False
    with task("tests", "test") as under_way:
        # Threads that share a core wait for each other, so settings of as many threads run side by side as cores allow.
        for threads, alike in itertools.groupby(settings, lambda setting: setting.threads):
            with ThreadPoolExecutor(max(1, arguments.jobs // threads)) as pool:
                outcomes = {pool.submit(run, setting, options, under_way, len(settings)): setting for setting in alike}
                for future in as_completed(outcomes):
                    failed |= report(outcomes[future], future.result())
    return int(failed)


def report(setting: Setting, outcome: Outcome) -> bool:
    """Print a line for a setting, and what pytest said where a test failed; whether any did."""
    print(f"{outcome.passed:6} {len(outcome.failed):6} {outcome.seconds:7.0f}  {setting.name}", flush=True)
    if outcome.failed:
        print(*outcome.failed, outcome.output, sep="\n", flush=True)
    return bool(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
