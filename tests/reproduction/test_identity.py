"""A result is of what its name says: one changed byte of anything that it depends on is another name.

`COUNTS` has a line for every input, `SAYS_NOTHING` for what must not matter; an input without a line fails.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from reproduction.corpora import Corpus
from reproduction.corpora.digests import refuse_other_text
from reproduction.identity import code
from reproduction.identity.names import HISTORY_FILE, MODEL, ROTATION_RECORD, ROTATIONS_FILE, WEIGHTS_RECORD, key_in
from reproduction.identity.run import Run, signed
from reproduction.planning.current import current_plan
from reproduction.run.execution import to_compute, wanted
from reproduction.run.plan import Plan
from reproduction.run.results import RunResult, read_result, write_result
from reproduction.run.stages import jobs
from reproduction.sources import sources
from reproduction.tasks import folders, shipped
from rotquant.foundation.errors import CorpusError, ResultError
from rotquant.foundation.files import file_digest, read_json, write_json
from rotquant.text import text_digest
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import tiny_model
from tests.helpers.project import CONFIG, TABLES, Copy, packages_in

WORDS = " ".join(f"w{number}" for number in range(3, 60))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one run of learned rotations on a checkpoint, all computed, so that nothing is left to do."""
    copy = Copy(tmp_path_factory.mktemp("identity"), fake=False)
    tiny_model(dtype=torch.float32).save_pretrained(copy.root / "model")
    tiny_tokenizer().save_pretrained(copy.root / "model")
    for split in ("train", "test"):
        copy.write(f"text/{split}.txt", f"{WORDS} {split}\n" * 20)
    rows = [{"name": "Baseline", "method": "baseline"}, {"name": "SpinQuant", "method": "spinquant-easy"}]
    metrics = [{"kind": "perplexity", "corpus": "wikitext2"}, {"kind": "zero_shot"}]
    table = {**TABLES["tables"][0], "columns": ["Llama-2-7B"], "rows": rows, "claims": [], "metrics": metrics}
    for name in ("published", "figure"):
        table.pop(name)
    copy.set_tables({**TABLES, "tables": [table]})
    slots = {"Llama-2-7B": {"checkpoint": "model", "group_sizes": {}}}
    copy.set_config({**CONFIG, "seeds": [0], "slots": slots})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy.root)
        patch.setattr(code, "PACKAGES", packages_in(copy.root))
        code.forget()
        record_all(current_plan(copy.root))
    return copy.root


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it to change."""
    root = tmp_path / "project"
    shutil.copytree(made, root, symlinks=True)
    monkeypatch.chdir(root)
    monkeypatch.setattr(code, "PACKAGES", packages_in(root))
    code.forget()
    yield root
    code.forget()


def record_all(plan: Plan) -> None:
    """Write the results of a plan as its jobs would, with made-up numbers."""
    results = plan.results()
    for key, rotation in plan.rotations.items():
        folder, run = results.rotation(key), plan.run(rotation.run)
        folder.mkdir(parents=True)
        (folder / ROTATIONS_FILE).write_bytes(b"matrices")
        write_json(folder / HISTORY_FILE, [])
        told = {"code_digest": rotation.code, "digest": file_digest(folder / ROTATIONS_FILE)}
        write_json(folder / ROTATION_RECORD, signed(told, run.rotation_identity() or {}))
    for key, weights in plan.weights.items():
        folder, run = results.weights(key), plan.run(weights.run)
        (folder / MODEL).mkdir(parents=True)
        (folder / MODEL / "quantized.safetensors").write_bytes(b"codes")
        learned = read_json(results.rotation(str(weights.rotation)) / ROTATION_RECORD)
        told = {"code_digest": weights.code, "digests": {"quantized.safetensors": "0"}, "rotation": learned}
        write_json(folder / WEIGHTS_RECORD, signed(told, run.weights_identity() or {}))
    for key in plan.tasks:
        task = {"definition": "d", "file": "there/grammar.jsonl", "sha256": "a", "items": 3}
        write_json(results.tasks(key), {"suite": "shipped", "lm_eval": None, "tasks": {"grammar": task}})
    for key, planned in plan.runs.items():
        run = plan.run(key)
        stored = planned.weights and read_json(results.weights(planned.weights) / WEIGHTS_RECORD)
        tasks = {} if planned.tasks is None else {"tasks": read_json(results.tasks(planned.tasks))}
        write_result(results.run(key), RunResult(run, scores(run), {"code_digest": planned.code, **tasks}, stored))


def scores(run: Run) -> dict[str, float]:
    """Numbers for all quantities of a run."""
    from reproduction.tables.quantities import quantities

    return {quantity.name: 2.0 for quantity in quantities(run.metric)}


def to_do() -> set[str]:
    """The kinds of results that have no file under their names."""
    plan = current_plan(Path.cwd(), write=False)
    kinds = {"rotation": plan.rotations, "weights": plan.weights, "tasks": plan.tasks, "runs": plan.runs}
    found = to_compute(plan, wanted(plan, [*plan.rotations, *plan.weights, *plan.tasks, *plan.runs]))
    return {kind for kind, known in kinds.items() if not known.keys().isdisjoint(found)}


def appended(path: str, text: str = "\n") -> Callable[[], None]:
    """One more byte, or some, at a file's end."""

    def change() -> None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)

    return change


