# What all rules share: the plan of what is to be computed, whether it is there, and how a command is run. Everything is
# computed by `rotquant ...` commands, which can be run by hand with --config in place of --plan.
import os
import shutil
import subprocess
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from rotquant.foundation.errors import RotquantError
from reproduction.run.cluster import lost_jobs
from reproduction.planning.current import current_plan
from reproduction.run.starting import begin
from reproduction.run.states import States
from reproduction.run.workers import visible_gpus


def sentence(function, *arguments):
    """Call a function of the library; its error ends this Snakemake with one sentence.

    Around an error in an input function Snakemake prints where it was raised, which tells a user nothing.
    """
    try:
        return function(*arguments)
    except RotquantError as error:
        raise SystemExit(f"rotquant: {error}") from None


def checked(function, *arguments):
    """The same once jobs have begun, which Snakemake then ends and unlocks."""
    try:
        return function(*arguments)
    except RotquantError as error:
        raise WorkflowError(str(error)) from None


# Kept open for as long as this Snakemake lives (workflow/reproduction/run/starting.py). A cluster's jobs are Snakemakes as well.
if workflow.is_main_process and not workflow.dryrun:
    RUNNING = sentence(begin)

# The files of --configfile are read there and not taken as `config`, where Snakemake has merged them: a file that stands
# alone would show no trace of that. The plan's file is named by all that it follows from, so a running job's stays.
PLAN = sentence(current_plan, Path.cwd(), workflow.overwrite_configfiles, workflow.config_settings.config)
CURRENT = States(PLAN)

# The commands are those of the environment that runs Snakemake, activated or not, and end with it, however it ends.
shell.prefix(
    f"export PATH='{Path(sys.executable).parent}':\"$PATH\" ROTQUANT_ENDS_WITH={os.getpid()}; set -euo pipefail; "
)

GPU = int(PLAN.device == "cuda" or (PLAN.device == "auto" and shutil.which("nvidia-smi") is not None))
# A job on this machine uses all of its GPUs, a process each; a cluster's job has the one that it asks for.
PROCESSES = max(1, len(visible_gpus())) if GPU and workflow.local_exec else 1


# Before the first job rather than inside of each. A cluster's jobs have another machine's GPU.
onstart:
    from rotquant.tensors.devices import check_gpu

    if workflow.local_exec and any(job.resources.get("gpu") for job in workflow.dag.needrun_jobs()):
        checked(check_gpu, PLAN.device)


def say_lost_jobs(logs):
    """Print a sentence for each job that a cluster has lost. `logs` are Snakemake's own."""
    for log in logs:
        for line in lost_jobs(Path(log)):
            print(line, file=sys.stderr)


onerror:
    say_lost_jobs(log)


def workers(wildcards):
    """Processes of one job; those of a GPU, and those on a cluster, are as many as `--set-threads measure=N` says."""
    return 1 if GPU else workflow.cores


# Parts of tables on small models are called as their tables (workflow/reproduction/tables/project.py); their runs are small too.
SMALL = {run for name, part in PLAN.parts.items() if name in PLAN.tables for run in part.runs}

# What a job asks of a cluster, megabytes and minutes, more at each attempt. A process on small models takes PROCESS_MB at
# most, twice what was measured (results/reliability/slurm.json). A model of real size is one process, and streams
# layer by layer: Llama-2-7B's shape went through GPTQ on a machine with 128 GB (results/bench), less was not tried. Table 1
# with three seeds takes 6 minutes on 2 cores, the largest table more than 35; 7B's GPTQ takes one for each set of weights on
# an H200. What a job has computed when its time is up is kept, and the next attempt goes on from there.
PROCESS_MB = 3000
LARGE_MB = 96000
MINUTES = 240


def memory(run, threads, attempt):
    """Megabytes of a job that computes such a run, half more at each attempt."""
    return (1 + attempt) * (1000 + PROCESS_MB * threads if run in SMALL else LARGE_MB) // 2


def processes(run, threads):
    """How many processes share a job's threads and GPUs: models of real size fill one alone."""
    return max(threads if run in SMALL else 1, PROCESSES)


# Tables of time and memory that a GPU measures.
SPEED = [name for name, table in PLAN.tables.items() if table.on_gpu and table.benchmarks]


wildcard_constraints:
    part="[a-z0-9_]+(-[0-9a-f]{8})?",
    tasks="[0-9a-f]{16}",
    table=r"(?!index\b)[a-z0-9_]+",
    speed="|".join(SPEED) or "none",


# What a rule's command is given to: messages to the log, and earlier results kept when it fails (see there). A rule's one
# parameter says whether its output is current (workflow/reproduction/run/states.py).
JOB = "STATE={params.current} OMP_NUM_THREADS=1 workflow/scripts/job.sh {output[0]} {log} rotquant "
BY_PLAN = " --plan {PLAN.path}"


# Tables of which was said what is not possible here.
REMARKED = set()


def measured(name):
    """What a table's numbers are collected from: the records of its parts, and those of what was timed.

    Without a GPU there may be none of these, and the page says so. What of it is not possible on the models here is said
    when the jobs are planned, thus by a dry run too.
    """
    table = sentence(PLAN.table, name)
    if workflow.is_main_process and name not in REMARKED:
        REMARKED.add(name)
        for remark in table.remarks:
            print(f"{name}: {remark}", file=sys.stderr)
    timed = (timed_record(*record) for record in table.records.items())
    return [*(f"results/measured/{part}.json" for part in table.parts), *filter(None, timed)]


def timed_record(name, committed):
    """The record of what was timed for a table, None where there is none and none is to be made."""
    own = f"results/speed/{name}.json"
    return own if (GPU and name in SPEED) or Path(own).exists() else committed


def numbers(name):
    """The file with a table's numbers; a figure that draws those of other tables has none."""
    return f"results/tables/{name}.csv" if sentence(PLAN.table, name).has_numbers else []


def shown(what):
    """Arguments of `report`: in `snakemake --report` a table's files stand below its paper."""
    return {
        "category": lambda wildcards: sentence(PLAN.table, wildcards.table).paper,
        "labels": lambda wildcards: {"table": wildcards.table, "file": what},
    }


def task_files(keys):
    """The records of sets of zero-shot tasks."""
    return [f"results/tasks/{key}.json" for key in keys]
