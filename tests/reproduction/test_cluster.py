"""The profile of a SLURM cluster: what is asked of it for a job, and what is said of jobs that it refuses or loses.

A cluster itself is tried by `scripts/test-slurm`; here `sbatch` is a program that writes down what it is given and
refuses it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from reproduction.run.cluster import lost_jobs

from rotquant.foundation.data import merge
from tests.helpers import forked
from tests.helpers.project import CONFIG, REPOSITORY, Copy
from tests.helpers.workflows import REPORT, one_column

PROGRAMS = {
    "sbatch": 'echo "$@" >> submitted; echo "sbatch: error: Requested node configuration is not available" >&2; exit 1',
    "sacct": "exit 1",
    "sinfo": "echo main*",
}


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """A project, and a cluster that accepts no job."""
    project = one_column(tmp_path / "project", figure=False)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return project


def submitted(project: Copy, *arguments: str) -> tuple[list[dict[str, int]], str]:
    """What a run asks of the cluster, job by job, and its output."""
    command = ("--profile", "profiles/slurm", REPORT, *arguments)
    status, output = forked.snakemake(project.root, project.environment(), *command)
    assert status != 0
    calls = (project.root / "submitted").read_text().splitlines()
    options = {
        "memory": r"--mem (\d+)",
        "minutes": r"-t (\d+)",
        "cores": r"--cpus-per-task=(\d+)",
        "gpus": r"--gpus=(\d+)",
    }
    asked = [
        {name: int(said[1]) for name, what in options.items() if (said := re.search(what, call))} for call in calls
    ]
    assert not any("--gres" in call for call in calls)
    return asked, output


def test_a_job_asks_for_more_at_each_attempt_and_a_refusal_is_a_sentence(refusing: Copy) -> None:
    (first, *others), output = submitted(refusing)
    assert first.keys() == {"memory", "minutes", "cores"}
    assert [asked["memory"] / first["memory"] for asked in others] == [1.5, 2]
    assert [asked["minutes"] / first["minutes"] for asked in others] == [2, 3]
    reason = "sbatch: error: Requested node configuration is not available"
    assert re.search(
        rf"failed: SLURM did not accept a job of rule measure \(logs/measured/.*\.log\): {reason}\n", output
    )
    assert "Traceback" not in output


def test_a_gpu_is_asked_for_by_its_number_and_threads_are_as_said(refusing: Copy) -> None:
    refusing.set_config(merge(CONFIG, {"device": "cuda", "slots": {"Llama-2-13B": {"compute": False}}}))
    (asked,), _ = submitted(refusing, "--retries", "0", "--set-threads", "measure=12")
    assert (asked["gpus"], asked["cores"]) == (1, 12)  # more than this machine has


def test_jobs_that_do_not_need_each_other_are_submitted_at_once(refusing: Copy) -> None:
    refusing.set_config({**CONFIG, "device": "cuda"})
    asked, _ = submitted(refusing, "--retries", "0")
    assert len(asked) == 2  # of the two models' parts, though profiles/default says that one GPU job runs at a time


def test_what_renders_is_local_and_what_computes_says_what_it_needs() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "workflow/rules").glob("*.smk"))
    local = {
        name.strip()
        for block in re.findall(r"^localrules:\n((?:    \w+,\n)+)", text, re.M)
        for name in block.split(",")
    }
    rules = dict(re.findall(r"^ *(?:rule|use rule \w+ as) (\w+)(?::| with:)\n(.*?)(?=^\S|\Z)", text, re.M | re.S))
    computing = {name: rule for name, rule in rules.items() if name not in local}
    assert computing.keys() == {"measure", "train", "measure_speed"}
    assert all(f"{what}=" in rule for rule in computing.values() for what in ("gpu", "mem_mb", "runtime"))
    assert all("threads:" in rule for rule in computing.values())


def test_without_the_executor_a_sentence_says_how_to_install_it(tmp_path: Path) -> None:
    hiding = """
