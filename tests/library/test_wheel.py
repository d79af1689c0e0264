"""The library's wheel works alone: far from a checkout, in an environment that has never seen the reproduction."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import VOCABULARY, tiny_model

REPOSITORY = Path(__file__).parents[2]

#: Commands in one process, since most of the time is imports; then a kernel. Prints statuses and the sources' folder.
SCRIPT = """
import json, sys
from rotquant.cli import app

def status(arguments):
    try:
        app(arguments)
    except SystemExit as stop:
        return stop.code

statuses = [status(arguments) for arguments in json.loads(sys.argv[1])]
from rotquant.kernels.hadamard import launch
from rotquant.kernels.launch.loading import SOURCES, compile_source
assert compile_source(launch.sources("sm_90a")[0], "sm_90a").cubin.read_bytes()[:4] == b"\\x7fELF"
print(json.dumps([statuses, str(SOURCES)]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and of all that is installed here what is not ours."""
    source, wheels, folder = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "environment"))
    for name in ("rotquant", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", wheels, source], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "rotquant" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def test_the_commands_about_models_and_the_kernels_come_with_the_wheel(python: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "300"}
    tiny_model(hidden_size=256, intermediate_size=384, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=4000)
    (tmp_path / "words.txt").write_text("".join(f"{word}\n" for word in words))
    text = ("--corpus", "words.txt", "--sequence-length", "24", "--device", "cpu")
    commands = (
        ("quantize", "model", "-o", "quantized", "--samples", "4", *text),
        ("evaluate", "quantized", *text),
        ("convert", "quantized", "-o", "converted"),
        ("diagnose", "model", "--tasks-limit", "0", "--max-windows", "2", *text),
        ("runs", "list"),
    )
    command = [python, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses, sources = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0, 0, 0, 0, 2], done.stdout + done.stderr
    assert (tmp_path / "converted/decoder.json").is_file()
    assert "`rotquant runs` is a command of the reproduction, which is not installed" in done.stderr
    assert Path(sources).is_relative_to(python.parents[1])
