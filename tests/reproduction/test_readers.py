"""Everything that reads is fuzzed or says why not, nothing unpickles, and what fuzzing found stays refused."""

import ast
import json
import os
from pathlib import Path

import pytest

from reproduction.reading.written import read_csv, read_yaml
from rotquant.foundation.errors import ConfigError, CorpusError, KernelError, ResultError, RotquantError
from rotquant.foundation.files import file_inside, read_object
from rotquant.foundation.parsing import parse_json
from rotquant.foundation.written import yaml_value
from rotquant.models.folders import read_safetensors_header
from rotquant.recipes.corpus import CorpusSpec
from rotquant.text import load_rows
from tests.trials.fuzz.readers import ASIDE, FUZZED, found

REPOSITORY = Path(__file__).parents[2]
#: What unpickles, by module and attribute.
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_every_function_that_reads_is_fuzzed_or_says_why_not() -> None:
    known = FUZZED.keys() | ASIDE.keys()
    assert found().keys() - known == set(), "new readers: name their formats in tests/trials/fuzz/readers.py"
    assert known - found().keys() == set(), "these read no more"
    assert not FUZZED.keys() & ASIDE.keys()


def sources() -> list[Path]:
    return [path for folder in ("rotquant", "workflow", "tests/trials") for path in (REPOSITORY / folder).rglob("*.py")]


def unpickling(path: Path) -> list[str]:
    """The lines of a module that import what unpickles, or call a reader that may."""
    lines = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            lines += [f"{path}:{node.lineno} {name}" for name in modules if name.split(".")[0] in PICKLES]
        if isinstance(node, ast.Call):
            lines += [f"{path}:{node.lineno} {why}" for why in [_unpickles(node)] if why]
    return lines


def _unpickles(call: ast.Call) -> str | None:
    if getattr(call.func, "attr", "") not in ("load", "load_all", "read_pickle", "unsafe_load", "full_load"):
        return None
    called = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        return called
    if called == "torch.load" or called.endswith((".read_pickle", ".unsafe_load", ".full_load")):
        return called
    loader = given.get("Loader", ast.unparse(call.args[1]) if len(call.args) > 1 else "")
    if called in ("yaml.load", "yaml.load_all") and "Safe" not in loader and loader != "_Reader":
        return called
    return None


def test_nothing_unpickles() -> None:
    assert [line for path in sources() for line in unpickling(path)] == []


def test_what_unpickles_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text, yaml.UnsafeLoader)",
        "frame = pd.read_pickle(path)",
    ):
        module.write_text(line)
        assert unpickling(module), line
    module.write_text("np.load(path, allow_pickle=False)\nyaml.load(text, Loader=yaml.SafeLoader)\njson.load(file)")
    assert unpickling(module) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number in it has too many digits"),
        (b'{"a": "\\ud800"}', "a text in it has half of a character"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
        (b"[]", "it is no JSON object"),
        (b"{", "Expecting property name"),
    ],
)
def test_json_that_python_stumbles_over_is_damage(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ResultError, match=rf"^record .*file\.json is damaged \(.*{why}.*\); delete it .*\.$"):
        read_object(tmp_path / "file.json", "record")


def test_json_is_read_as_python_reads_it() -> None:
    assert parse_json('{"a": [1, "\\ud83d\\ude00", "é", NaN]}'.encode())["a"][1:3] == ["\U0001f600", "é"]
    with pytest.raises(ValueError, match="it has the number NaN"):
        parse_json(b"[NaN]", finite=True)


