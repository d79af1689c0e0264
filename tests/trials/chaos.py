"""Faults while the workflow runs: processes killed, disks full, the clock set back, two at once, results read-only.

Each ends in a sentence or completes at the next start, and what is computed in the end equals what an undisturbed run
computes. With -9, at moments that are drawn; nothing is removed or mended between the starts. Where Snakemake itself
was killed, `snakemake --unlock` takes its lock away, as it asks for.

    scripts/chaos [--quick] [--record] [--seed N]
"""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tests.helpers.project import Copy
from tests.trials import faults, namespaces, projects, sockets
from tests.trials.faults import ALL, SNAKEMAKE, VICTIMS, Clock, Job
from tests.trials.sockets import Seen
from tests.trials.trial import Skip, Trial, run
from tests.trials.undisturbed import (
    WORKFLOW,
    Undisturbed,
    completes,
    empty,
    ends_well,
    finished,
    in_sentences,
    is_whole,
    mechanics,
    shipped,
    shown_in_mlflow,
    tiny,
    undisturbed,
    unlock,
)

EXECUTE = ("rotquant", "runs", "execute", "--jobs", "2")
LOCKED = "Directory cannot be locked"
CLOCK = "could indicate a clock skew problem"
FULL = re.compile(r"No space left on device|disk is full|MB left")
#: The folder of the database, where it has a disk of its own; and of the user's cache.
DATABASE, CACHE = "database", "cache"
ELSEWHERE = ("env", f"MLFLOW_TRACKING_URI=sqlite:///{DATABASE}/mlflow.db", f"ROTQUANT_CACHE={CACHE}")


@dataclass
class Kills:
    """Kills so far. lost, twice: finished results that lay there no more, or were computed again."""

    counted: Counter[str] = field(default_factory=Counter)
    moments: list[float] = field(default_factory=list)
    starts: int = 0
    lost: int = 0
    twice: int = 0

    def compare(self, written: dict[Path, int], now: dict[Path, int]) -> None:
        """Count what became of results that were finished before."""
        self.lost += len(written.keys() - now.keys())
        self.twice += sum(now[path] != written[path] for path in written.keys() & now.keys())

    def tell(self, trial: Trial) -> None:
        """Keep the figures."""
        for victim, times in self.counted.items():
            trial.figure(f"kills of {victim}", times)
        trial.figure("moments of kills, seconds after the start", f"{min(self.moments):.1f} to {max(self.moments):.1f}")
        trial.figure("starts for these kills", self.starts)
        trial.figure("finished results computed twice after kills", self.twice)
        trial.check("No finished result is lost by a kill", self.lost == 0, str(self.lost))


def kills(trial: Trial, calm: Undisturbed, count: int, in_one: int, place: Path, so_far: Kills) -> None:
    """Kill so many times at drawn moments, up to `in_one` times on the way to one result."""
    draws = Random(trial.seed)
    victims = [[*VICTIMS][number % len(VICTIMS)] for number in range(count)]
    draws.shuffle(victims)
    project, latest = calm.make(place), 0.9 * calm.seconds
    while victims:
        written: dict[Path, int] = {}
        for victim in victims[:in_one]:
            unlock(project)
            job = Job(project, *WORKFLOW)
            so_far.starts += 1
            moment = faults.kill(job, victim, draws.uniform(0, latest), draws)
            if moment is None:
                trial.say(f"complete before the kill of {victim}")
                latest *= 0.8
                break
            victims.remove(victim)
            so_far.counted[victim] += 1
            so_far.moments.append(moment)
            trial.say(f"{victim} killed after {moment:.1f} s")
            after_a_kill(trial, job, victim)
            now = finished(place)
            so_far.compare(written, now)
            written = now
        so_far.starts += 1
        ends_well(trial, "kills", project, calm)
        so_far.compare(written, finished(place))
        shown = [synced(one) for one in (project, calm.project)]
        trial.check(
            "After kills and a sync MLflow shows each run once and finished", shown[0] == shown[1], str(shown[0])
        )
        empty(project)


def synced(project: Copy) -> list[tuple[str, str]]:
    """What MLflow shows once the results of all tables are logged, those that share some with the default job's too."""
    Job(project, "rotquant", "runs", "sync-tracking").ends()
    return shown_in_mlflow(project.root)


def after_a_kill(trial: Trial, job: Job, victim: str) -> None:
    """Check how a job ends of which a process was killed."""
    status, output = job.ends()
    if victim not in (SNAKEMAKE, ALL):
        said = status == 0 or "Error in rule" in output
        trial.check(f"A kill of {victim} ends in a sentence", said and in_sentences(output), output[-3000:])
    trial.check("No process of a killed job works on", job.is_gone(), str(job.processes))
    trial.check("What a killed job leaves under a name is whole", is_whole(job.root))


