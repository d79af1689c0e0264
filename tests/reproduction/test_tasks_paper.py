"""The papers' tasks from local files: lm-eval's own prompts, examples, every file format, errors that name the row."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reproduction.tasks import TASKS, identity, longbench, prepare
from reproduction.tasks.paper import PAPER_TASKS, parts
from reproduction.tasks.scoring import Scorer
from reproduction.tasks.settings import ZeroShot
from rotquant import api
from rotquant.foundation.errors import TaskError
from rotquant.models.checkpoints import load_tokenizer
from tests.helpers.models import TINY_SHAPE
from tests.helpers.zeroshot_items import measured

MODEL = Path(__file__).parents[2] / "workflow" / "resources" / "models" / "rq-7b"

# Invented rows in the hub's schema.
ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {"goal": "Keep soup warm.", "sol1": "Put a lid on the pot.", "sol2": "Put the lid in a drawer.", "label": 0},
        {"goal": "Dry a wet towel.", "sol1": "Fold it into a bag.", "sol2": "Hang it in the sun.", "label": 1},
        {"goal": "Find a lost key.", "sol1": "Look under the mat.", "sol2": "Paint the mat blue.", "label": 0},
    ],
    "winogrande": [
        {
            "sentence": "The box did not fit the shelf as the _ was wide.",
            "option1": "box",
            "option2": "shelf",
            "answer": "1",
        },
        {"sentence": "Ann thanked Eve since _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        {
            "sentence": "The file beat the cache because the _ was new.",
            "option1": "file",
            "option2": "cache",
            "answer": "1",
        },
    ],
    "hellaswag": [
        {
            "activity_label": "Baking bread",
            "ctx_a": "A man kneads dough on a table.",
            "ctx_b": "he",
            "endings": ["puts it in the oven.", "sings to a cloud.", "reads the roof.", "is a table."],
            "label": "0",
        },
        {
            "activity_label": "Washing a car",
            "ctx_a": "A hose lies by a car.",
            "ctx_b": "the girl",
            "endings": ["eats the hose.", "flies away.", "rinses the doors.", "[substeps] sleeps."],
            "label": "2",
        },
    ],
    "arc_easy": [
        {
            "question": "What does a plant need to grow?",
            "choices": {"text": ["light", "noise", "paint", "sand"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        },
        {
            "question": "Which one is a solid at room temperature?",
            "choices": {"text": ["steam", "iron", "milk"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
    ],
    "lambada_openai": [
        {"text": "He lost the ring at sea and for years he looked for the ring"},
        {"text": "Return the value of the key, or the default value"},
        {"text": "The parser reads a token, then the next token"},
    ],
    "boolq": [
        {"passage": "The river freezes in winter.", "question": "does the river freeze", "label": 1},
        {"passage": "The bridge was never built.", "question": "can one cross the bridge", "label": 0},
    ],
    "social_iqa": [
        {
            "context": "Kim gave Lee a book.",
            "question": "How does Lee feel?",
            "answerA": "thankful",
            "answerB": "like a tree",
            "answerC": "square",
            "label": "1",
        },
        {
            "context": "Sam forgot the date.",
            "question": "What will Sam do next?",
            "answerA": "melt",
            "answerB": "say sorry",
            "answerC": "be a date",
            "label": "2",
        },
    ],
    "openbookqa": [
        {
            "question_stem": "Ice that gets warm turns into",
            "choices": {"text": ["water", "wood", "wind", "wool"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        },
    ],
}
ROWS["arc_challenge"] = ROWS["arc_easy"]
ROWS["tldr"] = [
    {"document": "I lost my key.\nThen I found it in the car.", "summary": "Found my key in the car."},
    {"document": "My cat sleeps all day and eats at night.", "summary": "My cat lives at night."},
    {"document": "The bus was late, so I walked home.", "summary": "Walked, as the bus was late."},
]
QUESTION = {"question": " How many legs has a spider?", "choices": ["two", "four", "six", "eight"], "answer": 3}
ROWS |= {subject: [QUESTION, {**QUESTION, "answer": index % 4}] for index, subject in enumerate(parts("mmlu"))}
ROWS["humaneval"] = [
    {
        "prompt": f'def more(x):\n    """Return x and {step}."""\n',
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + step}\n",
        "entry_point": "more",
    }
    for step in (1, 2)
]
ROWS["gsm8k"] = [
    {"question": "Ann has 2 eggs and finds 3. How many are these?", "answer": "2 + 3 = <<2+3=5>>5.\n#### 5"},
    {"question": "Bo has 1,500 nails and loses 300. How many are left?", "answer": "1500 - 300 = 1200.\n#### 1,200"},
]
LONG = [
    {"input": f"Who said {word}?", "context": f"Eve said {word}. " * 12, "answers": ["Eve", "eve"], "length": 36}
    for word in ("yes", "no")
]
ROWS |= {task: [{**row, "all_classes": None} for row in LONG] for task in longbench.DEFINITIONS}
SUFFIXES = dict(zip(ROWS, ("jsonl", "json", "parquet") * len(ROWS), strict=False))  # each serves several tasks


# More than there are shots, and other rows than the items where the prompt is looked at.
EXAMPLES = {
    "arc_easy": [{**ROWS["arc_easy"][0], "question": f"What does seed {index} need?"} for index in range(4)],
    "mmlu_anatomy": [{**QUESTION, "question": f"How many legs have {index} spiders?"} for index in range(5)],
    "tldr": [{"document": "It rained and I got wet.", "summary": "I got wet."}],
}


def rows_of(task: str) -> int:
    return sum(len(ROWS[part]) for part in parts(task))


def write_rows(folder: Path, task: str, rows: list[dict[str, Any]], suffix: str) -> Path:
    file = folder / f"{task}.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task, rows in ROWS.items():
        write_rows(folder, task, rows, SUFFIXES[task])
        write_rows(folder, f"{task}.examples", EXAMPLES.get(task, rows), SUFFIXES[task])
    return folder


@pytest.fixture(scope="module")
def metric(data: Path) -> ZeroShot:
    return ZeroShot(suite="paper", path=str(data), tasks=tuple(PAPER_TASKS), longest_prompt=60)


@pytest.fixture(scope="module")
def folder(metric: ZeroShot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(metric, tmp_path_factory.mktemp("root"))


def test_every_task_runs_offline_from_local_files(metric: ZeroShot, folder: Path):
    tokenizer = load_tokenizer(MODEL)
    with torch.random.fork_rng():
        shape = {**TINY_SHAPE, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    found = measured(model, tokenizer, metric, folder, allow_code_execution=True)
    for name, task in TASKS["paper"].items():
        assert found[f"{name}.items"] == rows_of(name)
        assert found[name] == found[f"{name}.{task.measure}"]
        # acc_norm where lm-eval's task has it, else acc.
        assert (f"{name}.acc_norm" in found) == (task.measure == "acc_norm")
        right = found[name] / 100 * rows_of(name)
        assert task.measure in ("score", "rouge_l") or right == pytest.approx(round(right))
        assert 0 <= right <= rows_of(name)
    accuracies = [found[name] for name, task in TASKS["paper"].items() if task.measure != "rouge_l"]
    assert found["average"] == pytest.approx(sum(accuracies) / len(accuracies))
    assert found["rouge_l"] == found["tldr"]
    fewer = measured(model, tokenizer, metric.model_copy(update={"limit": 2, "tasks": ("piqa",)}), folder)
    assert fewer["piqa.items"] == 2


def test_by_the_unconditional_likelihood_a_choice_counts_by_what_the_question_adds(metric: ZeroShot, tmp_path: Path):
    """Brown et al. 2020, Sec. 2.4: log P(choice | question) - log P(choice | "Answer:"), in ARC and OpenBookQA."""
    tasks = ("arc_easy", "openbookqa", "piqa")
    metric = metric.model_copy(update={"tasks": tasks, "normalization": "unconditional"})
    model = api.load(MODEL)
    found = measured(model.network, model.tokenizer, metric, prepare(metric, tmp_path))
    scorer = Scorer(model.network, model.tokenizer, True, 8)
    prompts = {"arc_easy": "Question: {question}\nAnswer:", "openbookqa": "{question_stem}"}
    for task, prompt in prompts.items():
        right = []
        for row in ROWS[task]:
            choices = [f" {text}" for text in row["choices"]["text"]]
            asked, alone = (
                [
                    score
                    for score, _ in scorer.log_likelihoods([(context, one) for one in choices], [task] * len(choices))
                ]
                for context in (prompt.format(**row), "Answer:")
            )
            gains = [one - other for one, other in zip(asked, alone, strict=True)]
            right.append(gains.index(max(gains)) == row["choices"]["label"].index(row["answerKey"]))
        assert found[task] == found[f"{task}.acc_mutual_info"] == pytest.approx(100 * sum(right) / len(right))
        assert {f"{task}.acc", f"{task}.acc_norm"} <= found.keys()
    assert found["piqa"] == found["piqa.acc_norm"]
    assert "piqa.acc_mutual_info" not in found
    with pytest.raises(ValueError, match="normalization 'unconditional' is about tasks of suite 'paper'"):
        ZeroShot(corpus="docstrings", normalization="unconditional")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "piqa",
            [("Question: Keep soup warm.\nAnswer:", " Put a lid on the pot."), (None, " Put the lid in a drawer.")],
        ),
        # Partial scoring: the choices stand in the context, and what follows the blank is predicted.
        ("winogrande", [("The box did not fit the shelf as the box", " was wide."), (None, " was wide.")]),
        ("hellaswag", [("Baking bread: A man kneads dough on a table. He", " puts it in the oven.")]),
        ("arc_easy", [("Question: What does a plant need to grow?\nAnswer:", " light"), (None, " noise")]),
        ("lambada_openai", [("He lost the ring at sea and for years he looked for the", " ring")]),
        ("boolq", [("The river freezes in winter.\nQuestion: does the river freeze?\nAnswer:", " no"), (None, " yes")]),
        ("social_iqa", [("Q: Kim gave Lee a book. How does Lee feel?\nA:", " thankful"), (None, " like a tree")]),
        ("openbookqa", [("Ice that gets warm turns into", " water"), (None, " wood")]),
        (
            "mmlu_anatomy",
            [
                (
                    "The following are multiple choice questions (with answers) about anatomy.\n\n"
                    "How many legs has a spider?\nA. two\nB. four\nC. six\nD. eight\nAnswer:",
                    " A",
                ),
                (None, " B"),
            ],
        ),
    ],
)
def test_prompts_are_lm_evals_own(metric: ZeroShot, folder: Path, task: str, expected: list[tuple[str | None, str]]):
    from reproduction.tasks.harness import load_tasks

    built = load_tasks(folder.resolve(), metric)[task]
    built.build_all_requests(limit=1)
    for request, (context, continuation) in zip(built.instances, expected, strict=False):
        assert request.args[1] == continuation
        assert context is None or request.args[0] == context


def test_mmlu_is_all_questions_of_57_subjects(data: Path, tmp_path: Path):
    assert len(parts("mmlu")) == 57
    metric = ZeroShot(suite="paper", path=str(data), tasks=("mmlu",), shots=1)
    folder = prepare(metric, tmp_path)
    assert len(identity(metric, folder)["tasks"]) == 57
    model = api.load(MODEL)
    found = measured(model.network, model.tokenizer, metric, folder)
    assert found["mmlu.items"] == 2 * 57
    assert found["average"] == found["mmlu"]


def prompt(metric: ZeroShot, folder: Path, task: str, shots: int) -> str:
    """The prompt of a task's first item."""
    from reproduction.tasks.harness import load_tasks, set_shots

    tasks = load_tasks(folder.resolve(), metric)
    set_shots({task: tasks[task]}, shots)
    tasks[task].build_all_requests(limit=1)
    return tasks[task].instances[0].args[0]


