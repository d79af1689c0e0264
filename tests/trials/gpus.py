"""Trial of several GPUs of one host: a training that they share, the workflow on all of them, and GPTQ on each.

A training of RCP is computed by one GPU and by two, and is killed and continued. QuaRot's Table 1 with the kinds of
cell of config/paper.yaml is computed by one GPU and by two, on random weights of Llama-2-7B's widths. Layers of
Llama-3-70B's widths go through GPTQ on one GPU and on two at a time. The quick form has a tiny model, on processes of
the CPU where there are no two GPUs.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from reproduction.planning.current import current_plan
from reproduction.rehearsal.material import TINY, make_folder, tiny_config
from reproduction.run.workers import visible_gpus
from rotquant.commands.distil import HISTORY
from rotquant.models.folders import MANIFEST
from tests.helpers.processes import end, start
from tests.trials import projects
from tests.trials.trial import REPOSITORY, Skip, Trial, run

#: Largest difference of a step's loss between one GPU and two, as a share: sums of bfloat16 in another order.
SAME_LOSS = 0.01
TABLE = "quarot_table1"


@dataclass(frozen=True)
class Size:
    """Amounts of a trial. layers: of the shape, in the workflow and in a training. training: fields of RCP. dtype: of
    the trained model. amounts: of the workflow's configuration. gptq: shape, layers, samples and tokens."""

    shape: str
    layers: tuple[int, int]
    training: dict[str, Any]
    dtype: str
    amounts: dict[str, Any]
    gptq: tuple[str, int, int, int]


WHOLE = Size(
    shape="llama-2-7b",
    layers=(4, 1),
    training={"epochs": 2, "batch_size": 8, "text.samples": 32, "text.sequence_length": 512, "start_samples": 8},
    dtype="bfloat16",
    amounts={
        "seeds": [0, 1],
        "calibration": {"samples": 64, "sequence_length": 2048},
        "evaluation": {"sequence_length": 2048, "max_windows": 32},
        "methods": {"omniquant": {"steps": 32}},
    },
    gptq=("llama-3-70b", 2, 128, 2048),
)
#: Of `gptq`, before a time is taken.
WARM = (TINY, 1, 1, 64)
QUICK = Size(
    shape=TINY,
    layers=(2, 1),
    training={"epochs": 3, "batch_size": 4, "text.samples": 16, "text.sequence_length": 32, "start_samples": 4},
    dtype="float32",
    amounts={},
    gptq=(TINY, 1, 2, 64),
)


def body(trial: Trial) -> None:
    """Try all three."""
    gpus = visible_gpus()
    if len(gpus) < 2 and not trial.quick:
        raise Skip("it takes two NVIDIA GPUs; --quick tries it out on a CPU.")
    device, size = ("cuda" if len(gpus) > 1 else "cpu"), (QUICK if trial.quick else WHOLE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        files = make_folder(REPOSITORY, place / "two", size.shape, size.layers[0], device)
        if gpus:
            import torch

            trial.versions["GPUs"] = ", ".join(torch.cuda.get_device_name(index) for index in (0, 1))
        parts = {
            "the workflow": partial(_workflow, trial, size, gpus[:2], place, files),
            "GPTQ": partial(_gptq, trial, size, device),
            "a training": partial(_training, trial, size, device, place),
        }
        for name, part in parts.items():
            try:
                part()
            except Exception as error:  # the other parts are tried
                trial.check(f"The trial of {name} ends", False, repr(error)[-3000:])


# --- a training that two share


def _training(trial: Trial, size: Size, device: str, place: Path) -> None:
    """Compare the losses of one process and of two, and continue a killed training."""
    make_folder(REPOSITORY, place / "trained", size.shape, size.layers[1], device)
    command = _train(size, device, place / "trained")
    found = {}
    for name, count in (("one", 1), ("two", 2), ("again", 2)):
        started = time.monotonic()
        _end(_start(command, place / f"by-{name}", count))
        found[name] = _losses(place / f"by-{name}")
        trial.figure(f"seconds of a training by {count}", round(time.monotonic() - started, 1))
    worst = _largest(found["one"], found["two"])
    trial.figure("steps of a training", len(found["two"]))
    trial.figure("largest difference of a step's loss between one and two", f"{worst:.2e}")
    trial.check("Two have the losses of one in each step, within 1 %", worst <= SAME_LOSS, f"{found}")
    killed = place / "killed"
    process = _start(command, killed, 2)
    state = place / "killed.unfinished/training.parts/latest.json"
    while not state.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    end(process)
    trial.figure("steps of a killed training", json.loads(state.read_text())["step"])
    said = _end(_start([*command, "--resume"], killed, 1), fails=True)
    trial.check(
        "One process refuses a checkpoint of two, in a sentence",
        "holds a training of several processes" in said,
        said[-1000:],
    )
    _end(_start([*command, "--resume"], killed, 2))
    found["killed"] = _losses(killed)
    usual, then = (_largest(found["two"], found[name]) for name in ("again", "killed"))
    trial.figure("largest difference of a step's loss between two undisturbed trainings", f"{usual:.2e}")
    trial.figure("largest difference of a step's loss to a training that was killed", f"{then:.2e}")
    trial.check("A killed training has the losses of an undisturbed one in each step, within 1 %", then <= SAME_LOSS)
    undisturbed, *others = [_tensors(place / name) for name in ("by-two", "by-again", "killed")]
    equal = [weights == undisturbed != "" for weights in others]
    for what, same in zip(("two undisturbed trainings", "a killed and an undisturbed training"), equal, strict=True):
        trial.figure(f"equal weights of {what}, to the last bit", "yes" if same else "no")
    if device == "cpu":
        trial.check("All end in equal weights, to the last bit", all(equal))


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in json.loads((folder / HISTORY).read_text())]


