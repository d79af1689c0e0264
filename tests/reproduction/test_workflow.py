"""The workflow as a user meets it: what runs, what does not run again, and what an interruption or a failure leaves.

Each test runs Snakemake itself in a copy of the project. The mechanics are tested with stand-ins for the computing
stages, which write down what they make; one test runs everything for real on tiny random models.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Set
from contextlib import closing
from pathlib import Path

import pytest

from reproduction.run.results import read_result
from rotquant.foundation.files import short_hash
from rotquant.tensors.devices import has_driver
from tests.helpers.project import CONFIG, Copy, alive
from tests.helpers.workflows import REPORT, one_column, with_rotations
from tests.trials.faults import soon
from tests.trials.projects import tiny

DONE = "Nothing to be done"


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A project whose report is rendered. Tests leave it as they found it."""
    project = one_column(tmp_path_factory.mktemp("computed"))
    status, output = project.snakemake(REPORT, "reports/index.md")
    assert status == 0, output + logs(project)
    return project


def logs(project: Copy) -> str:
    """What the jobs said."""
    return "".join(log.decode() for log in project.read("logs/**/*.log").values())


def made(project: Copy) -> Counter[str]:
    """What the stand-ins have made since this was asked last, by kind."""
    record = project.root / "made"
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return Counter(line.partition(" ")[0] for line in lines)


def test_a_dry_run_names_each_cell_and_without_a_target_everything_is_made(tmp_path: Path) -> None:
    project = Copy(tmp_path, small=False)
    project.edit("config/config.yaml", "seeds: [0, 1, 2]", "seeds: [1]")  # a third of the cells
    _, output = project.snakemake("--dry-run", REPORT)
    assert "QuaRot-128G on Llama-2-13B, seed 1, perplexity" in output
    counts = output.partition("Job stats:")[2].split()
    assert [counts[counts.index(rule) + 1] for rule in ("run", "weights", "page_numbers_figure")] == ["21", "18", "1"]
    planned = project.planned()  # without a target everything is made
    assert planned.pop("everything") == 1
    assert planned["page"] > 100
    assert planned["run"] > 1100
    assert not (tmp_path / "results/runs").exists()


def test_a_report_is_complete_and_nothing_is_left_to_do(computed: Copy) -> None:
    text = (computed.root / REPORT).read_text()
    assert "*5.47*" in text
    assert "✅\u00a0agrees" in text
    assert "<svg" in (computed.root / "reports/figures/quarot_table1.svg").read_text()
    assert f"[quarot_table1]({Path(REPORT).name})" in (computed.root / "reports/index.md").read_text()
    assert DONE in computed.snakemake(REPORT, "reports/index.md")[1]
    made(computed)
    # tensors were temporary, and nothing needs them
    assert not [*computed.root.glob("results/weights/*/model")]
    # results that Snakemake knows nothing of are taken as they are: their names say what they are of
    shutil.copytree(computed.root / ".snakemake/metadata", computed.root / "kept")
    shutil.rmtree(computed.root / ".snakemake/metadata")
    assert computed.planned(REPORT) == {}
    (computed.root / "kept").rename(computed.root / ".snakemake/metadata")


KINDS = {
    "a run": "results/runs/*.json",
    "the record of weights": "results/weights/*/weights.json",
    "the history of weights": "results/weights/*/history.json",
    "all of weights": "results/weights/*",
    "numbers": "results/tables/*.csv",
    "numbers as Parquet": "results/tables/*.parquet",
    "the figure": "reports/figures/*.svg",
    "the page": REPORT,
    "the scoreboard": "reports/index.*",
    "logs": "logs",
    "all results": "results",
    "all reports": "reports",
    "what Snakemake knows": ".snakemake",
}
#: What other things are made of, and what Snakemake alone reads.
FEW = {"a run", "all of weights", "what Snakemake knows"}


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(KINDS.keys() - FEW, marks=pytest.mark.long)], ids=["few", "others"]
)
def test_whatever_is_deleted_is_made_again(computed: Copy, kinds: Set[str]) -> None:
    def present() -> set[str]:
        return {
            path for place in ("results/*/*.*", "results/*/*/*.json", "reports/**/*.*") for path in computed.read(place)
        }

    whole = present()
    for kind, pattern in ((kind, pattern) for kind, pattern in KINDS.items() if kind in kinds):
        for path in computed.root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        status, output = computed.snakemake(REPORT, "reports/index.md")
        assert status == 0, f"{kind}: {output}{logs(computed)}"
        assert present() == whole, kind
        if kind in ("a run", "numbers"):  # once, and not at the next start too
            assert computed.planned(REPORT) == {}, kind
    made(computed)