def test_examples_come_from_their_own_file(data: Path, tmp_path: Path):
    tasks = ("arc_easy", "mmlu", "tldr")
    metric = ZeroShot(suite="paper", path=str(data), tasks=tasks, shots=1)
    folder = prepare(metric, tmp_path)
    spiders = [f"How many legs have {index} spiders?\nA. two" for index in range(5)]
    text = prompt(metric, folder, "mmlu_anatomy", 5)  # the first ones in order, as MMLU's authors gave them
    assert [text.index(question) for question in spiders] == sorted(text.index(question) for question in spiders)
    assert text.count("Answer: D\n\n") == 5
    assert text.endswith("D. eight\nAnswer:")
    text = prompt(metric, folder, "arc_easy", 3)  # drawn by lm-eval's seed
    assert text.count("What does seed") == 3
    assert text == prompt(metric, folder, "arc_easy", 3)
    text = prompt(metric, folder, "tldr", 1)
    assert text.startswith("It rained and I got wet.\nTL;DR: I got wet.\n\nI lost my key.")
    assert text.endswith("in the car.\nTL;DR:")


def test_too_few_examples_are_named(data: Path, tmp_path: Path):
    metric = ZeroShot(suite="paper", path=str(data), tasks=("tldr",), shots=2)
    folder = prepare(metric, tmp_path)
    model = api.load(MODEL)
    with pytest.raises(TaskError, match="'tldr' has 1 examples, fewer than 2 shots"):
        measured(model.network, model.tokenizer, metric, folder)
    write_rows(tmp_path, "piqa", ROWS["piqa"], "jsonl")
    with pytest.raises(
        TaskError, match=rf"'piqa' has no examples for 5 shots: expected {tmp_path}/piqa.examples.jsonl"
    ):
        prepare(ZeroShot(suite="paper", path=str(tmp_path), tasks=("piqa",), shots=5), tmp_path)


