"""Results as Parquet files: they come back as they were, but for digits that no page shows, and nothing else comes."""

import itertools
import json
import math
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.identity.names import HISTORY_FILE, ROTATION_RECORD, WEIGHTS_RECORD
from reproduction.identity.run import Run, signed
from reproduction.planning.expansion import make_plan
from reproduction.run import archives
from reproduction.run.plan import Plan
from reproduction.run.results import RunResult, read_result, write_result
from reproduction.run.samples import observations
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import quantities
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import choices_of, log_odds_of
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import read_json, write_json
from rotquant.recipes.recipe import Recipe
from tests.helpers.learned import LEARNED, learned_record
from tests.helpers.project import CONFIG, REPOSITORY
from tests.helpers.reports import TASKS, TEXT, ZERO_SHOT, load, provenance, table

PERPLEXITY = {"kind": "perplexity", "corpus": "wikitext2"}
ROWS = [
    {"name": "Baseline", "method": "baseline"},
    {"name": "QuaRot", "method": "quarot"},
    LEARNED,
]
TABLE = {"columns": ["Llama-2-7B"], "rows": ROWS, "published": None, "claims": [], "figure": None}
TABLES = [
    table("table1", metrics=[PERPLEXITY, ZERO_SHOT], **TABLE),
    table("figure1", metrics=[{"kind": "magnitudes"}], **TABLE),
]
NAMES = ("quarot_table1", "quarot_figure1")
#: Steps of the training of all weights: more than are kept.
HISTORY = [{"step": step, "loss": 3 / (1 + step), "learning_rate": 0.1} for step in range(1000)]


def result(run: Any, weights: dict[str, Any] | None, drawn: random.Random) -> RunResult:
    """A made-up measurement with all samples that there are, whose means are its numbers."""
    samples: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    metrics = {quantity.name: math.pi for quantity in quantities(run.metric)}
    if run.metric.kind == "perplexity":
        sizes = {"perplexity": 2.0, "kl": 0.01, "flips": 0.1}
        samples = {name: [size * drawn.lognormvariate(0, 0.3) for _ in range(50)] for name, size in sizes.items()}
        means = {name: statistics.fmean(values) for name, values in samples.items()}
        metrics |= {"perplexity": math.exp(means["perplexity"]), "kl": means["kl"], "flips": 100 * means["flips"]}
        metrics |= {"nll": means["perplexity"], "kl_median": math.inf}
    elif run.metric.kind == "zero_shot":
        for name in run.metric.tasks:
            samples[name] = "".join(drawn.choices("01", k=90))
            metrics[name] = 100 * samples[name].count("1") / 90
        samples[choices_of("grammar")] = "".join(drawn.choices("0123", k=90))
        samples[log_odds_of("grammar")] = [drawn.gauss(1, 4) for _ in range(90)]
        metrics[log_odds_of("grammar")] = statistics.fmean(samples[log_odds_of("grammar")])
    else:
        arrays = {"input": [[drawn.random() for _ in range(4)] for _ in range(3)], "count": 7, "axis": ["a", "b"]}
    record = provenance(corpora={"evaluation": TEXT}, tasks=TASKS)
    return RunResult(run, metrics, record, weights, arrays=arrays, samples=samples)


def record_all(project: Project) -> None:
    """Results of all kinds, whose records are of what they say."""
    drawn = random.Random(7)
    for key, runs in project.rotations.items():
        told = signed(learned_record(runs[0]), runs[0].rotation_identity() or {})
        write_json(project.results.rotation(key) / ROTATION_RECORD, told)
        write_json(project.results.rotation(key) / HISTORY_FILE, HISTORY[:3])
    for key, runs in project.weights.items():
        run, folder = runs[0], project.results.weights(key)
        told = {**provenance(seconds=2.0), "digests": {"model.safetensors": "0"}}
        if run.rotation_key:
            told["rotation"] = read_json(project.results.rotation(run.rotation_key) / ROTATION_RECORD)
        write_json(folder / WEIGHTS_RECORD, signed(told, run.weights_identity() or {}))
        write_json(folder / HISTORY_FILE, HISTORY)
        (folder / "model").mkdir()
        (folder / "model/model.safetensors").write_bytes(b"tensors")
    for run in project.runs.values():
        weights = read_json(project.results.weights(run.weights_key) / WEIGHTS_RECORD) if run.weights_key else None
        write_result(project.results.run(run.key), result(run, weights, drawn))


