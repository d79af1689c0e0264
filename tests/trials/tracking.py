"""Trial of a tracking server that a team shares: MLflow on PostgreSQL, by itself and behind an `mlflow server`.

What a store shows is read from its tables, and compared with what one process alone shows of the same files in SQLite.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from reproduction.identity.names import key_in
from tests.helpers.project import CONFIG, Copy
from tests.trials import postgresql
from tests.trials.faults import loggers_ended
from tests.trials.group import SYNC, alone, clone, compute, computed, some_tables, tables_of
from tests.trials.postgresql import Connections, Server
from tests.trials.served import mlflow_server
from tests.trials.shown import Shown, count_runs, shown, some_runs, unfinished
from tests.trials.trial import Skip, Trial, run
from tests.trials.writers import Ended, Writers

ONE_SENTENCE = "A writer that loses the server says so in one sentence"
COMPLETE = "A later `rotquant runs sync-tracking` completes to exactly the result files"
UNCHANGED = "Started again, `rotquant runs sync-tracking` changes nothing"


@dataclass
class Stage:
    """What every part of the trial works with: a server, a computed project, and what should be shown of it."""

    trial: Trial
    folder: Path
    server: Server
    writers: Writers
    project: Copy
    reference: Shown

    def show(self, uri: str, *commands: str, project: Copy | None = None) -> list[Ended]:
        """Run commands of a project on a store, all at once."""
        return self.writers.run([(project or self.project, one) for one in commands], {"MLFLOW_TRACKING_URI": uri})

    def shown(self, database: str, name: str = "group") -> Shown:
        """What a database shows of a project's paper."""
        with self.server.connected(database) as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")  # all of it as it was at one moment
            return shown(cursor, f"{name}/quarot")

    def complete(self, what: str, database: str) -> None:
        """Check that a database shows exactly the result files, as one writer alone shows them."""
        problem = self.shown(database).missing(self.reference)
        self.trial.check(what, not problem, problem)

    def clean(self, what: str, ended: Sequence[Ended]) -> None:
        """Check that commands ended well and without a warning."""
        for one in ended:
            self.trial.check(what, one.status == 0 and not one.sentences, f"{one.command}: {one.status}, {one.said}")

    def settled(self, uri: str, database: str) -> None:
        """Check that showing the files makes the database complete, and that doing it again writes nothing."""
        self.clean("A sync that nothing disturbs ends well", self.show(uri, SYNC))
        self.complete(COMPLETE, database)
        if self.trial.quick and UNCHANGED in self.trial.checks:  # once is enough
            return
        before = self.server.rows(database)
        self.show(uri, SYNC)
        changed = before ^ self.server.rows(database)
        self.trial.check(UNCHANGED, not changed, f"{len(changed)} rows, of {sorted({row[0] for row in changed})}")


def main(trial: Trial) -> None:
    """Try all of it; the quick form has fewer runs and writers, and less of what is killed."""
    draw = random.Random(trial.seed)
    postgresql.programs()
    try:
        folder = Path(tempfile.mkdtemp(prefix="tracking-"))
    except OSError as error:
        raise Skip(f"there is no place for temporary files ({error.strerror}).") from None
    writers = Writers(folder)
    try:
        with postgresql.running() as server:
            trial.versions |= {"postgresql": server.version.split()[0]}
            trial.versions |= {name: version(name) for name in ("mlflow", "SQLAlchemy", "psycopg2-binary")}
            tables, seeds = (2, 1) if trial.quick else (10, 2)
            project = computed(folder / "project", writers, tables, seeds)
            stage = Stage(trial, folder, server, writers, project, alone(project, writers))
            trial.figure("tables", len(tables_of(project)))
            trial.figure("MLflow runs that are to be shown", len(stage.reference.runs))
            many_writers(stage)
            server.fresh("tables", like="load")  # MLflow takes seconds to make the tables of an empty database
            server.execute("TRUNCATE runs CASCADE", "tables")
            jobs(stage)
            server_lost(stage)
            sync_killed(stage, draw)
            if not trial.quick:
                two_projects(stage)
                clones(stage)
                refusals(stage)
            tracking_server(stage)
    finally:
        writers.close()
        shutil.rmtree(folder)