def _largest(one: list[float], other: list[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


def _train(size: Size, device: str, place: Path) -> list[str]:
    """The command, but for its output, on the model and text of a folder."""
    fields = {**size.training, "temperature": "null", "validation_share": 0}
    changes = [part for name, value in fields.items() for part in ("--set", f"methods.rcp.{name}={value}")]
    where = ["--corpus", str(place / "text"), "--device", device, "--dtype", size.dtype, "--every", "4"]
    return ["train-quantized", str(place / "model"), "--method", "rcp", *where, *changes]


def _start(command: list[str], output: Path, count: int) -> subprocess.Popen[str]:
    return start([*command, "-o", str(output)], count, stderr=subprocess.STDOUT, text=True)


def _end(process: subprocess.Popen[str], fails: bool = False) -> str:
    said = process.communicate(timeout=600)[0]
    assert (process.returncode != 0) == fails, said[-3000:]
    return said


def _tensors(folder: Path) -> str:
    """The digests of a folder's tensors."""
    return json.dumps(json.loads((folder / MANIFEST).read_text())["digests"], sort_keys=True)


# --- the workflow


def _workflow(trial: Trial, size: Size, gpus: list[str], place: Path, files: list[Path]) -> None:
    """Compute Table 1 by two GPUs, then by one, so that what is there already by then is to the advantage of one."""
    two, one = place / "two", place / "one"
    one.mkdir()
    (one / "model").symlink_to(two / "model")
    make_folder(REPOSITORY, one, size.shape, size.layers[0], "cuda" if gpus else "cpu")
    trial.versions["snakemake"] = version("snakemake")
    seconds = {}
    for count, folder in ((2, two), (1, one)):
        for name in ("Snakefile", "profiles"):
            (folder / name).symlink_to(REPOSITORY / name)
        amounts = folder / "amounts.json"
        amounts.write_text(json.dumps({**projects.ONE_COLUMN, **size.amounts}))
        names = [str(folder / path.relative_to(two)) for path in files] + [str(amounts)]
        with contextlib.chdir(folder):
            parts = current_plan(folder, [Path(name) for name in names], write=False).table(TABLE).parts
        targets = [f"results/measured/{part}.json" for part in parts]
        line = [sys.executable, "-m", "snakemake", "--cores", "all" if gpus else str(count), *targets]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:count])} if gpus else {}
        env, started = {**os.environ, **visible}, time.monotonic()
        done = subprocess.run(
            [*line, "--configfile", *names], cwd=folder, env=env, capture_output=True, text=True, timeout=900
        )
        seconds[count] = round(time.monotonic() - started, 1)
        held = trial.check("Snakemake computes Table 1", done.returncode == 0, (done.stdout + done.stderr)[-3000:])
        if not held:
            return
    found = [projects.digests(folder) for folder in (one, two)]
    trial.figure("runs of Table 1", sum(name.startswith("run ") for name in found[0]))
    trial.figure("sets of weights of Table 1", sum(name.startswith("weights ") for name in found[0]))
    differing = projects.difference(*found)
    trial.check("Two compute what one computes, to the last bit", not differing, differing)
    trial.figure("seconds of Table 1 by one", seconds[1])
    trial.figure("seconds of Table 1 by two", seconds[2])
    trial.figure("times as fast by two", round(seconds[1] / seconds[2], 2))


# --- GPTQ


def _gptq(trial: Trial, size: Size, device: str) -> None:
    """GPTQ of a few layers, by one process and by two at a time."""
    devices = [f"{device}:{index}" if device == "cuda" else device for index in (0, 1)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(_quantize, devices, *([part] * 2 for part in WARM)))  # imports, and a GPU's libraries
        alone = pool.submit(_quantize, devices[0], *size.gptq).result()
        both = list(pool.map(_quantize, devices, *([part] * 2 for part in size.gptq)))
    shape, layers, samples, tokens = size.gptq
    trial.figure("GPTQ", f"{layers} layers of {shape}, {samples} samples of {tokens} tokens")
    trial.figure("seconds of GPTQ by one alone", round(alone[0], 1))
    trial.figure("seconds of GPTQ by two at a time, the slower", round(max(one[0] for one in both), 1))
    trial.figure("GiB of a GPU that GPTQ allocates", round(alone[1] / 2**30, 1))
    equal = {digest for *_, digest in (alone, *both)}
    trial.check("GPTQ gives equal bits on each GPU", len(equal) == 1, str(equal))


def _quantize(device: str, shape: str, layers: int, samples: int, tokens: int) -> tuple[float, int, str]:
    """Seconds of GPTQ on a random model of the host, bytes that its GPU allocates, and the digest of the result."""
    import torch

    from reproduction.benchmarks.learning.benchmarks import random_tokens
    from reproduction.benchmarks.learning.models import random_model_on, shape_config
    from rotquant.models.integrity import tensors_digest
    from rotquant.models.placement import current_gpu
    from rotquant.recipes.presets import preset
    from rotquant.weights.build import build_weights
    from rotquant.weights.packing import all_weight_tensors

    place = torch.device(device)
    config = tiny_config(layers, 1000) if shape == TINY else shape_config(shape, layers)
    model = random_model_on((place,), config, torch.bfloat16, host=torch.device("cpu"))
    ids = random_tokens(model.config.vocab_size, samples, tokens)
    started = time.perf_counter()
    with current_gpu(device):
        stored = build_weights(model, None, preset("gptq"), 0, ids, device=place, progress=False)
    seconds = time.perf_counter() - started
    peak = max(stored.manifest.peak_bytes.values(), default=0)
    return seconds, peak, tensors_digest(all_weight_tensors(stored.weights))


if __name__ == "__main__":
    run("gpus", __doc__.splitlines()[0], body)