def test_a_task_that_the_hub_lacks_needs_a_folder(tmp_path: Path):
    with pytest.raises(TaskError, match=r"'tldr' is not on the hub; name a local folder with tldr.jsonl"):
        prepare(ZeroShot(suite="paper", tasks=("tldr",)), tmp_path)


def test_provenance_names_each_local_file(metric: ZeroShot, folder: Path, data: Path):
    tasks = identity(metric, folder)["tasks"]
    assert tasks["piqa"]["file"] == str(data / "piqa.jsonl")
    assert tasks["winogrande"]["items"] == 3
    assert len(tasks["hellaswag"]["sha256"]) == 64


def test_changed_data_make_another_folder(tmp_path: Path):
    metric = ZeroShot(suite="paper", path=str(tmp_path), tasks=("piqa",))
    write_rows(tmp_path, "piqa", ROWS["piqa"], "jsonl")
    first = prepare(metric, tmp_path)
    assert prepare(metric, tmp_path) == first
    write_rows(tmp_path, "piqa", ROWS["piqa"][:2], "jsonl")
    assert prepare(metric, tmp_path) != first


def test_without_local_files_the_hub_is_named(tmp_path: Path):
    metric = ZeroShot(suite="paper", tasks=("piqa",))
    folder = prepare(metric, tmp_path)
    found = identity(metric, folder)["tasks"]["piqa"]
    assert (found["source"], found["commit"], len(found["definition"])) == ("hub", None, 16)


