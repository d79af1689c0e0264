"""`--json`: one document on standard output, of documented keys, for every command that prints numbers; completion."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.table import Table
from typer.main import get_command
from typer.testing import CliRunner

from rotquant.commands.answers import NOT_FINITE, CommandResult, answers, print_table
from rotquant.commands.root import cli
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.models import tiny_model

#: Commands without numbers: they write, serve or draw, and say where.
WITHOUT = {
    "version",
    "bench costs",
    "runs execute",
    "runs sync-tracking",
    "runs make",
    "runs ui",
    "report figure",
    "report gallery",
    "report index",
    "report page",
}


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command of the tree by its path."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        here = (*path, name)
        found |= commands(command, here) if hasattr(command, "commands") else {" ".join(here): command}
    return found


COMMANDS = commands(get_command(cli))


def standard(text: str) -> Any:
    """Parse JSON as other languages do, in which NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text."""
    root = tmp_path_factory.mktemp("answers")
    tiny_model(hidden_size=256, intermediate_size=384, dtype=torch.bfloat16).save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    save_words(root / "words.txt", 1500)
    return root


def test_every_command_but_those_without_numbers_answers_in_json() -> None:
    with_json = {name for name, one in COMMANDS.items() if any("--json" in part.opts for part in one.params)}
    assert set(COMMANDS) - with_json == WITHOUT


def test_keys_are_documented_and_nothing_else_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    text = ("--corpus", "words.txt", "--sequence-length", "24", "--device", "cpu")
    small = ("--set", "rotation.heads=false", "--samples", "4")
    for line in (
        ("methods",),
        ("recipe", "quarot"),
        ("tasks",),
        ("families", "model"),
        ("quantize", "model", "-o", "quantized", *small, *text),
        ("evaluate", "quantized", *text),
        ("export", "quantized", "-o", "served", "--format", "compressed-tensors"),
        ("convert", "quantized", "-o", "decoder", "--dtype", "float32"),
        ("generate", "decoder", "--prompt", "w5 w6", "--tokens", "3", "--device", "cpu"),
        ("corpus", "words.txt"),
    ):
        capsys.readouterr()
        assert rotquant(monkeypatch, *line, "--json") == 0, line
        found = standard(capsys.readouterr().out)
        keys = COMMANDS[line[0]].callback.keys
        assert set(found) <= set(keys) or any(" " in key for key in keys), (line, set(found) - set(keys))
    assert len(found["splits"]["test"]["sha256"]) == 64


def answering(data: dict[str, Any], status: int = 0, *, file: bool = False) -> typer.Typer:
    """A command line of one command that prints and answers."""
    app = typer.Typer()

    @app.command()
    @answers({"value": "what it found"}, file=file)
    def find() -> CommandResult:
        print("a library speaks")
        return CommandResult(data, ("found",), status)

    return app


def test_numbers_that_are_not_finite_stay_json() -> None:
    found = CliRunner().invoke(answering({"value": [math.nan, -math.inf, 1.5]}), ["--json"])
    assert standard(found.stdout) == {"value": ["nan", "-inf", 1.5]}
    assert found.stderr == "a library speaks\n"


def test_without_json_people_read_words_and_the_status_is_the_answers() -> None:
    found = CliRunner().invoke(answering({"value": 1}, status=1))
    assert (found.stdout, found.exit_code) == ("a library speaks\nfound\n", 1)
    assert CliRunner().invoke(answering({"value": 1}, status=1), ["--json"]).exit_code == 1


def test_a_result_that_is_not_finite_is_printed_with_a_sentence_and_a_status_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    broken = tiny_model(hidden_size=256, intermediate_size=384)
    with torch.no_grad():
        broken.lm_head.weight.mul_(1e38)  # which float32 holds, but not its products with hidden states
    broken.save_pretrained(folder / "broken")
    tiny_tokenizer().save_pretrained(folder / "broken")
    monkeypatch.chdir(folder)
    text = ("--corpus", "words.txt", "--sequence-length", "24", "--device", "cpu", "--max-windows", "2")
    for line in (("evaluate", "broken", *text), ("compare", "model", "broken", *text)):
        capsys.readouterr()
        assert rotquant(monkeypatch, *line, "--json") == NOT_FINITE, line
        printed = capsys.readouterr()
        data = standard(printed.out)
        assert (data if line[0] == "evaluate" else data["models"][0]["perplexity"])["perplexity"] in ("nan", "inf")
        assert re.search(r"^rotquant: not finite: .*perplexity.*\. The network's outputs overflow", printed.err, re.M)
    assert rotquant(monkeypatch, "compare", "model", "model", *text) == 0


def test_a_path_that_is_wider_than_its_column_is_printed_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table, path = Table("found", "what to do"), "/a/folder/of/many/names/in/a/row/python"
    table.add_row(path, "nothing that needs more words than these")
    print_table(table)
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert "".join(cells) == path


def test_the_file_holds_what_json_prints(tmp_path: Path) -> None:
    app, file = answering({"value": 2}, file=True), tmp_path / "found.json"
    assert CliRunner().invoke(app, ["-o", str(file), "--json"]).stdout == file.read_text()
    refused = CliRunner().invoke(app, ["-o", str(tmp_path)])
    assert "is a folder; name a file" in str(refused.exception)
    assert refused.stdout == ""  # before the work


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("recipe spinquant-", ["spinquant-easy", "spinquant-hard"]),
        ("quantize model --method quarot-r", ["quarot-rtn"]),
        ("tasks --tasks piqa,hella", ["piqa,hellaswag"]),
        ("evaluate model --corpus wiki", ["wikitext2"]),
        ("compare a b --split va", ["validation"]),
    ],
)
def test_a_shell_completes_names(typed: str, offered: list[str]) -> None:
    words = f"rotquant {typed}"
    environment = {"_ROTQUANT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    found = CliRunner().invoke(cli, prog_name="rotquant", env=environment)
    assert found.stdout.split() == offered


def test_a_command_line_without_work_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "datasets", "lm_eval", "numpy", "pandas", "matplotlib", "mlflow", "snakemake"}
    code = f"import sys, rotquant.commands.root; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
