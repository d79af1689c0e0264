"""`rotquant train-quantized`: what it says before it starts, kills and --resume, several processes, bad input."""

import io
import json
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rotquant import api
from rotquant.commands.distil import _check_unfinished
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.models.checkpoints import config_of
from rotquant.models.integrity import weights_digest
from rotquant.qat import estimate as estimates
from rotquant.qat.engine import Engine, ShardedCheckpoint
from rotquant.qat.estimate import estimate
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.training.state import Checkpoint
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import VOCABULARY, tiny_model
from tests.helpers.processes import end, run_together, start

SETTINGS = {
    "text.samples": 8,
    "text.sequence_length": 24,
    "epochs": 6,
    "batch_size": 4,
    "start_samples": 4,
    "weight_lr": 1e-3,
    "temperature": "null",
    "validation_share": 0.0,
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
    first, last, cost, *_ = capsys.readouterr().out.splitlines()
    assert cost.startswith("cost: perplexity ")
    assert "12 steps of 96 tokens on 1 process: about" in first
    assert "GiB free) and " in first
    assert "14 weights trained and quantized, loss" in last
    assert "tokens/s" in last
    assert not (place / "trained.unfinished").exists()
    loaded = api.load(place / "trained")
    assert loaded.recipe.methods["rcp"].epochs == 6
    history = json.loads((place / "trained/history.json").read_text())
    assert [record["step"] for record in history] == [*range(12)]
    assert f"loss {history[0]['loss']:.3f} at the first and {history[-1]['loss']:.3f} at the last" in last


def wait_for(path: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "it ended before its first checkpoint"
        assert time.monotonic() < until
        time.sleep(0.01)


def called(processes: int, place: Path, *commands: list[str]) -> list[str]:
    """Run commands in processes that are not those of `start`; what each wrote to stderr, where it was refused."""
    if processes == 1:
        return [commanded(0, command) for command in commands]
    run_together(place, partial(each_commanded, commands=commands, processes=processes), processes)
    return json.loads((place / "said").read_text())


def each_commanded(rank: int, place: Path, commands: Sequence[list[str]], processes: int) -> None:
    """What each process does, one command after the other."""
    said = []
    for command in commands:
        if not dist.is_initialized():  # a command that has ended has left the others
            meeting = f"file://{place / f'meeting{len(said)}'}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
        said.append(commanded(rank, command, processes))
    if rank == 0:
        (place / "said").write_text(json.dumps(said))


def commanded(rank: int, command: list[str], processes: int = 1) -> str:
    """Run a command; torchrun's variables tell it that there are other processes."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        for name, value in variables.items() if processes > 1 else ():
            patch.setenv(name, str(value))
        status = rotquant(patch, *command)
    assert status == (2 if "rotquant: " in said.getvalue() else 0), said.getvalue()
    return said.getvalue()


@pytest.mark.long
@pytest.mark.unflipped
@pytest.mark.parametrize(
    ("processes", "epochs"),  # steps of several take longer
    [(1, 15), (2, 8)],
)
def test_a_killed_training_resumes_with_equal_bits(processes, epochs, place):
    if processes > 1 and not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    longer = {"epochs": epochs}
    called(processes, place, arguments(place, "straight", **longer))
    killed = start(arguments(place, "killed", **longer), processes, stderr=subprocess.PIPE)
    state = place / "killed.unfinished" / ("training" if processes == 1 else "training.parts/latest.json")
    try:
        wait_for(state, killed)
    finally:
        end(killed)
    assert not (place / "killed").exists()
    again = arguments(place, "killed", **longer)
    refused, _ = called(processes, place, again, [*again, "--resume"])
    assert "pass --resume" in refused
    stored = [(place / name / "quantized.safetensors").read_bytes() for name in ("straight", "killed")]
    assert stored[0] == stored[1]
    assert not (place / "killed.unfinished").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_checkpoint_of_another_number_of_processes_is_refused(processes, tmp_path):
    engine = Engine(torch.device("cpu"))
    engine.processes = 3 - processes
    kept = Checkpoint(tmp_path / "training", "any", every=1)
    state = kept.path if processes == 1 else ShardedCheckpoint(kept, processes, 0).path
    state.parent.mkdir(exist_ok=True)
    state.touch()
    whose = ("one process", "several processes")[processes - 1]
    for resume in (True, False):
        with pytest.raises(ResultError, match=f"holds a training of {whose}: start as many as it had"):
            _check_unfinished(kept, engine, resume)


def sentence(monkeypatch, capsys, command: list[str]) -> str:
    assert rotquant(monkeypatch, *command) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_bad_input_is_one_sentence(place, monkeypatch, capsys):
    command = arguments(place)
    assert "holds no training to resume" in sentence(monkeypatch, capsys, [*command, "--resume"])
    assert "2 and 3 bits" in sentence(monkeypatch, capsys, [*command, "--set", "weights.scheme.bits=4"])
    other = [
        *arguments(place)[:3],
        "quarot",
        *arguments(place)[4:6],
        "--corpus",
        str(place / "words.txt"),
        "--device",
        "cpu",
    ]
    assert "does not train a whole model" in sentence(monkeypatch, capsys, other)
    assert "groups of 10 do not divide the 64 features" in sentence(
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
    assert whole.steps == 800  # four fifths of 8,000 samples, 8 times, in batches of 64
    assert whole.tokens == 64 * 1024
    # Weights, gradients, moments and the teacher must be there whatever the batch.
    assert whole.needed > 20 * whole.parameters
    assert needs(place, epochs=4).seconds == pytest.approx(whole.seconds / 2)
    assert needs(place, batch_size=4).needed < whole.needed
    assert needs(place, processes=4).seconds == pytest.approx(whole.seconds / 4)
    # Student 6 x teacher 2 x one more forward pass, 2 operations a weight and token, at 0.4 of the rate.
    read = whole.steps * whole.tokens
    assert read * 8 * whole.parameters <= 0.4e12 * whole.seconds <= read * 10 * whole.parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_estimate_leaves_the_model_as_it_is(dtype, monkeypatch):
    """Its configuration decides what is saved, and by a digest which text it wrote."""
    monkeypatch.setattr(estimates, "_rate", lambda *_: 1e12)
    model, of = tiny_model(dtype=dtype), preset("rcp")
    before = weights_digest(model)
    estimate(model.config, of, of.methods["rcp"], torch.device("cpu"), dtype)
    assert weights_digest(model) == before


def test_a_gpu_takes_the_first_way_that_fits(place, monkeypatch):
    """From as asked to fewer sequences at once and to offloading, by the size of the GPU alone."""
    monkeypatch.setattr(estimates, "_rate", lambda *_: 1e12)
    monkeypatch.setattr(estimates, "LIBRARIES", 0)
    monkeypatch.setattr(estimates, "_TILES", 0)
    of = override(preset("rcp"), {"methods": {"rcp": {"batch_size": 8, "text": {"sequence_length": 64}}}}, "test")
    config = config_of(place / "model")
    config.num_hidden_layers = 8

    def way(memory, processes=1, at_once=None):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory, int(memory / estimates.USABLE) + 1))
        settings, device = of.methods["rcp"], torch.device("cuda")
        return estimate(config, of, settings, device, torch.bfloat16, processes, at_once)

    whole, least = way(2**40), way(1)
    assert (whole.at_once, whole.offloaded) == (None, False)
    assert (least.at_once, least.offloaded) == (1, True)
    alone = way(2**40, at_once=1)
    parts = way(whole.needed - 1)
    assert (parts.at_once, parts.offloaded) == (4, False)
    assert alone.needed < parts.needed < whole.needed
    offloaded = way(alone.needed - 1)
    assert offloaded.offloaded
    assert offloaded.needed < alone.needed
    with pytest.raises(RecipeError, match="GiB are missing"):
        least.check()
    assert not way(1, processes=2).offloaded
    # Moments leave, and the teacher's layers but for the three that are on their way.
    assert alone.needed - way(1, at_once=1).needed > 8 * whole.parameters
