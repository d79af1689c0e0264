"""Trial of SLURM: a table is computed through `profiles/slurm` on a cluster of two nodes, and jobs are lost.

The table is QuaRot's Table 1 with one seed on the shipped models, or in the quick form a small one on tiny models.
Every number is compared with a local run. Jobs are lost on projects whose stages are stand-ins that wait, while the
table is computed.
"""

import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tests.helpers.project import Copy
from tests.trials import cluster, namespaces, projects
from tests.trials.cluster import Cluster
from tests.trials.faults import soon
from tests.trials.trial import Trial, run

SNAKEMAKE = ("snakemake", "--profile", "profiles/slurm", projects.REPORT)
CANCELLED, KILLED, LATE = "cancelled by scancel", "whose slurmd is killed", "past its time limit"
#: What a sentence says of each way of losing a job. A slurmd that is killed leaves the job itself alone, which then
#: ends because SLURM has given its node up; so its state may be either.
SAID = {
    CANCELLED: r"\(CANCELLED\)",
    KILLED: r"\(NODE_FAIL\)|\(FAILED\): srun: error: Node failure",
    LATE: r"\(TIMEOUT\)",
}
SENTENCE = re.compile(r"^failed: job (\d+) of rule measure (.*)\. Its log is (\S+), SLURM's own (\S+)\.$", re.MULTILINE)


def body(trial: Trial) -> None:
    """Lose jobs, compute a table meanwhile, and compute what was lost again."""
    namespaces.enter("mount", "pid")
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as place, Cluster(Path(place) / "cluster") as slurm:
        trial.versions |= {"slurm": cluster.version(), "munge": cluster.munge_version()}
        trial.versions |= {name: version(name) for name in ("snakemake", "snakemake-executor-plugin-slurm")}
        lost = _Lost(trial, slurm, Path(place))
        _a_table_is_computed(trial, Path(place))
        lost.told()
        lost.computed_again()


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
        logs = b"".join(there.read("logs/measured/*").values()).decode()
        trial.figure(
            "gigabytes of the largest process of a job",
            max(map(float, re.findall(r"largest process had ([\d.]+) GB", logs))),
        )
        computing = set(re.findall(r"slurm_logs/rule_(\w+)", output))
        trial.check(
            "Jobs compute, and pages are rendered where Snakemake runs", computing == {"measure"}, str(computing)
        )


class _Lost:
    """Projects whose jobs are lost, each in its own way and all at the same time: a time limit is a minute at least."""

    def __init__(self, trial: Trial, slurm: Cluster, place: Path) -> None:
        """Start them, and lose their jobs."""
        self.trial, self.slurm = trial, slurm
        self.reference, self.retried = projects.mechanics(place / "reference"), projects.mechanics(place / "retried")
        ways = [CANCELLED] if trial.quick else [CANCELLED, KILLED, LATE]
        self.projects = {way: projects.mechanics(place / f"lost{number}") for number, way in enumerate(ways)}
        status, output = self.reference.snakemake(projects.REPORT)
        assert status == 0, output
        self.started = {way: self._start(way, project) for way, project in self.projects.items()}
        (self.retried.root / "slow").touch()
        self.retrying = self.retried.start(*SNAKEMAKE)
        self.jobs = {way: self._running(project) for way, project in self.projects.items()}
        self._lose()

    def _start(self, way: str, project: Copy) -> subprocess.Popen[str]:
        (project.root / "slow").touch()
        node = cluster.NODES[way == KILLED]
        asked = ["mem_mb=1000", f"slurm_extra='--nodelist={node}'", *(["runtime=1"] if way == LATE else [])]
        quickly = ("--retries", "0", "--latency-wait", "5", "--set-threads", "measure=1")
        return project.start(*SNAKEMAKE, *quickly, "--set-resources", *(f"measure:{one}" for one in asked))

    def _running(self, project: Copy) -> list[str]:
        """The jobs of a project, once both run and wait."""
        soon(lambda: len(self.slurm.jobs(folder=project.root)) == 2 and (project.root / "started").exists(), 120)
        jobs = self.slurm.jobs(folder=project.root)
        self.trial.check("Jobs that do not need each other run at once", len(jobs) == 2, str(jobs))
        return jobs

    def _lose(self) -> None:
        """Each way. A time limit passes by itself."""
        for project, jobs in (
            (self.projects[CANCELLED], self.jobs[CANCELLED]),
            (self.retried, self._running(self.retried)),
        ):
            self.slurm.cancel(jobs[0])
            (project.root / "slow").unlink()
        if KILLED in self.projects:
            self.slurm.kill_node(cluster.NODES[True])

    def told(self) -> None:
        """Whether every lost job has a sentence with its cause, and the logs that it names exist."""
        for way, process in self.started.items():
            output, _ = process.communicate(timeout=300)
            lost = self.jobs[way][:1] if way == CANCELLED else self.jobs[way]
            found = {job: (why, logs) for job, why, *logs in SENTENCE.findall(output)}
            whole = process.returncode != 0 and sorted(found) == sorted(lost)
            for why, logs in found.values():
                there = all((self.projects[way].root / log).exists() for log in logs)
                whole = whole and there and re.search(SAID[way], why) is not None
            self.trial.check(f"A job {way} ends in a sentence that says so and names its logs", whole, output[-3000:])
        output, _ = self.retrying.communicate(timeout=300)
        asked = self.slurm.memory_asked(self.retried.root)
        again = self.retrying.returncode == 0 and len(asked) == 3 and asked[2] > max(asked[:2])
        said = "With the profile's retries a cancelled job is submitted again, with more memory, and the run completes"
        self.trial.check(said, again, f"{asked} {output[-3000:]}")
        self._check_equal("After a retry", self.retried)

    def computed_again(self) -> None:
        """Whether the next start completes all that was lost."""
        self.slurm.start_node(cluster.NODES[True])
        for project in self.projects.values():
            (project.root / "slow").unlink(missing_ok=True)
        with ThreadPoolExecutor() as pool:
            ended = pool.map(lambda project: project.run(*SNAKEMAKE, timeout=300), self.projects.values())
            for (way, project), (status, output) in zip(self.projects.items(), ended, strict=True):
                self.trial.check(f"After a job {way} the next start completes", status == 0, output[-3000:])
                self._check_equal(f"After a job {way}", project)

    def _check_equal(self, when: str, project: Copy) -> None:
        differing = projects.difference(projects.digests(self.reference.root), projects.digests(project.root))
        self.trial.check(f"{when} the results are those of an undisturbed run", not differing, differing)


if __name__ == "__main__":
    run("slurm", __doc__.splitlines()[0], body)