def plan_of(project: Project) -> Plan:
    """The plan of a project as it is."""
    return make_plan(project, "0" * 16, "0" * 16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project of two tables, all of it computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root := tmp_path_factory.mktemp("made"))  # to which texts are relative
        project = load(root, patch, *TABLES)
        record_all(project)
        yield project


@pytest.fixture
def home(made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The same project on a machine that has computed nothing; it is the working folder."""
    ignore = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(made.root, tmp_path / "home", ignore=ignore)
    monkeypatch.chdir(tmp_path / "home")
    return load_project(root=tmp_path / "home")


@pytest.fixture
def files(made: Project, tmp_path: Path) -> list[Path]:
    """All results as files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.root)
        found, held, of = archives.export(plan_of(made), NAMES, tmp_path, partial=False)
    assert held == of == len(made.runs)
    assert [path.name for path in found] == [f"quarot-{kind}.parquet" for kind in archives.KINDS]
    return found


def results(project: Project) -> dict[str, RunResult]:
    """What is there, by key."""
    paths = {key: project.results.run(key) for key in project.runs}
    return {key: read_result(path) for key, path in paths.items() if path.exists()}


def test_results_come_back_as_they_were_but_for_samples_of_fewer_digits(
    made: Project, home: Project, files: list[Path]
) -> None:
    ours, others = archives.import_(plan_of(home), files)
    assert (sorted(ours), others) == (sorted(home.runs), [])
    before, after = results(made), results(home)
    for key, old in before.items():
        new = after[key]
        assert new.metrics == old.metrics  # all digits, infinity too
        assert (new.run, new.provenance, new.weights, new.texts) == (old.run, old.provenance, old.weights, old.texts)
        assert new.samples.keys() == old.samples.keys()
        for name, values in old.samples.items():
            if isinstance(values, str):
                assert new.samples[name] == values
                continue
            size = statistics.fmean(map(abs, values))
            step = archives.LOG_ODDS_STEP if name == log_odds_of("grammar") else size * 2.0**-archives.BITS
            differences = [abs(one - other) for one, other in zip(new.samples[name], values, strict=True)]
            assert max(differences) <= step
            assert statistics.fmean(new.samples[name]) == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-15)
        for quantity in quantities(old.run.metric):
            noise = [observations(one.run.metric, quantity.name, one.metrics, one.samples) for one in (old, new)]
            if noise[0] is not None:  # standard errors are those that pages show
                assert noise[1].std() == pytest.approx(noise[0].std(), rel=1e-3)
    surfaces = [one.arrays for one in after.values() if one.run.metric.kind == "magnitudes"]
    assert surfaces
    assert all(one["axis"] == ["a", "b"] and one["count"] == 7 for one in surfaces)
    exact = {key: one.arrays for key, one in before.items()}
    for key, one in after.items():
        if one.arrays:
            assert one.arrays["input"] == [[pytest.approx(x, rel=5e-3) for x in row] for row in exact[key]["input"]]


def test_records_and_histories_of_weights_and_rotations_come_without_tensors(
    made: Project, home: Project, files: list[Path]
) -> None:
    archives.import_(plan_of(home), files)
    for name, keys, record in (
        ("weights", home.weights, WEIGHTS_RECORD),
        ("rotation", home.rotations, ROTATION_RECORD),
    ):
        assert keys
        for key in keys:
            old, new = (getattr(project.results, name)(key) for project in (made, home))
            assert read_json(new / record) == read_json(old / record)
            history = read_json(new / HISTORY_FILE)
            assert history[-1]["step"] == read_json(old / HISTORY_FILE)[-1]["step"]
            assert len(history) <= archives.LONGEST
    assert not [*home.root.glob("results/**/*.safetensors")]