def full_disks(trial: Trial, calm: Undisturbed, places: list[str], folder: Path) -> None:
    """Let the disk of a part of the project fill up, for each place at a moment of its own, and then make room."""
    draws, said, moments = Random(trial.seed), 0, []
    for number, where in enumerate(places):
        project = calm.make(folder / f"full{number}")
        (project.root / DATABASE).mkdir()
        with faults.disk(project.root / where) as disk:
            moment = draws.uniform(0, 0.9 * calm.seconds) if number else 0.0
            job = Job(project, *ELSEWHERE, *WORKFLOW)
            faults.wait(job, moment)
            disk.fill()
            moments.append(moment)
            status, output = job.ends()
            told = FULL.search(output)
            said += told is not None
            trial.say(f"{where} full after {moment:.1f} s: {told[0] if told else 'completed'}")
            good = (status == 0 or told is not None) and (in_sentences(output) or where == ".snakemake")
            trial.check(f"A full disk below {where} ends in a sentence or nothing is lost", good, output[-3000:])
            earlier = finished(project.root)
            disk.make_room()
            ends_well(trial, "a full disk", project, calm, *ELSEWHERE)
            kept = {path: finished(project.root).get(path) for path in earlier}
            trial.check("What was finished before the disk was full stays", kept == earlier, str(kept))
            status, output = Job(project, *ELSEWHERE, "rotquant", "runs", "sync-tracking").ends()
            shown = shown_in_mlflow(project.root / DATABASE)
            trial.check("MLflow shows all once there is room", status == 0 and shown == calm.shown, output[-1000:])
    for where, times in Counter(places).items():
        trial.figure(f"full disks below {where}", times)
    trial.figure("full disks that ended in a sentence, the others completed", said)
    trial.figure("moments of full disks, seconds after the start", f"{min(moments):.1f} to {max(moments):.1f}")


def clock(trial: Trial, calm: Undisturbed, folder: Path) -> None:
    """Set the clock back by a day, once between two starts and once in the middle of one.

    Results follow from their names, whatever their dates. A page is not rendered from what is dated in the future.
    """
    project = calm.make(folder / "between")
    Job(project, *WORKFLOW).ends()
    faults.date_later(project)
    trial.check("A clock set back by a day between two starts leaves nothing to do", completes(project))
    published = "workflow/papers/quarot/published/small.csv"
    project.edit(published, "5.47", "6.47")
    status, output = Job(project, *WORKFLOW).ends()
    told = status != 0 and CLOCK in output and in_sentences(output)
    trial.check(
        "A page of numbers that are dated in the future ends in a sentence about the clock", told, output[-3000:]
    )
    faults.date_now(project)
    status, output = Job(project, *WORKFLOW).ends()
    page = (project.root / projects.REPORT).read_text(encoding="utf-8") if status == 0 else ""
    trial.check("No page is taken for current that is older than its numbers", "6.47" in page, output[-3000:])
    trial.check("After the clock was set back nothing runs for ever", completes(project))

    project = calm.make(folder / "amid")
    try:
        wrong = Clock(folder / "clock")
    except Skip as reason:
        trial.say(f"skipped: the clock in the middle of a start: {reason}")
        return
    job = Job(project, *wrong.around, *WORKFLOW)
    faults.wait(job, Random(trial.seed).uniform(0.3, 0.9) * calm.seconds)
    wrong.set_back(project)
    status, output = job.ends()
    good = in_sentences(output) and (status == 0 or CLOCK in output)
    trial.check("A clock set back in the middle ends in a sentence or completes", good, output[-3000:])
    faults.date_now(project)
    ends_well(trial, "the clock was set back", project, calm)


def at_once(trial: Trial, calm: Undisturbed, folder: Path) -> None:
    """Run two at once on one project."""
    project = calm.make(folder / "locked")
    first = Job(project, *WORKFLOW)
    faults.soon(lambda: not first.runs or [*(project.root / ".snakemake/locks").glob("*.lock")], faults.PATIENCE)
    status, output = Job(project, *WORKFLOW).ends()
    refused = status != 0 and LOCKED in output and in_sentences(output)
    trial.check("A second Snakemake on one project ends in a sentence", refused, output[-1000:])
    status, output = first.ends()
    trial.check("The first Snakemake completes", status == 0 and completes(project), output[-1000:])

    pairs = {"two Snakemakes without a lock": (*WORKFLOW, "--nolock"), "Snakemake and `rotquant runs execute`": EXECUTE}
    for number, (what, other) in enumerate(pairs.items()):
        project = calm.make(folder / f"two{number}")
        both = [Job(project, *WORKFLOW, "--nolock"), Job(project, *other)]
        said = [job.ends() for job in both]
        told = said[0][1] + said[1][1]
        trial.check(
            f"Two at once end without a traceback: {what}", all(in_sentences(output) for _, output in said), told
        )
        trial.check("What two at once leave under a name is whole", is_whole(project.root), told)
        trial.say(f"{what} end with {[status for status, _ in said]}")
        ends_well(trial, "two at once", project, calm)

    project = calm.make(folder / "configurations")
    project.write("more.yaml", "seeds: [0, 1, 2]\n")
    both = [Job(project, *WORKFLOW, "--nolock", *more) for more in ((), ("--configfile", "more.yaml"))]
    said = [job.ends() for job in both]
    ended = all(in_sentences(output) for _, output in said)
    trial.check("Two configurations at once end without a traceback", ended, said[0][1] + said[1][1])
    status, output = Job(project, *WORKFLOW).ends()
    found = projects.digests(project.root)
    same = status == 0 and calm.digests.items() <= found.items()
    trial.check("After two configurations at once each gets its own digests", same, output[-2000:])


