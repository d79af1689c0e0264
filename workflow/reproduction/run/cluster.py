"""Runs on a SLURM cluster: check of the environment before the start, and messages about lost jobs."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path


def check_executor() -> None:
    """Exit with a message if Snakemake's executor for SLURM is not installed.

    A profile calls this while Snakemake reads it; Snakemake shows other errors below a hundred lines of usage, and by
    itself reports only an invalid choice of executor.
    """
    if find_spec("snakemake_executor_plugin_slurm") is None:
        sys.exit(
            "error: the profile needs Snakemake's executor for SLURM, which is not installed: `pip install -e "
            "./workflow[slurm]` in the project's folder, or `pip install snakemake-executor-plugin-slurm`."
        )


#: Reasons why SLURM ended a job, by state; for other states the job's own log gives the reason.
_ENDINGS = {
    "CANCELLED": "it was cancelled, by scancel or by an administrator",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it took more memory than asked for: give it more with --set-resources {rule}:mem_mb=MEGABYTES",
    "PREEMPTED": "another job took its place",
    "TIMEOUT": "its time limit passed: give it more with --set-resources {rule}:runtime=MINUTES",
}
# Patterns of Snakemake's log; the messages are those of its executor for SLURM.
_ERROR = re.compile(
    r"^Error in rule (?P<rule>\w+):\n    message: (?P<message>.*?)\n    jobid: (?P<number>\d+)\n"
    r".*?^    log: (?P<logs>[^\n]*) \(check log",
    re.MULTILINE | re.DOTALL,
)
_STATE = re.compile(r"SLURM-job '(?P<job>[\d_]+)' failed.*SLURM status is: '(?P<state>\w+)'")
_COMPLAINT = re.compile(r"(?:srun|slurmstepd): error: (?!.*Exited with exit code)")
_REFUSED = re.compile(
    r"(?:sbatch failed\. The error message was '|submission failed with exception: )"
    r"(?P<reason>.*?)(?:'\.\n|For further|\Z)",
    re.DOTALL,
)


def lost_jobs(log: Path) -> list[str]:
    """A message for each job that failed on a cluster and that no retry completed: the reason and its logs.

    SLURM ends a job without a message in the job's log, and its state is in the middle of Snakemake's output.

    Args:
        log: Snakemake's log of this run.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    found = {}
    for error in _ERROR.finditer(text):
        completed = re.search(rf"^Finished jobid: {error['number']} ", text[error.end() :], re.MULTILINE)
        if sentence := "" if completed else _sentence(error):
            found[error["number"]] = sentence  # the last of several attempts
    return [*found.values()]


def _sentence(error: re.Match[str]) -> str:
    """The message for a failed job; empty if SLURM did not end it."""
    own, *others = error["logs"].split(", ")
    rule = error["rule"]
    if refused := _REFUSED.search(error["message"]):
        return f"failed: SLURM did not accept a job of rule {rule} ({own}): {' '.join(refused['reason'].split())}"
    ended = _STATE.search(error["message"])
    if ended is None:
        return ""
    why = _ENDINGS.get(ended["state"], "").format(rule=rule) or _last_words(own, others)
    also = f", SLURM's own {os.path.relpath(others[0])}" if others else ""
    return f"failed: job {ended['job']} of rule {rule} ({ended['state']}): {why.rstrip('.')}. Its log is {own}{also}."


def _last_words(own: str, others: list[str]) -> str:
    """SLURM's error in its log of a job, such as a lost node; else the last line of the job's log."""
    complaints = [line for log in others for line in _lines(Path(log)) if _COMPLAINT.match(line)]
    said = complaints or _lines(Path(own))
    return said[-1] if said else "it left no message"


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]