def test_an_export_is_the_same_bytes_again_also_of_what_was_imported(
    made: Project, home: Project, files: list[Path], tmp_path: Path
) -> None:
    archives.import_(plan_of(home), files)
    (tmp_path / "again").mkdir()
    archives.export(plan_of(home), NAMES, tmp_path / "again", partial=False)
    for path in files:
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_what_is_there_already_stays_as_it_is(made: Project, home: Project, files: list[Path]) -> None:
    run = next(iter(home.runs.values()))
    own = RunResult(run, dict.fromkeys((one.name for one in quantities(run.metric)), 2.5), provenance(), None)
    write_result(home.results.run(run.key), own)
    archives.import_(plan_of(home), files)
    before = {path: path.stat().st_mtime_ns for path in home.root.glob("results/**/*")}
    assert read_result(home.results.run(run.key)).metrics == own.metrics
    assert len(archives.import_(plan_of(home), files)[0]) == len(home.runs)
    assert {path: path.stat().st_mtime_ns for path in home.root.glob("results/**/*")} == before


def test_runs_that_are_missing_are_named_or_left_out(home: Project, files: list[Path], tmp_path: Path) -> None:
    plan, some = plan_of(home), tmp_path / "some"
    some.mkdir()
    for partial in (False, True):
        with pytest.raises(ResultError, match="are not computed, such as" if not partial else "no run of these tables"):
            archives.export(plan, NAMES, some, partial)
    archives.import_(plan, files)
    missing = next(iter(home.runs))
    home.results.run(missing).unlink()
    with pytest.raises(ResultError, match=f"1 runs of quarot are not computed, such as {missing} .*--partial leaves"):
        archives.export(plan, NAMES, some, partial=False)
    assert not [*some.iterdir()]
    _, held, of = archives.export(plan, NAMES, some, partial=True)
    assert (held, of) == (len(home.runs) - 1, len(home.runs))
    shutil.rmtree(home.root / "results")
    assert sorted(archives.import_(plan, [*some.iterdir()])[0]) == sorted({*home.runs} - {missing})


def test_of_a_damaged_run_nothing_is_exported(home: Project, files: list[Path], tmp_path: Path) -> None:
    archives.import_(plan_of(home), files)
    path = home.results.run(next(iter(home.runs)))
    path.write_text(path.read_text().replace('"metrics"', '"metric"'))
    (tmp_path / "none").mkdir()
    with pytest.raises(ResultError, match=f"{path.name} is damaged"):
        archives.export(plan_of(home), NAMES, tmp_path / "none", partial=True)
    assert not [*(tmp_path / "none").iterdir()]


def test_results_of_other_settings_or_code_stay_out(home: Project, files: list[Path]) -> None:
    (home.root / "config/config.yaml").write_text(json.dumps({**CONFIG, "seeds": [0]}))
    fewer = load_project(root=home.root)
    ours, others = archives.import_(plan_of(fewer), files)
    assert sorted(ours) == sorted(fewer.runs)
    assert {name.partition("-")[0] for name in others} == home.runs.keys() - fewer.runs.keys()
    assert {path.stem for path in home.root.glob("results/runs/*")} == {fewer.names[key] for key in ours}
    assert {path.name for path in home.root.glob("results/weights/*")} == {fewer.names[key] for key in fewer.weights}
    shutil.rmtree(home.root / "results")
    changed = {key: f"{key}-00000000" for key in home.names}  # as the names of another version of the code
    ours, others = archives.import_(plan_of(home).model_copy(update={"names": changed}), files)
    assert (ours, sorted(others)) == ([], sorted(home.names[key] for key in home.runs))
    assert not (home.root / "results").exists()