def flipped() -> None:
    """The last bit of the weights, with size and time set back."""
    path = Path("model/model.safetensors")
    times, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def edited(path: str, *places: str | int, value: Any) -> Callable[[], None]:
    """A value of a JSON or YAML file; `*` in its path stands for the one file that is there."""

    def change() -> None:
        (file,) = Path().glob(path)
        told = inner = yaml.safe_load(file.read_text(encoding="utf-8"))
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = value
        file.write_text(json.dumps(told), encoding="utf-8")

    return change


def source(path: str, old: str, new: str) -> Callable[[], None]:
    """An edit of a source file."""

    def change() -> None:
        file = Path(path)
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


THREE_BITS = {"weights": {"scheme": {"bits": 3}}}
RECORD = "results/weights/*/weights.json"
TABLE = "workflow/papers/quarot/tables.yaml"
ALL = {"rotation", "weights", "runs"}
TASKS = {"tasks", "runs"}
#: By input of a run: what changes it, and what is to be computed then.
COUNTS: dict[str, tuple[Callable[[], None], set[str]]] = {
    "checkpoint_digest: weights": (flipped, ALL),
    "checkpoint_digest: configuration": (appended("model/config.json"), ALL),
    "checkpoint_digest: tokenizer": (appended("model/tokenizer.json"), ALL),
    "checkpoint_digest: tokenizer's settings": (appended("model/tokenizer_config.json"), ALL),
    "texts: evaluated": (appended("text/test.txt", "w"), {"runs"}),
    "texts: calibrated on": (appended("text/train.txt", "w"), ALL),
    "texts: a new file of the split": (appended("text/more.test.txt", "w4 w5\n"), {"runs"}),
    "recipe": (edited(TABLE, "tables", 0, "rows", 1, "recipe", value=THREE_BITS), {"weights", "runs"}),
    "metric": (edited("config/config.yaml", "evaluation", "max_windows", value=1), {"runs"}),
    "seed": (edited("config/config.yaml", "seeds", value=[1]), ALL),
    "dtype": (edited("config/config.yaml", "dtype", value="bfloat16"), ALL),
    "code: a stage": (appended("workflow/reproduction/run/stages/runs.py", "x = 1\n"), {"runs"}),
    "code: the divergence": (source("rotquant/metrics/divergence.py", "return self.cap *", "return"), {"runs"}),
    "code: log-odds of items": (source("workflow/reproduction/tasks/odds.py", "- most", "- 1"), {"runs"}),
    "code: what stages share": (source("rotquant/tensors/quantization.py", "+ 0.5, x", "+ 0.6, x"), ALL),
    "code: a method": (appended("rotquant/methods/gptq/columns.py", "x = 1\n"), {"weights", "runs"}),
    "code: the learner": (appended("rotquant/methods/spinquant/cayley_training.py", "x = 1\n"), ALL),
    "tasks: which": (edited("config/config.yaml", "zero_shot", "tasks", value=["next_word"]), TASKS),
}  # fmt: skip
#: What must not matter.
SAYS_NOTHING: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "checkpoint: its place": lambda: (
        Path("model").rename("moved"),
        edited("config/config.yaml", "slots", "Llama-2-7B", "checkpoint", value="moved")(),
    ),
    "checkpoint: its time": lambda: os.utime("model/model.safetensors", (0, 0)),
    "checkpoint: a file that nothing reads": appended("model/README.md"),
    "corpora: their place": lambda: (
        Path("text").rename("texts"),
        edited("config/config.yaml", "corpora", "wikitext2", "path", value="texts")(),
    ),
    "documentation": source("rotquant/tensors/quantization.py", '"""', '"""More: '),
    "comment": appended("workflow/reproduction/run/stages/runs.py", "# a comment\n"),
    "a function that no stage calls": appended("rotquant/tensors/quantization.py", "def more():\n    pass\n"),
    "planned memory": source("rotquant/models/memory.py", "_MOST_WRITTEN = 256", "_MOST_WRITTEN = 128"),
    "rendering": appended("workflow/reproduction/render/pages/markdown.py", "x = 1\n"),
    "a method that is not used": appended("rotquant/methods/duquant/__init__.py", "x = 1\n"),
    "another words of the table": edited(TABLE, "tables", 0, "caption", value="Another caption."),
    "order of keys": lambda: Path("config/config.yaml").write_text(
        yaml.safe_dump(dict(reversed(yaml.safe_load(Path("config/config.yaml").read_text()).items())), sort_keys=False)
    ),
    "tasks: where their files lie": edited("results/tasks/*.json", "tasks", "grammar", "file", value="here"),
    "rotations: how they were learned": edited("results/rotations/*/rotation.json", "seconds", value=3),
    "weights: how they were made": edited(RECORD, "seconds", value=3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_one_changed_byte_of_an_input_makes_what_depends_on_it_not_current(project: Path, name: str) -> None:
    change, expected = COUNTS[name]
    change()
    assert to_do() == expected


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_what_decides_no_number_leaves_all_current(project: Path, name: str) -> None:
    SAYS_NOTHING[name]()
    assert to_do() == set()


@pytest.mark.parametrize("name", ["rules", "code", "a package"])
def test_tasks_of_other_content_have_another_name_and_so_have_runs_on_them(
    project: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "rules":
        monkeypatch.setattr(shipped, "GENERATOR_VERSION", 1000)
    elif name == "code":
        monkeypatch.setattr(folders, "_source_digest", lambda: "another")
    else:
        monkeypatch.setattr(shipped, "versions", lambda split: {"some": "1.0"})
    plan = current_plan(project, [], {"tracking": True}, write=False)  # which is not read: it was never made
    assert {*to_compute(plan, wanted(plan, []))} == {*plan.tasks} | {key for key, run in plan.runs.items() if run.tasks}


def test_data_of_tasks_that_changes_or_comes_makes_another_plan(project: Path) -> None:
    """Nothing is expanded as long as all that a plan follows from is as it was."""
    Path("tasks").mkdir()
    edited("config/config.yaml", "zero_shot", value={"suite": "paper", "tasks": ["piqa"], "path": "tasks"})()
    names = [current_plan(project).names]
    for other in "cd":
        Path("tasks/piqa.jsonl").write_text(json.dumps({"goal": "a", "sol1": "b", "sol2": other, "label": 0}))
        names.append(current_plan(project).names)
    (key,) = current_plan(project).tasks
    assert len({found[key] for found in names}) == 3


def test_every_input_has_a_line() -> None:
    """Fields of a run, and what else its name is of (`identity.names.names_of`)."""
    covered = {name.partition(":")[0] for name in itertools.chain(COUNTS, SAYS_NOTHING)}
    elsewhere = {"checkpoint": "where it lies", "corpora": "where they lie"}
    assert {*Run.model_fields, "code", "weights", "rotations", "tasks"} <= covered | elsewhere.keys()
    assert elsewhere.keys() <= {name.partition(":")[0] for name in SAYS_NOTHING}
    assert {*Run.model_fields} - elsewhere.keys() == {*Run.model_validate(RUN).identity()}


RUN: dict[str, Any] = {
    "checkpoint": "model",
    "checkpoint_digest": "0",
    "metric": {"kind": "perplexity", "corpus": "text"},
    "corpora": {"text": {"name": "text", "source": "local", "path": "text"}},
}


def test_a_run_file_under_another_name_is_refused(project: Path) -> None:
    first, second, *_ = sorted(Path("results/runs").iterdir())
    shutil.copy(first, second)
    key = key_in(first.stem)
    with pytest.raises(ResultError, match=f"{second} is damaged .its name is not the key of its run, {key}"):
        read_result(second)


def test_a_job_computes_by_the_planned_code_or_not_at_all(project: Path) -> None:
    """Whether files were edited since this process loaded them, or since the plan was made; other edits do not stop."""
    plan = current_plan(project, write=False)
    (weights,) = plan.weights
    run = plan.run(plan.weights[weights].run)
    planned = plan.weights[weights].code
    loaded = code.LoadedCode.now()
    code.refuse_other_code(planned, plan.sources, "weights", run.recipe, loaded)
    appended("workflow/reproduction/render/pages/markdown.py", "x = 1\n")()
    appended("workflow/reproduction/run/stages/runs.py", "x = 1\n")()
    code.forget()
    code.refuse_other_code(planned, "another", "weights", run.recipe, loaded)
    with pytest.raises(
        ResultError, match=r"'runs' changed since the plan was made \(workflow/reproduction/run/stages/runs.py\)"
    ):
        code.refuse_other_code(plan.runs[run.key].code, "another", "runs", run.recipe, loaded)
    newer = code.LoadedCode.now()  # of a process that loads the edited files
    with pytest.raises(ResultError, match="'runs' changed since the plan was made: start again"):
        code.refuse_other_code(plan.runs[run.key].code, "another", "runs", run.recipe, newer)


def test_a_job_reads_the_planned_text_or_none(project: Path) -> None:
    spec = Corpus(name="text", source="local", path="text")
    planned = text_digest(spec, "test")
    refuse_other_text(spec, "test", None, Path("text/test.txt").read_text(), None)
    with pytest.raises(CorpusError, match="its test text is not the one that was planned"):
        refuse_other_text(spec, "test", None, "another text", planned)
    assert text_digest(Corpus(name="none", source="local", path="nowhere"), "test") == "unread"


@pytest.mark.parametrize("part", ["key", "identity"])
def test_jobs_refuse_weights_and_rotations_of_another_name(
    project: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "LOADED", code.LoadedCode.now())
    plan = current_plan(project, write=False)
    ((weights, planned),) = plan.weights.items()
    for record, key in (("results/rotations/*/rotation.json", weights), (RECORD, planned.run)):
        edited(record, *([part] if part == "key" else [part, "seed"]), value=5)()
        with pytest.raises(ResultError, match="delete it and start again"):
            jobs.make(plan, key, plan.results())


@pytest.mark.parametrize("lost", ["record", "tensors"])
def test_jobs_say_how_to_make_what_they_need_and_is_not_there(
    project: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "LOADED", code.LoadedCode.now())
    plan = current_plan(project, write=False)
    ((weights, planned),) = plan.weights.items()
    folder = plan.results().weights(weights)
    (folder / WEIGHTS_RECORD).unlink() if lost == "record" else shutil.rmtree(folder / MODEL)
    with pytest.raises(ResultError, match=f"is needed and not there: `rotquant runs execute {weights}` makes it"):
        jobs.make(plan, planned.run, plan.results())


def test_every_stage_follows_its_modules() -> None:
    """And none of another kind: what renders has no part in what computes."""
    files = {stage: code.code_files(*code.stage_entries(stage)) for stage in code.STAGES}
    names = {stage: {str(path.relative_to(code.root())) for path in found} for stage, found in files.items()}
    for stage in ("rotations", "weights", "runs"):
        aside = ("workflow/reproduction/render", "rotquant/foundation")
        assert not [name for name in names[stage] if name.startswith(aside)]
        assert {"workflow/reproduction/run/stages/text.py", "rotquant/text/windows.py"} <= names[stage]
    assert {"kernels/hadamard_any.cu", "kernels/include/pipeline/row_share.cuh"} <= names["runs"]
    assert any(path.suffix == ".jinja" for path in code.code_files(*sources()["runs"].code["page"]))
