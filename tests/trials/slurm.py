"""Trial of SLURM: a table is computed through profiles/slurm on two nodes, and jobs are lost in three ways.

The table is QuaRot's Table 1 with one seed on the shipped models, or in the quick form a small one on tiny models.
Every number is compared with a local run. Jobs are lost on projects whose stages are stand-ins that wait.
"""

import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tests.project import Copy
from tests.trials import cluster, namespaces, projects
from tests.trials.cluster import Cluster
from tests.trials.trial import Trial, run

SNAKEMAKE = ("snakemake", "--profile", "profiles/slurm", projects.REPORT)
#: What SLURM calls each way of losing a job.
STATES = {"cancelled by scancel": "CANCELLED", "whose slurmd is killed": "NODE_FAIL", "past its time limit": "TIMEOUT"}


def body(trial: Trial) -> None:
    """Compute, lose, compute again."""
    namespaces.enter("mount", "pid")
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as place, Cluster(Path(place) / "cluster") as slurm:
        trial.versions |= {"slurm": cluster.version(), "munge": cluster.munge_version()}
        trial.versions |= {name: version(name) for name in ("snakemake", "snakemake-executor-plugin-slurm")}
        _jobs_are_lost(trial, slurm, Path(place))
        _a_table_is_computed(trial, Path(place))


def _a_table_is_computed(trial: Trial, place: Path) -> None:
    """A table on the cluster and here."""
    make = projects.tiny if trial.quick else projects.shipped
    options = () if trial.quick else ("--config", "seeds=[0]")
    here, there = make(place / "here"), make(place / "there")
    started = time.monotonic()
    status, output = here.run("snakemake", "--cores", "all", projects.REPORT, *options, timeout=3600)
    assert status == 0, output
    trial.figure("seconds of the local run", round(time.monotonic() - started))
    started = time.monotonic()
    status, output = there.run(*SNAKEMAKE, *options, timeout=3600)
    trial.figure("seconds through SLURM", round(time.monotonic() - started))
    submitted = len(re.findall("has been submitted with SLURM jobid", output))
    if trial.check("A table is computed through profiles/slurm", status == 0 and submitted > 0, output[-3000:]):
        mine, theirs = projects.digests(here.root), projects.digests(there.root)
        trial.figure("jobs submitted", submitted)
        trial.figure("runs compared with a local run", len([name for name in mine if name.startswith("run ")]))
        differing = projects.difference(mine, theirs)
        trial.check("Runs, weights and tables are equal to a local run's to the last bit", not differing, differing)
        peaks = re.findall(
            r"largest process had ([\d.]+) GB", "".join(map(bytes.decode, there.read("logs/measured/*").values()))
        )
        trial.figure("gigabytes of the largest process of a job", max(map(float, peaks)))
        _pages_are_rendered_here(trial, output)


def _pages_are_rendered_here(trial: Trial, output: str) -> None:
    computing = set(re.findall(r"slurm_logs/rule_(\w+)", output))
    trial.check("Jobs compute, and pages are rendered where Snakemake runs", computing == {"measure"}, str(computing))


def _jobs_are_lost(trial: Trial, slurm: Cluster, place: Path) -> None:
    """Three ways to lose a job, on a project each, at the same time: a time limit is a minute at least."""
    reference = projects.mechanics(place / "reference")
    status, output = reference.snakemake(projects.REPORT)
    assert status == 0, output
    ways = [way for way in STATES if not (trial.quick and way == "past its time limit")]
    lost = {way: projects.mechanics(place / STATES[way]) for way in ways}
    started: dict[str, subprocess.Popen[str]] = {}
    jobs: dict[str, list[str]] = {}
    for way, project in lost.items():
        (project.root / "slow").touch()
        known = set(slurm.jobs())
        node = f"--nodelist={cluster.NODES[way == 'whose slurmd is killed']}"
        asked = [f"measure:slurm_extra='{node}'", *(["measure:runtime=1"] if way == "past its time limit" else [])]
        started[way] = project.start(*SNAKEMAKE, "--retries", "0", "--set-resources", *asked)
        _until(lambda known=known: len(set(slurm.jobs()) - known) == 2)
        jobs[way] = sorted(set(slurm.jobs()) - known)
        trial.check("Jobs that do not need each other run at once", len(jobs[way]) == 2, str(jobs[way]))
    slurm.cancel(jobs["cancelled by scancel"][0])
    (lost["cancelled by scancel"].root / "slow").unlink()
    slurm.kill_node(cluster.NODES[True])
    for way, process in started.items():
        output, _ = process.communicate(timeout=300)
        _check_sentence(trial, way, jobs[way], lost[way], output)
    for node in cluster.NODES:
        slurm.start_node(node)
    for way, project in lost.items():
        (project.root / "slow").unlink(missing_ok=True)
        status, output = project.run(*SNAKEMAKE, timeout=300)
        trial.check(f"After a job {way} the next start completes", status == 0, output[-2000:])
        differing = projects.difference(projects.digests(reference.root), projects.digests(project.root))
        trial.check(f"After a job {way} the results are those of an undisturbed run", not differing, differing)


def _check_sentence(trial: Trial, way: str, jobs: list[str], project: Copy, output: str) -> None:
    """Whether Snakemake's words about a lost job have its state and existing logs."""
    said = re.findall(r"SLURM-job '(\d+)' failed, SLURM status is: '(\w+)'", output)
    logs = [log for line in re.findall(r"log: (.*) \(check log", output) for log in line.split(", ")]
    whole = (STATES[way] in {state for job, state in said if job in jobs}) and len(logs) >= 2
    written = [log for log in logs if (project.root / log).exists()]
    trial.check(
        f"A job {way} ends in a sentence that says so and names its logs", whole and bool(written), output[-3000:]
    )


def _until(what: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.2)


if __name__ == "__main__":
    run("slurm", __doc__.splitlines()[0], body)
