"""Trial of pretrained models: what a user's commands give on each of them, preset by preset.

It reads ROTQUANT_REAL_MODELS, a folder with a folder for each checkpoint; ROTQUANT_REAL_TEXT, a folder with train.txt
and test.txt; and ROTQUANT_REAL_TASKS, a folder for `--task-data`. Each command is a process as a user starts it. A
method that trains has a short training, which tries the way and not the method. What is refused has its sentence.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from rotquant.foundation.files import write_json
from rotquant.recipes.presets import all_presets
from tests.trials.trial import RECORDS, Skip, Trial, run

#: Rows of the record, one for a model and a preset.
ROWS = RECORDS / "real_models.json"
#: Short trainings: settings of methods that would take hours with their papers' amounts.
SHORT: Mapping[str, Sequence[str]] = {
    "omniquant": ["methods.omniquant.steps=32"],
    "duquant-lwc": ["methods.lwc.steps=32"],
    "llm-qat": ["methods.llm_qat.samples=64", "methods.llm_qat.sequence_length=256", "methods.llm_qat.steps=32"],
    "spinquant": ["methods.spinquant.steps=32", "methods.spinquant.text.samples=256"],
    "cushioncache": [
        "methods.cushioncache.candidates=64",
        "methods.cushioncache.max_tokens=3",
        "methods.cushioncache.sequence_length=256",
        "methods.cushioncache.steps=16",
    ],
    "block_ap": ["methods.block_ap.text.samples=64", "methods.block_ap.text.sequence_length=512"],
}
#: Of a training of the whole model: RCP and BitDistiller.
TRAINING = ["text.samples=64", "text.sequence_length=256", "epochs=1", "batch_size=8", "temperature=null"]
#: Formats of `rotquant export`; `convert` makes a decoder.
FORMATS = ("plain", "compressed-tensors", "gguf")
#: Nats of KL divergence above which a command has to say a sentence.
ODD = 1.0


@dataclass
class Row:
    """A preset on a model.

    outcome: quantized, refused (status 1 or 2 and one sentence) or failed. said: the last line of what the command
    wrote on standard error or, of a recipe that was changed to fit, the note. seconds, gib: of `quantize`, gib being
    the largest memory allocated by torch on a GPU, else the process's resident memory. exported: by format `yes`, or
    the sentence that refuses it.
    """

    model: str
    preset: str
    outcome: str
    said: str = ""
    seconds: float = 0.0
    gib: float = 0.0
    perplexity: float | None = None
    full_precision: float | None = None
    kl: float | None = None
    bits: float | None = None
    warned: bool = False
    exported: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A finished command of rotquant: its status, its JSON answer where it has one, and standard error's lines."""

    status: int
    answer: dict[str, Any]
    said: list[str]
    seconds: float
    gib: float

    @property
    def sentence(self) -> str:
        """The last line that it wrote on standard error."""
        return self.said[-1] if self.said else ""

    @property
    def refused(self) -> bool:
        """Whether it ended in one sentence and no traceback."""
        return self.status in (1, 2) and bool(self.said) and not any("Traceback" in line for line in self.said)


