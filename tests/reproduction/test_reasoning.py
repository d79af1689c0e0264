"""HumanEval, GSM8K and LongBench: what a response is taken for, the metrics, prompts, and permission to run code."""

import json
import random
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from reproduction.run import execution
from reproduction.tasks import TASKS, prepare
from reproduction.tasks.evaluation import scores
from reproduction.tasks.longbench import DEFINITIONS, count, f1, rouge_of_words
from reproduction.tasks.reasoning import by_number, by_running, number, program
from reproduction.tasks.scoring import Scorer
from reproduction.tasks.settings import ZeroShot
from rotquant import api
from rotquant.foundation.errors import TaskError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "workflow" / "resources" / "models" / "rq-7b"

# Invented, in HumanEval's schema.
PROBLEM = {
    "prompt": 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n    """The sum of all values."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}
QUESTION = {"question": "Ann has 2 eggs and finds 3. How many are these?", "answer": "2 + 3 = 5\n#### 5"}


# Programs


@pytest.mark.parametrize(
    "response",
    [
        "    return sum(values)\n",
        "def total(values: List[int]) -> int:\n    return sum(values)\n",
        "Here it is:\n\n```python\ndef total(values):\n    return sum(values)\n```\nIt adds them.",
        "```\ndef helper(values):\n    return sum(values)\n\ndef total(values):\n    return helper(values)\n```",
        "\n\ndef total(values):\n    return sum(values)\n\n# Example usage\nprint(total(input()))",
        '    return sum(values)\n\nif __name__ == "__main__":\n    raise SystemExit\n',
        "```python\ndef total(values):\n    return sum(values)\n",  # the answer ended before the fence
    ],
)
def test_a_right_response_passes_however_it_is_written(response: str):
    assert by_running(PROBLEM, [response]) == {"pass_at_1": 1.0}


@pytest.mark.parametrize(
    "response",
    [
        "",
        "    return 3\n",
        "    pass\n",
        "I do not know.",
        "```python\ndef other(values):\n    return 0\n```",
        "    exit(0)\n",
    ],
)
def test_a_wrong_response_does_not(response: str):
    assert by_running(PROBLEM, [response]) == {"pass_at_1": 0.0}


def test_a_program_has_the_imports_of_the_problem():
    assert program(PROBLEM, "```python\ndef total(values: List[int]):\n    return 0\n```").startswith(PROBLEM["prompt"])


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 = 5. The answer is: 5", 5),
        ("The answer is 5. No, the answer is: 1,250.", 1250),
        ("so it is $18.\n#### 18", 18),
        ("The answer is: $-3.50", Decimal("-3.5")),
        ("The answer is: .5 pounds", Decimal("0.5")),
        ("It is 5", None),
        ("The answer is: none of them", None),
    ],
)
def test_the_number_that_a_solution_ends_with(text: str, value: Any):
    assert number(text) == value


def test_equal_numbers_match_however_they_are_written():
    for generated, right in (("The answer is: 5.00", 1.0), ("The answer is: 5.01", 0.0), ("5", 0.0), ("#### 5", 1.0)):
        assert by_number(QUESTION, [generated]) == {"exact_match": right}


# LongBench's metrics, by hand


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("a tall tower in Paris", "Paris", 2 / 5),  # tall tower in paris: one of four, one of one
        ("no no yes", "no yes yes", 4 / 6),  # no and yes once each: two of three, two of three
        ("nothing", "something", 0.0),
        ("", "something", 0.0),
        ("the", "a", 0.0),  # articles alone are no words
    ],
)
def test_f1_counts_common_words(prediction: str, answer: str, value: float):
    assert f1(prediction, answer) == pytest.approx(value)


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("Ann meets Bo today", "Ann meets Bo", 2 * (3 / 4) / (3 / 4 + 1)),
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * (4 / 8) * (4 / 5) / (4 / 8 + 4 / 5)),  # Lin 2004, 3.2
        ("yes yes yes", "yes", 1.0),  # sets of words
        ("b a", "a b", 1 / 2),  # one of two, in order
        ("", "a", 0.0),
        (".", "a", 0.0),
    ],
)
def test_rouge_of_words_takes_the_union_over_sentences(prediction: str, answer: str, value: float):
    assert rouge_of_words(prediction, answer) == pytest.approx(value)


def test_rouge_of_words_without_repetition_is_that_of_sequences():
    """Where no word occurs twice in a text of one sentence, sets and sequences are the same."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer, draw = RougeScorer(["rougeL"], use_stemmer=False), random.Random(7)
    words = [letter * 3 for letter in "abcdefghij"]
    for _ in range(200):
        one, other = (" ".join(draw.sample(words, draw.randint(1, 10))) for _ in range(2))
        assert rouge_of_words(one, other) == pytest.approx(scorer.score(other, one)["rougeL"].fmeasure, abs=1e-12)


def test_count_is_the_share_of_right_numbers():
    assert [count(text, "12") for text in ("12", "There are 12 of 30", "112", "")] == [1.0, 0.5, 0.0, 0.0]


def test_the_best_answer_counts_and_only_the_first_line_after_examples():
    item = {"answers": ["Bo", "Bo Derek"]}
    judge = {name: definition["process_results"] for name, definition in DEFINITIONS.items()}
    assert judge["musique"](item, ["Bo Derek"]) == {"score": 1.0}
    assert judge["triviaqa"](item, ["\nBo\nQuestion: who else?"]) == {"score": 1.0}
    assert judge["samsum"](item, ["Bo\nDialogue: Ann and Bo"]) == {"score": 1.0}
    assert judge["hotpotqa"](item, ["Bo\nQuestion"])["score"] < 1.0


# Prompts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reasoning")
    long = {"input": "Who won?", "context": "word " * 200, "answers": ["Eve"], "all_classes": None, "length": 200}
    for name, row in {"humaneval": PROBLEM, "gsm8k": QUESTION, **dict.fromkeys(DEFINITIONS, long)}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def model() -> api.Model:
    return api.load(MODEL)


def prompts(model: api.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **fields: Any) -> dict[str, str]:
    """What a model reads for the first item of each task; it answers nothing."""
    seen: dict[str, str] = {}

    def generate(self: Scorer, asked: list[str], settings: Any, names: list[str]) -> list[tuple[str, bool]]:
        seen.update(zip(names, asked, strict=True))
        return [("", True)] * len(asked)

    monkeypatch.setattr(Scorer, "generate", generate)
    metric = ZeroShot(suite="paper", **fields)
    scores(model.network, model.tokenizer, metric, prepare(metric, tmp_path), allow_code_execution=True)
    return seen


def test_questions_are_asked_alone_or_in_the_template(model, data: Path, monkeypatch, tmp_path: Path):
    tasks = ("humaneval", "gsm8k", "musique", "samsum")
    alone = prompts(model, monkeypatch, tmp_path, path=str(data), tasks=tasks)
    assert alone["humaneval"] == PROBLEM["prompt"]
    assert alone["gsm8k"] == f"Question: {QUESTION['question']}\nAnswer:"
    assert alone["musique"].endswith("Question: Who won?\nAnswer:")
    found = prompts(model, monkeypatch, tmp_path, path=str(data), tasks=tasks, template="### {question} ###")
    assert found["humaneval"] == f"### {PROBLEM['prompt']} ###"
    assert found["gsm8k"] == f"### {QUESTION['question']} ###"
    assert found["musique"] == f"### {alone['musique']} ###"
    assert found["samsum"] == alone["samsum"]  # examples to be continued


def test_long_prompts_lose_their_middle(model, data: Path, monkeypatch, tmp_path: Path):
    fields: dict[str, Any] = {"path": str(data), "tasks": ("hotpotqa", "gsm8k")}
    whole = prompts(model, monkeypatch, tmp_path, **fields)
    short = prompts(model, monkeypatch, tmp_path, **fields, longest_prompt=100)
    long = prompts(model, monkeypatch, tmp_path, **fields, longest_prompt=5000)
    assert long == whole
    assert short["gsm8k"] == whole["gsm8k"]
    assert short["hotpotqa"].endswith("Question: Who won?\nAnswer:")
    assert short["hotpotqa"].startswith("Answer the question based on the given passages.")

    def length(text: str) -> int:
        return len(model.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert length(whole["hotpotqa"]) > 200
    assert 97 <= length(short["hotpotqa"]) <= 101  # at the seam tokens may join; BOS is one of the hundred


def test_generation_without_an_end_writes_all_its_tokens(model):
    scorer = Scorer(model.network, model.tokenizer, True, 4)
    settings = [((), 12), (("\n",), 12)]
    (free, _), (line, _) = scorer.generate(["def main():\n"] * 2, settings, ["a", "b"])
    assert free.split("\n")[0] == line
    assert len(model.tokenizer(free, add_special_tokens=False)["input_ids"]) >= 10


def test_a_template_has_one_place_for_the_question():
    for template in ("no place", "{question} {question}", "{other} {question}"):
        with pytest.raises(ValidationError, match="template"):
            ZeroShot(suite="paper", template=template)
    changes: tuple[dict[str, Any], ...] = ({"template": "{question}"}, {"longest_prompt": 100})
    for fields in changes:
        with pytest.raises(ValidationError, match="template and longest_prompt are about tasks of suite 'paper'"):
            ZeroShot(corpus="modules", **fields)


# Permission


def test_programs_are_not_run_unless_that_is_allowed(model, data: Path, tmp_path: Path, monkeypatch):
    def run(*_: Any) -> bool:
        raise AssertionError("it was run")

    monkeypatch.setattr("reproduction.tasks.sandbox.passes", run)
    metric = ZeroShot(suite="paper", path=str(data), tasks=("gsm8k", "humaneval"))
    sentence = "zero-shot task 'humaneval' runs programs that the model writes: allow it by --allow-code-execution"
    with pytest.raises(TaskError, match=sentence):
        scores(model.network, model.tokenizer, metric, prepare(metric, tmp_path))


@pytest.mark.parametrize(("allowed", "there"), [(False, set()), (False, {"code"}), (True, set())])
def test_what_only_refused_runs_need_is_left_out(
    allowed: bool, there: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and rotations; but for what others are on, and for results that are there already."""
    one, two = SimpleNamespace(rotation="turned"), SimpleNamespace(rotation="straight")
    metrics = {"code": "runs", "code on shared": "runs", "text": "reads"}
    shared = {"runs": {"suite": "paper", "tasks": ["gsm8k", "humaneval"]}, "reads": {"corpus": "wikitext2"}}
    plan: Any = SimpleNamespace(
        allow_code_execution=allowed,
        metric=lambda key: shared[metrics[key]],
        runs={key: SimpleNamespace(weights="own" if key == "code" else "shared", tasks=None) for key in metrics},
        weights={"own": one, "shared": two},
        rotations={},
    )
    monkeypatch.setattr(execution, "_is_there", lambda _, key: key in there)
    refused = execution.refused(plan, [*metrics])
    graph = execution.to_compute(plan, [key for key in metrics if key not in refused])
    if allowed:
        assert not refused
        assert graph.keys() == {*metrics, "own", "shared", "turned", "straight"}
        return
    assert refused == [key for key in ("code", "code on shared") if key not in there]
    assert graph.keys() == {"text", "shared", "straight"}


def test_a_model_that_writes_the_right_program_passes(model, data: Path, tmp_path: Path, monkeypatch):
    metric = ZeroShot(suite="paper", path=str(data), tasks=("humaneval", "gsm8k", "musique"))
    written = {"humaneval": "    return sum(values)\n", "gsm8k": "The answer is: 5", "musique": "Eve, I think"}

    def generate(self: Scorer, asked: Any, settings: Any, names: list[str]) -> list[tuple[str, bool]]:
        return [(written[name], True) for name in names]

    monkeypatch.setattr(Scorer, "generate", generate)
    found = scores(model.network, model.tokenizer, metric, prepare(metric, tmp_path), allow_code_execution=True).metrics
    assert (found["humaneval.pass_at_1"], found["gsm8k"], found["musique"]) == (100.0, 100.0, pytest.approx(50.0))
    assert found["average"] == pytest.approx(250 / 3)


def test_lm_eval_itself_would_ask_before_it_runs_programs(data: Path, tmp_path: Path):
    """The definition says that it runs code: lm-eval's own command line refuses it unless told otherwise."""
    from reproduction.tasks.harness import load_tasks

    metric = ZeroShot(suite="paper", path=str(data), tasks=("humaneval", "gsm8k"))
    tasks = load_tasks(prepare(metric, tmp_path).resolve(), metric)
    assert [getattr(tasks[name], "UNSAFE_CODE", False) for name in ("humaneval", "gsm8k")] == [True, False]


def test_the_seven_tasks_of_longbench_are_those_that_rcp_prints():
    """RCP speaks of eight tasks and prints seven, whose mean is the printed average."""
    printed = {"hotpotqa": 30.45, "multifieldqa_en": 33.76, "triviaqa": 85.72, "2wikimqa": 26.32, "musique": 9.74}
    printed |= {"samsum": 37.74, "passage_count": 4.0}
    assert tuple(printed) == tuple(DEFINITIONS)
    assert sum(printed.values()) / 7 == pytest.approx(32.53, abs=0.005)
    assert {TASKS["paper"][name].measure for name in DEFINITIONS} == {"score"}