def test_of_a_checkpoint_that_is_not_here_what_is_computed_is_shown(tmp_path: Path) -> None:
    project = one_column(tmp_path)
    assert project.snakemake(REPORT)[0] == 0
    made(project)
    page, runs = tmp_path / REPORT, [*tmp_path.glob("results/runs/*.json")]
    of_quarot = {json.loads(path.read_text())["run"]["seed"]: path for path in runs if weights_of(path)}
    assert of_quarot.keys() == {0, 1}
    digest = short_hash("models/small")  # as the stand-in has it
    project.edit("config/config.yaml", "checkpoint: models/small", f"checkpoint: models/small\n    digest: {digest}")
    assert project.planned(REPORT) == {"page": 1}

    def row() -> str:
        page.unlink()
        status, output = project.snakemake(REPORT)
        assert status == 0, output + logs(project)
        return next(line for line in page.read_text().splitlines() if line.startswith("| QuaRot |"))

    assert "±" in row()
    of_quarot[1].unlink()
    assert "±" not in row()
    assert "- Fewer seeds than other rows: QuaRot: 0." in page.read_text()
    shutil.rmtree(tmp_path / "results/weights")
    shutil.rmtree(tmp_path / ".snakemake/metadata")  # which imported results have none of
    assert any(letter.isdigit() for letter in row().partition("*")[0])  # one seed is left, and needs no weights
    of_quarot[0].unlink()
    assert [*tmp_path.glob("results/runs/*.json")]  # the unquantized model's
    assert project.planned("quarot") == {"quarot": 1}
    status, output = project.snakemake(REPORT)
    assert status != 0
    assert "rotquant: quarot_table1: none of its runs is here but of the unquantized model" in output
    assert not made(project)


def weights_of(run: Path) -> str | None:
    return json.loads(run.read_text())["weights_key"]


def planned_after(project: Copy, path: str, old: str, new: str) -> set[str]:
    """What an edit, which is taken back, would have computed."""
    project.edit(path, old, new)
    try:
        return set(project.planned(REPORT))
    finally:
        project.edit(path, new, old)


def test_an_edit_reruns_what_it_affects_and_only_that(computed: Copy) -> None:
    (computed.root / REPORT).unlink()  # made again, so that Snakemake knows what it follows from
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0
    render = "workflow/reproduction/render"
    assert planned_after(computed, f"{render}/pages/runs.jinja", "Upright numbers", "Numbers") == {"page"}
    assert planned_after(computed, f"{render}/figures/style.py", "Matplotlib names", "It names") == set()  # a comment
    stages = "workflow/reproduction/run/stages"
    assert planned_after(computed, f"{stages}/runs.py", "FACTOR = 1.0", "FACTOR = 2.0") == {"run", "weights", "page"}
    assert planned_after(computed, "config/config.yaml", "max_windows: 2", "max_windows: 1") >= {"run", "page"}


@pytest.mark.long
def test_further_edits_rerun_what_they_affect(computed: Copy) -> None:
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0
    style = "workflow/reproduction/render/figures/style.py"
    assert planned_after(computed, style, 'OURS = "#0072B2"', 'OURS = "#0072B1"') == {"page"}
    weights = "workflow/reproduction/run/stages/weights.py"
    assert planned_after(computed, weights, "sleep(0.05)", "sleep(0.04)") == {"run", "weights", "page"}
    assert planned_after(computed, "workflow/papers/quarot/published/small.csv", "8.37", "8.38") == {"page"}
    assert planned_after(computed, "text/test.txt", "text of", "texts of") >= {"run", "page"}


