"""What is wrong with an argument is said before torch is loaded, which takes seconds of every mistake."""

import json
import subprocess
import sys

import pytest

from rotquant.models.folders import DECODER_MANIFEST, MANIFEST

#: Each command line, with M for a plain checkpoint, Q and D for a quantized and a converted folder, T for a text, X for
#: a file that is in the way, G.gguf for a GGUF file cut short, and what is said.
CASES = {
    "quantize ./nothing -o out": "model folder ./nothing does not exist",
    "quantize M -o out --method quarott": "unknown method 'quarott'",
    "quantize M -o out --method none.yaml": "none.yaml does not exist",
    "quantize M -o out --set weights.bits=3": "unknown field 'bits'",
    "quantize M -o X": "is a file, where a folder is to be written",
    "quantize M -o out --corpus ./nothing": "there is no folder or file nothing",
    "quantize M -o out --device tpu": "unknown device 'tpu'",
    "quantize M -o out --dtype int4": "unknown dtype 'int4'",
    "quantize Q -o out": "holds quantized weights already",
    "plan ./nothing": "model folder ./nothing does not exist",
    "plan M --dtype int4": "unknown dtype 'int4'",
    "families ./nothing": "model folder ./nothing does not exist",
    "frontier ./nothing": "model folder ./nothing does not exist",
    "frontier M --corpus T --budget soon": "'soon' is no time: write it as 90s, 10min or 2h",
    "evaluate ./nothing": "model folder ./nothing does not exist",
    "evaluate M --dtype int4": "unknown dtype 'int4'",
    "quantize M -o out": "name it with --corpus",
    "evaluate M": "name it with --corpus",
    "compare M M": "Missing option '--corpus'",
    "evaluate M --corpus T --split tests": "unknown split 'tests'",
    "evaluate M --corpus T --split sample": "unknown split 'sample'",
    "compare M ./nothing": "model folder ./nothing does not exist",
    "diagnose Q": "holds quantized weights already",
    "diagnose M --corpus ./nothing": "there is no folder or file nothing",
    "export ./nothing -o out": "model folder nothing does not exist",
    "export M -o out": "is a plain checkpoint: quantize it first",
    "export Q -o X": "is a file, where a folder is to be written",
    "import-gguf ./nothing -o out": "GGUF file nothing does not exist",
    "import-gguf X -o out": "X is no GGUF file",
    "evaluate G.gguf": "G.gguf is truncated or damaged (it ends within its header)",
    "quantize G.gguf -o out": "G.gguf is truncated or damaged",
    "convert G.gguf -o out": "G.gguf is a plain checkpoint: quantize it first",
    "convert D -o out": "is a converted decoder",
    "generate Q --prompt x": "is a quantized model: convert it first",
    "train-quantized ./nothing --method rcp -o out": "model folder ./nothing does not exist",
    "train-quantized M --method rcp --corpus T -o X": "is a file, where a folder is to be written",
}
RUN = """
import contextlib, io, json, sys
from rotquant.cli import app
found = []
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        app(arguments)
    found.append((said.getvalue(), sorted({"torch", "transformers", "datasets"} & sys.modules.keys())))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """What each command line says, and the heavy libraries that are loaded by then: all of them in one process."""
    folder = tmp_path_factory.mktemp("arguments")
    for name, marker in (("M", "model.safetensors"), ("Q", MANIFEST), ("D", DECODER_MANIFEST)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
        (folder / name / marker).write_text("{}")
    (folder / "T").mkdir()
    (folder / "T/test.txt").write_text("words")
    (folder / "X").write_text("precious")
    (folder / "G.gguf").write_bytes(b"GGUF\3\0\0\0")
    lines = json.dumps([line.split() for line in CASES])
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=lines, cwd=folder, capture_output=True, text=True, check=True
    )
    assert (folder / "X").read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == ["D", "G.gguf", "M", "Q", "T", "X"]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("line", CASES)
def test_an_argument_is_refused_without_torch(line: str, found: dict[str, tuple[str, list[str]]]) -> None:
    said, loaded = found[line]
    assert CASES[line] in " ".join(said.split())
    assert loaded == []


def test_every_command_that_works_on_a_model_is_tried() -> None:
    from typer.main import get_command

    from rotquant.commands.root import cli

    commands = get_command(cli).commands  # pyright: ignore[reportAttributeAccessIssue]  # a group's
    of_models = {name for name, one in commands.items() if any(p.name in ("model", "models") for p in one.params)}
    assert of_models == {line.split()[0] for line in CASES}