def test_results_of_other_code_come_by_their_keys_where_asked_and_say_whose_they_are(
    made: Project, home: Project, files: list[Path]
) -> None:
    """Also from a folder of files, and once where two files have it.

    Each lies where the present code's would, with the provenance that it had.
    """
    changed = {key: f"{key}-00000000" for key in home.names}
    plan = plan_of(home).model_copy(update={"names": changed})
    ours, others = archives.import_(plan, [files[0].parent, files[0]], any_code=True)
    assert (sorted(ours), others) == (sorted(home.runs), [])
    for key in home.runs:
        found = read_result(home.root / f"results/runs/{changed[key]}.json")
        assert found.provenance["code_digest"] == read_result(made.results.run(key)).provenance["code_digest"]
    assert {path.name for path in home.root.glob("results/weights/*")} == {changed[key] for key in home.weights}


def _rewritten(path: Path, change: Any) -> None:
    """Change the rows of a file."""
    rows = pq.read_table(path).to_pylist()
    change(rows)
    archives._write(path, rows)


def _exchanged(rows: list[dict[str, Any]]) -> None:
    rows[0]["record"], rows[1]["record"] = rows[1]["record"], rows[0]["record"]


def _edited(old: str, new: str) -> Any:
    def change(rows: list[dict[str, Any]]) -> None:
        assert old in rows[0]["record"]
        rows[0]["record"] = rows[0]["record"].replace(old, new)

    return change


def _sampled(rows: list[dict[str, Any]]) -> None:
    values = next(one["values"] for row in rows for one in row["samples"] if one["values"])
    values[0] += 100


DAMAGE: dict[str, tuple[str, Any]] = {
    "runs: the record of another": ("runs", _exchanged),
    "runs: no JSON": ("runs", _edited('{"key"', '{"key')),
    "runs: nested too deeply": ("runs", lambda rows: rows[0].update(record="[" * 100_000)),
    "runs: nothing": ("runs", lambda rows: rows[0].update(record=None)),
    "runs: no object": ("runs", lambda rows: rows[0].update(record="[1]")),
    "runs: another type": ("runs", _edited('"dtype":"float32"', '"dtype":"bfloat16"')),
    "runs: samples of another mean": ("runs", _sampled),
    "runs: no list of samples": ("runs", lambda rows: rows[0].update(samples=None)),
    "weights: the record of another": ("weights", _exchanged),
    "weights: another identity": ("weights", _edited('"seed":0', '"seed":5')),
    "weights: no history": ("weights", lambda rows: rows[0].update(history=None)),
    "rotations: the record of another": ("rotations", _exchanged),
    "rotations: a name with a path": ("rotations", lambda rows: rows[0].update(record='{"key":"../../escaped"}')),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_record_that_is_not_of_its_name_is_one_sentence_and_not_written(
    case: str, home: Project, files: list[Path]
) -> None:
    kind, change = DAMAGE[case]
    path = files[archives.KINDS.index(kind)]
    _rewritten(path, change)
    with pytest.raises(ResultError) as refused:
        archives.import_(plan_of(home), [path])
    assert "\n" not in str(refused.value)
    for key, project in ((key, home) for key in home.runs):
        found = project.results.run(key)
        assert not found.exists() or read_result(found).key == key
    assert not [*home.root.glob("results/**/.tmp*")]


def test_a_name_that_leads_elsewhere_is_nobodys(home: Project, files: list[Path]) -> None:
    _rewritten(files[0], lambda rows: [row.update(name=f"../../{row['name']}") for row in rows])
    ours, others = archives.import_(plan_of(home), files[:1])
    assert (ours, len(others)) == ([], len(home.runs))
    assert not (home.root / "results").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "no such", "folder", "another kind", "renamed"])
def test_a_foreign_or_damaged_file_is_one_sentence(
    damage: str, home: Project, files: list[Path], tmp_path: Path
) -> None:
    path, content = files[0], files[0].read_bytes()
    if damage in ("cut", "empty", "text"):
        path.write_bytes({"cut": content[:-300], "empty": b"", "text": b"key,value\n"}[damage])
    elif damage == "another kind":
        path = files[1].rename(files[0])
    elif damage == "renamed":
        path = path.rename(tmp_path / "quarot.parquet")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(ResultError) as refused:
        archives.import_(plan_of(home), [path])
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (home.root / "results").exists()