def test_a_failing_job_leaves_the_others_and_the_earlier_report_and_is_tried_again(computed: Copy) -> None:
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0
    kept = {**computed.read("results/runs/*.json"), **computed.read("reports/**/*.*")}
    computed.edit("workflow/reproduction/run/stages/weights.py", '"seconds": 0.5', '"seconds": 0.25')
    (computed.root / "fail").touch()
    made(computed)
    status, output = computed.snakemake(REPORT)
    assert status != 0
    assert "the weights cannot be read." in output
    assert "Traceback" not in output
    now = {**computed.read("results/runs/*.json"), **computed.read("reports/**/*.*")}
    assert now.items() >= kept.items()
    assert made(computed) == {"run": 0} or not made(computed)  # the full-precision run is of unchanged code

    (computed.root / "fail").unlink()  # all else is computed where the page then fails
    computed.edit("workflow/reproduction/render/pages/verdicts.py", "title=title(table)", "title=table.no_such_field")
    assert computed.snakemake(REPORT)[0] != 0
    assert made(computed) == {"weights": 2, "run": 2}
    computed.edit("workflow/reproduction/render/pages/verdicts.py", "title=table.no_such_field", "title=title(table)")
    assert set(computed.planned(REPORT)) == {"page"}
    computed.edit("workflow/reproduction/commands/report.py", "page.index(", "page.no_such_index(")
    status, output = computed.snakemake(REPORT)
    assert status == 0, output
    assert "warning: the scoreboard reports/index.html could not be rendered" in output
    computed.edit("workflow/reproduction/commands/report.py", "page.no_such_index(", "page.index(")
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_learning_continues_and_no_finished_result_is_lost(tmp_path: Path, how: signal.Signals) -> None:
    project = with_rotations(tmp_path)
    process = start_slowly(project)
    # what started first may be other work
    assert soon(lambda: list(project.root.glob("results/rotations/*/unfinished")), 60), "nothing is learned"
    if how is signal.SIGKILL:
        process.kill()  # Snakemake alone: its jobs end with it
        process.wait()
        assert soon(lambda: not alive(process.pid), 60), "a job works on"
    else:
        os.killpg(process.pid, how)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            # Once in some twenty interrupts Snakemake's threads wait for each other for ever; its user then kills it.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    (project.root / "slow").unlink()
    assert not list(project.root.glob("results/rotations/*/rotation.json"))
    finished = results(project)
    project.snakemake("--unlock", REPORT)
    status, output = project.snakemake(REPORT)
    assert status == 0, output + logs(project)
    histories = [json.loads(text) for text in project.read("results/rotations/*/history.json").values()]
    assert [[step["step"] for step in history] for history in histories] == [list(range(10))] * 2
    assert max(len({step["process"] for step in history}) for history in histories) == 2
    assert results(project).items() >= finished.items()
    assert not list(tmp_path.glob("results/**/.tmp-*"))
    assert DONE in project.snakemake(REPORT)[1]
    made(project)
    # what is learned again has what was made of it made again
    shutil.rmtree(sorted(project.root.glob("results/rotations/*"))[0])
    assert project.snakemake(REPORT)[0] == 0
    assert len(list(project.root.glob("results/rotations/*/rotations.safetensors"))) == 2


def results(project: Copy) -> dict[str, dict]:
    """The runs by file, without their times: Snakemake repeats a job that ended while Snakemake itself was killed."""

    def without_times(found: dict) -> dict:
        return {name: value for name, value in found.items() if name not in ("seconds", "date")}

    runs = project.read("results/runs/*.json")
    return {name: json.loads(text, object_hook=without_times) for name, text in runs.items()}


def start_slowly(project: Copy) -> subprocess.Popen:
    """Start the workflow; it learns rotations, or makes weights, for as long as the file `slow` is there."""
    (project.root / "started").unlink(missing_ok=True)
    (project.root / "slow").touch()
    # more cores than weights that need no rotation, or those could hold all of them
    process = project.start("snakemake", "--cores", "4", REPORT)
    assert soon((project.root / "started").exists, 60), "no job started"
    return process


def test_bad_requests_are_one_sentence_before_anything_is_computed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.set_config({**CONFIG, "evaluation": {"sequence_lenght": 16}})
    status, output = project.snakemake(REPORT)
    assert status != 0
    assert "evaluation: unknown field 'sequence_lenght'; nearest: sequence_length" in output.splitlines()[-1]
    assert "Traceback" not in output
    project.set_config(CONFIG)
    status, output = project.snakemake("results/runs/0123456789abcdef-01234567.json")
    assert (status != 0, "is no result of this configuration and this code" in output) == (True, True), output
    status, output = project.snakemake("reports/quarot_tabel1.md")
    assert (status != 0, "unknown table 'quarot_tabel1'; nearest: quarot_table1" in output) == (True, True), output
    if not has_driver():
        project.set_config({**CONFIG, "device": "cuda"})
        status, output = project.snakemake(REPORT)
        assert (status != 0, "this machine has no NVIDIA GPU" in output) == (True, True)
        assert "run" in project.planned(REPORT)  # a dry run is for any machine
    assert not (tmp_path / "results/runs").exists()


