"""`rotquant train-quantized`: what it says before it starts, kills and --resume, several processes, bad input."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rotquant import api
from rotquant.models.checkpoints import config_of
from rotquant.qat import estimate as estimates
from rotquant.qat.estimate import estimate
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from tests.models import VOCABULARY, tiny_model
from tests.test_checkpoints import tiny_tokenizer
from tests.test_cli import rotquant

#: Each starts trainings in processes of their own, minutes in all: CI goes without.
_SLOW = pytest.mark.skipif(os.environ.get("ROTQUANT_SLOW_TESTS") != "1", reason="minutes: set ROTQUANT_SLOW_TESTS=1")
pytestmark = _SLOW

SETTINGS = {
    "text.samples": 8,
    "text.sequence_length": 24,
    "epochs": 6,
    "batch_size": 4,
    "start_samples": 4,
    "weight_lr": 1e-3,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=2000)
    (tmp_path / "words.txt").write_text(" ".join(words).replace("w9 ", "w9\n"))
    return tmp_path


def arguments(place: Path, output: str = "trained", method: str = "rcp", **settings: object) -> list[str]:
    (name,) = preset(method).methods
    said = {f"methods.{name}.{field}": value for field, value in {**SETTINGS, **settings}.items()}
    said |= {"weights.scheme.group_size": 16}
    changes = [part for field, value in said.items() for part in ("--set", f"{field}={value}")]
    text = ["--corpus", str(place / "words.txt"), "--device", "cpu", "--dtype", "float32", "--every", "2"]
    return ["train-quantized", str(place / "model"), "--method", method, "-o", str(place / output), *text, *changes]


def test_a_model_is_trained_and_can_be_loaded(place, monkeypatch, capsys):
    assert rotquant(monkeypatch, *arguments(place)) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "12 steps of 96 tokens on 1 process: about" in first
    assert "GiB free) and " in first
    assert "14 weights trained and quantized, loss" in last
    assert "tokens/s" in last
    assert not (place / "trained.unfinished").exists()
    loaded = api.load(place / "trained")
    assert loaded.recipe.methods["rcp"].epochs == 6


def wait_for(path: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "it ended before its first checkpoint"
        assert time.monotonic() < until
        time.sleep(0.01)


def start(command: list[str], processes: int) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    together = launcher if processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *together, "-m", "rotquant.cli", *command]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: subprocess.Popen) -> None:
    """Kill a process and those that it has started, which torchrun puts into sessions of their own."""
    every = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in every:
        one.kill()
    process.communicate()
    psutil.wait_procs(every[:-1])


@pytest.mark.unflipped
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_training_resumes_with_equal_bits(processes, place):
    if processes > 1 and not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    longer = {"epochs": 60}
    straight = start(arguments(place, "straight", **longer), processes)
    assert straight.wait(180) == 0, straight.stderr.read().decode()
    killed = start(arguments(place, "killed", **longer), processes)
    state = place / "killed.unfinished" / ("training" if processes == 1 else "training.parts/latest.json")
    try:
        wait_for(state, killed)
    finally:
        end(killed)
    assert not (place / "killed").exists()
    assert "pass --resume" in refused(arguments(place, "killed", **longer), processes)
    again = start([*arguments(place, "killed", **longer), "--resume"], processes)
    assert again.wait(180) == 0, again.stderr.read().decode()
    stored = [(place / name / "quantized.safetensors").read_bytes() for name in ("straight", "killed")]
    assert stored[0] == stored[1]
    assert not (place / "killed.unfinished").exists()


def refused(command: list[str], processes: int) -> str:
    process = start(command, processes)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    return errors.decode()


def sentence(monkeypatch, capsys, command: list[str]) -> str:
    assert rotquant(monkeypatch, *command) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_bad_input_is_one_sentence(place, monkeypatch, capsys):
    command = arguments(place)
    assert "holds no training to resume" in sentence(monkeypatch, capsys, [*command, "--resume"])
    assert "2 and 3 bits" in sentence(monkeypatch, capsys, [*command, "--set", "weights.scheme.bits=4"])
    other = [*arguments(place)[:3], "quarot", *arguments(place)[4:6], "--device", "cpu"]
    assert "does not train a whole model" in sentence(monkeypatch, capsys, other)
    assert "groups of 10 do not divide" in sentence(
        monkeypatch, capsys, [*command, "--set", "weights.scheme.group_size=10"]
    )


def test_too_little_memory_is_said_before_a_weight_is_loaded(place, monkeypatch, capsys):
    monkeypatch.setattr(estimates, "free_memory", lambda _: 2**20)
    monkeypatch.setattr(api, "load_checkpoint", None)
    said = sentence(monkeypatch, capsys, arguments(place))
    assert "GiB are missing" in said
    assert not (place / "trained.unfinished").exists()


def test_a_training_that_diverges_keeps_its_checkpoint(place, monkeypatch, capsys):
    command = arguments(place, weight_lr=1e30)
    assert "at step" in sentence(monkeypatch, capsys, command)
    assert not (place / "trained").exists()


def needs(place, processes=1, **changes):
    of = override(preset("rcp"), {"methods": {"rcp": changes}}, "test")
    config = config_of(place / "model")
    return estimate(config, of, of.methods["rcp"], torch.device("cpu"), torch.float32, processes)


def test_the_estimate_follows_what_it_is_made_of(place, monkeypatch):
    monkeypatch.setattr(estimates, "_rate", lambda *_: 1e12)
    model = tiny_model()
    whole = needs(place)
    assert whole.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert whole.steps == 8000
    assert whole.tokens == 8 * 1024
    # Weights, gradients, moments and the teacher must be there whatever the batch.
    assert whole.needed > 20 * whole.parameters
    assert needs(place, epochs=4).seconds == pytest.approx(whole.seconds / 2)
    assert needs(place, batch_size=4).needed < whole.needed
    assert needs(place, processes=4).seconds == pytest.approx(whole.seconds / 4)
    # Student 6 x teacher 2 x one more forward pass, 2 operations a weight and token, at 0.4 of the rate.
    assert 8000 * 8192 * 8 * whole.parameters <= 0.4e12 * whole.seconds <= 8000 * 8192 * 10 * whole.parameters