def test_only_files_of_its_kind_are_replaced(files: list[Path], tmp_path: Path) -> None:
    assert all(archives.is_archive(path) for path in files)
    for name, content in (("a-runs.parquet", b"x"), ("runs.parquet", files[0].read_bytes())):
        (tmp_path / name).write_bytes(content)
        assert not archives.is_archive(tmp_path / name)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80), st.sampled_from([2.0**-12, 0.0625, 0.5]))
def test_rounded_values_keep_their_mean_and_each_is_near(values: list[float], step: float) -> None:
    found = archives.mean_kept(values, step)
    assert math.fsum(found) == pytest.approx(math.fsum(values), abs=1e-9)
    assert all(abs(one - other) <= step * (1 + 1e-9) + 1e-9 for one, other in zip(found, values, strict=True))
    assert all((one / step).is_integer() for one in found[:-1])


@pytest.mark.parametrize("count", [0, 1, 199, 200, 201, 999])
def test_a_thinned_history_is_even_short_and_ends_as_the_whole(count: int) -> None:
    found = archives.thinned(range(count))
    assert len(found) <= archives.LONGEST
    assert found[-1:] == [*range(count)][-1:]
    assert len({after - before for before, after in itertools.pairwise(found)}) <= 1
    assert count > archives.LONGEST or found == [*range(count)]


def test_files_of_tasks_are_named_without_a_machines_places() -> None:
    files = {"a": "/home/me/project/results/tasks/shipped-1/a.jsonl", "b": "/data/mine/b.jsonl"}
    tasks = {"tasks": {**{name: {"file": file} for name, file in files.items()}, "c": {"source": "hub"}}}
    archives._name_files(tasks)
    assert [one.get("file") for one in tasks["tasks"].values()] == ["results/tasks/shipped-1/a.jsonl", "b.jsonl", None]


def test_checkpoints_and_texts_are_named_without_a_machines_places() -> None:
    data = {
        "run": {
            "checkpoint": "/data/mine/llama",
            "corpora": [{"path": "/data/mine/wiki"}, {"path": "Salesforce/wikitext"}],
        },
        "weights": {"checkpoint": "meta-llama/Llama-2-7b-hf", "path": None, "file": "/stays"},
    }
    assert archives._without_places(data) == {
        "run": {"checkpoint": "llama", "corpora": [{"path": "wiki"}, {"path": "Salesforce/wikitext"}]},
        "weights": {"checkpoint": "meta-llama/Llama-2-7b-hf", "path": None, "file": "/stays"},
    }


def test_a_run_on_tasks_of_a_folder_anywhere_keeps_its_key() -> None:
    """A run is imported only as what its key says, and no machine's place of tasks is in that."""
    run = Run(
        checkpoint="/data/llama",
        checkpoint_digest="0123456789abcdef",
        recipe=Recipe(),
        metric=ZeroShot(suite="paper", path="/data/tasks"),
        corpora={},
    )
    named = archives._without_places({"run": run.model_dump(mode="json")})["run"]
    assert (named["checkpoint"], named["metric"]["path"]) == ("llama", "tasks")
    assert Run.model_validate(named).key == run.key


def test_the_runs_that_come_with_the_project_are_of_its_tables() -> None:
    """Each is a run of the plan of config/published.yaml by its key, which is what `runs import --any-code` asks."""
    configurations = [REPOSITORY / f"config/{name}.yaml" for name in ("paper", "real", "published")]
    runs = load_project(configurations, root=REPOSITORY).runs
    files = sorted((REPOSITORY / "workflow/resources/real").glob("*-runs.parquet"))
    assert files
    for file in files:
        assert {row["name"].partition("-")[0] for row in pq.read_table(file).to_pylist()} <= runs.keys()
