"""A PostgreSQL of a trial's own, below a temporary folder, on a free port of this machine alone."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg2

from tests.trials.namespaces import enter, with_packages
from tests.trials.trial import Skip

ADMIN, WRITER = "admin", "writer"


class Server:
    """A server with Debian's settings, 100 connections among them; `writer` has a password and owns its databases."""

    def __init__(self, folder: Path) -> None:
        self.password = secrets.token_hex(12)
        self.folder, self.data = folder, folder / "data"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._programs, self._process = programs(), None
        # PostgreSQL refuses to run as root: then nobody has it, and the folder.
        nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if nobody else {}
        secret = folder / "password"
        secret.write_text(self.password)
        if nobody:
            for path in (folder, secret):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        made = self._run(
            "initdb",
            "-D",
            self.data,
            "-U",
            ADMIN,
            "-A",
            "scram-sha-256",
            "--pwfile",
            secret,
            "--locale=C",
            "-E",
            "UTF8",
        )
        if made.returncode != 0:
            raise Skip(f"PostgreSQL's initdb ends with: {made.stdout.strip().splitlines()[-1]}.")

    @property
    def version(self) -> str:
        """Its version."""
        return str(self.query("SHOW server_version")[0][0])

    @property
    def max_connections(self) -> int:
        """The most connections that it takes."""
        return int(self.query("SHOW max_connections")[0][0])

    def uri(self, database: str, user: str = WRITER, password: str | None = None, host: str = "127.0.0.1") -> str:
        """A database as MLFLOW_TRACKING_URI names it."""
        return f"postgresql://{user}:{password or self.password}@{host}:{self.port}/{database}"

    def fresh(self, database: str, like: str = "template1") -> str:
        """The address of a new database, empty or a copy of another."""
        self.execute(f"CREATE DATABASE {database} OWNER {WRITER} TEMPLATE {like}")
        return self.uri(database)

    def start(self) -> None:
        """Start it, also after a crash, and wait until it answers."""
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self.folder}"]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:  # one that still goes down refuses another
                command = [self._programs / "postgres", "-D", self.data, "-p", str(self.port), *options]
                with (self.folder / "log").open("a") as log:
                    self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **self._user)
            with suppress(psycopg2.OperationalError):
                self.query("SELECT 1")
                return
            time.sleep(0.1)
        raise Skip(f"PostgreSQL does not start: {(self.folder / 'log').read_text().splitlines()[-1]}.")

    def crash(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill its first process, or shut down at once (SIGQUIT)."""
        if self._process:
            self._process.send_signal(how)
            self._process.wait()

    def query(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        with self.connected(database) as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def execute(self, statement: str, database: str = "postgres") -> int:
        """The number of rows that a statement changes."""
        with self.connected(database) as cursor:
            cursor.execute(statement)
            return cursor.rowcount

    def rows(self, database: str) -> set[tuple[str, str, str]]:
        """Each row of a database's tables: its table, place and the transaction that wrote it, all new once it changes.

        PostgreSQL's own counters will not do: a server process that idles keeps what it counted back for ten seconds.
        """
        tables = self.query("SELECT relname FROM pg_stat_user_tables", database)
        rows = (
            self.query(f"SELECT '{table}', ctid::text, xmin::text FROM \"{table}\"", database) for (table,) in tables
        )
        return {row for of_table in rows for row in of_table}

    @contextmanager
    def connected(self, database: str) -> Iterator[Any]:
        """A cursor of the administrator's, each statement a transaction."""
        connection = psycopg2.connect(self.uri(database, ADMIN), connect_timeout=5)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()

    def _run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(self._programs / program), *map(str, arguments)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, text=True, cwd=self.folder, **streams, **self._user)


@contextmanager
def running() -> Iterator[Server]:
    """A server, ended and removed afterwards.

    Raises:
        Skip: this machine has no PostgreSQL, and none can be had.
    """
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    try:
        server = Server(folder)
        try:
            server.start()
            server.execute(f"CREATE ROLE {WRITER} LOGIN PASSWORD '{server.password}'")
            yield server
        finally:
            server.crash(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Connections:
    """The most connections to a database that were seen at once."""

    def __init__(self, server: Server, database: str) -> None:
        self.most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(server, database))

    def __enter__(self) -> "Connections":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self, server: Server, database: str) -> None:
        with server.connected("postgres") as cursor:
            while not self._ended.wait(0.01):
                cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", (database,))
                self.most = max(self.most, cursor.fetchone()[0])


def programs() -> Path:
    """The folder of PostgreSQL's programs: in the path, Debian's, or unpacked from its packages.

    To be asked first of all: the program may be started anew in a mount namespace (`enter`).

    Raises:
        Skip: there are none.
    """
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    if not (places := _installed()):
        enter("mount")
        with_packages("postgresql")
        places = _installed()
    return places[-1]


def _installed() -> list[Path]:
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"))
