"""Measuring a speed table: cell by cell, resumed where it was interrupted, a reason in place of each missing number.

The GPU is made up here: what is tested is what becomes of the functions' answers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from reproduction.benchmarks.records import Measurement, read_record
from reproduction.benchmarks.registry import Benchmark
from reproduction.run.stages import speed as measuring
from reproduction.sources import load_tables
from reproduction.tables.speed.definitions import SpeedTable
from rotquant.commands.root import cli
from rotquant.foundation.data import Frozen
from rotquant.foundation.errors import KernelError, ResultError
from tests.helpers.project import Copy
from tests.helpers.speed import SPEED, STATE, files_timed

Answer = Callable[[Frozen], dict[str, Measurement]]


@pytest.fixture
def table(tmp_path: Path) -> SpeedTable:
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED))
    return load_tables(tmp_path)["quarot_table14"]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[Any]]:
    """Stand in for the benchmarks' functions on a made-up GPU; returns the list of arguments they are called with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measuring, "gpu_state", lambda device: STATE)

    def use(function: Answer) -> list[Any]:
        calls: list[Any] = []

        def counted(arguments: Frozen) -> dict[str, Measurement]:
            calls.append(arguments)
            return function(arguments)

        monkeypatch.setattr(Benchmark, "function", lambda self: counted)
        return calls

    return use


def one_second(arguments: Frozen) -> dict[str, Measurement]:
    return {"seconds": Measurement(1.0, "s", 0.9, 1.1, 15, 10), "bytes": Measurement(4.0, "B")}


def test_every_cell_is_measured_once_and_the_record_says_where_and_by_which_code(
    table: SpeedTable, tmp_path: Path, answer: Callable
) -> None:
    calls = answer(one_second)
    output = tmp_path / "record.json"
    made = measuring.measure(table, output)
    assert len(calls) == len(table.cells) == 6
    assert read_record(output, table.id) == made
    assert (made.gpu, made.sittings[0].gpu_after) == ("Some GPU", STATE)
    assert all(cell.quantities["seconds"].value == 1.0 and len(cell.code) == 16 for cell in made.cells)
    assert not output.with_suffix(".partial.json").exists()


