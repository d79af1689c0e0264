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
from tests.helpers.workflows import one_column
from tests.trials import cluster, namespaces, projects
from tests.trials.cluster import Cluster
from tests.trials.faults import soon
from tests.trials.trial import Trial, run

SNAKEMAKE = ("snakemake", "--profile", "profiles/slurm", projects.REPORT)
CANCELLED, KILLED, LATE = "cancelled by scancel", "whose slurmd is killed", "past its time limit"
#: What SLURM's log of a job says of each way of losing it. Snakemake itself names the log, and of a group no cause.
SAID = {
    CANCELLED: r"CANCELLED AT \S+ \*\*\*",
    KILLED: r"[Nn]ode [Ff]ailure|NODE FAILURE",
    LATE: r"DUE TO TIME LIMIT",
}
ERROR = re.compile(
    r"^    message: Error in group cells\n    log: (\S+/(\d+)\.log) .*\n    jobs:\n +rule (\w+):", re.MULTILINE
)
#: Jobs of a project that do not need each other: weights with the run on them, for two seeds; and a run without.
JOBS = 3


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
        computing = set(re.findall(r"slurm_logs/(\w+)", output))
        kinds = {"rule_rotation", "group_cells_run", "group_cells_run_weights"}
        trial.check("Jobs compute, and pages are rendered where Snakemake runs", computing <= kinds, str(computing))
        weights = len([*there.root.glob("results/weights/*")])
        trial.check(
            "Weights and the runs on them are one job", output.count("_run_weights/") == weights, output[-3000:]
        )


class _Lost:
    """Projects whose jobs are lost, each in its own way and all at the same time: a time limit is a minute at least."""

    def __init__(self, trial: Trial, slurm: Cluster, place: Path) -> None:
        """Start them, and lose their jobs."""
        self.trial, self.slurm = trial, slurm
        self.reference, self.retried = one_column(place / "reference"), one_column(place / "retried")
        ways = [CANCELLED] if trial.quick else [CANCELLED, KILLED, LATE]
        self.projects = {way: one_column(place / f"lost{number}") for number, way in enumerate(ways)}
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
        quickly = ("--retries", "0", "--latency-wait", "5")
        cells = [f"{rule}:{one}" for rule in ("weights", "run") for one in asked]
        return project.start(*SNAKEMAKE, *quickly, "--set-resources", *cells)

    def _running(self, project: Copy) -> list[str]:
        """The jobs of a project that wait for its file `slow` to go, once they run."""
        waiting = JOBS - 1

        def both() -> bool:
            measured = any(project.root.glob("results/runs/*.json"))  # what waits for nothing
            jobs = self.slurm.jobs(folder=project.root)
            return measured and len(jobs) == waiting and (project.root / "started").exists()

        soon(both, 180)
        jobs = self.slurm.jobs(folder=project.root)
        self.trial.check("Jobs that do not need each other run at once", len(jobs) == waiting, str(jobs))
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
        """Whether Snakemake names every lost job's rules and SLURM's log of it, which says why it was lost."""
        for way, process in self.started.items():
            output, _ = process.communicate(timeout=400)
            lost = self.jobs[way][:1] if way == CANCELLED else self.jobs[way]
            found = {job: (Path(log), rule) for log, job, rule in ERROR.findall(output)}
            whole = process.returncode != 0 and sorted(found, key=int) == lost
            logs = [log.read_text(encoding="utf-8") for log, rule in found.values() if rule in ("weights", "run")]
            whole = whole and all(re.search(SAID[way], log) for log in logs)
            what = f"Snakemake names the rules of a job {way}, and SLURM's log, which says so"
            self.trial.check(what, whole, "\n".join([output[-3000:], *logs]))
        output, _ = self.retrying.communicate(timeout=400)
        asked = self.slurm.memory_asked(self.retried.root)
        again = self.retrying.returncode == 0 and len(asked) == JOBS + 1 and asked[-1] > max(asked[:-1])
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