def many_writers(stage: Stage) -> None:
    """Many processes on a fresh database, which log the same and different tables of one project at once."""
    trial, uri = stage.trial, stage.server.fresh("load")
    count = 6 if trial.quick else 32
    tables = tables_of(stage.project)
    each = [f"{SYNC} {table}" for table in tables]
    commands = [*each, *each, *[SYNC] * count][: count - count // 8] + [SYNC] * (count // 8)
    started = time.monotonic()
    with Connections(stage.server, "load") as connections:
        ended = stage.show(uri, *commands)
    trial.figure("writers at once", len(ended))
    trial.figure("seconds until the last of them ended", round(time.monotonic() - started, 1))
    trial.figure("rows that they left", len(stage.server.rows("load")))
    trial.figure("most connections at once", connections.most)
    trial.figure("connections that PostgreSQL takes", stage.server.max_connections)
    stage.clean("A writer on a fresh database ends well, its migration included", ended)
    stage.complete("After all writers at once nothing is lost and nothing is shown twice", "load")
    trial.figure("runs made at the same time by several writers and dropped", stage.shown("load").deleted)
    # One waits for its turn to open, and MLflow reads by one while it writes by another; a closed one lingers.
    most = min(4 * len(ended), stage.server.max_connections * 3 // 4)
    trial.check("A writer has few connections, and a quarter of PostgreSQL's stay free", connections.most <= most)
    stage.settled(uri, "load")


def jobs(stage: Stage) -> None:
    """Jobs that log while they compute, on PostgreSQL: undisturbed, and with the server lost in the middle."""
    trial = stage.trial
    for place, crash in enumerate((False, True)):
        database = f"jobs{place}"
        uri = stage.server.fresh(database, like="tables")
        project = clone(stage.project, stage.folder / database)
        shutil.rmtree(project.root / "results")
        stage.writers.start([(project, "runs execute --jobs 4")], {"MLFLOW_TRACKING_URI": uri})
        if crash:
            some_runs(stage.server, database, count_runs(stage.server, "tables") + 4)
            stage.server.crash(signal.SIGKILL)
        (ended,) = stage.writers.wait()
        said = [line for line in ended.said.splitlines() if line.startswith("warning:")]
        trial.check("Jobs end well, with and without the server", ended.status == 0 and len(said) == crash, ended.said)
        no_password(stage, ended)
        if crash:
            stage.server.start()
            loggers_ended(project.root)  # one that lives works on its runs, and a sync leaves them to it
        else:
            live = stage.shown(database)
            keys = {key for key, one in live.runs.items() if one["status"] == "FINISHED"}
            lost = {key for key in stage.reference.runs if not key.startswith("quarot_")} - keys
            trial.check("All that jobs compute is logged while they run", not lost, ", ".join(lost))
            twice = [key for key, count in live.keys.items() if count > 1]
            trial.check("No job's result is shown twice", not twice, ", ".join(twice))
        stage.clean("A sync that nothing disturbs ends well", stage.show(uri, SYNC, project=project))
        keys = stage.shown(database).keys
        wrong = {
            key for key in {*keys, *stage.reference.keys} if (keys.get(key), stage.reference.keys.get(key)) != (1, 1)
        }
        trial.check("After jobs a sync completes to exactly their results", not wrong, f"{wrong}: {keys}")


def server_lost(stage: Stage) -> None:
    """The server killed, shut down, and not there from the start, while processes write."""
    trial, tables = stage.trial, tables_of(stage.project)
    for place, how in enumerate([signal.SIGKILL] if trial.quick else [signal.SIGKILL, signal.SIGQUIT, signal.SIGKILL]):
        database = f"lost{place}"
        uri = stage.server.fresh(database, like="tables")
        commands = [f"{SYNC} {table}" for table in tables[:7]] + [SYNC]
        before = count_runs(stage.server, database)
        stage.writers.start([(stage.project, one) for one in commands], {"MLFLOW_TRACKING_URI": uri})
        some_runs(stage.server, database, before + 3 + 8 * place)
        stage.server.crash(how)
        lost_in_a_sentence(stage, stage.writers.wait())
        lost_in_a_sentence(stage, stage.show(uri, f"{SYNC} {tables[0]}"))
        stage.server.start()
        some = count_runs(stage.server, database) - before
        trial.figure(f"runs shown when the server was lost, {how.name}, {place + 1}", some)
        stage.settled(uri, database)


def lost_in_a_sentence(stage: Stage, ended: Sequence[Ended]) -> None:
    """Check writers whose server was lost."""
    for one in ended:
        right = one.status == 2 or not one.sentences  # it was done before
        quiet = len(one.sentences) <= 1 and "Traceback" not in one.said
        short = len(one.said.splitlines()) <= 1 + 2 * len(tables_of(stage.project))
        stage.trial.check(ONE_SENTENCE, right and quiet and short, f"{one.command}: {one.status}, {one.said}")
        no_password(stage, one)


def sync_killed(stage: Stage, draw: random.Random) -> None:
    """A sync killed at random moments, and in the middle of a run that it writes."""
    trial, uri = stage.trial, stage.server.fresh("killed", like="tables")
    started = time.monotonic()
    stage.show(stage.server.fresh("whole", like="tables"), SYNC)
    whole = time.monotonic() - started
    moments = [draw.uniform(0.05, 0.9) * whole for _ in range(2 if trial.quick else 8)]
    for moment in moments:
        stage.writers.start([(stage.project, SYNC)], {"MLFLOW_TRACKING_URI": uri})
        time.sleep(moment)
        stage.writers.kill()
        stage.writers.wait()
        twice = [key for key, count in stage.shown("killed").keys.items() if count > 1]
        trial.check("A sync killed at a random moment leaves no run twice", not twice, ", ".join(twice))
    left = 0
    for _ in range(1 if trial.quick else 3):
        stage.server.execute("DELETE FROM tags WHERE key = 'rotquant.result'", "killed")  # so that there is work to do
        left += killed_in_a_run(stage, uri)
    trial.figure("syncs killed at random moments", len(moments))
    trial.figure("syncs killed in the middle of a run that they wrote", left)
    stage.server.execute("UPDATE tags SET value = 'elsewhere 1 1' WHERE key = 'rotquant.logger'", "killed")
    found = unfinished(stage.server, "killed")
    stage.show(uri, SYNC)
    trial.check("A young unfinished run of another machine is left alone", unfinished(stage.server, "killed") == found)
    stage.server.execute("UPDATE runs SET start_time = 0 WHERE status = 'RUNNING'", "killed")
    stage.show(uri, SYNC)
    found = stage.shown("killed").unfinished
    trial.check("An unfinished run that is days old is deleted", found == 0, f"{found} are left")
    stage.settled(uri, "killed")


def killed_in_a_run(stage: Stage, uri: str) -> bool:
    """Start a sync and kill it while a run that it writes is not finished; whether that was met."""
    before = unfinished(stage.server, "killed")
    stage.writers.start([(stage.project, SYNC)], {"MLFLOW_TRACKING_URI": uri})
    (process,) = stage.writers.processes
    deadline = time.monotonic() + 60
    try:
        with suppress(ProcessLookupError):  # it has ended, and has been waited for by who forked it
            while time.monotonic() < deadline:
                os.kill(process, signal.SIGSTOP)
                if unfinished(stage.server, "killed") > before:
                    return True
                os.kill(process, signal.SIGCONT)
                time.sleep(0.003)
        return False
    finally:
        stage.writers.kill()
        stage.writers.wait()


def two_projects(stage: Stage) -> None:
    """Two projects of one server, whose tables have the same names and some of the same runs."""
    trial, uri = stage.trial, stage.server.fresh("projects", like="tables")
    other = clone(stage.project, stage.folder / "other")
    other.set_config({**CONFIG, "tracking": "other-group"})
    other.set_tables(some_tables(2, row="Another row"))
    compute(other, stage.writers)
    for project in (stage.project, other, stage.project):
        stage.clean("Two projects show their runs on one server", stage.show(uri, SYNC, project=project))
    ours, theirs = stage.shown("projects"), stage.shown("projects", "other-group")
    stage.complete("A project shows exactly its own files beside another", "projects")
    other.set_tables(some_tables(1, row="Renamed"))
    compute(other, stage.writers)
    stage.show(uri, SYNC, project=other)
    trial.check("What another project shows, renames or deletes changes nothing", stage.shown("projects") == ours)
    changed = stage.shown("projects", "other-group")
    trial.check("It changes its own", changed != theirs and changed.runs.keys() <= theirs.runs.keys())
    unnamed = clone(stage.project, stage.folder / "unnamed")
    unnamed.set_config({**CONFIG, "tracking": True})
    (sync,) = stage.show(uri, SYNC, project=unnamed)
    trial.check(
        "A project without a name writes nothing to a server, and says what to write",
        sync.status == 2 and len(sync.sentences) == 1 and "`tracking: NAME`" in sync.sentences[0],
        sync.said,
    )


def clones(stage: Stage) -> None:
    """Two clones of one project: with the same files, and with some computed again later."""
    trial, uri = stage.trial, stage.server.fresh("clones", like="tables")
    second = clone(stage.project, stage.folder / "clone")
    stage.show(uri, SYNC)
    before = stage.shown("clones")
    stage.show(uri, SYNC, project=second)
    trial.check("The same files in two clones are shown once", stage.shown("clones") == before)
    second.edit("workflow/reproduction/run/stages/runs.py", "FACTOR = 1.0", "FACTOR = 1.5")
    shutil.rmtree(second.root / "results/runs")
    compute(second, stage.writers)
    stage.show(uri, SYNC, project=second)
    later = stage.shown("clones")
    measured = {key_in(path.stem) for path in second.root.glob("results/runs/*.json")}
    replaced = all(later.runs[key]["metrics"] != before.runs[key]["metrics"] for key in measured)
    twice = [key for key, count in later.keys.items() if count > 1]
    trial.check("Of a run that two clones computed the later result is shown, once", replaced and not twice)
    stage.show(uri, SYNC)
    again = stage.shown("clones")
    trial.check("The clone with the earlier result does not take it back", again.identities == later.identities)


def refusals(stage: Stage) -> None:
    """What a server refuses: each a sentence, without the password."""
    server, trial = stage.server, stage.trial
    server.execute(f"CREATE ROLE narrow LOGIN CONNECTION LIMIT 1 PASSWORD '{server.password}'")
    server.execute("CREATE DATABASE narrow OWNER narrow")
    cases = {
        "authentication failed": server.uri("load", password="not-" + server.password),
        "does not exist": server.uri("nothing"),
        "could not translate host name": server.uri("load", host="no-such-host.invalid"),
        "too many connections": server.uri("narrow", user="narrow"),
    }
    with closing(postgresql.psycopg2.connect(cases["too many connections"])):
        for said, uri in cases.items():
            (sync,) = stage.show(uri, SYNC)
            right = len(sync.sentences) == 1 and said in sync.sentences[0] and len(sync.said.splitlines()) == 1
            trial.check("What a server refuses is one sentence that says why", sync.status == 2 and right, sync.said)
            no_password(stage, sync)


def tracking_server(stage: Stage) -> None:
    """The same behind `mlflow server`, by several clones of a project."""
    trial, uri = stage.trial, stage.server.fresh("served")
    with mlflow_server(stage.folder / "server", uri, 1 if trial.quick else 4) as address:
        tables, members = tables_of(stage.project), 2 if trial.quick else 4
        others = (clone(stage.project, stage.folder / f"member {place}") for place in range(1, members))
        clones = [stage.project, *others]
        count = 4 if trial.quick else 32
        commands = [SYNC, *(f"{SYNC} {table}" for table in tables)] * count
        writers = [(clones[place % members], commands[place // members]) for place in range(count)]
        started = time.monotonic()
        patient = {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
        with Connections(stage.server, "served") as connections:
            ended = stage.writers.run(writers, patient)
        trial.figure("writers at once, through one mlflow server", len(ended))
        trial.figure("clones of the project that they belong to", members)
        trial.figure(
            "seconds until the last of them ended, through one mlflow server", round(time.monotonic() - started)
        )
        trial.figure("most connections at once, of one mlflow server", connections.most)
        stage.clean("A writer through an mlflow server ends well", ended)
        stage.complete(
            "After all writers through an mlflow server nothing is lost and nothing is shown twice", "served"
        )
        trial.figure("runs made twice and dropped, through one mlflow server", stage.shown("served").deleted)
        stage.settled(address, "served")
        if not trial.quick:
            behind_it(stage, address)


def behind_it(stage: Stage, address: str) -> None:
    """The database lost behind an mlflow server."""
    stage.server.execute("DELETE FROM tags WHERE key = 'rotquant.result'", "served")
    before = count_runs(stage.server, "served")
    commands = [f"{SYNC} {table}" for table in tables_of(stage.project)[:7]] + [SYNC]
    stage.writers.start([(stage.project, one) for one in commands], {"MLFLOW_TRACKING_URI": address})
    some_runs(stage.server, "served", before + 8)
    stage.server.crash()
    lost_in_a_sentence(stage, stage.writers.wait())
    stage.server.start()
    stage.settled(address, "served")


def no_password(stage: Stage, ended: Ended) -> None:
    """Check that a command printed no password."""
    stage.trial.check("No message names the password", stage.server.password not in ended.said, ended.said)


if __name__ == "__main__":
    run("tracking", __doc__ or "", main)
