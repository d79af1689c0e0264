"""Snakemake and its jobs, forked from processes that have imported what they import: more than half of their time.

These have imported nothing of the project, so what they fork imports the package of the copy that it works in. A job is
the command `rotquant` as Snakemake's shell finds it, before the environment's own: its arguments, environment, working
folder and streams go to a process that forks, and its exit status comes back. What a test starts by itself, to kill it
or as a user does, is a process of its own all along.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SNAKEMAKE = """
import gc, json, os, sys
import matplotlib, pandas, pydantic, smart_open, snakemake.cli
import snakemake_executor_plugin_slurm, snakemake_storage_plugin_s3

gc.set_threshold(20_000, 20, 100)
gc.freeze()  # no process that is forked looks through what is imported here, nor copies it thereby
sys.dont_write_bytecode = True
assert not any(name.split(".")[0] in ("rotquant", "reproduction") for name in sys.modules)
for line in sys.stdin:
    folder, environment, arguments, output, python = json.loads(line)
    process = os.fork()
    if process == 0:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        said = os.open(output, os.O_WRONLY)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
            os.dup2(file, stream)
        sys.path[:1] = environment["PYTHONPATH"].split(":")
        sys.argv = arguments
        sys.executable = python
        snakemake.cli.main()
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""

#: A connection brings the caller's streams with the length of a JSON object, then that, and takes the status away.
JOBS = """
import gc, json, os, signal, socket, sys
import jinja2, matplotlib.backends.backend_svg, pandas, pyarrow.parquet, pydantic, rich.console, scipy.optimize
import typer, yaml

gc.set_threshold(20_000, 20, 100)
gc.freeze()  # no process that is forked looks through what is imported here, nor copies it thereby
sys.dont_write_bytecode = True
assert not any(name.split(".")[0] in ("rotquant", "reproduction") for name in sys.modules)


def serve(connection):
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as rest:
        arguments, environment, folder = json.loads(rest.read(int(length)))
    process = os.fork()
    if process == 0:
        connection.close()
        run(arguments, environment, folder, streams)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(b"%d" % (status if status >= 0 else 128 - status))


def run(arguments, environment, folder, streams):
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(streams):
        os.dup2(file, stream)
        os.close(file)
    sys.path[:1] = environment["PYTHONPATH"].split(":")
    sys.argv = arguments
    from rotquant.cli import app

    app()


listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print(flush=True)
while True:
    connection, _ = listening.accept()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that serve
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        serve(connection)
        os._exit(0)
    connection.close()
"""

#: Isolated and without site packages: the rest is what a job's command costs.
COMMAND = """#!{python} -IS
import json, os, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({place!r})
asked = json.dumps([["rotquant", *sys.argv[1:]], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(connection, [b"%8d" % len(asked)], [0, 1, 2])
connection.sendall(asked)
sys.exit(int(connection.recv(8) or 1))
"""


def snakemake(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run Snakemake in a folder; its exit status and its output, both streams together."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        server = _server()
        asked = [str(folder), environment, ["snakemake", *arguments], output.name, str(_commands() / "python")]
        print(json.dumps(asked), file=server.stdin, flush=True)
        process = int(server.stdout.readline())
        try:
            status = int(server.stdout.readline())
        except BaseException:  # pytest's limit of time
            os.killpg(process, signal.SIGKILL)
            server.stdout.readline()
            raise
        return status, output.read()


def rotquant(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run `rotquant` in a folder as a job; its exit status and its output, both streams together."""
    done = subprocess.run(
        [_commands() / "rotquant", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


@cache
def _server() -> subprocess.Popen:
    """It ends with its input, that is with this process."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SNAKEMAKE], cwd="/", text=True, **streams)


@cache
def _commands() -> Path:
    """A folder that Snakemake takes for its environment's: its `rotquant` is a job of the process started here."""
    folder = Path(tempfile.mkdtemp())
    place = str(folder / "jobs")
    command, alone = [sys.executable, "-c", JOBS, place], {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd="/", env=alone, text=True, stdout=subprocess.PIPE)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    texts = {
        "rotquant": COMMAND.format(python=sys.executable, place=place),
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    assert server.stdout.readline(), "the process that forks jobs has ended"
    return folder
