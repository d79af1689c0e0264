"""Trial of peers: other libraries and this one quantize the same model, from the same token ids, at the same bits.

ROTQUANT_PEERS is a folder with an environment for each library (llmcompressor, auto_round, gptqmodel, torchao: each
with its bin/python); a library without one is left out. ROTQUANT_REAL_MODELS and ROTQUANT_REAL_TEXT are as in the trial
of pretrained models; ROTQUANT_PEERS_MODELS names some models, ROTQUANT_PEERS_SEEDS how many seeds draw the calibration
samples (1), ROTQUANT_PEERS_CASES is a regular expression of what is tried, ROTQUANT_PEERS_WORKERS how many pairs of a
model and a seed are tried at once (1). All work on a GPU where there is one. `rotquant compare` measures what each
library wrote. Rows that the record has are not made again.
"""

import fcntl
import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from rotquant import api
from rotquant.foundation.files import read_json, short_hash, write_json, write_text
from rotquant.recipes.schemes import Calibration
from rotquant.text import corpus_spec
from tests.trials.real import _folder, rotquant
from tests.trials.trial import REPOSITORY, Skip, Trial, run

ROWS, PAGE = REPOSITORY / "docs/peers.json", REPOSITORY / "docs/peers.md"
#: Calibration samples and their tokens; windows that are measured.
SAMPLES, TOKENS, WINDOWS = 128, 512, 64
#: Rows that are measured together on a CPU, where full precision, computed for each batch, is slow.
BATCH = 5
#: Who reads these.
OURS = "rotquant"
#: What is computed at one price, in the order of the page; `G` is a group of 128, or of 64 where a width needs it.
CLASSES = ("W4A16, groups of G", "W4A16, channels", "W8A8, dynamic")
_GROUP, _CHANNEL, _INT8 = CLASSES
#: Changes of our presets: scales over all steps, as other libraries have them, and what takes their settings away.
_FULL = ("weights.scheme.scale=full",)
_NO_CLIPS = ("weights.clip_search=false",)
_NATURAL = ("methods.gptq.act_order=false", "methods.gptq.group_scales=updated")


@dataclass(frozen=True)
class Case:
    """A setting of a library: its class of CLASSES, its words on the page, and what the library is told.

    settings: of a peer what `peers_libraries` takes; of this project a preset and its changes. seeded: whether
    calibration samples count.
    """

    library: str
    klass: str
    words: str
    settings: Mapping[str, Any]
    seeded: bool = True


@dataclass
class Row:
    """A case on a model with a seed. said: why there is no number. processor: a GPU's name, or CPU.

    gib: largest memory that torch took on a GPU; on a CPU, largest resident memory of the process.
    """

    model: str
    library: str
    klass: str
    words: str
    seed: int
    version: str = ""
    seconds: float = 0.0
    gib: float = 0.0
    perplexity: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    bits: float | None = None
    full_precision: float | None = None
    said: str = ""
    group: int = 0
    processor: str = "CPU"

    @property
    def key(self) -> tuple[object, ...]:
        return self.model, self.library, self.klass, self.words, self.seed


