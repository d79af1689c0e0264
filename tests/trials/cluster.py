"""A SLURM cluster of two nodes on this machine: munge, slurmctld and two slurmd, in namespaces of their own.

Debian's packages are unpacked and laid over /usr, the configuration over /etc, so nothing of the machine changes; all
of it is gone with the namespace. Nodes are those of one machine: a job on one sees the files of the other, unless a
node is given folders of its own.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.trials import namespaces
from tests.trials.trial import Skip

PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd")
NODES = ("n1", "n2")
#: What SLURM believes of each node, whatever this machine has; it does not enforce memory without cgroups.
CORES, MEMORY = 16, 400_000

#: What is not about places: a lost node is noticed in seconds, jobs of it are not started again by SLURM itself (the
#: workflow starts them), ended jobs are remembered until the trial asks for them.
CONFIGURATION = """
ClusterName=trial
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MinJobAge=7200
SlurmdTimeout=10
KillWait=2
JobRequeue=0
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,batch_sched_delay=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Cluster:
    """A running cluster; as a context manager it ends with its block."""

    def __init__(
        self, folder: Path, own: Mapping[str, tuple[tuple[Path, Path], ...]] | None = None, cores: int = CORES
    ) -> None:
        """Prepare a cluster below a folder, in namespaces of mounts and processes that this program must be in.

        Args:
            own: for a node, pairs of a folder and the place that it is mounted at for this node alone.
            cores: what SLURM believes of each node.

        Raises:
            Skip: the packages cannot be had or mounted.
        """
        self.folder, self.own, self.cores = folder, own or {}, cores
        namespaces.with_packages(*PACKAGES)
        namespaces.over("/etc", folder / "etc")
        for name in ("munge", "control", *NODES):
            (folder / name).mkdir(mode=0o700, parents=True)
        key = folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        Path("/etc/slurm").mkdir(exist_ok=True)
        Path("/etc/slurm/slurm.conf").write_text(self._configuration())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        with ExitStack() as started:
            started.callback(self.close)
            munge = self.folder / "munge"
            places = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
            self._start("munged", "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *places)
            _until((munge / "socket").exists, "munged does not start", munge / "log")
            self._start("slurmctld", "slurmctld-wlm", "-D")
            for node in NODES:
                self.start_node(node)
            _until(
                lambda: self.states() == dict.fromkeys(NODES, "idle"), "the nodes do not come up", self.log("slurmctld")
            )
            started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it, jobs included: everything in the namespace of processes that this one is the first of."""
        assert os.getpid() == 1
        os.kill(-1, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, unless it runs, with the folders that are its own."""
        if node in self._processes:
            return
        mounts = "".join(f"mount --bind '{folder}' '{place}' && " for folder, place in self.own.get(node, ()))
        alone = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", f'{mounts}exec "$@"', "sh"]
        self._start(node, *(alone if mounts else []), "slurmd-wlm", "-D", "-d", "/usr/sbin/slurmstepd-wlm", "-N", node)

    def kill_node(self, node: str) -> None:
        """End a node's slurmd at once. What it has started goes on, as where the network to a node is lost."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def states(self) -> dict[str, str]:
        """The state of each node."""
        lines = _output("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines if line.count(" ") == 1)

    def jobs(self, state: str = "running", folder: Path | None = None) -> list[str]:
        """The ids of jobs in a state; of those that were submitted in a folder, where one is given."""
        said = _output("squeue", "--noheader", f"--states={state}", "--format=%i %Z").splitlines()
        found = [line.split() for line in said]
        return sorted((job for job, place in found if folder is None or Path(place) == folder), key=int)

    def memory_asked(self, folder: Path) -> list[int]:
        """Megabytes that each job of a folder asked for, ended ones too, in the order of submission."""
        lines = _output("scontrol", "--oneliner", "show", "jobs").splitlines()
        found = [re.search(r"JobId=(\d+).* MinMemoryNode=([\d.]+)([MG]).* WorkDir=(\S+)", line) for line in lines]
        unit = {"M": 1, "G": 1024}
        asked = {int(job[1]): round(float(job[2]) * unit[job[3]]) for job in found if job and Path(job[4]) == folder}
        return [asked[job] for job in sorted(asked)]

    def cancel(self, job: str) -> None:
        """End a job as its user would."""
        subprocess.run(["scancel", job], check=True)

    def log(self, name: str) -> Path:
        """What a daemon said."""
        return self.folder / f"{name}.out"

    def _start(self, name: str, *command: str) -> None:
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _configuration(self) -> str:
        control, *ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={self.cores} "
            f"RealMemory={MEMORY} State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        ]
        places = [
            f"AuthInfo=socket={self.folder}/munge/socket",
            f"SlurmctldPort={control}",
            f"StateSaveLocation={self.folder}/control",
            f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmctldPidFile={self.folder}/control/pid",
            f"SlurmdPidFile={self.folder}/%n/pid",
        ]
        return "\n".join([CONFIGURATION.strip(), *places, *nodes]) + "\n"


def version() -> str:
    """SLURM's version."""
    return _output("sinfo", "--version").split()[-1]


def munge_version() -> str:
    """munge's version."""
    return _output("munge", "--version").split()[0].removeprefix("munge-")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def _until(what: Callable[[], object], else_: str, log: Path, seconds: float = 30) -> None:
    """Wait for something to be so.

    Raises:
        Skip: it never is; the sentence has the last line of a log.
    """
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            raise Skip(f"{else_} here ({re.sub(r'^.*?: ', '', said[-1]) if said else 'without a word'}).")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