def rotquant(*words: object, gpu: str | None = None) -> Command:
    """Run a command with `--json`; of several GPUs it sees one."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        arguments = [sys.executable, "-m", "rotquant", *map(str, words), "--json"]
        process = subprocess.Popen(arguments, stdout=out, stderr=err, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        out.seek(0)
        err.seek(0)
        said = [line.strip() for line in err.read().splitlines() if line.strip()]
        try:
            answer = json.loads(out.read())
        except ValueError:
            answer = {}
    return Command(process.returncode, answer, said, seconds, usage.ru_maxrss / 2**20)


def body(trial: Trial) -> None:
    """Each preset on each model."""
    models, text, tasks = (_folder(name) for name in ("MODELS", "TEXT", "TASKS"))
    checkpoints = sorted(path.parent for path in models.glob("*/config.json"))
    gpus = [str(index) for index in range(torch.cuda.device_count())] or [None]
    length, samples, many = (1024, 32, 16) if gpus[0] else (256, 8, 4)
    amounts = ["--samples", samples, "--sequence-length", length, "--bos", "window"]
    windows = ["--max-windows", many, "--sequence-length", length, "--bos", "window"]
    presets = [name for name in all_presets() if not trial.quick or name in ("baseline", "rtn", "quarot-rtn")]
    workers = int(os.environ.get("ROTQUANT_REAL_WORKERS", len(gpus)))
    free: SimpleQueue[str | None] = SimpleQueue()
    for index in range(workers):
        free.put(gpus[index % len(gpus)])
    work = [(checkpoint, preset) for checkpoint in checkpoints for preset in presets]

    def one(checkpoint: Path, preset: str) -> Row:
        gpu = free.get()
        try:
            return quantized(checkpoint, preset, text, amounts, windows, gpu)
        finally:
            free.put(gpu)

    rows = []
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(one, *pair) for pair in work]):
            rows.append(row := done.result())
            trial.say(json.dumps(asdict(row)))
    if not trial.quick:
        rows.sort(key=lambda row: (row.model, [*all_presets()].index(row.preset)))
        write_json(ROWS, [asdict(one) for one in rows])
    for checkpoint in checkpoints:
        answers(trial, checkpoint, text, tasks, windows)
    for row in rows:
        what = f"{row.preset} on {row.model}"
        trial.check("A preset is quantized or refused in a sentence", row.outcome != "failed", f"{what}: {row.said}")
        odd = row.kl is not None and not row.kl < ODD
        trial.check("An absurd result has a sentence", row.warned or not odd, f"{what}: KL {row.kl}, {row.said}")
        for form, how in row.exported.items():
            trial.check("An export is made or refused in a sentence", how != "failed", f"{what} as {form}")


def quantized(
    checkpoint: Path, preset: str, text: Path, amounts: Sequence[object], windows: Sequence[object], gpu: str | None
) -> Row:
    """Quantize, compare with the checkpoint, export in every format, and convert."""
    changes = [word for key, values in SHORT.items() if key in _methods(preset) for word in values]
    training = {"rcp", "bitdistiller"} & _methods(preset)
    changes += [f"methods.{name}.{change}" for name in training for change in TRAINING]
    options = [word for change in changes for word in ("--set", change)]
    command = "train-quantized" if training else "quantize"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "quantized"
        asked = () if training else amounts
        made = rotquant(
            command, checkpoint, "--method", preset, "--corpus", text, "-o", folder, *asked, *options, gpu=gpu
        )
        row = Row(checkpoint.name, preset, _outcome(made), made.sentence, round(made.seconds, 1), round(made.gib, 2))
        row.warned = any(re.search(r"KL|nats", line) for line in made.said)
        if made.status:
            return row
        peaks = json.loads((folder / "rotquant.json").read_text())["peak_bytes"] if gpu else {}
        row.gib = round(max(peaks.values(), default=0) / 2**30, 2) if peaks else row.gib
        against = rotquant("compare", checkpoint, folder, "--corpus", text, *windows, gpu=gpu)
        row = replace(row, **_measured(against.answer))
        if against.status:
            row.outcome, row.said = "failed", f"compare: {against.sentence}"
        for form in FORMATS:
            target = Path(temporary) / (f"{form}.gguf" if form == "gguf" else form)
            row.exported[form] = _how(rotquant("export", folder, "-o", target, "--format", form, gpu=gpu))
            shutil.rmtree(target, ignore_errors=True)
        row.exported["decoder"] = _how(rotquant("convert", folder, "-o", Path(temporary) / "decoder", gpu=gpu))
    return row


def answers(trial: Trial, checkpoint: Path, text: Path, tasks: Path, windows: Sequence[object]) -> None:
    """The commands that need no quantized folder."""
    asked = ["--tasks", "arc_easy,piqa,winogrande", "--task-data", tasks, "--limit", 100]
    commands = {
        "diagnose": ["diagnose", checkpoint, "--corpus", text, "--max-windows", 4, "--tasks-limit", 0],
        "evaluate": ["evaluate", checkpoint, "--corpus", text, *windows],
        "evaluate --tasks": ["evaluate", checkpoint, *asked],
        "plan": ["plan", checkpoint, "--method", "quarot"],
    }
    for name, words in commands.items():
        found = rotquant(*words)
        trial.check(f"`{name}` answers", found.status == 0, f"{checkpoint.name}: {found.sentence}")


def _folder(name: str) -> Path:
    variable = f"ROTQUANT_REAL_{name}"
    if variable not in os.environ:
        raise Skip(f"{variable} names no folder.")
    return Path(os.environ[variable])


def _methods(preset: str) -> set[str]:
    return {*all_presets()[preset]().methods}


def _measured(answer: dict[str, Any]) -> dict[str, float]:
    """What `rotquant compare` found of one model."""
    if not answer:
        return {}
    (model,) = answer["models"]
    return {
        "perplexity": model["perplexity"]["perplexity"],
        "full_precision": answer["reference"]["perplexity"]["perplexity"],
        "kl": model["kl"][0],
        "bits": model["bits_per_weight"],
    }


def _outcome(command: Command) -> str:
    return "quantized" if command.status == 0 else "refused" if command.refused else "failed"


def _how(command: Command) -> str:
    return "yes" if command.status == 0 else command.sentence if command.refused else "failed"


if __name__ == "__main__":
    run("real", __doc__.splitlines()[0], body)
