"""No command loses a file: an output replaces only its like, never an input, and anything else with --force alone.

The commands are found in the tree, so that one that is added is asked too.
"""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from rotquant import api
from rotquant.cli import app
from rotquant.commands.outputs import Reads, Writes, places_of
from rotquant.commands.root import cli
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import OutputKind, check_output_file, check_output_folder, replacing
from tests.helpers.checkpoints import save_tiny
from tests.helpers.places import snapshot
from tests.helpers.project import REPOSITORY
from tests.helpers.weights import ROTATED_GPTQ, build

#: What stands for arguments that name no place, where a command needs them.
WORDS = {"method": "rtn", "table": "quarot_table14", "slots": "Llama-2-7B", "tables": "quarot_table14"}

#: Names of files that a command replaces where they are there; which ones it writes follows from what it finds.
REPLACED = {"runs export": "quarot-runs.parquet"}


def commands(tree: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for info in tree.registered_commands:
        name = info.name or info.callback.__name__.replace("_", "-")
        yield (*path, name), info.callback
    for group in tree.registered_groups:
        yield from commands(group.typer_instance, (*path, group.name or group.typer_instance.info.name))


COMMANDS = {" ".join(path): callback for path, callback in commands(cli)}
WRITING = [
    (command, name)
    for command, callback in COMMANDS.items()
    for name, mark in places_of(callback).items()
    if isinstance(mark, Writes)
]
READING = [
    (command, name, read)
    for command, name in WRITING
    for read, mark in places_of(COMMANDS[command]).items()
    if isinstance(mark, Reads)
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of what commands may read, in a project, whose reports are not this one's."""
    (tmp_path / "inputs").mkdir()
    save_tiny(tmp_path / "inputs" / "model")
    quantized = Path(shutil.copytree(tmp_path / "inputs" / "model", tmp_path / "inputs" / "quantized"))
    (quantized / "rotquant.json").write_text("{}")
    (tmp_path / "inputs" / "text.txt").write_text("w3 w4 w5\n" * 900)
    (tmp_path / "inputs" / "recipe.yaml").write_text("weights: null\n")
    (tmp_path / "project" / "reports").mkdir(parents=True)
    for name in ("config", "workflow"):
        (tmp_path / "project" / name).symlink_to(REPOSITORY / name)
    (tmp_path / "project" / "reports" / "page.md").write_text("# Page\n")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def inputs(command: str, places: Path) -> dict[str, Path]:
    """A place for each parameter of a command that reads one."""
    found = {}
    for name, mark in places_of(COMMANDS[command]).items():
        if isinstance(mark, Reads):
            text, recipe = name in ("corpus", "archived", "needed", "plan"), name in ("method", "config")
            kind = "quantized" if command in ("export", "convert") else "model"
            found[name] = places / "inputs" / ("text.txt" if text else "recipe.yaml" if recipe else kind)
    return found


def line(command: str, given: Mapping[str, object]) -> list[str]:
    """A command's line with these arguments, and words for the others that it needs."""
    named: list[str] = []
    positional: list[str] = []
    for name, parameter in inspect.signature(COMMANDS[command], eval_str=True).parameters.items():
        info = next(
            (one for one in getattr(parameter.annotation, "__metadata__", ()) if hasattr(one, "param_decls")), None
        )
        value = given.get(name, WORDS.get(name) if parameter.default is inspect.Parameter.empty else None)
        if value is None:
            continue
        if isinstance(info, typer.models.ArgumentInfo):
            positional.append(str(value))
        else:
            said = () if info is None else (info.default, *(info.param_decls or ()))  # in typer the first is there
            flags = [flag for flag in said if str(flag).startswith("--")]
            named += [flags[0] if flags else f"--{name.replace('_', '-')}", str(value)]
    return [*command.split(), *positional, *named]


def targets(command: str, name: str, given: Mapping[str, object], place: Path) -> tuple[list[Path], bool]:
    """The files or the folder that an output's value means."""
    mark = places_of(COMMANDS[command])[name]
    defaults = {
        one: parameter.default
        for one, parameter in inspect.signature(COMMANDS[command], eval_str=True).parameters.items()
    }
    arguments = {**defaults, "method": "rtn", "slots": ["Llama-2-7B"], "tables": ["quarot_table14"], **given}
    folder = mark.folder if isinstance(mark.folder, bool) else mark.folder(arguments)
    return ([place] if mark.files is None else [*mark.files(place, arguments)]), folder


def refused(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as stop:
        app(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert said.startswith("rotquant: "), said
    return said


def test_every_parameter_that_names_a_place_says_whether_it_is_read_or_written() -> None:
    silent = {(command, name) for command, one in COMMANDS.items() for name, mark in places_of(one).items() if not mark}
    assert silent == set()
    assert len(WRITING) >= 15


@pytest.mark.parametrize(("command", "name"), WRITING)
def test_what_is_of_another_kind_is_replaced_by_force_alone(
    command: str, name: str, places: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(command, places)
    place = places / "mine"
    written, folder = targets(command, name, given, place)
    if command in REPLACED:  # what is there under such a name
        written = [place / REPLACED[command]]
        assert targets(command, name, given, place)[0] == []
    for file in [place / "notes.txt"] if folder else written:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine, and nobody else's")
    before = snapshot(places)
    monkeypatch.setenv("COLUMNS", "300")
    arguments = line(command, {**given, name: place})
    if name in ("rotations", "card"):  # which are read where they are there, and say what is wrong with them
        refused(arguments, capsys)
    else:
        said = refused(arguments, capsys)
        assert "pass --force to replace what is there" in said, said
        assert "1 files of 23 bytes" in said if folder else "a file of 23 bytes" in said
    assert snapshot(places) == before


@pytest.mark.parametrize(("command", "name", "read"), READING)
def test_an_input_is_not_replaced_even_by_force(
    command: str, name: str, read: str, places: Path, capsys: pytest.CaptureFixture
) -> None:
    given = inputs(command, places)
    source = given[read]
    (places / "link").symlink_to(source)
    (places / "around").symlink_to(places / "inputs")
    _, folder = targets(command, name, given, places)
    tried = [source, places / "link"]
    if places_of(COMMANDS[command])[name].files is not None:
        tried = []  # the files' names are the command's
    elif folder:
        tried += [places / "around", *([source / "in"] if source.is_dir() else [])]
    elif source.is_dir():
        tried += [source / "config.json", places / "link" / "model.safetensors"]
    before = snapshot(places)
    for place in tried:
        said = refused([*line(command, {**given, name: place}), "--force"], capsys)
        assert name in ("rotations", "card") or re.search(r"which this command reads|is a (folder|file)[;,] ", said)
        assert snapshot(places) == before, place


def test_results_are_replaced_by_their_like(places: Path, capsys: pytest.CaptureFixture) -> None:
    """Twice what `evaluate` writes, and what is forced."""
    evaluate = [
        "evaluate",
        str(places / "inputs/model"),
        "--corpus",
        str(places / "inputs/text.txt"),
        "--device",
        "cpu",
    ]
    evaluate += ["--sequence-length", "16", "--max-windows", "1", "--device", "cpu", "-o", str(places / "result.json")]
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            app(evaluate)
        assert stop.value.code == 0
    assert json.loads((places / "result.json").read_text())["command"] == "rotquant evaluate"
    (places / "result.json").write_text("{}")
    assert "is not a result of `rotquant evaluate`" in refused(evaluate, capsys)
    with pytest.raises(SystemExit) as stop:
        app([*evaluate, "--force"])
    assert stop.value.code == 0
    assert "perplexity" in json.loads((places / "result.json").read_text())


def test_the_librarys_writers_follow_the_rule(tmp_path: Path) -> None:
    from rotquant.weights.storage import save_quantized

    stored = build(ROTATED_GPTQ)
    for _ in range(2):
        save_quantized(tmp_path / "model", stored)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rotquant.json").write_text("{}")  # the name of the manifest alone makes no model
    with pytest.raises(ResultError, match="mine exists and is not a quantized model"):
        save_quantized(tmp_path / "mine", stored)
    with replacing(tmp_path / "mine"):
        save_quantized(tmp_path / "mine", stored)
    assert api.load(tmp_path / "mine").recipe == ROTATED_GPTQ


def test_what_links_in_an_input_lead_to_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the hub's cache, whose folders of models are links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "weights").write_text("weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "blobs" / "weights")
    anything = OutputKind("anything", lambda _: True)
    with replacing(tmp_path / "blobs", tmp_path / "blobs" / "weights"):
        for check, place in ((check_output_file, "blobs/weights"), (check_output_folder, "blobs")):
            with pytest.raises(ResultError, match="which this command reads"):
                check(tmp_path / place, anything, inputs=[tmp_path / "model"])
    monkeypatch.chdir(tmp_path)
    check_output_file("model/new.json", anything, ["model"])
    shutil.rmtree(tmp_path / "model")
