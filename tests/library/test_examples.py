"""The programs of `examples/` run as their first lines say, here on a shipped model with tiny amounts."""

import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "workflow/resources/models/rq-qwen2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Source files of this project, of the kind that the model was trained on."""
    file = tmp_path_factory.mktemp("text") / "source.txt"
    file.write_text("".join(path.read_text() for path in sorted((ROOT / "rotquant/foundation").glob("*.py"))))
    return str(file)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, folder: Path, name: str, *arguments: str
) -> str:
    """Run an example in a folder; what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, MODEL, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_rotation_loses_less_than_rounding_alone(text, tmp_path, monkeypatch, capsys) -> None:
    small = ("--corpus", text, "--windows", "4", "--length", "128", "--samples", "2", "--methods", "rtn", "quarot-rtn")
    shown = run(monkeypatch, capsys, tmp_path, "quantize_and_compare.py", *small)
    rows = dict(re.findall(r"^ *([\w-]+) .*?\(x ([\d.]+) ±", shown, re.MULTILINE))
    assert 1 < float(rows["quarot-rtn"]) < float(rows["rtn"])
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_learned_rotation_is_drawn(text, tmp_path, monkeypatch, capsys) -> None:
    small = ("--corpus", text, "--steps", "4", "--length", "64")
    shown = run(monkeypatch, capsys, tmp_path, "learn_a_rotation.py", *small)
    times = dict(re.findall(r"^(.*): largest feature ([\d.]+) times", shown, re.MULTILINE))
    assert float(times["random Hadamard rotation"]) < float(times["as it is"])
    assert set(re.findall(r"^rotation (.*): perplexity \d", shown, re.MULTILINE)) == {"as drawn", "learned"}
    drawn = ElementTree.parse(tmp_path / "rotation.svg").getroot()
    assert drawn.tag.endswith("svg")
    assert (tmp_path / "rotation.safetensors").is_file()


def test_an_export_is_what_was_quantized(tmp_path, monkeypatch, capsys) -> None:
    shown = run(monkeypatch, capsys, tmp_path, "export_and_load.py", "--output", "served", "--tokens", "4")
    assert "logits equal to those of rotquant.api.load: yes" in shown
    assert (tmp_path / "served/config.json").is_file()


def test_the_readme_names_every_example() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in readme