def _weights(group: int | None, bits: int = 4, **more: Any) -> dict[str, Any]:
    """A config_groups of llm-compressor: symmetric integers by group, or by channel."""
    shared = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **shared, **more}
    return {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def _int8() -> dict[str, Any]:
    found = _weights(None, 8)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    found["config_groups"]["all"]["input_activations"] = inputs
    return found


def cases(group: int) -> list[Case]:
    """All settings, with groups of so many weights."""
    made, mse = _weights(group), _weights(group, observer="memoryless_mse")

    def theirs(klass: str, words: str, *modifiers: Any, **more: Any) -> Case:
        calibrates = {} if more.get("seeded", True) else {"calibrates": False}
        return Case("llmcompressor", klass, words, {"modifiers": modifiers, **calibrates}, **more)

    def ours(klass: str, preset: str, *changes: str, seeded: bool = True) -> Case:
        bits = {_GROUP: [f"granularity=group group_size={group} symmetric=true".split()], _INT8: [["bits=8"]]}
        scheme = [f"weights.scheme.{one}" for many in bits.get(klass, []) for one in many]
        runtime = ["keys=null", "values=null"]
        runtime += ["activations.bits=8"] if klass == _INT8 else ["activations=null"]
        words = ", ".join([preset, *changes])
        return Case(OURS, klass, words, {"preset": preset, "changes": [*scheme, *runtime, *changes]}, seeded)

    def tuned(*changes: str, klass: str = _GROUP) -> Case:
        case = ours(klass, "quarot-w4a16-tuned", *changes)
        text = [f"methods.block_ap.text.{name}" for name in (f"samples={SAMPLES}", f"sequence_length={TOKENS}")]
        return replace(case, settings={**case.settings, "changes": [*case.settings["changes"], *text]})

    rotated = ("SpinQuantModifier", {"rotations": ["R1", "R2"], "transform_type": "random-hadamard"})
    channel = ["weights.scheme.granularity=channel", "weights.scheme.group_size=null"]
    return [
        ours(_GROUP, "rtn", *_NO_CLIPS, seeded=False),
        ours(_GROUP, "rtn", *_NO_CLIPS, *_FULL, seeded=False),
        theirs(_GROUP, "RTN", ("QuantizationModifier", made), seeded=False),
        Case("torchao", _GROUP, "int4", {"bits": 4, "group": group}, seeded=False),
        Case("auto_round", _GROUP, "50 steps", {"iters": 50, "group_size": group}),
        theirs(_GROUP, "GPTQ, no order", ("GPTQModifier", {**made, "actorder": None})),
        ours(_GROUP, "gptq-w4a16"),
        theirs(_GROUP, "GPTQ (static order)", ("GPTQModifier", made)),
        ours(_GROUP, "gptq-w4a16", *_NO_CLIPS),
        ours(_GROUP, "gptq-w4a16", *_NO_CLIPS, *_NATURAL),
        theirs(_GROUP, "GPTQ, MSE observer", ("GPTQModifier", mse)),
        theirs(_GROUP, "AWQ", ("AWQModifier", {}), ("QuantizationModifier", made)),
        ours(_GROUP, "awq-128g"),
        ours(_GROUP, "quarot-w4a16"),
        tuned(),
        tuned("rotation=null"),
        theirs(_GROUP, "SpinQuant R1 R2, GPTQ", rotated, ("GPTQModifier", made)),
        theirs(_GROUP, "RTN, MSE observer", ("QuantizationModifier", mse), seeded=False),
        ours(_GROUP, "rtn", seeded=False),
        theirs(_INT8, "RTN", ("QuantizationModifier", _int8()), seeded=False),
        theirs(_INT8, "SmoothQuant, GPTQ", ("SmoothQuantModifier", {}), ("GPTQModifier", _int8())),
        ours(_INT8, "rtn", seeded=False),
        ours(_INT8, "smoothquant"),
        ours(_INT8, "quarot", "activations.clip_ratio=1"),
        theirs(_CHANNEL, "GPTQ (static order)", ("GPTQModifier", _weights(None))),
        ours(_CHANNEL, "gptq-w4a16", *channel, *_NO_CLIPS),
        ours(_CHANNEL, "quarot-w4a16", *channel),
        tuned(*channel, klass=_CHANNEL),
        Case("auto_round", _CHANNEL, "50 steps", {"iters": 50, "group_size": -1}),
        Case("gptqmodel", _GROUP, "GPTQ (group-aware order)", {"bits": 4, "group_size": group, "sym": True}),
        Case("gptqmodel", _GROUP, "GPTQ, order", {"bits": 4, "group_size": group, "sym": True, "desc_act": True}),
        Case("auto_round", _GROUP, "200 steps", {"iters": 200, "group_size": group}),
        Case("auto_round", _CHANNEL, "200 steps", {"iters": 200, "group_size": -1}),
    ]


def body(trial: Trial) -> None:
    """Each case on each model with each seed, made and then measured."""
    models, text, place = _folder("MODELS"), _folder("TEXT"), Path(os.environ.get("ROTQUANT_PEERS", ""))
    libraries = environments()
    asked = os.environ.get("ROTQUANT_PEERS_MODELS", "smollm2-135m,gemma3-270m,qwen2.5-coder-0.5b").split(",")
    chosen = os.environ.get("ROTQUANT_PEERS_CASES", "")
    seeds = range(int(os.environ.get("ROTQUANT_PEERS_SEEDS", "1")))
    known = recorded()
    processor, one = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", Lock()

    def on(checkpoint: Path, seed: int) -> None:
        group, wanted = group_of(checkpoint), []
        for case in [case for case in cases(group) if case.library in (OURS, *libraries)]:
            if not re.search(chosen, f"{case.klass}, {case.library}, {case.words}"):
                continue
            row = Row(checkpoint.name, case.library, case.klass, case.words, seed, group=group, processor=processor)
            if (case.seeded or seed == 0) and not any(row.key == old.key and old.perplexity for old in known):
                wanted.append((row, case))
        size = BATCH if processor == "CPU" else 1
        for start in range(0, len(wanted), size):
            measured = made_and_measured(wanted[start : start + size], checkpoint, text, libraries, place / "made")
            with one:
                for row in measured:
                    trial.say(json.dumps(asdict(row)))
                    trial.check("A peer's folder is read", not row.said, f"{row.library}, {row.words}: {row.said}")
                record(measured)

    with ThreadPoolExecutor(int(os.environ.get("ROTQUANT_PEERS_WORKERS", "1"))) as pool:
        for done in [pool.submit(on, models / name, seed) for seed in seeds for name in asked]:
            done.result()


def recorded() -> list[Row]:
    """The rows of the record."""
    return [Row(**row) for row in read_json(ROWS, "rows")] if ROWS.exists() else []


def record(measured: Sequence[Row]) -> None:
    """Put rows into the record in place of the same cases' and write its page; other trials may write at the time."""
    lock = os.open(ROWS.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = {row.key for row in measured}
        rows = [row for row in recorded() if row.key not in keys] + list(measured)
        write_json(ROWS, [asdict(row) for row in rows])
        write_text(PAGE, page(rows))
    finally:
        os.close(lock)


def environments() -> dict[str, Path]:
    """The Python of each library that has an environment in ROTQUANT_PEERS.

    Raises:
        Skip: none has.
    """
    place, names = Path(os.environ.get("ROTQUANT_PEERS", "")), ("llmcompressor", "auto_round", "gptqmodel", "torchao")
    found = {name: place / name / "bin/python" for name in names if (place / name / "bin/python").exists()}
    if not found:
        raise Skip("ROTQUANT_PEERS names no folder with environments.")
    return found


def made_and_measured(
    batch: Sequence[tuple[Row, Case]], checkpoint: Path, text: Path, libraries: Mapping[str, Path], place: Path
) -> list[Row]:
    """Rows of a batch, quantized each where that is not done, and measured by one command, which reads the model once.

    place: where quantized folders lie until they are measured, so that a trial that was ended goes on.
    """
    bos = "window" if api.load_tokenizer(checkpoint).bos_token else "text"
    folders: list[tuple[Row, Path]] = []
    for row, case in batch:
        folder = place / short_hash(str(row.key))
        facts = folder / "made.json"
        if facts.exists():
            row = replace(row, **read_json(facts, "facts"))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(exist_ok=True)
            make(row, case, checkpoint, folder, text, libraries.get(case.library), bos)
            if not row.said:
                write_json(facts, {name: getattr(row, name) for name in ("seconds", "gib", "version")})
        folders.append((row, folder))
    readable = [(row, folder) for row, folder in folders if not row.said]
    windows = ["--max-windows", WINDOWS, "--sequence-length", TOKENS, "--bos", bos]
    found = rotquant("compare", checkpoint, *(folder for _, folder in readable), "--corpus", text, *windows)
    if found.status:
        return [replace(row, said=row.said or found.sentence) for row, _ in folders]
    for (row, folder), model in zip(readable, found.answer["models"], strict=True):
        row.perplexity, row.bits = model["perplexity"]["perplexity"], model["bits_per_weight"]
        row.kl, row.kl_error = model["kl"]
        row.full_precision = found.answer["reference"]["perplexity"]["perplexity"]
        shutil.rmtree(folder)
    return [row for row, _ in folders]


def make(row: Row, case: Case, checkpoint: Path, folder: Path, text: Path, python: Path | None, bos: Any) -> None:
    """Quantize as a case says; what it says where it fails is in the row."""
    if python is not None:
        row.said = by_library(row, case, checkpoint, folder, text, python, bos)
        return
    words = ["--method", case.settings["preset"], "--corpus", text, "--samples", SAMPLES]
    words += ["--sequence-length", TOKENS, "--bos", bos, "--seed", row.seed, "--no-check"]
    words += [word for change in case.settings["changes"] for word in ("--set", change)]
    made = rotquant("quantize", checkpoint, "-o", folder, *words, as_json=False)
    row.seconds, row.gib = round(made.seconds, 1), round(made.gib, 2)
    if row.processor != "CPU" and not made.status:
        row.gib = round(max(read_json(folder / "rotquant.json", "manifest")["peak_bytes"].values()) / 2**30, 2)
    row.said = (made.sentence or f"status {made.status}") if made.status else ""


def by_library(row: Row, case: Case, checkpoint: Path, folder: Path, text: Path, python: Path, bos: Any) -> str:
    """Let a peer quantize in its own environment; what it says where it fails."""
    calibration = Calibration(corpus=str(text), samples=SAMPLES, sequence_length=TOKENS, bos=bos)
    tokenizer = api.load_tokenizer(checkpoint)
    ids = api.calibration_tokens(corpus_spec(str(text)), calibration, tokenizer, row.seed).tolist()
    answer = in_environment(python, case.library, checkpoint, folder, case.settings, ids, row.seed)
    if isinstance(answer, str):
        return answer
    row.seconds, row.gib, row.version = round(answer["seconds"], 1), round(answer["gib"], 2), answer["version"]
    return ""


def in_environment(
    python: Path,
    library: str,
    checkpoint: Path,
    folder: Path,
    settings: Mapping[str, Any],
    ids: list[list[int]],
    seed: int = 0,
    windows: Sequence[list[int]] = (),
) -> dict[str, Any] | str:
    """The answer of `peers_libraries` in a library's own environment, or the last error that it names."""
    given = folder.with_suffix(".json")
    write_json(given, {"ids": ids, "settings": settings, "seed": seed, "windows": list(windows)})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [python, Path(__file__).with_name("peers_libraries.py"), library, checkpoint, folder, given]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return lines[-1][:200] if lines else "no word"
    return json.loads(done.stdout.splitlines()[-1])


def group_of(checkpoint: Path) -> int:
    """128, or 64 where a layer's inputs are no multiple of it."""
    config = read_json(checkpoint / "config.json", "configuration")
    return 64 if any(config[name] % 128 for name in ("hidden_size", "intermediate_size")) else 128


def page(rows: Sequence[Row]) -> str:
    """The page of the record: a table for each model and class, the least KL divergence first."""
    processors = " and ".join(sorted({row.processor for row in rows}))
    parts = [_OPENING.format(samples=SAMPLES, tokens=TOKENS, windows=WINDOWS, processors=processors)]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        exact = next((row.full_precision for row in own if row.full_precision), None)
        parts.append(f"## {model}\n" + (f"\nFull precision: {exact:.2f}.\n" if exact else ""))
        for klass in CLASSES:
            lines = _lines([row for row in own if row.klass == klass])
            if lines:
                parts.append(f"### {klass.replace('of G', f'of {own[0].group}')}\n")
                parts.append("| library | setting | KL, nats | perplexity | bits | s | GiB | seeds |")
                parts.append("| :-- | :-- | --: | --: | --: | --: | --: | --: |")
                parts += [*lines, ""]
    return "\n".join(parts)


_OPENING = """# Peers

Other libraries and this one quantize the same checkpoint. Each gets the same {samples} calibration samples of
{tokens} tokens of C4, the same bits and the same groups, and works in float32 on {processors}. `rotquant compare`
measures what each wrote: KL divergence from full precision and perplexity on {windows} windows of {tokens} tokens of
WikiText-2's raw test text. Bits are those stored for a weight of a linear layer, scales and zero points included:
scales are float32 of llm-compressor and of this library, which both would store in 16 bits for a model in 16 bits
(4.25 at groups of 64), and float16 of the others. The number after ± is the standard error over windows; with several
seeds it is the standard deviation over them. All read the same windows, so differences between rows are surer than
that. Seconds are those of quantizing beside other work, and tell the order of size alone; ours have the start of
Python and the writing too. GiB are what torch took on a GPU, or the resident memory of the process on a CPU. torchao's
weights are stored dequantized, so its bits are not its own. llm-compressor's SmoothQuant takes a wrong norm of Gemma 3
(`docs/upstream/llmcompressor_smoothquant_gemma.py`). `python -m tests.trials.peers` makes this page, and [real
models](real_models.md) says what these checkpoints are.
"""


def _lines(rows: Sequence[Row]) -> list[str]:
    """A line for each setting that has a number, and after them those that failed."""
    settings: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        settings.setdefault((row.library, row.words), []).append(row)
    measured, failed = [], []
    for (library, words), seeds in settings.items():
        version = next((f" {row.version}" for row in seeds if row.version), "")
        found = [row for row in seeds if row.kl is not None]
        if not found:
            failed.append(f"| {library}{version} | {words} | failed: {seeds[0].said} | | | | | |")
            continue
        kls = [row.kl or 0.0 for row in found]
        error = statistics.stdev(kls) if len(kls) > 1 else found[0].kl_error or 0.0
        perplexities = statistics.mean(row.perplexity or 0.0 for row in found)
        bits = "-" if library == "torchao" else f"{found[0].bits:.2f}"
        seconds, gib = statistics.median(row.seconds for row in found), max(row.gib for row in found)
        kl = statistics.mean(kls)
        cells = f"{kl:.4f} ± {error:.4f} | {perplexities:.2f} | {bits} | {seconds:.0f} | {gib:.1f} | {len(found)}"
        name = f"**{library}**" if library == OURS else library
        measured.append((kl, f"| {name}{version} | {words} | {cells} |"))
    return [line for _, line in sorted(measured)] + failed


if __name__ == "__main__":
    run("peers", (__doc__ or "").splitlines()[0], body)
