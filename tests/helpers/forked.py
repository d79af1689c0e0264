"""Snakemake and its jobs, forked from processes that have imported what they import: more than half of their time.

These have imported nothing of the project, so what they fork imports the package of the copy that it works in. A
command is `snakemake`, or `rotquant` as the shell of Snakemake finds it, before the environment's own; `torch` runs the
code that it is given where torch and transformers are imported. Its arguments, environment, working folder and streams
go to a process that forks, and its exit status comes back. What a test starts by itself, to kill it or as a user does,
is a process of its own all along.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: What a process imports before it forks, and what a child runs.
KINDS = {
    "snakemake": (
        "import matplotlib, pandas, pydantic, smart_open, snakemake.cli\n"
        "import snakemake_executor_plugin_slurm, snakemake_storage_plugin_s3",
        "sys.executable = python; snakemake.cli.main()",
    ),
    "rotquant": (
        "import jinja2, matplotlib.backends.backend_svg, pandas, pyarrow.parquet, pydantic, rich.console\n"
        "import scipy.optimize, typer, yaml",
        "from rotquant.cli import app; app()",
    ),
    "torch": (
        "import torch, transformers.activations, transformers.generation.utils, transformers.models.auto",
        "exec(sys.argv[1]); sys.exit()",
    ),
}

#: A connection brings the caller's streams with the length of a JSON object, then that, and takes the status away. A
#: command ends with its caller.
SERVER = """
import gc, json, os, select, signal, socket, sys
{imports}

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
    if connection in select.select([connection, os.pidfd_open(process)], [], [])[0]:
        os.killpg(process, signal.SIGKILL)
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
    {call}


_, place, python = sys.argv
listening = socket.socket(socket.AF_UNIX)
listening.bind(place)
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
asked = json.dumps([[{name!r}, *sys.argv[1:]], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(connection, [b"%8d" % len(asked)], [0, 1, 2])
connection.sendall(asked)
sys.exit(int(connection.recv(8) or 1))
"""


def run(name: str, folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run a command in a folder: `snakemake`, `rotquant` as a job, or `torch` with code for it.

    Returns:
        Its exit status and its output, both streams together.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    together = (name,) if name == "torch" else ("snakemake", "rotquant")
    done = subprocess.run([_commands(*together) / name, *arguments], cwd=folder, env=environment, text=True, **streams)
    return done.returncode, done.stdout


@cache
def _commands(*names: str) -> Path:
    """A folder that Snakemake takes for its environment's: its commands are forked from processes started here."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts = {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
    for name in names:
        imports, call = KINDS[name]
        place = str(folder / f"{name}.socket")
        code = SERVER.format(imports=imports, call=call)
        command = [sys.executable, "-c", code, place, str(folder / "python")]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, cwd="/", env=alone, text=True, stdout=subprocess.PIPE)
        atexit.register(server.kill)
        assert server.stdout.readline(), "the process that forks commands has ended"
        texts[name] = COMMAND.format(python=sys.executable, place=place, name=name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder
