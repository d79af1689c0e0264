"""The command line as its user meets it: the same number in another process, and errors that are sentences."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import rotquant as rotquant_package
from rotquant.cli import app, warnings_in_words
from rotquant.commands.options import changed, corpus_spec
from rotquant.commands.root import cli
from rotquant.foundation.errors import CorpusError
from rotquant.foundation.files import file_digest
from rotquant.methods.spinquant import cayley_training
from rotquant.methods.spinquant.cayley_training import learn_rotations
from rotquant.models import checkpoints
from rotquant.recipes.presets import preset
from rotquant.recipes.schemes import RotationScheme
from rotquant.text import content_hash, loading
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import SMALL, printed_perplexity, rotquant
from tests.helpers.models import tiny_model
from tests.helpers.processes import run_elsewhere


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cli") / "model"
    tiny_model(dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_words(tmp_path_factory.mktemp("text") / "words.txt", 2000))


def into_file(file, *arguments):
    """Run the command in this process, which ends with it and prints into a file."""
    with file.open("w") as printed, redirect_stdout(printed):
        app(arguments)


def test_quantizing_reads_and_checks_the_configuration_once(text, tmp_path, monkeypatch):
    """The second time it is opened is for its digest, with all other files of the checkpoint."""
    folder, opened, checks = tmp_path / "model", [], []
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    def hear(event, arguments):
        if event == "open" and str(arguments[0]) == str(folder / "config.json"):
            opened.append([frame.name for frame in traceback.extract_stack()])

    sys.addaudithook(hear)
    check = checkpoints.check_declared
    monkeypatch.setattr(checkpoints, "check_declared", lambda *given: checks.append(given) or check(*given))
    arguments = ["quantize", str(folder), "-o", str(tmp_path / "out"), "--corpus", text, *SMALL]
    assert rotquant(monkeypatch, *arguments) == 0
    assert [("content_digest" in frames) for frames in opened] == [False, True]
    assert len(checks) == 1


def test_a_quantized_folder_has_the_same_perplexity_in_another_process(model, text, tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "quantized")
    arguments = ["quantize", model, "-o", folder, "--corpus", text, "--set", "rotation.heads=false", *SMALL]
    assert rotquant(monkeypatch, *arguments) == 0
    assert "14 weights quantized" in capsys.readouterr().out
    evaluate = ["evaluate", folder, "--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, *evaluate) == 0
    here = printed_perplexity(capsys.readouterr().out)
    assert run_elsewhere(into_file, tmp_path / "printed", *evaluate) == 0
    there = (tmp_path / "printed").read_text()
    assert printed_perplexity(there) == here
    assert rotquant(monkeypatch, "evaluate", model, *evaluate[2:]) == 0
    assert printed_perplexity(capsys.readouterr().out) != here  # the folder's quantizers are at work


def test_own_warnings_are_printed_as_their_sentence_alone() -> None:
    own, foreign = str(Path(rotquant_package.__file__).parent / "api.py"), "/elsewhere/api.py"
    usual = warnings.formatwarning
    with warnings_in_words():
        assert warnings.formatwarning("no GPU: slow.", UserWarning, own, 3) == "warning: no GPU: slow.\n"
        for file, category in ((foreign, UserWarning), (own, DeprecationWarning)):
            assert f"{file}:3: {category.__name__}: old" in warnings.formatwarning("old", category, file, 3)
    assert warnings.formatwarning is usual


LEARNING = ["steps=4", "batch_size=2", "text.samples=4"]


def test_learned_rotations_are_kept_in_a_file_that_recipes_share_and_the_model_exported(
    model, text, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "rotations.safetensors"
    settings = [option for change in LEARNING for option in ("--set", f"methods.spinquant.{change}")]
    common = ["--method", "spinquant-easy", "--corpus", text, "--rotations", str(file), *settings, *SMALL]
    assert rotquant(monkeypatch, "quantize", model, "-o", str(tmp_path / "gptq"), *common) == 0
    assert "(learning " in capsys.readouterr().out
    content = file.read_bytes()
    rtn = ["quantize", model, "-o", str(tmp_path / "rtn"), *common, "--set", "methods.gptq=null"]
    assert rotquant(monkeypatch, *rtn) == 0
    assert "(learning " not in capsys.readouterr().out
    sources = [json.loads((tmp_path / name / "rotquant.json").read_text())["source"] for name in ("gptq", "rtn")]
    assert sources[0]["rotation"]["digest"] == sources[1]["rotation"]["digest"] == file_digest(file)
    assert sources[0]["rotation"]["last"]["step"] == 3
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*.unfinished"))
    for change, said in (
        (["--seed", "1"], "were learned with seed 0 (here 1)"),
        (["--set", "methods.spinquant.steps=5"], "were learned with methods.spinquant.steps 4 (here 5)"),
    ):
        assert rotquant(monkeypatch, *rtn, *change) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert file.read_bytes() == content

    assert rotquant(monkeypatch, "export", str(tmp_path / "rtn"), "-o", str(tmp_path / "plain")) == 0
    capsys.readouterr()
    evaluate = ["--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, "evaluate", str(tmp_path / "plain"), *evaluate) == 0
    plain = printed_perplexity(capsys.readouterr().out)
    assert rotquant(monkeypatch, "evaluate", str(tmp_path / "rtn"), *evaluate) == 0
    assert printed_perplexity(capsys.readouterr().out) != plain  # quantized activations are at work


def test_rotations_of_a_float16_model_are_learned_in_bfloat16(model, text, tmp_path, monkeypatch):
    given: list[torch.dtype] = []

    def learn(network, *arguments, **options):
        given.append(network.dtype)
        return learn_rotations(network, *arguments, **options)

    monkeypatch.setattr(cayley_training, "learn_rotations", learn)
    settings = [option for change in LEARNING for option in ("--set", f"methods.spinquant.{change}")]
    arguments = ["--method", "spinquant-hard", "--corpus", text, "--dtype", "float16", *settings, *SMALL]
    assert rotquant(monkeypatch, "quantize", model, "-o", str(tmp_path / "quantized"), *arguments) == 0
    assert given == [torch.bfloat16]
    assert json.loads((tmp_path / "quantized" / "rotquant.json").read_text())["dtype"] == "float16"


def test_evaluation_reads_its_text_once(model, text, tmp_path, monkeypatch):
    read: list[str] = []

    def load_rows(spec, split, **options):
        read.append(split)
        return rows(spec, split, **options)

    rows = loading.load_rows
    monkeypatch.setattr(loading, "load_rows", load_rows)
    arguments = ["evaluate", model, "--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, *arguments, "-o", str(tmp_path / "result.json")) == 0
    assert read == ["test"]
    told = json.loads((tmp_path / "result.json").read_text())["text"]["splits"]["test"]
    assert told["sha256"] == content_hash(loading.load_text(corpus_spec(text), "test"))


@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
def test_the_hub_is_asked_once_where_a_model_is(command, model, text, monkeypatch, capsys):
    asked: list[str] = []

    def download(name, **options):
        asked.append(name)
        return model

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    small = ["--sequence-length", "32", "--max-windows", "1", "--device", "cpu"]
    assert rotquant(monkeypatch, command, "owner/model", "--corpus", text, *small) == 0
    assert asked == ["owner/model"]
    assert capsys.readouterr().out


def test_the_package_is_the_command_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["python -m rotquant", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("rotquant", run_name="__main__")
    assert (stop.value.code, capsys.readouterr().out) == (0, f"{rotquant_package.__version__}\n")


def test_corpus_prints_the_hash_of_each_split(text, monkeypatch, capsys):
    assert rotquant(monkeypatch, "corpus", text, "--split", "test") == 0
    assert "words" in capsys.readouterr().out


def test_changes_that_need_each_other_stand_in_any_order():
    both = ["weights.scheme.granularity=group", "weights.scheme.group_size=4"]
    recipe = changed(preset("quarot"), both)
    assert recipe.weights.scheme.group_size == 4
    assert recipe == changed(preset("quarot"), both[::-1])


def test_changes_are_applied_one_after_the_other():
    recipe = changed(preset("quarot"), ["rotation=null", "rotation.heads=false", "calibration.samples=3"])
    assert recipe.rotation == RotationScheme(heads=False)
    assert recipe.calibration.samples == 3


def test_help_says_which_kind_of_model_a_command_takes(monkeypatch, capsys):
    said = {}
    for command in ("quantize", "diagnose", "evaluate"):
        assert rotquant(monkeypatch, command, "--help") == 0
        said[command] = " ".join(capsys.readouterr().out.split())
    assert "or a folder of rotquant quantize or convert" in said["evaluate"]
    for command in ("quantize", "diagnose"):
        assert "A plain checkpoint: Hugging Face folder, GGUF file or hub id." in said[command]


def commands(group, path=()):
    """Every command of the tree with its path."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), list(commands(get_command(cli))))
def test_help_prints_every_placeholder_of_its_text(path, command, monkeypatch, capsys):
    assert rotquant(monkeypatch, *path, "--help") == 0
    printed = capsys.readouterr().out
    texts = [command.help, *(parameter.help or "" for parameter in command.params if hasattr(parameter, "help"))]
    for placeholder in re.findall(r"<[^<>\n]+>", " ".join(texts)):
        assert placeholder in printed


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_of_any_import_is_status_130_without_a_traceback(model, tmp_path, module):
    """The stand-in makes another error of an interrupt, as numpy does."""
    stand_in = (
        "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\nfinally:\n    raise ImportError\n"
    )
    (tmp_path / f"{module}.py").write_text(stand_in)
    path = f"{tmp_path}:{Path(rotquant_package.__file__).parents[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "rotquant.cli", "quantize", model, "-o", "out", "--corpus", "wikitext2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "__pycache__"] == [f"{module}.py"]


def test_a_result_says_which_part_of_a_single_file_it_was_measured_on(model, text, tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    arguments = ["--corpus", text, "--sequence-length", "32", "--device", "cpu", "-o", str(file)]
    assert rotquant(monkeypatch, "evaluate", model, *arguments) == 0
    (part,) = json.loads(file.read_text())["text"]["splits"].values()
    assert part["share"] == "rows from 90 to 100 % of the file"


def test_a_corpus_that_is_nearly_wikitext2_is_not_asked_of_the_hub() -> None:
    for name in ("wikitxt2", "wikitext-2", "wikitxt"):
        with pytest.raises(CorpusError, match=f"unknown corpus '{name}'; nearest: wikitext2"):
            corpus_spec(name)
    assert corpus_spec("wikitext").source == corpus_spec("wikitext2").source == corpus_spec("c4").source == "hub"
