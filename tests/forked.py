"""Snakemake, forked from one process that has imported it: two thirds of a dry run are Snakemake's imports.

The process has imported nothing of the project, so what it forks imports the package of the copy that it works in.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

WAITING = """
import json, os, sys
import matplotlib, pandas, pydantic, smart_open, snakemake.cli
import snakemake_executor_plugin_slurm, snakemake_storage_plugin_s3

sys.dont_write_bytecode = True
assert not any(name.split(".")[0] == "rotquant" for name in sys.modules)
for line in sys.stdin:
    folder, environment, arguments, output = json.loads(line)
    process = os.fork()
    if process == 0:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        said = os.open(output, os.O_WRONLY)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
            os.dup2(file, stream)
        sys.path[0] = folder
        sys.argv = arguments
        snakemake.cli.main()
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def snakemake(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run Snakemake in a folder; its exit status and its output, both streams together."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        server = _server()
        asked = [str(folder), environment, ["snakemake", *arguments], output.name]
        print(json.dumps(asked), file=server.stdin, flush=True)
        process = int(server.stdout.readline())
        try:
            status = int(server.stdout.readline())
        except BaseException:  # pytest's limit of time
            os.killpg(process, signal.SIGKILL)
            server.stdout.readline()
            raise
        return status, output.read()


@cache
def _server() -> subprocess.Popen:
    """It ends with its input, that is with this process."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", WAITING], cwd="/", text=True, **streams)
