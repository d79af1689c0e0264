"""Files are whole or absent, and JSON keys are canonical."""

import math

import pytest

from rotquant.errors import ResultError
from rotquant.files import atomic_directory, atomic_path, canonical_json, read_json, write_json


def fail_halfway(context, name: str | None):
    with context as path:
        (path / name if name else path).write_text("half")
        raise RuntimeError("killed")


def test_a_failed_write_leaves_the_earlier_file_and_no_litter(tmp_path):
    file = tmp_path / "result.json"
    write_json(file, {"value": 1})
    with pytest.raises(RuntimeError):
        fail_halfway(atomic_path(file), None)
    assert read_json(file) == {"value": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_failed_directory_leaves_the_earlier_one_and_no_litter(tmp_path):
    folder = tmp_path / "weights"
    with atomic_directory(folder) as path:
        (path / "a").write_text("whole")
    with pytest.raises(RuntimeError):
        fail_halfway(atomic_directory(folder), "b")
    assert [entry.name for entry in folder.iterdir()] == ["a"]
    with atomic_directory(folder) as path:
        (path / "c").write_text("new")
    assert [entry.name for entry in folder.iterdir()] == ["c"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]


def test_non_finite_numbers_stay_standard_json(tmp_path):
    write_json(tmp_path / "x.json", {"perplexity": math.inf, "list": [math.nan, -math.inf]})
    assert read_json(tmp_path / "x.json") == {"perplexity": "inf", "list": ["nan", "-inf"]}


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"metrics": ')
    with pytest.raises(ResultError, match=r"run file .*run\.json is damaged .*delete it"):
        read_json(file, "run file")
    with pytest.raises(ResultError, match="does not exist"):
        read_json(tmp_path / "absent.json", "run file")


def test_canonical_json_does_not_depend_on_order():
    assert canonical_json({"b": 1, "a": [1.0, None]}) == canonical_json({"a": [1.0, None], "b": 1})
