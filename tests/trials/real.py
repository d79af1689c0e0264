"""Trial of pretrained models: what a user's commands give on each of them, preset by preset.

It reads ROTQUANT_REAL_MODELS, a folder with a folder for each checkpoint; ROTQUANT_REAL_TEXT, a folder with train.txt
and test.txt; and ROTQUANT_REAL_TASKS, a folder for `--task-data`. Each command is a process as a user starts it. A
method that trains has a short training, which tries the way and not the method. What is refused has its sentence.
ROTQUANT_REAL_PRESETS names rows, with semicolons between, where not all are to be tried; the record keeps other rows.
"""

import json
import os
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

from rotquant.foundation.files import read_json, write_json, write_text
from rotquant.metrics.diagnostics import INPUTS_ROTATED
from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import find_method
from tests.trials.trial import REPOSITORY, Skip, Trial, run

#: Rows of the record, one for a model and a preset, and the page that shows them.
ROWS, PAGE = REPOSITORY / "docs/real_models.json", REPOSITORY / "docs/real_models.md"
#: Rows that are a preset with changes. R1 passes a norm with its gain in the weights behind it, where inputs are what
#: the gain would have scaled; online rotations of the inputs come after the gain. Keys of Qwen2 have a large bias.
_INPUTS = [f"rotation.{field}={value}" for field, value in INPUTS_ROTATED.items()]
_BY_CHANNEL = [f"weights.scheme.{field}" for field in ("granularity=channel", "group_size=null")]
_BY_CHANNEL += ["methods.gptq.act_order=false"]
_NO_CLIPS = ["weights.clip_search=false"]
VARIANTS: Mapping[str, tuple[str, Sequence[str]]] = (
    {f"{preset}, inputs rotated": (preset, _INPUTS) for preset in ("quarot-rtn", "quarot", "quarot-w4a16")}
    | {f"{preset}, keys in 8 bits": (preset, ["keys.bits=8"]) for preset in ("quarot-rtn", "quarot")}
    | {"gptq-w4a16 by channel, no clip search": ("gptq-w4a16", [*_BY_CHANNEL, *_NO_CLIPS])}
    | {"quarot-w4a16 by channel": ("quarot-w4a16", _BY_CHANNEL)}
    | {"quarot-w4a16 by channel, inputs rotated": ("quarot-w4a16", [*_BY_CHANNEL, *_INPUTS])}
    | {
        "quarot-w4a16 by channel, inputs rotated, no clip search": (
            "quarot-w4a16",
            [*_BY_CHANNEL, *_INPUTS, *_NO_CLIPS],
        )
    }
)
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
    tokens: int = 0
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


