"""The workflow as a user meets it: what runs, what does not run again, and what an interruption or a failure leaves.

Each test runs Snakemake itself in a copy of the project. The mechanics are tested with stand-ins for the computing
stages; one test runs everything for real on tiny random models.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from reproduction.run.results import read_result
from rotquant.foundation.files import write_json
from rotquant.tensors.devices import has_driver
from tests.helpers.project import CONFIG, Copy, alive
from tests.helpers.workflows import REPORT, one_column, with_rotations
from tests.trials.projects import tiny


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A project whose report is rendered. Tests leave it as they found it."""
    project = one_column(tmp_path_factory.mktemp("computed"))
    status, output = project.snakemake(REPORT, "reports/index.md")
    assert status == 0, output
    return project


def test_the_main_table_is_computed_by_one_job(tmp_path: Path) -> None:
    project = Copy(tmp_path, small=False)
    assert project.planned(REPORT) == dict.fromkeys(("measure", "tracking", "table", "figure", "report"), 1)
    assert not (tmp_path / "results" / "runs").exists()


def test_without_a_target_everything_is_made(tmp_path: Path) -> None:
    project = Copy(tmp_path, small=False)
    without, with_one = project.planned(), project.planned("all")
    assert without.pop("everything") == with_one.pop("all") == 1
    assert without == with_one
    assert without["report"] > 100


def test_paper_configuration_expands_to_the_same_cells_with_other_keys(tmp_path: Path) -> None:
    project = Copy(tmp_path, small=False)
    assert project.planned(REPORT, "--configfile", "config/paper.yaml")["measure"] == 3  # one for each model
    status, output = project.rotquant("runs", "list", "quarot_table1", "--config", "config/paper.yaml")
    assert status == 0, output


def test_report_is_complete_and_nothing_is_left_to_do(computed: Copy) -> None:
    text = (computed.root / REPORT).read_text()
    assert "*5.47*" in text
    assert "1 of 1 mechanisms reproduced" in text
    assert all(path.split("/")[-1] in text for path in computed.read("results/runs/*.json"))
    assert "<svg" in (computed.root / "reports/figures/quarot_table1.svg").read_text()
    assert f"[quarot_table1]({Path(REPORT).name})" in (computed.root / "reports/index.md").read_text()
    status, output = computed.snakemake(REPORT, "reports/index.md")
    assert (status, "Nothing to be done" in output) == (0, True)


def test_a_deleted_form_of_a_table_is_made_anew(computed: Copy) -> None:
    tables = computed.read("results/tables/*")
    assert {Path(path).suffix for path in tables} == {".csv", ".parquet"}
    (computed.root / "results/tables/quarot_table1.parquet").unlink()
    assert computed.planned(REPORT) == {"table": 1, "figure": 1, "report": 1}
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0
    assert computed.read("results/tables/*").keys() == tables.keys()


def test_an_edit_reruns_what_it_affects_and_only_that(computed: Copy) -> None:
    def planned_after(path: str, old: str, new: str) -> set[str]:
        computed.edit(path, old, new)
        try:
            return set(computed.planned(REPORT))
        finally:
            computed.edit(path, new, old)

    rendering = {"report"}
    assert planned_after("workflow/reproduction/render/pages/runs.jinja", "Upright numbers", "Numbers") == rendering
    assert planned_after("workflow/reproduction/render/figures/style.py", 'OURS = "#0072B2"', 'OURS = "#0072B1"') >= {
        "figure",
        "report",
    }
    assert (
        planned_after("workflow/reproduction/render/figures/style.py", "Matplotlib names", "It names") == set()
    )  # a comment
    measuring = {"measure", "table", "figure", "report"}
    assert planned_after("workflow/reproduction/run/stages/runs.py", "FACTOR = 1.0", "FACTOR = 2.0") == measuring
    assert planned_after("workflow/reproduction/run/stages/weights.py", "sleep(0.05)", "sleep(0.04)") == measuring
    assert planned_after("workflow/papers/quarot/published/small.csv", "8.37", "8.38") == {"table", "figure", "report"}
    assert planned_after("config/config.yaml", "max_windows: 2", "max_windows: 1") >= {"measure"}


def test_a_failing_rerun_leaves_the_earlier_results_and_is_tried_again(computed: Copy) -> None:
    kept = {**computed.read("results/runs/*.json"), **computed.read("reports/**/*.*")}
    assert len(kept) == 3 + 5  # runs; report and index as Markdown and as HTML, figure
    computed.edit("workflow/reproduction/run/stages/weights.py", '"seconds": 0.5', '"seconds": 0.25')
    (computed.root / "fail").touch()
    status, output = computed.snakemake(REPORT)
    assert status != 0
    assert "the weights cannot be read." in output
    assert all(b"the weights cannot be read." in log for log in computed.read("logs/measured/*.log").values())
    assert {**computed.read("results/runs/*.json"), **computed.read("reports/**/*.*")} == kept
    assert computed.planned(REPORT)["measure"] == 1

    (computed.root / "fail").unlink()
    status, output = computed.snakemake(REPORT, "reports/index.md")
    assert status == 0, output
    assert "Nothing to be done" in computed.snakemake(REPORT, "reports/index.md")[1]