def test_a_missing_file_is_named_with_its_task(data: Path, tmp_path: Path):
    with pytest.raises(TaskError, match="there is no folder /nowhere"):
        prepare(ZeroShot(suite="paper", path="/nowhere"), tmp_path)
    metric = ZeroShot(suite="paper", path=str(tmp_path), tasks=("piqa",))
    with pytest.raises(TaskError, match=rf"task 'piqa' has no data file: expected {tmp_path}/piqa.jsonl"):
        prepare(metric, tmp_path)


@pytest.mark.parametrize(
    ("task", "change", "sentence"),
    [
        ("piqa", {"sol2": None}, "line 2, field 'sol2': Input should be a valid string"),
        ("piqa", {"label": "1"}, "line 2, field 'label': Input should be 0 or 1"),
        ("winogrande", {"answer": 2}, "line 2, field 'answer': Input should be '1' or '2'"),
        ("winogrande", {"sentence": "No blank."}, "line 2, field 'sentence': should have a blank"),
        ("hellaswag", {"endings": ["one", "two"]}, "line 2, field 'endings': List should have at least 4 items"),
        ("arc_easy", {"answerKey": "Z"}, "line 2, field 'answerKey' is 'Z', which is none of the labels"),
        ("arc_easy", {"choices": {"text": ["a", "b"]}}, "line 2, field 'choices.label': Field required"),
        ("lambada_openai", {"text": "word"}, "line 2, field 'text': should have at least two words"),
        ("tldr", {"summary": ""}, "line 2, field 'summary': String should have at least 1 character"),
        ("humaneval", {"entry_point": "less"}, "line 2, field 'prompt' defines no function 'less', its 'entry_point'"),
        ("humaneval", {"test": "assert True"}, "line 2, field 'test' defines no function 'check'"),
        ("gsm8k", {"answer": "1200"}, "line 2, field 'answer': should end with \"#### \" and a number"),
        ("musique", {"answers": []}, "line 2, field 'answers': List should have at least 1 item"),
        ("samsum", {"input": None}, "line 2, field 'input': Input should be a valid string"),
    ],
)
def test_a_row_of_another_schema_is_named(tmp_path: Path, task: str, change: dict[str, Any], sentence: str):
    rows = [dict(row) for row in ROWS[task]]
    rows[1] |= change
    file = write_rows(tmp_path, task, rows, "jsonl")
    with pytest.raises(TaskError) as error:
        prepare(ZeroShot(suite="paper", path=str(tmp_path), tasks=(task,)), tmp_path)
    assert f"zero-shot task '{task}': {file}, {sentence}" in str(error.value)
    assert not list((tmp_path / "results").rglob("*.yaml"))