def rotquant(*words: object, gpu: str | None = None, as_json: bool = True) -> Command:
    """Run a command, by default with `--json`, else in words, which are then among its lines; it sees one GPU."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        arguments = [sys.executable, "-m", "rotquant", *map(str, words), *(["--json"] if as_json else [])]
        process = subprocess.Popen(arguments, stdout=out, stderr=err, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        out.seek(0)
        err.seek(0)
        printed = out.read()
        said = [line.strip() for line in err.read().splitlines() if line.strip()]
        try:
            answer = json.loads(printed)
        except ValueError:
            answer, said = {}, [*printed.splitlines(), *said]
    return Command(process.returncode, answer, said, seconds, usage.ru_maxrss / 2**20)


def body(trial: Trial) -> None:
    """Each preset on each model."""
    models, text, tasks = (_folder(name) for name in ("MODELS", "TEXT", "TASKS"))
    checkpoints = sorted(path.parent for path in models.glob("*/config.json"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    gpus = shown.split(",") if shown else [None]
    length, samples, many = (256, 8, 4) if trial.quick else (480, 64, 32)  # a prefix fits the window of Gemma 3 too
    asked = [name for name in os.environ.get("ROTQUANT_REAL_PRESETS", "").split(";") if name]
    asked = asked or _rows()
    presets = [name for name in asked if not trial.quick or name in ("baseline", "rtn", "quarot-rtn")]
    workers = int(os.environ.get("ROTQUANT_REAL_WORKERS", len(gpus)))
    free: SimpleQueue[str | None] = SimpleQueue()
    for index in range(workers):
        free.put(gpus[index % len(gpus)])
    work = [(checkpoint, preset) for preset in presets for checkpoint in checkpoints]

    def read_as(checkpoint: Path) -> list[object]:
        has_bos = read_json(checkpoint / "tokenizer_config.json", "tokenizer").get("bos_token")
        return ["--sequence-length", length, "--bos", "window" if has_bos else "text"]

    def one(checkpoint: Path, preset: str) -> Row:
        gpu, windows = free.get(), read_as(checkpoint)
        try:
            amounts, windows = ["--samples", samples, *windows], ["--max-windows", many, *windows]
            return replace(quantized(checkpoint, preset, text, amounts, windows, gpu), tokens=length)
        finally:
            free.put(gpu)

    rows = []
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(one, *pair) for pair in work]):
            rows.append(row := done.result())
            trial.say(json.dumps(asdict(row)))
    if not trial.quick:
        kept = {(row["model"], row["preset"]): row for row in read_json(ROWS, "rows")} if ROWS.exists() else {}
        kept |= {(row.model, row.preset): asdict(row) for row in rows}
        known = sorted(kept.values(), key=lambda row: (row["model"], _rows().index(row["preset"])))
        write_json(ROWS, known)
        write_text(PAGE, page(known))
    for checkpoint in checkpoints:
        answers(trial, checkpoint, text, tasks, ["--max-windows", many, *read_as(checkpoint)])
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
    row_name, (preset, changed) = preset, VARIANTS.get(preset, (preset, ()))
    changes = [*changed]
    shorter = {name: dict(find_method(name).short) for name in _methods(preset)}
    changes += [f"methods.{name}={json.dumps(less)}" for name, less in shorter.items() if less]
    training = {"rcp", "bitdistiller"} & _methods(preset)
    changes += [f"methods.{name}.{change}" for name in training for change in TRAINING]
    options = [word for change in changes for word in ("--set", change)]
    command = "train-quantized" if training else "quantize"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "quantized"
        asked = () if training else amounts
        words = [command, checkpoint, "--method", preset, "--corpus", text, "-o", folder, *asked, *options]
        made = rotquant(*words, gpu=gpu, as_json=False)
        row = Row(checkpoint.name, row_name, _outcome(made), made.sentence, round(made.seconds, 1), round(made.gib, 2))
        row.warned = "out of the ordinary" in " ".join(made.said)
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
        "diagnose": ["diagnose", checkpoint, "--corpus", text, "--max-windows", 4],
        "evaluate": ["evaluate", checkpoint, "--corpus", text, *windows],
        "evaluate --tasks": ["evaluate", checkpoint, *asked],
        "plan": ["plan", checkpoint, "--method", "quarot"],
    }
    for name, words in commands.items():
        found = rotquant(*words)
        trial.check(f"`{name}` answers", found.status == 0, f"{checkpoint.name}: {found.sentence}")


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of the record: a table for each model."""
    parts = [_OPENING]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        exact = {row["tokens"]: row["full_precision"] for row in own if row["full_precision"]}
        told = ", ".join(f"{value:.2f} in windows of {tokens:,} tokens" for tokens, value in sorted(exact.items()))
        parts.append(f"## {model}\n\nFull precision: {told}.\n")
        parts.append("| preset | tokens | perplexity | KL, nats | bits | s | GiB | plain | packed | GGUF | decoder |")
        parts.append("| :-- | --: | --: | --: | --: | --: | --: | :-- | :-- | :-- | :-- |")
        parts += [_line(row) for row in own if row["preset"] != "baseline"]
        parts.append("")
    return "\n".join(parts)


_OPENING = """# Real models

Presets by the commands of a user, on pretrained checkpoints; a preset without a row was not tried. These are
dequantized GGUF files, at 4 to 8 bits a weight, and no hub's originals: SmolLM2's weights lie on a 4-bit grid already.
Calibration is text of C4, the perplexity is of WikiText-2's raw test text, in windows of so many tokens as a row says.
Methods that train have a short training, so their rows try the way and not the method: 2-bit weights after some tens of
steps are broken. Seconds are of the whole command beside others on one GPU, GiB what torch allocates there. In the last
columns: yes, or - where the format cannot hold the result and a sentence says so. `python -m tests.trials.real` makes
this page.
"""


def _line(row: Mapping[str, Any]) -> str:
    """A preset's line of the page."""
    if row["outcome"] != "quantized":
        said = row["said"].removeprefix("rotquant: ")
        return f"| {row['preset']} | {row['tokens']:,} | {row['outcome']}: {said} | | | | | | | | |"
    forms = ["yes" if row["exported"].get(form) == "yes" else "-" for form in (*FORMATS, "decoder")]
    numbers = [f"{row['perplexity']:,.2f}", f"{row['kl']:.3f}", f"{row['bits']:.2f}", f"{row['seconds']:.0f}"]
    cells = [row["preset"], f"{row['tokens']:,}", *numbers, str(round(row["gib"], 1)), *forms]
    return f"| {' | '.join(cells)} |"


def _folder(name: str) -> Path:
    variable = f"ROTQUANT_REAL_{name}"
    if variable not in os.environ:
        raise Skip(f"{variable} names no folder.")
    return Path(os.environ[variable])


def _rows() -> list[str]:
    """Presets and the variants of each."""
    of = {preset: [name for name, (base, _) in VARIANTS.items() if base == preset] for preset in all_presets()}
    return [name for preset, variants in of.items() for name in (preset, *variants)]


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
    run("real", (__doc__ or "").splitlines()[0], body)
