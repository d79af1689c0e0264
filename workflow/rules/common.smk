# What all rules share: the plan of what is to be computed, and how a command is run. Everything is computed by
# `rotquant ...` commands, which can be run by hand with --config in place of --plan.
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rotquant.foundation.errors import RotquantError
from reproduction.identity.names import key_in
from reproduction.planning.current import current_plan
from reproduction.run.plan import occupied
from reproduction.run.tracking.line import settled

# Snakemake makes objects by the million, and hardly a cycle among them.
gc.set_threshold(1_000_000, 50, 100)


def sentence(function, *arguments):
    """Call a function of the library; its error ends this Snakemake with one sentence.

    Around an error in an input function Snakemake prints where it was raised, which tells a user nothing.
    """
    try:
        return function(*arguments)
    except RotquantError as error:
        raise SystemExit(f"rotquant: {error}") from None


# The files of --configfile are read there and not taken as `config`, where Snakemake has merged them: a file that stands
# alone would show no trace of that. The plan's file is named by all that it follows from, so a running job's stays.
PLAN = sentence(current_plan, Path.cwd(), workflow.overwrite_configfiles, workflow.config_settings.config)
FILES = PLAN.results()

# Where a machine has several GPUs each job sees one of them, unless the configuration names it.
SHARES = " ROTQUANT_SHARES_GPUS=1" if PLAN.device in ("cuda", "auto") else ""

# A job is a command in a child of a process that has imported what it needs (workflow/reproduction/run/server.py). That
# process, and the one that logs what they say to MLflow, end with this Snakemake, however it ends.
ENDS = f"ROTQUANT_ENDS_WITH={os.getpid()} ROTQUANT_LOGS_WITH={os.getpid()}"
shell.prefix(f"export {ENDS} ROTQUANT_PLAN='{PLAN.path}'{SHARES}; set -euo pipefail; ")
WARM = f"OMP_NUM_THREADS={{threads}} '{sys.executable}' -IS workflow/reproduction/run/client.py "
CELL, PAGE = WARM + "cells {log} ", WARM + "pages {log} "
BY_PLAN = f" --plan {PLAN.path}"

GPU = int(PLAN.device == "cuda" or (PLAN.device == "auto" and shutil.which("nvidia-smi") is not None))


# The file by which `rotquant runs execute` knows that this Snakemake computes.
COMPUTING = []


# Before the first job rather than inside of each. A cluster's jobs have another machine's GPU.
onstart:
    from rotquant.tensors.devices import check_gpu

    if workflow.local_exec and any(job.resources.get("gpu") for job in workflow.dag.needrun_jobs()):
        sentence(check_gpu, PLAN.device)
    COMPUTING.append(sentence(occupied, Path.cwd()))


# Tables of time and memory that a GPU measures.
SPEED = [name for name, table in PLAN.tables.items() if table.on_gpu and table.benchmarks]


wildcard_constraints:
    run="[0-9a-f]{16}-[0-9a-f]{8}",
    weights="[0-9a-f]{16}-[0-9a-f]{8}",
    rotation="[0-9a-f]{16}-[0-9a-f]{8}",
    tasks="[0-9a-f]{16}-[0-9a-f]{8}",
    speed="|".join(SPEED) or "none",


def shown(what):
    """Arguments of `report`: in `snakemake --report` a table's files stand below its paper."""
    return {
        "category": lambda wildcards: sentence(PLAN.table, wildcards.table).paper,
        "labels": lambda wildcards: {"table": wildcards.table, "file": what},
    }
