"""Trial of GPUs that share a training of RCP: losses of two, and of four, are those of one; two are killed and go on.

The quick form trains a tiny model, by processes of the CPU where there are no two GPUs.
"""

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotquant.commands.distil import HISTORY
from rotquant.models.folders import MANIFEST
from tests.helpers.processes import end, start
from tests.trials.gpus import several_gpus
from tests.trials.material import TINY, make_folder
from tests.trials.trial import REPOSITORY, Trial, run

#: Largest difference of a step's loss between one GPU and two, as a share: sums of bfloat16 in another order.
SAME_LOSS = 0.01


@dataclass(frozen=True)
class Size:
    """What is trained. fields: of RCP. dtype: of the model."""

    shape: str
    layers: int
    fields: dict[str, Any]
    dtype: str


WHOLE = Size(
    shape="llama-2-7b",
    layers=1,
    fields={"epochs": 2, "batch_size": 8, "text.samples": 32, "text.sequence_length": 512, "start_samples": 8},
    dtype="bfloat16",
)
QUICK = Size(
    shape=TINY,
    layers=1,
    fields={"epochs": 3, "batch_size": 4, "text.samples": 16, "text.sequence_length": 32, "start_samples": 4},
    dtype="float32",
)


def body(trial: Trial) -> None:
    """Compare the losses of one process and of several, and continue a killed training of two."""
    gpus, size = several_gpus(trial, most=4), (QUICK if trial.quick else WHOLE)
    device, shared = ("cuda" if gpus else "cpu"), {"two": 2} | ({"four": 4} if len(gpus) == 4 else {})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        make_folder(REPOSITORY, place, size.shape, size.layers, device)
        command = _command(size, device, place)
        losses = {}
        for name, count in {"one": 1, "again": 2, **shared}.items():
            _end(_start(command, place / name, count))
            losses[name] = _losses(place / name)
        trial.figure("steps", len(losses["two"]))
        for name in shared:
            worst = _largest(losses["one"], losses[name])
            trial.figure(f"largest difference of a step's loss between one and {name}", f"{worst:.2e}")
            what = f"{name.capitalize()} have the losses of one in each step, within 1 %"
            trial.check(what, worst <= SAME_LOSS, f"{losses}")
        _kill(trial, command, place / "killed")
        losses["killed"] = _losses(place / "killed")
        usual, then = (_largest(losses["two"], losses[name]) for name in ("again", "killed"))
        trial.figure("largest difference of a step's loss between two undisturbed trainings", f"{usual:.2e}")
        trial.figure("largest difference of a step's loss to a training that was killed", f"{then:.2e}")
        trial.check("A killed training has the losses of one left alone in each step, within 1 %", then <= SAME_LOSS)
        undisturbed, *others = [_tensors(place / name) for name in ("two", "again", "killed")]
        equal = [weights == undisturbed != "" for weights in others]
        for what, same in zip(("two undisturbed trainings", "a killed and an undisturbed one"), equal, strict=True):
            trial.figure(f"equal weights of {what}, to the last bit", "yes" if same else "no")
        if device == "cpu":
            trial.check("All end in equal weights, to the last bit", all(equal))


def _kill(trial: Trial, command: list[str], output: Path) -> None:
    """Kill a training by two after its first checkpoint, and continue it."""
    process = _start(command, output, 2)
    state = output.with_name("killed.unfinished") / "training.parts/latest.json"
    while not state.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    end(process)
    trial.figure("steps of the killed training", json.loads(state.read_text())["step"])
    said = _end(_start([*command, "--resume"], output, 1), fails=True)
    refused = "holds a training of several processes" in said
    trial.check("One process refuses a checkpoint of two, in a sentence", refused, said[-1000:])
    _end(_start([*command, "--resume"], output, 2))


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in json.loads((folder / HISTORY).read_text())]


def _largest(one: list[float], other: list[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


def _command(size: Size, device: str, place: Path) -> list[str]:
    """The command, but for its output, on the model and text of a folder."""
    fields = {**size.fields, "temperature": "null", "validation_share": 0}
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


if __name__ == "__main__":
    run("gpus_training", __doc__.splitlines()[0], body)