def test_a_rendering_that_fails_leaves_the_earlier_report_and_is_tried_again(computed: Copy) -> None:
    earlier = computed.read(REPORT)
    computed.edit("workflow/reproduction/render/pages/runs.py", "def runs_report(", "broken syntax\ndef runs_report(")
    status, output = computed.snakemake(REPORT)
    assert status != 0
    assert "runs.py is not valid Python" in output  # found before anything is run
    assert "Traceback" not in output
    computed.edit("workflow/reproduction/render/pages/runs.py", "broken syntax\ndef runs_report(", "def runs_report(")
    computed.edit("workflow/reproduction/render/pages/verdicts.py", "title=title(table)", "title=table.no_such_field")
    assert computed.snakemake(REPORT)[0] != 0
    assert computed.read(REPORT) == earlier
    computed.edit("workflow/reproduction/render/pages/verdicts.py", "title=table.no_such_field", "title=title(table)")
    assert set(computed.planned(REPORT)) == {"report"}
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0


def test_a_scoreboard_that_cannot_be_rendered_fails_no_run(computed: Copy) -> None:
    earlier = computed.read("reports/index.*")
    computed.edit("workflow/reproduction/commands/report.py", "page.index(", "page.no_such_index(")
    (computed.root / REPORT).unlink()
    status, output = computed.snakemake(REPORT)
    assert status == 0, output
    assert "warning: the scoreboard reports/index.html could not be rendered" in output
    assert computed.read("reports/index.*") == earlier
    computed.edit("workflow/reproduction/commands/report.py", "page.no_such_index(", "page.index(")
    (computed.root / REPORT).unlink()
    status, output = computed.snakemake(REPORT)
    assert (status, "to look at in a browser: reports/index.html" in output) == (0, True)
    assert computed.snakemake(REPORT, "reports/index.md")[0] == 0


