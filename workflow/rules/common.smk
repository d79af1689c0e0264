# What all rules share: the tables expanded into runs, and how a command is run. Everything is computed by `rotquant ...`
# commands, which can be run by hand with the same arguments.
import functools
import shutil
import sys
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError

from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import canonical_json, short_hash, write_json
from rotquant.study import configuration, digests, project
from rotquant.study.results import HISTORY_FILE, ROTATION_RECORD, ROTATIONS_FILE
from rotquant.study.results import batch_path, group_path, rotation_path, run_path


def sentence(function, *arguments):
    """Call a function of the library; its error becomes the workflow's, one sentence without a traceback."""
    try:
        return function(*arguments)
    except RotquantError as error:
        raise WorkflowError(str(error)) from None


# The files of --configfile are read here and not taken as `config`, where Snakemake has merged them: a file that stands alone
# would show no trace of that.
CONFIG = sentence(
    configuration.load_config, workflow.overwrite_configfiles, Path.cwd(), workflow.config_settings.config
)
PROJECT = sentence(project.load_project, (), Path.cwd(), CONFIG)

# The commands read the configuration as this workflow sees it, --configfile and --config included. The file's name is its
# content's, so nothing that is computed depends on when it was written.
CONFIG_FILE = Path("results/config") / f"{short_hash(canonical_json(CONFIG.alone))}.yaml"
if not CONFIG_FILE.exists():
    write_json(CONFIG_FILE, CONFIG.alone)

# The commands are those of the environment that runs Snakemake, activated or not.
shell.prefix(f"export PATH='{Path(sys.executable).parent}':\"$PATH\"; set -euo pipefail; ")

GPU = int(CONFIG.device == "cuda" or (CONFIG.device == "auto" and shutil.which("nvidia-smi") is not None))


# Speed tables have rules of their own for the same kinds of files.
SPEED = "|".join(sentence(lambda: PROJECT.speed)) or "none"


wildcard_constraints:
    batch="[0-9a-f]{16}",
    group="[0-9a-f]{16}",
    rotation="[0-9a-f]{16}",
    tasks="[0-9a-f]{16}",
    table=rf"(?!(?:index|{SPEED})\b)[a-z0-9_]+",
    speed=SPEED,


def code(stage, run=None):
    """Digest of the code of a stage, for a run: as a parameter of its rule it re-runs what an edit affects."""
    return sentence(digests.code_digest, stage, *(() if run is None else (run.recipe, run.metric)))


# What a rule's command is given to: messages to the log, and earlier results kept when it fails (see there).
JOB = "OMP_NUM_THREADS={threads} workflow/scripts/job.sh {output[0]} {log} "


ATTEMPTS = Path(".snakemake/attempts")


@functools.cache
def attempt(output):
    """What the attempt file of an output says: nothing unless a job for it once failed (scripts/job.sh)."""
    path = ATTEMPTS / output
    return path.read_text().strip() if path.exists() else ""


def try_again(output):
    """Give an output a new attempt file, so that its job runs again though the output is there."""
    (ATTEMPTS / output).parent.mkdir(parents=True, exist_ok=True)
    (ATTEMPTS / output).write_text(str(time.time_ns()))


def is_current(record, runs):
    """Whether the files of a group's runs are all there and none is newer than the group's record."""
    files = [run_path(run.key) for run in runs]
    return all(file.exists() and file.stat().st_mtime <= record.stat().st_mtime for file in files)


# A record stands for its runs' files. Where one was deleted, damaged or made anew by hand, the record's job is to run again,
# as after a failure: it finds the others there.
for group, runs in sentence(lambda: PROJECT.groups).items():
    record = group_path(group)
    if record.exists() and not is_current(record, runs):
        try_again(record)


def rotation_files(runs):
    """What the learned rotations behind some runs consist of."""
    keys = sorted({run.rotation_key for run in runs if run.rotation_key})
    return [str(rotation_path(key) / name) for key in keys for name in (ROTATION_RECORD, ROTATIONS_FILE, HISTORY_FILE)]


# Snakemake makes a deleted intermediate file only for a job that has to run anyway. Rotations are small and wanted for
# themselves, so weights whose rotations were deleted have their job run again: it finds the weights there if the rotations are
# learned as before.
for batch, members in sentence(lambda: PROJECT.batches).items():
    files = rotation_files(run for runs in members.values() for run in runs)
    if batch_path(batch).exists() and not all(Path(file).exists() for file in files):
        try_again(batch_path(batch))


def measured(name):
    """The records of the groups of runs behind a table."""
    runs = (run for cell in sentence(PROJECT.cells, name) for run in cell.runs)
    return sorted({f"results/measured/{PROJECT.group_of[run.key]}.json" for run in runs})


def task_files(runs):
    """The records of the zero-shot tasks that runs are measured on."""
    return sorted({f"results/tasks/{key}.json" for key in map(project.task_set, runs) if key})


def definition(name):
    """Digest of everything a table's files say besides the numbers computed: its YAML, the published values, the slots."""
    table = sentence(PROJECT.table, name)
    printed = (PROJECT.published(table), PROJECT.published_deviations(table))
    published = [sorted((*cell, str(value)) for cell, value in numbers.items()) for numbers in printed]
    slots = {column: PROJECT.slot(table, column).model_dump(mode="json") for column in PROJECT.columns(table)}
    return short_hash(canonical_json([table.model_dump(mode="json"), published, slots]))


class CellNames:
    """For messages: `{CELL:<key>}` is the first cell of a group of runs, a batch of weights, or learned rotations.

    A parameter would do as well, but then a renamed row would be computed anew.
    """

    def __format__(self, key):
        runs = PROJECT.groups.get(key) or PROJECT.rotations.get(key) or next(iter(PROJECT.batches[key].values()))
        cell = PROJECT.places[runs[0].key]
        more = f" and {len(runs) - 1} more" if len(runs) > 1 and key in PROJECT.groups else ""
        seed = f", seed {runs[0].seed}" if key in PROJECT.rotations else ""
        measured = ", measured at once" if key in PROJECT.batches and PROJECT.measured_with(key) else ""
        return f"{cell.row} on {cell.column}{more}{seed}{measured}"


CELL = CellNames()
