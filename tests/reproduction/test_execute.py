"""The runner without Snakemake computes what the workflow would, once; whatever ends it, the next call continues."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduction.run import execution
from reproduction.run.execution import WorkUnit
from rotquant.foundation.data import merge
from tests.helpers.project import CONFIG, TABLES, Copy, alive

REPORT = "reports/quarot_table1.md"
PROBLEM = {"prompt": "def one():\n", "test": "def check(one):\n    assert one() == 1\n", "entry_point": "one"}
EXECUTE = ("rotquant", "runs", "execute")


def until(what: Callable[[], object]) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.05)


def started(project: Copy) -> subprocess.Popen:
    """The runner, once it makes weights, which take as long as the file `slow` is there."""
    (project.root / "slow").touch()
    process = project.start(*EXECUTE, "--jobs", "2")
    until((project.root / "started").exists)
    return process


def test_what_the_runner_has_computed_the_workflow_finds_current(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    status, output = project.rotquant(*EXECUTE[1:], "quarot", "--jobs", "2")
    assert status == 0, output
    made = project.read("results/*/*.json")
    assert set(project.planned(REPORT)) == {"table", "figure", "report"}
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, "nothing to compute" in output) == (0, True)
    assert project.snakemake(REPORT)[0] == 0
    assert "Nothing to be done" in project.snakemake(REPORT)[1]
    assert project.read("results/runs/*.json").items() <= made.items()


def test_the_workflow_measures_anew_what_other_code_has_computed_without_it(tmp_path: Path) -> None:
    """Snakemake has no record of such a job that it could compare."""
    project = Copy(tmp_path)
    assert project.rotquant(*EXECUTE[1:], "--jobs", "2")[0] == 0
    code = ("workflow/reproduction/run/stages/runs.py", "FACTOR = 1.0", "FACTOR = 2.0")
    project.edit(*code)
    assert set(project.planned(REPORT)) == {"measure", "table", "figure", "report"}
    project.edit(code[0], code[2], code[1])  # as it was: current
    assert set(project.planned(REPORT)) == {"table", "figure", "report"}
    project.edit(*code)
    earlier = project.read("results/runs/*.json")
    status, output = project.snakemake(REPORT)
    assert status == 0, output
    assert all(run != earlier[path] for path, run in project.read("results/runs/*.json").items())
    assert "Nothing to be done" in project.snakemake(REPORT)[1]


def test_trainings_come_first_of_a_table_and_its_largest_models_before_smaller_ones(tmp_path: Path) -> None:
    def planned(recipe: str, checkpoint: str) -> Any:
        (tmp_path / checkpoint).mkdir(exist_ok=True)
        (tmp_path / checkpoint / "model.safetensors").write_bytes(bytes(len(checkpoint)))
        return SimpleNamespace(fields={"recipe": recipe, "checkpoint": tmp_path / checkpoint})

    runs = {
        "rounded": planned("rounds", "large"),
        "small": planned("trains", "s"),
        "trained": planned("trains", "large"),
        "later": planned("trains", "large"),
    }
    shared = {"rounds": {"methods": {"gptq": {"damping": 0.01}}}, "trains": {"methods": {"omniquant": {"steps": 24}}}}
    parts = {"one": SimpleNamespace(runs=("rounded", "small", "trained")), "two": SimpleNamespace(runs=("later",))}
    plan: Any = SimpleNamespace(runs=runs, shared=shared, parts=parts)
    found = {("runs", key): WorkUnit("runs", key, key, (key,), frozenset({("weights", key)})) for key in runs}
    found |= {("weights", key): WorkUnit("weights", key, key) for key in runs}
    asked: Any = SimpleNamespace(parts=("one", "two"))
    ordered = [(unit.kind, unit.key) for unit in execution._in_order(plan, asked, found)]
    keys = ("trained", "small", "rounded", "later")
    assert ordered == [(kind, key) for key in keys for kind in ("weights", "runs")]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_runner_that_is_ended_takes_its_workers_with_it_and_the_next_one_continues(
    tmp_path: Path, how: signal.Signals
) -> None:
    project = Copy(tmp_path)
    process = started(project)
    until(lambda: project.read("results/runs/*.json"))  # of a baseline, which needs no weights
    process.send_signal(how)  # to it alone
    process.communicate(timeout=60)
    until(lambda: not alive(process.pid))
    kept = project.read("results/runs/*.json")
    (tmp_path / "slow").unlink()
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 0, output
    assert len(project.read("results/runs/*.json")) == 6
    assert kept.items() <= project.read("results/runs/*.json").items()
    assert not list(tmp_path.glob("results/**/.tmp-*"))


def test_two_runners_at_once_compute_each_result_once(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    first = started(project)
    second = project.start(*EXECUTE, "--jobs", "2")
    time.sleep(1)
    (tmp_path / "slow").unlink()
    said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], said
    lines = "".join(said).splitlines()
    assert sum("weights" in line for line in lines) == 4
    assert sum("perplexity:" in line for line in lines) == 6


def test_what_fails_is_told_in_a_sentence_and_all_else_is_computed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (tmp_path / "fail").touch()
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 2
    # Which of the two failing weights is the first is up to the workers.
    assert re.search(r"QuaRot on Llama-2-7B, seed [01]: the weights cannot be read\.", output.splitlines()[-1])
    assert "Traceback" not in output
    assert len(project.read("results/runs/*.json")) == 2
    assert not project.read("results/measured/*")


def test_results_that_cannot_be_written_are_one_sentence_before_any_process_starts(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.write("results", "a file")
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, output.count("\n")) == (2, 1), output
    assert "results is a file" in output


def test_a_killed_worker_costs_its_step_alone(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    killed = "import os, signal\n    if run.seed: os.kill(os.getpid(), signal.SIGKILL)\n    if Path"
    project.edit("workflow/reproduction/run/stages/weights.py", "if Path", killed)
    status, output = project.rotquant(*EXECUTE[1:], "--jobs", "2")
    assert status == 2
    assert "its process was ended by SIGKILL" in output
    assert len(project.read("results/runs/*.json")) == 4


#: Weights stage of a GPU that has memory for the weights of one seed at a time, or of none.
CROWDED = """if Path("none").exists(): raise RuntimeError("CUDA out of memory.")
    try: Path("used").mkdir()
    except FileExistsError:
        Path("crowded").touch()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`") from None
    while not Path("crowded").exists(): time.sleep(0.05)
    Path("used").rmdir()
    if Path"""


def test_what_finds_no_memory_beside_others_is_computed_after_them(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.edit("workflow/reproduction/run/stages/weights.py", "if Path", CROWDED)
    status, output = project.rotquant(*EXECUTE[1:], "--jobs", "2")
    assert status == 0, output
    assert (project.root / "crowded").exists()
    assert "failed" not in output


def test_what_finds_no_memory_alone_has_failed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.edit("workflow/reproduction/run/stages/weights.py", "if Path", CROWDED)
    (project.root / "none").touch()
    status, output = project.rotquant(*EXECUTE[1:], "--jobs", "2")
    assert status == 2
    failed = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(failed) == len({*failed}) == 4
    assert all("the GPU's memory does not suffice" in line for line in failed)
    assert len(project.read("results/runs/*.json")) == 2


def test_without_lm_eval_zero_shot_runs_are_left_out_and_named(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (table,) = TABLES["tables"]
    both = [*table["metrics"], {"kind": "zero_shot"}]
    fields = {key: value for key, value in table.items() if key not in ("published", "figure")}
    project.set_tables({**TABLES, "tables": [{**fields, "metrics": both, "claims": []}]})
    paper = {"slots": {"Llama-2-13B": {"compute": False}}, "zero_shot": {"suite": "paper", "corpus": None}}
    project.set_config(merge(CONFIG, paper))
    project.edit("workflow/reproduction/run/execution.py", '"lm_eval"', '"no_such_package"')
    status, output = project.rotquant(*EXECUTE[1:])
    assert status == 2
    assert "3 runs of the papers' zero-shot tasks were left out (quarot_table1-" in output
    assert len(project.read("results/runs/*.json")) == 3


def test_runs_that_execute_what_models_write_are_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    (table,) = TABLES["tables"]
    fields = {key: value for key, value in table.items() if key not in ("published", "figure")}
    reasoning = {"kind": "zero_shot", "tasks": ["humaneval"]}
    other = {**fields, "id": "quarot_table2", "metrics": [reasoning], "claims": []}
    project.set_tables({**TABLES, "tables": [{**fields, "claims": []}, other]})
    paper = {"slots": {"Llama-2-13B": {"compute": False}}, "zero_shot": {"suite": "paper", "corpus": None}}
    project.set_config(merge(CONFIG, paper))
    project.write("humaneval.jsonl", json.dumps(PROBLEM))
    project.edit("config/config.yaml", "suite: paper", "suite: paper\n  path: .")
    sentence = "3 runs execute programs that models write (HumanEval), which needs --allow-code-execution"
    status, output = project.rotquant(*EXECUTE[1:])
    assert (status, sentence in output) == (2, True), output
    assert {json.loads(text)["run"]["metric"]["kind"] for text in project.read("results/runs/*.json").values()} == {
        "perplexity"
    }
    status, output = project.rotquant(*EXECUTE[1:], "quarot_table2", "--allow-code-execution")
    assert status == 0, output
    assert len(project.read("results/runs/*.json")) == 6


def test_what_a_target_names_is_computed_again_and_nothing_else(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    assert project.rotquant(*EXECUTE[1:])[0] == 0
    earlier = project.read("results/runs/*.json")
    key = next(key for key, text in earlier.items() if json.loads(text)["weights"] is None)
    time.sleep(1)  # the time in the provenance has seconds
    assert project.rotquant(*EXECUTE[1:], Path(key).stem, "--again")[0] == 0
    later = project.read("results/runs/*.json")
    assert {path for path in earlier if later[path] != earlier[path]} == {key}