@pytest.mark.skipif(has_driver(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_here_is_told_before_the_first_job(tmp_path: Path) -> None:
    project = one_column(tmp_path)
    project.set_config({**CONFIG, "device": "cuda"})
    status, output = project.snakemake(REPORT)
    assert (status != 0, "this machine has no NVIDIA GPU" in output, "Traceback" in output) == (True, True, False)
    assert not list(tmp_path.glob("logs/**/*.log"))
    assert "measure" in project.planned(REPORT)  # a dry run is for any machine
    status, output = project.rotquant("runs", "execute", "quarot_table1")
    assert (status, "this machine has no NVIDIA GPU" in output) == (2, True)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A project with learned rotations, which each test computes where it must."""
    return with_rotations(tmp_path_factory.mktemp("learned"))


def test_rows_share_learned_rotations_which_a_killed_job_leaves_half_done_and_the_next_one_completes(
    learned: Copy,
) -> None:
    interrupt(learned, signal.SIGKILL)
    assert not list(learned.root.glob("results/rotations/*/rotation.json"))
    status, output = learned.snakemake(REPORT)
    assert status == 0, output
    histories = [json.loads(text) for text in learned.read("results/rotations/*/history.json").values()]
    assert [[step["step"] for step in history] for history in histories] == [list(range(10))] * 2
    assert max(len({step["process"] for step in history}) for history in histories) == 2
    assert not list(learned.root.glob("results/rotations/*/unfinished"))
    records = {path.parent.name: json.loads(path.read_text()) for path in learned.root.glob("results/weights/*/*.json")}
    assert len({record.get("rotation", {}).get("key") for record in records.values()}) == 3  # two, and none
    assert "Nothing to be done" in learned.snakemake(REPORT)[1]


def test_deleted_rotations_are_learned_again_and_what_they_served_is_kept(learned: Copy) -> None:
    assert learned.snakemake(REPORT)[0] == 0
    earlier = {**learned.read("results/runs/*.json"), **learned.read("results/weights/*/weights.json")}
    folders = sorted(learned.root.glob("results/rotations/*"))
    assert len(folders) == 2
    shutil.rmtree(folders[0])
    (folders[1] / "history.json").unlink()
    assert learned.planned(REPORT)["measure"] == 1
    status, output = learned.snakemake(REPORT)
    assert status == 0, output
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"rotation.json", "rotations.safetensors", "history.json"}
    assert {**learned.read("results/runs/*.json"), **learned.read("results/weights/*/weights.json")} == earlier
    assert "Nothing to be done" in learned.snakemake(REPORT)[1]


def test_results_copied_without_their_tensors_are_current_until_one_is_lacking(learned: Copy) -> None:
    assert learned.snakemake(REPORT)[0] == 0
    for file in learned.root.glob("results/*/*/*.safetensors"):
        file.unlink()
    assert "nothing to compute" in learned.rotquant("runs", "execute")[1]
    assert "Nothing to be done" in learned.snakemake(REPORT)[1]
    results = {path: json.loads(text) for path, text in learned.read("results/runs/*.json").items()}
    path = next(path for path, result in results.items() if "rotation" in (result["weights"] or {}))
    (learned.root / path).unlink()
    status, output = learned.rotquant("runs", "execute")
    assert status == 0, output
    # its rotations are learned again, and the weights on them made again, which two rows share; what was measured on
    # the other weights stays, since they are the same to the byte
    assert [output.count(word) for word in (": rotations ", ": weights ", ": run ")] == [1, 2, 1]
    assert json.loads((learned.root / path).read_text())["metrics"] == results[path]["metrics"]


def test_a_run_stays_current_while_its_weights_are_the_same_to_the_byte(learned: Copy) -> None:
    assert learned.snakemake(REPORT)[0] == 0
    earlier = learned.read("results/runs/*.json")
    for file in learned.root.glob("results/weights/*/weights.json"):
        write_json(file, {**json.loads(file.read_text()), "date": "2020-02-02T20:20:20+00:00", "seconds": 1.0})
    assert "nothing to compute" in learned.rotquant("runs", "execute")[1]
    file = sorted(learned.root.glob("results/weights/*/weights.json"))[0]
    write_json(file, {**json.loads(file.read_text()), "digests": {"model.safetensors": "of others"}})
    status, output = learned.rotquant("runs", "execute")
    assert status == 0, output
    assert output.count(": run ") == 1
    assert learned.read("results/runs/*.json").keys() == earlier.keys()


def test_an_edit_of_the_learning_makes_weights_anew_where_the_rotations_differ(learned: Copy) -> None:
    status, output = learned.snakemake(REPORT)
    assert status == 0, output
    earlier = learned.read("results/weights/*/weights.json")
    learned.edit("workflow/reproduction/run/stages/rotations.py", "learned with seed", "learned otherwise with seed")
    assert set(learned.planned(REPORT)) >= {"measure", "table", "report"}
    status, output = learned.snakemake(REPORT)
    assert status == 0, output
    changed = {path for path, text in learned.read("results/weights/*/weights.json").items() if text != earlier[path]}
    assert len(changed) == 4  # two rows with two seeds; those without learning stay
    assert "Nothing to be done" in learned.snakemake(REPORT)[1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_completes_and_an_interrupted_rerun_keeps_the_earlier_results(
    tmp_path: Path, how: signal.Signals
) -> None:
    project = one_column(tmp_path, figure=False)
    interrupt(project, how)
    assert not (tmp_path / REPORT).exists()
    status, output = project.snakemake(REPORT)
    assert status == 0, output
    assert "quarot_table1" in (tmp_path / "reports/index.html").read_text()  # which nobody asked for
    assert not list(tmp_path.glob("results/**/.tmp-*"))

    earlier = project.read("results/runs/*.json")
    project.edit("workflow/reproduction/run/stages/weights.py", "sleep(0.05)", "sleep(0.04)")
    interrupt(project, how)
    assert project.read("results/runs/*.json") == earlier
    assert project.planned(REPORT)["measure"] == 1


def test_a_killed_snakemake_takes_its_jobs_with_it(tmp_path: Path) -> None:
    project = one_column(tmp_path, figure=False)
    process = start_slowly(project)
    process.kill()  # alone; its job would wait for ever
    process.wait()
    deadline = time.monotonic() + 60
    while alive(process.pid):
        assert time.monotonic() < deadline, "its job works on"
        time.sleep(0.05)
    (tmp_path / "slow").unlink()
    status, output = project.snakemake(REPORT)
    assert status == 0, output


def start_slowly(project: Copy) -> subprocess.Popen:
    """Start the workflow; it computes weights for as long as the file `slow` is there."""
    (project.root / "started").unlink(missing_ok=True)
    (project.root / "slow").touch()
    process = project.start("snakemake", "--cores", "2", REPORT)
    deadline = time.monotonic() + 60
    while not (project.root / "started").exists():
        assert time.monotonic() < deadline, "no job started"
        time.sleep(0.05)
    return process


def interrupt(project: Copy, how: signal.Signals) -> None:
    """Start the workflow and send a signal to all of its processes while they compute weights."""
    process = start_slowly(project)
    os.killpg(process.pid, how)
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        # Once in some twenty interrupts Snakemake's threads wait for each other for ever; its user then kills it.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    (project.root / "slow").unlink()


def test_bad_requests_are_one_sentence_before_anything_is_computed(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    status, output = project.snakemake("reports/quarot_tabel1.md")
    assert status != 0
    assert output.splitlines()[-1] == "rotquant: unknown table 'quarot_tabel1'; nearest: quarot_table1."
    assert "Traceback" not in output
    assert not list(tmp_path.glob(".snakemake/locks/*"))
    project.set_config({**CONFIG, "evaluation": {"sequence_lenght": 16}})
    status, output = project.snakemake(REPORT)
    assert status != 0
    assert "evaluation: unknown field 'sequence_lenght'; nearest: sequence_length" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert not (tmp_path / "results" / "runs").exists()


def test_deleted_and_damaged_run_files_are_measured_again(computed: Copy) -> None:
    deleted, cut, _ = sorted(computed.root.glob("results/runs/*.json"))
    good = {path: read_result(path).metrics for path in (deleted, cut)}
    cut.write_bytes(cut.read_bytes()[:100])
    status, output = computed.rotquant("report", "table", "quarot_table1")
    assert (status, f"{cut.name} is damaged" in output) == (2, True)
    deleted.unlink()
    status, output = computed.snakemake(REPORT, "reports/index.md")
    assert status == 0, output
    assert {path: read_result(path).metrics for path in good} == good
    assert "Nothing to be done" in computed.snakemake(REPORT, "reports/index.md")[1]


def test_tiny_models_go_from_checkpoint_to_report_with_real_numbers(tmp_path: Path) -> None:
    one = {"Llama-2-13B": {"compute": False}}
    long = {"name": "Long", "method": "quarot", "recipe": {"calibration": {"sequence_length": 4096}}}
    rows = {"quarot_table1": [long]}
    project = tiny(tmp_path, seeds=[1], tracking=True, methods={"spinquant": {"steps": 60}}, slots=one, rows=rows)

    status, output = project.snakemake(REPORT, "reports/index.md")
    assert status == 0, output + "".join(log.decode() for log in project.read("logs/**/*.log").values())
    impossible = "Not possible here: Long: calibration samples of 4096 tokens exceed the model's context"
    assert f"quarot_table1: {impossible}" in output.partition("Job stats")[0]
    assert impossible in (tmp_path / REPORT).read_text()
    results = {path: read_result(tmp_path / path) for path in project.read("results/runs/*.json")}
    assert len(results) == 3
    assert all(1 < result.value < 1000 for result in results.values())  # 96 words, untrained: about 96
    assert all(result.provenance["corpora"]["evaluation"]["splits"] for result in results.values())
    assert "Nothing to be done" in project.snakemake(REPORT)[1]
    text = (tmp_path / REPORT).read_text()
    assert "MLflow: experiment `quarot`" in text
    assert all(f"{result.value:.2f}" in text for result in results.values())
    assert "1 learned rotation, from the first step to the last" in text

    rotations = {
        path: text for path, text in project.read("results/rotations/*/*").items() if "rotation.json" not in path
    }
    for place in ("runs", "rotations"):
        shutil.rmtree(tmp_path / "results" / place)
    # Weights without learned rotations are left: runs on them are measured in another process than made these.
    made = {path: json.loads(record) for path, record in project.read("results/weights/*/weights.json").items()}
    kept = [path for path, record in made.items() if not record.get("rotation")]
    for path in made.keys() - {*kept}:
        shutil.rmtree((tmp_path / path).parent)
    folder = kill_while_learning(project)
    assert not (folder / "rotation.json").exists()
    for path, result in results.items():
        if result.weights:
            (tmp_path / path).unlink(missing_ok=True)
    status, output = project.rotquant("runs", "execute", "--jobs", "1")
    assert status == 0, output
    again = {path: read_result(tmp_path / path) for path in project.read("results/runs/*.json")}
    assert {path: one.metrics for path, one in again.items()} == {path: one.metrics for path, one in results.items()}
    assert (output.count(": weights "), len(kept)) == (1, 1)
    assert {path: (tmp_path / path).read_bytes() for path in rotations} == rotations
    assert sorted(path.name for path in folder.iterdir()) == ["history.json", "rotation.json", "rotations.safetensors"]


def kill_while_learning(project: Copy) -> Path:
    """Start to compute everything and kill the process once it has written a checkpoint of rotations; their folder."""
    process = project.start("rotquant", "runs", "execute", "--jobs", "1")
    deadline = time.monotonic() + 120
    while not (found := list(project.root.glob("results/rotations/*/unfinished-*"))):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return found[0].parent