import importlib.util, pkgutil

hidden, modules, find = "snakemake_executor_plugin_slurm", pkgutil.iter_modules, importlib.util.find_spec
pkgutil.iter_modules = lambda *given: (one for one in modules(*given) if not one.name.startswith(hidden))
importlib.util.find_spec = lambda name, package=None: None if name == hidden else find(name, package)
import snakemake.cli

snakemake.cli.main()
"""
    command = [sys.executable, "-c", hiding, "--profile", "profiles/slurm", "--dry-run", REPORT]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    said = ended.stderr.splitlines()
    assert (ended.returncode, len(said)) == (1, 2)  # the first names the profiles
    assert said[-1].startswith("error: the profile needs Snakemake's executor for SLURM, which is not installed: `pip")


def test_no_profile_names_generic_resources() -> None:
    for path in (REPOSITORY / "profiles").glob("*/config.yaml"):
        assert "gres" not in path.read_text(encoding="utf-8")
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def block(rule: str, number: int, message: str, *logs: str) -> str:
    """What Snakemake writes of a job that failed."""
    return (
        f"Error in rule {rule}:\n    message: {message}\n    jobid: {number}\n    output: {number}.json (update)\n"
        f"    log: {', '.join(logs)} (check log file(s) for error details)\n    external_jobid: {number + 10}\n"
    )


def state(number: int, said: str) -> str:
    """The executor's message where it asks squeue."""
    return f"SLURM-job '{number + 10}' failed, SLURM status is: '{said}'. Detailed failure reason unavailable (...)."


def test_a_lost_job_is_a_sentence_with_its_cause_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    for number in (4, 7):
        (tmp_path / f"{number}.log").write_text("a line\nrotquant: the weights cannot be read.\n")
    (tmp_path / "slurm/14.log").write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    (tmp_path / "slurm/17.log").write_text("srun: error: Node failure on n1\nWaiting at most 60 seconds.\n")
    node = "SLURM-job '12' failed due to a node failure, SLURM status is: 'NODE_FAIL'. Failed nodes will be excluded."
    (tmp_path / "log").write_text(
        block("measure", 1, state(1, "CANCELLED"), "1.log", f"{tmp_path}/slurm/11.log")
        + block("measure", 2, node, "2.log", f"{tmp_path}/slurm/12.log")
        + block("measure", 3, state(3, "TIMEOUT"), "3.log", f"{tmp_path}/slurm/13.log")
        + block("measure", 4, state(4, "FAILED"), "4.log", f"{tmp_path}/slurm/14.log")
        + block("measure", 7, state(7, "FAILED"), "7.log", f"{tmp_path}/slurm/17.log")
        + block("table", 5, "None", "5.log")  # not of the cluster
        + block("measure", 6, state(6, "OUT_OF_MEMORY"), "6.log", f"{tmp_path}/slurm/16.log")
        + "[a day]\nFinished jobid: 6 (Rule: measure)\n"
        + block("measure", 1, state(1, "TIMEOUT"), "1.log", f"{tmp_path}/slurm/21.log")
    )
    passed = "its time limit passed: give it more with --set-resources measure:runtime=MINUTES."
    assert lost_jobs(tmp_path / "log") == [
        f"failed: job 11 of rule measure (TIMEOUT): {passed} Its log is 1.log, SLURM's own slurm/21.log.",
        "failed: job 12 of rule measure (NODE_FAIL): its node was lost. Its log is 2.log, SLURM's own slurm/12.log.",
        f"failed: job 13 of rule measure (TIMEOUT): {passed} Its log is 3.log, SLURM's own slurm/13.log.",
        "failed: job 14 of rule measure (FAILED): rotquant: the weights cannot be read. "
        "Its log is 4.log, SLURM's own slurm/14.log.",
        "failed: job 17 of rule measure (FAILED): srun: error: Node failure on n1. "
        "Its log is 7.log, SLURM's own slurm/17.log.",
    ]