@pytest.mark.parametrize(
    "value", ['!!int ""', '!!bool "maybe"', '!!timestamp "x"', '!!float "x"', "'\\ud800", "{[a]: b}"]
)
def test_a_tag_before_what_it_is_not_is_no_yaml(value: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(f"a: {value}\n")
    with pytest.raises(ConfigError, match=r"file\.yaml is not valid YAML: .*\.$"):
        read_yaml(tmp_path / "file.yaml")


def test_values_of_options_have_the_limits_of_files() -> None:
    laughs = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]" for n in range(12))
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        yaml_value(f"[{laughs}]", "--set")
    with pytest.raises(ConfigError, match="occurs twice"):
        yaml_value("{a: 1, a: 2}", "--set")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a,b\n1\n", "line 2: it has not as many cells as the head"),
        (b"a,b\n1,2,3\n", "line 2: it has not as many cells as the head"),
        (b"b\n1\n", "lack the column 'a'"),
        (b"", "lack the column 'a'"),
        (b"a,b\n\xff,1\n", "are not UTF-8 text"),
        (b'a,b\n"1"2,3\n', "are no CSV"),
    ],
)
def test_lines_of_a_csv_have_the_cells_of_its_head(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        read_csv(tmp_path / "file.csv", ("a", "b"), "printed numbers")


def header(path: Path, told: object, tensors: bytes = bytes(16)) -> Path:
    text = json.dumps(told).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)
    return path


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "told",
    [
        [],
        {"a": 3},
        {"a": GOOD | {"shape": [-1, -4]}},
        {"a": GOOD | {"shape": [3]}},
        {"a": GOOD | {"shape": "4"}},
        {"a": GOOD | {"data_offsets": [16, 0]}},
        {"a": GOOD | {"data_offsets": [8, 16], "shape": [2]}},
        {"a": GOOD, "b": GOOD},
        {"a": GOOD, "__metadata__": {"format": 3}},
        {"a": GOOD, "__metadata__": "pt"},
    ],
)
def test_a_header_that_its_tensors_do_not_fit_is_damage(told: object, tmp_path: Path) -> None:
    with pytest.raises(RotquantError, match=r"is truncated or damaged \(.*\); copy it again"):
        read_safetensors_header(header(tmp_path / "a.safetensors", told))
    assert read_safetensors_header(header(tmp_path / "b.safetensors", {"a": GOOD}))


@pytest.mark.parametrize("name", ["a\0b", "a" * 256, "a/" * 1100, "\ud800", "a\nb", "../a", "/a", ""])
def test_a_name_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="names the file"):
        file_inside(tmp_path, name, "index")


def test_a_sentence_is_one_line_that_a_terminal_only_shows() -> None:
    said = str(ResultError(f"tensor \x1b[2J\n{'a' * 5000}\ud800 is damaged."))
    assert said.isprintable()
    assert len(said) < 1100
    assert said.startswith("tensor \\x1b[2J ")
    assert said.endswith("\\ud800 is damaged.")
    assert str(KernelError("does not compile:\nline 1")) == "does not compile:\nline 1"


def test_reading_a_local_text_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for suffix, content in ((".jsonl", '{"text": "a"}\n'), (".json", '[{"text": "a"}]')):
        file = tmp_path / f"test{suffix}"
        file.write_text(content)
        assert load_rows(CorpusSpec(name="text", source="local", path=str(file)), "test") == ["a"]


@pytest.mark.parametrize("content", ['[NaN, {"text": "a"}]', "[3]", "{}", '{"text": 3}', "[[", '"a"'])
def test_a_damaged_text_of_json_ends_no_process(content: str, tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(content)
    with pytest.raises(CorpusError):
        load_rows(CorpusSpec(name="text", source="local", path=str(tmp_path / "test.json")), "test")


def test_a_plan_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    from reproduction.run.plan import read_plan

    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(ResultError, match="is a pipe, socket or device"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "change",
    [{"sitting": 1}, {"arguments": {"tokens": float("nan")}}, {"quantities": {"seconds": {"value": 0, "unit": "s"}}}],
)
def test_a_record_of_times_that_no_machine_measures_is_damage(change: dict, tmp_path: Path) -> None:
    _damaged_record(tmp_path, change, {})


@pytest.mark.parametrize("environment", [{"versions": "torch"}, {"git_commit": 3}, {"identified": {"git_commit": []}}])
def test_a_record_of_times_whose_environment_no_page_can_print_is_damage(environment: dict, tmp_path: Path) -> None:
    _damaged_record(tmp_path, {}, environment)


def _damaged_record(tmp_path: Path, change: dict, environment: dict) -> None:
    from reproduction.benchmarks.records import read_record

    cell = {"benchmark": "linear", "arguments": {}, "code": "0", "sitting": 0, "seconds": 1.0, "missing": "no GPU"}
    cell |= {"missing": None} | change if "quantities" in change else change
    record = {
        "table": "a_table1",
        "gpu": "Some GPU",
        "sittings": [{"environment": environment, "gpu_before": {}}],
        "cells": [cell],
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ResultError, match=r"record .* is damaged \(.*\); measure it again\."):
        read_record(tmp_path / "record.json", "a_table1")