PIQA_ROW = b'{"goal": "a\xe2\x80\xa8b", "sol1": "c", "sol2": "d", "label": 1}\n'
"""A row with a character at which Python would split lines, and JSON does not."""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("piqa.jsonl", b'\n{"goal": "a", \n', r", line 2 is no JSON \(column 15: Expecting property name"),
        ("piqa.jsonl", PIQA_ROW + b'{"goal": "\xe9"}', r", line 2 cannot be read \(it is not UTF-8 at byte 11\)"),
        ("piqa.jsonl", PIQA_ROW.decode().encode("utf-16"), ", line 1 cannot be read"),
        ("piqa.jsonl", PIQA_ROW + b'{"goal": "a"}', ", line 2, field 'sol1': Field required"),
        ("piqa.jsonl", PIQA_ROW + b'"piqa"', ", line 2, Input should be a valid dictionary"),
        ("piqa.jsonl", PIQA_ROW + b"[" * 100_000, ", line 2 cannot be read"),
        ("piqa.jsonl", PIQA_ROW + b"9" * 5_000, ", line 2 cannot be read"),
        ("piqa.jsonl", b"", "has no rows"),
        ("piqa.json", b"[]", "has no rows"),
        ("piqa.json", b"[\n{]", r" is no JSON \(line 2, column 2"),
        ("piqa.json", b"[1, 2]", "row 1, Input should be a valid dictionary"),
        ("piqa.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, sentence: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=f"task 'piqa': {tmp_path / name}.*{sentence}") as error:
        prepare(ZeroShot(suite="paper", path=str(tmp_path), tasks=("piqa",)), tmp_path)
    assert "\n" not in str(error.value)


def test_a_row_may_hold_every_mark_that_json_allows(tmp_path: Path):
    (tmp_path / "piqa.jsonl").write_bytes(PIQA_ROW * 2)
    metric = ZeroShot(suite="paper", path=str(tmp_path), tasks=("piqa",))
    assert identity(metric, prepare(metric, tmp_path))["tasks"]["piqa"]["items"] == 2


@pytest.mark.parametrize("task", ["piqa", "tldr", "mmlu_anatomy"])
@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("^(include|process_results): .*$", "include: /tmp/evil.yaml"),
        ("^(include|process_results): .*$", "process_results: !function os.system"),
        ("^task: .*$", "task: other"),
        ("^", "doc_to_text: other\n"),
        ("(?s)^.*$", ""),
        ("(?s)^.*$", "!!python/object/apply:os.system ['true']"),
    ],
)
def test_a_definition_that_is_not_as_it_was_written_is_refused(
    metric: ZeroShot, folder: Path, tmp_path: Path, task: str, line: str, other: str
):
    """lm-eval's reader would follow what it includes, and load the functions that it names."""
    from reproduction.tasks.harness import load_tasks

    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / f"{task}.yaml"
    file.write_text(re.sub(line, other, file.read_text(), count=1, flags=re.MULTILINE))
    for read in (lambda: load_tasks(tmp_path / "copy", metric), lambda: identity(metric, tmp_path / "copy")):
        with pytest.raises(TaskError, match=rf"definition {file} is missing, or not as it was written; remove its fo"):
            read()