def test_what_was_finished_before_a_kill_is_not_measured_again(
    table: SpeedTable, tmp_path: Path, answer: Callable
) -> None:
    output = tmp_path / "record.json"

    def killed_at_the_fourth(arguments: Frozen) -> dict[str, Measurement]:
        if len(calls) == 4:
            raise KeyboardInterrupt
        return one_second(arguments)

    calls = answer(killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(table, output)
    assert not output.exists()
    calls = answer(one_second)
    made = measuring.measure(table, output)
    assert len(calls) == 3
    assert [cell.sitting for cell in made.cells] == [0, 0, 0, 1, 1, 1]
    assert measuring.measure(table, output).cells == made.cells
    assert len(calls) == 3


def test_a_cell_without_a_number_says_why_and_is_tried_again(
    table: SpeedTable, tmp_path: Path, answer: Callable
) -> None:
    def refusing(arguments: Frozen) -> dict[str, Measurement]:
        if arguments.implementation == "fp8":
            raise KernelError("fp8 needs another GPU.")
        if arguments.implementation == "fp16":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return one_second(arguments)

    answer(refusing)
    output = tmp_path / "record.json"
    made = measuring.measure(table, output)
    reasons = ["out of GPU memory", None, "fp8 needs another GPU."]
    assert [cell.missing for cell in made.cells] == reasons * 2
    calls = answer(one_second)
    assert all(cell.missing is None for cell in measuring.measure(table, output).cells)
    assert len(calls) == 4


def test_a_defect_of_one_benchmark_keeps_the_other_cells_and_the_earlier_record(
    table: SpeedTable, tmp_path: Path, answer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(one_second)
    output = tmp_path / "record.json"
    measuring.measure(table, output)
    earlier = output.read_bytes()
    monkeypatch.setattr(measuring, "benchmark_digest", lambda name: "1" * 16)

    def broken(arguments: Frozen) -> dict[str, Measurement]:
        if arguments.implementation == "int4":
            raise IndexError("a defect")
        return one_second(arguments)

    answer(broken)
    with pytest.raises(ResultError, match="2 cells of quarot_table14 broke down, first 4096x4096 batch 1, INT4: Index"):
        measuring.measure(table, output)
    assert output.read_bytes() == earlier
    calls = answer(one_second)
    measuring.measure(table, output)
    assert [arguments.implementation for arguments in calls] == ["int4", "int4"]


def test_after_a_fault_of_the_gpu_nothing_more_is_measured_and_a_new_attempt_goes_on_behind_it(
    table: SpeedTable, tmp_path: Path, answer: Callable
) -> None:
    def faulty(arguments: Frozen) -> dict[str, Measurement]:
        if arguments.implementation == "int4":
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return one_second(arguments)

    calls = answer(faulty)
    with pytest.raises(ResultError, match="the GPU failed at 4096x4096 batch 1, INT4"):
        measuring.measure(table, tmp_path / "record.json")
    assert len(calls) == 2
    calls = answer(one_second)
    made = measuring.measure(table, tmp_path / "record.json")
    assert len(calls) == 4
    assert [cell.missing is None for cell in made.cells] == [True, False, True, True, True, True]


def test_other_code_or_another_gpu_measures_everything_anew(
    table: SpeedTable, tmp_path: Path, answer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = answer(one_second)
    output = tmp_path / "record.json"
    measuring.measure(table, output)
    monkeypatch.setattr(measuring, "benchmark_digest", lambda name: "2" * 16)
    assert {cell.code for cell in measuring.measure(table, output).cells} == {"2" * 16}
    assert len(calls) == 12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    assert len(measuring.measure(table, output).sittings) == 1
    assert len(calls) == 18


def test_a_time_depends_on_kernels_benchmarks_and_decoder_and_not_on_what_is_evaluated_or_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = files_timed("block", monkeypatch)
    timed = {
        "workflow/reproduction/benchmarks/timing.py",
        "rotquant/kernels/products/gemm.py",
        "rotquant/decoder/model.py",
    }
    assert timed | {"kernels/gemm_sm90.cu", "kernels/include/gemm/problem.cuh"} <= files
    rooms = ("recipes", "foundation", "identity", "study", "methods", "metrics", "reporting", "qat")
    assert not [path for path in files if path.startswith(tuple(f"rotquant/{room}/" for room in rooms))]
    assert "rotquant/weights/build.py" not in files


def test_rows_can_be_chosen_and_quick_takes_the_first_of_each_grid(
    table: SpeedTable, tmp_path: Path, answer: Callable
) -> None:
    calls = answer(one_second)
    made = measuring.measure(table, tmp_path / "a.json", patterns=("* batch 2",))
    assert {arguments.tokens for arguments in calls} == {4096}
    assert len(made.cells) == 3
    calls = answer(one_second)
    measuring.measure(table, tmp_path / "b.json", quick=True)
    assert {arguments.tokens for arguments in calls} == {2048}
    assert len(calls) == 3


def test_the_command_shows_its_progress(
    table: SpeedTable, tmp_path: Path, answer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(one_second)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["bench", "measure", "quarot_table14", "-o", "results/speed/x.json"])
    assert result.exit_code == 0, result.output
    assert "4096x4096 batch 1, INT4: seconds 1000000.00 us" in result.output
    assert "6 cells on Some GPU, 0 of them without a number" in result.output


def test_the_command_measures_several_tables_into_a_folder(
    tmp_path: Path, answer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["quarot_table14", "quarot_table15"]
    tables = [SPEED["tables"][0] | {"id": name, "published": None} for name in names]
    Copy(tmp_path).write("workflow/papers/quarot/speed.yaml", yaml.safe_dump(SPEED | {"tables": tables}))
    answer(one_second)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["bench", "measure", *names, "-o", "results/bench/a-gpu"])
    assert result.exit_code == 0, result.output
    assert [read_record(Path(f"results/bench/a-gpu/{name}.json"), name).table for name in names] == names


def test_without_a_gpu_it_is_one_sentence(table: SpeedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="needs an NVIDIA GPU"):
        measuring.measure(table, tmp_path / "record.json")