def read_only(trial: Trial, calm: Undisturbed, folder: Path) -> None:
    """Let results be read-only, before anything is computed and after all is."""
    project = calm.make(folder / "readonly")
    refuse_read_only(trial, project)
    ends_well(trial, "read-only results", project, calm)
    take_read_only(trial, project)


def refuse_read_only(trial: Trial, project: Copy) -> None:
    """Start on results that are read-only before anything is computed."""
    for what, command in (("Snakemake", WORKFLOW), ("`rotquant runs execute`", EXECUTE)):
        with faults.read_only(project.root / "results"):
            status, output = Job(project, *command).ends()
        good = status != 0 and output.count("Read-only file system") == 1 and in_sentences(output)
        trial.check(f"{what} on results that are read-only ends in one sentence", good, output[-3000:])
        trial.check("Nothing is computed for results that are read-only", not finished(project.root))


def take_read_only(trial: Trial, project: Copy) -> None:
    """Start on results that are read-only and complete."""
    with faults.read_only(project.root / "results"):
        trial.check("Complete results that are read-only are no error", completes(project))


def localhost(trial: Trial, calm: Undisturbed, folder: Path) -> None:
    """Run where every packet that leaves this machine and every socket that listens is seen."""
    project = calm.make(folder)
    commands = {"the default job": WORKFLOW}
    if [*folder.glob("models/*/*")]:  # not where they are stand-ins
        text = ("--corpus", "text")
        commands["rotquant quantize"] = ("rotquant", "quantize", "models/small", "-o", "quantized", *text)
        commands["rotquant evaluate"] = ("rotquant", "evaluate", "quantized", *text)
    try:
        for what, command in commands.items():
            seen = sockets.watch(project, *command)
            trial.check(f"{what} works without a network", seen.status == 0, seen.output[-2000:])
            stays_inside(trial, what, seen)
        seen = sockets.watch(project, "rotquant", "runs", "ui", serves=True)
        stays_inside(trial, "rotquant runs ui", seen)
        trial.check("The interface listens on localhost", seen.listening == {"127.0.0.1"}, seen.output[-2000:])
        listens = "import socket; s = socket.socket(); s.bind(('', 0)); s.listen(); "
        for what, tried in (
            ("connection", "socket.create_connection(('198.51.100.1', 80), 1)"),
            ("name that is looked up", "socket.gethostbyname('example.org')"),
        ):
            seen = sockets.watch(project, "python", "-c", listens + tried)
            trial.check(f"The watch sees a {what}", seen.packets > 0, str(seen))
            trial.check("The watch sees a socket for everybody", "tcp 0.0.0.0" in seen.opened, str(seen))
    except Skip as reason:
        trial.say(f"skipped: a network that leads nowhere: {reason}")


def stays_inside(trial: Trial, what: str, seen: Seen) -> None:
    """Check that a command reached for nothing."""
    trial.check("No packet leaves this machine", seen.packets == 0, f"{what}: {seen.packets}")
    trial.check("No socket but on localhost", not seen.opened, f"{what}: {seen.opened}")


def body(trial: Trial) -> None:
    """All faults; the quick form tries a few of each on projects with stand-ins for what computes."""
    namespaces.enter("mount")
    with tempfile.TemporaryDirectory() as made, faults.ending():
        folder = Path(made)
        so_far = Kills()
        if trial.quick:
            small = undisturbed(trial, mechanics, folder / "mechanics", partial(refuse_read_only, trial))
            take_read_only(trial, small.project)
            kills(trial, small, 2, 2, folder / "killed", so_far)
            so_far.tell(trial)
            full_disks(trial, small, ["results"], folder)
            return
        small = undisturbed(trial, mechanics, folder / "mechanics")
        whole = undisturbed(trial, shipped, folder / "shipped")
        real = undisturbed(trial, tiny, folder / "tiny")
        localhost(trial, whole, folder / "network")
        localhost(trial, real, folder / "commands")
        read_only(trial, small, folder)
        at_once(trial, real, folder)
        clock(trial, real, folder)
        places = ["results", "results", "results", ".snakemake", "logs", "reports", DATABASE, CACHE]
        full_disks(trial, real, places, folder)
        kills(trial, whole, 8, 8, folder / "killed", so_far)
        kills(trial, real, 12, 6, folder / "killed-small", so_far)
        so_far.tell(trial)


if __name__ == "__main__":
    run("chaos", "Faults while the workflow runs.", body)