def test_tiny_models_go_from_checkpoint_to_report_with_real_numbers(tmp_path: Path, fresh_database: Path) -> None:
    one = {"Llama-2-13B": {"compute": False}}
    long = {"name": "Long", "method": "quarot", "recipe": {"calibration": {"sequence_length": 4096}}}
    rows = {"quarot_table1": [long]}
    project = tiny(tmp_path, seeds=[1], tracking=True, methods={"spinquant": {"steps": 100}}, slots=one, rows=rows)
    shutil.copy(fresh_database, tmp_path)

    status, output = project.snakemake(REPORT, "reports/index.md", "--notemp")
    assert status == 0, output + logs(project)
    impossible = "Not possible here: Long: calibration samples of 4096 tokens exceed the model's context"
    assert f"quarot_table1: {impossible}" in output.partition("Job stats")[0]
    assert impossible in (tmp_path / REPORT).read_text()
    results = {path: read_result(tmp_path / path) for path in project.read("results/runs/*.json")}
    assert len(results) == 3
    assert all(1 < result.value < 1000 for result in results.values())  # 96 words, untrained: about 96
    assert all(result.provenance["corpora"]["evaluation"]["splits"] for result in results.values())
    assert DONE in project.snakemake(REPORT)[1]
    text = (tmp_path / REPORT).read_text()
    rotation, *others = shown_in_mlflow(tmp_path)
    assert rotation == ("rotation: SpinQuant on Llama-2-7B, seed 1", "FINISHED", 100)
    assert {status for _, status, _ in others} == {"FINISHED"}
    assert len(others) == 3 + 2 + 1  # runs, weights, the table
    assert all(f"{result.value:.2f}" in text for result in results.values())
    assert "Learned rotations: 1, from the first step to the last" in text

    # without Snakemake, after a kill while rotations are learned: the same numbers, and the same rotations
    rotations = {
        path: text for path, text in project.read("results/rotations/*/*").items() if "rotation.json" not in path
    }
    for place in ("runs", "weights", "rotations"):
        shutil.rmtree(tmp_path / "results" / place)
    folder = kill_while_learning(project)
    assert not (folder / "rotation.json").exists()
    status, output = project.rotquant("runs", "execute", "--jobs", "1")
    assert status == 0, output
    again = {path: read_result(tmp_path / path) for path in project.read("results/runs/*.json")}
    assert {path: one.metrics for path, one in again.items()} == {path: one.metrics for path, one in results.items()}
    assert {path: (tmp_path / path).read_bytes() for path in rotations} == rotations
    assert sorted(path.name for path in folder.iterdir()) == ["history.json", "rotation.json", "rotations.safetensors"]
    assert not [*project.root.glob("results/weights/*/model")]
    again = shown_in_mlflow(tmp_path)
    assert again[0] == rotation  # by the run that the killed job began, from its last checkpoint on
    assert [name for name, *_ in again[1:]] == [name for name, *_ in others]
    assert "nothing to compute" in project.rotquant("runs", "execute")[1]


def shown_in_mlflow(root: Path) -> list[tuple[str, str, int]]:
    """Name, status and steps of a loss of each run in a project's database, that of learned rotations first."""
    steps = "SELECT count(DISTINCT step) FROM metrics WHERE key = 'loss' AND metrics.run_uuid = runs.run_uuid"
    live = "runs WHERE lifecycle_stage = 'active' ORDER BY name NOT LIKE 'rotation%', name"
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        return database.execute(f"SELECT name, status, ({steps}) FROM {live}").fetchall()


def kill_while_learning(project: Copy) -> Path:
    """Start to compute everything and kill the process once it has written a checkpoint of rotations; their folder."""
    process = project.start("rotquant", "runs", "execute", "--jobs", "1")
    deadline = time.monotonic() + 120
    while not (found := list(project.root.glob("results/rotations/*/unfinished-*"))):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    while alive(process.pid):
        time.sleep(0.05)
    return found[0].parent
