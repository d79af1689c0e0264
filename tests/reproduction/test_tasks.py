"""The shipped tasks' evaluation: how BOS is handled, what accuracy and ROUGE-L mean, that lm-eval agrees."""

import copy
import itertools
import math
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.tasks import TASKS, check, prepare, scores, suite_of, task_names
from reproduction.tasks.scoring import Scorer
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import choices_of, has_choices, log_odds_of
from rotquant import api
from rotquant.foundation.errors import RecipeError, TaskError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from tests.helpers.checkpoints import with_few_layers
from tests.helpers.commands import rotquant
from tests.helpers.watching import long_work
from tests.helpers.zeroshot_items import ACCURACIES, ALL, COMPLETIONS, EIGHT, MODEL, examples, items, measured


@pytest.fixture(scope="module")
def shipped() -> api.Model:
    return api.load(MODEL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def folder() -> Path:
    """In the user's cache: making the tasks takes half a minute."""
    return prepare(ALL)


@pytest.fixture(scope="module")
def shallow(shipped: api.Model) -> api.Model:
    """Two layers of it, for what is asked twice: how well a model answers does not matter there."""
    model = replace(shipped, network=copy.deepcopy(shipped.network))
    model.network.model.layers = model.network.model.layers[:2]
    model.network.config.num_hidden_layers = 2
    return model


# Names


def test_names_and_chance_levels_cost_no_torch_and_no_lm_eval():
    code = "import sys, reproduction.tasks; print({'torch', 'lm_eval', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_metric_without_tasks_is_six_of_its_suite():
    six = ("piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "lambada_openai")
    assert task_names(ZeroShot(suite="paper")) == six
    assert task_names(ZeroShot(corpus="docs")) == tuple(TASKS["shipped"])[:6]
    assert task_names(ZeroShot(suite="paper", tasks=("boolq", "piqa"))) == ("boolq", "piqa")


def test_unknown_tasks_are_refused_with_the_nearest_names():
    with pytest.raises(RecipeError, match="no task 'hellaswg'; nearest: hellaswag"):
        check(ZeroShot(suite="paper", tasks=("hellaswg",)))
    with pytest.raises(RecipeError, match="named twice"):
        check(ZeroShot(suite="paper", tasks=("piqa", "piqa")))
    with pytest.raises(RecipeError, match="no zero-shot task 'gramar'; nearest: grammar"):
        suite_of(("gramar",))
    assert (suite_of(()), suite_of(("boolq",)), suite_of(("grammar",))) == ("shipped", "paper", "shipped")


# Evaluation


@pytest.mark.parametrize("bos", ["text", "none"])
def test_every_item_begins_with_exactly_one_bos_or_none(shipped: api.Model, bos: str):

    tokenizer = shipped.tokenizer
    scorer = Scorer(shipped.network, tokenizer, bos, batch_size=4)
    pairs = [("Return the", " value"), ("Return the ", "value"), ("Return", " a new list"), ("", "Return")]
    encoded = scorer.encode(pairs)
    start = [tokenizer.bos_token_id] if bos == "text" else []
    for (context, continuation), (context_ids, continuation_ids) in zip(pairs, encoded, strict=True):
        assert tokenizer.bos_token_id not in continuation_ids
        plain = tokenizer.encode(context + continuation, add_special_tokens=False)
        if context:
            assert context_ids + continuation_ids == start + plain
        else:  # a model needs something to predict from, so an empty context is one BOS in either case
            assert (context_ids, continuation_ids) == ([tokenizer.bos_token_id], plain)
    assert encoded[0] == encoded[1]  # a space at the end of a context belongs to the word after it


@torch.no_grad()
def reference_scores(model: api.Model, context: str, choices: list[str]) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of each continuation, one forward pass each: slow and obvious.

    Where one has no tokens beyond the context's, all begin with the first token that not all texts share.
    """
    texts = [context, *(context + choice for choice in choices)]
    start, *wholes = (
        [model.tokenizer.bos_token_id, *model.tokenizer.encode(text, add_special_tokens=False)] for text in texts
    )
    if min(map(len, wholes)) <= len(start):
        columns = zip(start, *wholes, strict=False)
        start = [ids[0] for ids in itertools.takewhile(lambda ids: len({*ids}) == 1, columns)]
    scores = []
    for ids in wholes:
        logits = model.network(torch.tensor([ids])).logits[0].double()
        predictions = logits[len(start) - 1 : -1]
        target = torch.tensor(ids[len(start) :])
        score = predictions.log_softmax(-1).gather(1, target[:, None]).sum().item()
        scores.append((score, bool((predictions.argmax(-1) == target).all())))
    return scores


def test_accuracies_are_those_of_one_item_at_a_time(shallow: api.Model, folder: Path):
    count = 4
    metric = ALL.model_copy(update={"limit": count})
    both = scores(shallow.network, shallow.tokenizer, metric, folder, batch_size=16)
    found = both.metrics
    for task, description in ACCURACIES.items():
        rows = items(folder, task)[:count]
        if task == "last_word":
            right = [reference_scores(shallow, row["context"], [row["word"]])[0][1] for row in rows]
            expected = {"acc": right}
        else:
            expected = {"acc": [], "acc_norm": []}
            for row in rows:
                likelihoods = [score for score, _ in reference_scores(shallow, row["context"], row["choices"])]
                by_length = [score / len(choice) for score, choice in zip(likelihoods, row["choices"], strict=True)]
                expected["acc"].append(likelihoods.index(max(likelihoods)) == row["answer"])
                expected["acc_norm"].append(by_length.index(max(by_length)) == row["answer"])
        assert found[f"{task}.items"] == count
        for measure, right in expected.items():
            share = sum(right) / count
            assert found[f"{task}.{measure}"] == pytest.approx(100 * share)
            # Standard error of the mean of zeros and ones.
            deviation = torch.tensor(right, dtype=torch.float64).std().item() / count**0.5
            assert found[f"{task}.{measure}_stderr"] == pytest.approx(100 * deviation)
        assert found[task] == found[f"{task}.{description.measure}"]
        assert both.items[task] == tuple(map(float, expected[description.measure]))
    assert found["average"] == pytest.approx(sum(found[task] for task in ALL.tasks) / len(ALL.tasks))


@pytest.mark.long
def test_the_shipped_model_is_clearly_above_chance_and_quantization_shows(shipped: api.Model, folder: Path):
    metric = ZeroShot(
        corpus="modules", tasks=("next_word", "continuation", "function_name", "grammar", "preposition"), limit=60
    )
    baseline = measured(shipped.network, shipped.tokenizer, metric, folder)
    for name in metric.tasks:
        task = ACCURACIES[name]
        assert baseline[name] > (task.chance or 0) + 3 * baseline[f"{name}.{task.measure}_stderr"]
    # The search of scales is most of the time.
    quantized = api.quantize(MODEL, override(preset("rtn"), {"weights": {"clip_search": False}}, ""))
    damaged = measured(quantized.network, quantized.tokenizer, metric, folder)
    assert damaged["average"] < baseline["average"] - 2


def test_an_evaluation_says_how_many_questions_are_answered_and_texts_written(
    shipped: api.Model, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    metric = ZeroShot(corpus="modules", tasks=("grammar", "summary"), limit=4)
    with long_work(monkeypatch):
        measured(shipped.network, shipped.tokenizer, metric, folder, batch_size=2)
    said = capsys.readouterr()
    questions = 4 * len(items(folder, "grammar")[0]["choices"])
    assert f"shipped tasks, answering: question {questions} of {questions}, " in said.err
    assert "shipped tasks, writing: text 3 of 4, " in said.err
    assert "it/s" not in said.err  # no bars of lm-eval's own
    assert said.out == ""


def test_a_prompt_is_the_first_examples_with_their_answers_and_then_the_item(folder: Path):
    from reproduction.tasks.harness import load_tasks, set_shots

    for task, answer in {
        "grammar": lambda row: row["choices"][row["answer"]],
        "last_word": lambda row: row["word"],
        "summary": lambda row: " " + row["summary"],
    }.items():
        built = load_tasks(folder.resolve(), ALL.model_copy(update={"tasks": (task,)}))
        for shots in (2, 0):
            set_shots(built, shots)
            built[task].build_all_requests(limit=1)
            solved = [row["context"] + answer(row) + "\n\n" for row in examples(folder, task)[:shots]]
            assert built[task].instances[0].args[0] == "".join(solved) + items(folder, task)[0]["context"]


def test_accuracy_with_examples_is_that_of_one_prompt_at_a_time(shallow: api.Model, folder: Path):
    metric = ZeroShot(corpus="modules", tasks=("parameter",), shots=3, limit=8)
    found = measured(shallow.network, shallow.tokenizer, metric, folder)
    solved = "".join(
        f"{row['context']}{row['choices'][row['answer']]}\n\n" for row in examples(folder, "parameter")[:3]
    )
    right = []
    for row in items(folder, "parameter")[:8]:
        found_here = reference_scores(shallow, solved + row["context"], row["choices"])
        right.append(found_here.index(max(found_here)) == row["answer"])
    assert found["parameter"] == found["average"] == pytest.approx(100 * sum(right) / 8)


def test_more_shots_than_examples_are_refused(shipped: api.Model, folder: Path):
    metric = ZeroShot(corpus="modules", tasks=("grammar",), shots=17, limit=1)
    with pytest.raises(TaskError, match="'grammar' has 16 examples, fewer than 17 shots"):
        measured(shipped.network, shipped.tokenizer, metric, folder)


def longest_common_subsequence(first: list[str], second: list[str]) -> int:
    """By its recursive definition, row by row."""
    row = [0] * (len(second) + 1)
    for word in first:
        new = [0]
        for index, other in enumerate(second):
            new.append(row[index] + 1 if word == other else max(new[index], row[index + 1]))
        row = new
    return row[-1]


def reference_rouge(summary: str, generated: str) -> float:
    """The harmonic mean of the subsequence's shares of both texts' words, which are lower-case letters and digits."""
    true, found = (re.findall(r"[a-z0-9]+", text.lower()) for text in (summary, generated))
    return 2 * longest_common_subsequence(true, found) / (len(true) + len(found))


@torch.no_grad()
def reference_summary(model: api.Model, prompt: str) -> str:
    """Greedy generation without cache or padding, token by token: slow and obvious."""
    ids = [model.tokenizer.bos_token_id, *model.tokenizer.encode(prompt, add_special_tokens=False)]
    start = len(ids)
    while len(ids) < start + 24 and "\n" not in model.tokenizer.decode(ids[start:]):
        ids.append(model.network(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return model.tokenizer.decode(ids[start:], skip_special_tokens=True).split("\n")[0]


@pytest.mark.parametrize("preset", [None, "rtn"])  # rtn quantizes the KV cache, too
def test_rouge_l_is_that_of_one_greedy_summary_at_a_time(
    shallow: api.Model, folder: Path, preset: str | None, tmp_path: Path
):
    model = shallow
    if preset is not None:
        model = api.quantize(with_few_layers(MODEL, 2, tmp_path), preset)
        model.network.double()  # In float32 an input next to a rounding boundary may get the neighbouring code.
    metric = ZeroShot(corpus="modules", tasks=("summary",), shots=1, limit=2)
    found = measured(model.network, model.tokenizer, metric, folder, batch_size=2)
    example = examples(folder, "summary")[0]
    solved = f"{example['context']} {example['summary']}\n\n"
    rows = items(folder, "summary")[:2]
    scores = torch.tensor(
        [reference_rouge(row["summary"], reference_summary(model, solved + row["context"])) for row in rows],
        dtype=torch.float64,
    )
    assert found["summary"] == found["rouge_l"] == pytest.approx(100 * scores.mean().item())
    assert found["rouge_l_stderr"] == pytest.approx(100 * scores.std().item() / 2**0.5)
    assert "average" not in found


@pytest.mark.parametrize("tasks", [("last_word", "grammar"), ("summary",)])
def test_a_network_that_is_not_finite_has_no_accuracy(shipped: api.Model, folder: Path, tasks: tuple[str, ...]):
    """Not that of a guess, which the first of several choices would be."""
    network = copy.deepcopy(shipped.network)
    network.model.norm.weight.data[0] = torch.nan
    metric = ZeroShot(corpus="modules", tasks=tasks, limit=4)
    found = measured(network, shipped.tokenizer, metric, folder)
    assert {name for name, value in found.items() if value == value} == {f"{task}.items" for task in tasks}


@contextmanager
def broken_tokens(model: api.Model, tokens: set[int]) -> Iterator[None]:
    """A network that is not finite where it reads some tokens."""

    def break_tokens(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(torch.isin(inputs[0], torch.tensor(list(tokens)))[..., None], torch.nan)

    hook = model.network.get_input_embeddings().register_forward_hook(break_tokens)
    try:
        yield
    finally:
        hook.remove()


def test_an_item_that_is_not_finite_spoils_its_own_task_alone(shallow: api.Model, folder: Path):
    """Items of the two tasks share rows, in which attention would spread what is not finite."""
    metric = ZeroShot(corpus="modules", tasks=("last_word", "grammar"), limit=24)
    tokens = {name: set[int]() for name in metric.tasks}
    for name, known in tokens.items():
        for row in items(folder, name)[: metric.limit]:
            known |= set(shallow.tokenizer.encode(row["context"] + "".join(row.get("choices", ()))))
    expected = measured(shallow.network, shallow.tokenizer, metric, folder)
    with broken_tokens(shallow, tokens["grammar"] - tokens["last_word"]):
        found = scores(shallow.network, shallow.tokenizer, metric, folder)
    assert set(found.items) == {"last_word"}
    for name, value in found.metrics.items():
        whole = name.startswith("last_word") or name == "grammar.items"
        assert value == expected[name] if whole else math.isnan(value), name


def test_a_text_that_is_not_finite_leaves_those_of_its_batch_alone(shipped: api.Model):
    scorer = Scorer(shipped.network, shipped.tokenizer, bos="text", batch_size=8)
    prompts = ["def add(first, second):\n    return", "import os\nclass Maximum:\n", "for index in"]
    asked = prompts, [((), 6)] * 3, ["complete_return", "complete_line", "complete_import"]
    (one, _), _, (other, _) = scorer.generate(*asked)
    with broken_tokens(shipped, set(shipped.tokenizer.encode(" Maximum", add_special_tokens=False))):
        found = scorer.generate(*asked)
    assert found[0] == (one, True)
    assert found[1][1] is False
    assert found[2] == (other, True)


def test_a_summary_that_may_exceed_the_context_is_refused(shipped: api.Model, folder: Path, monkeypatch):
    monkeypatch.setattr(shipped.network.config, "max_position_embeddings", 32)
    metric = ZeroShot(corpus="modules", tasks=("summary",))
    with pytest.raises(TaskError, match=r"'summary' needs \d+ tokens .* context is 32 tokens"):
        measured(shipped.network, shipped.tokenizer, metric, folder)


def test_an_evaluation_leaves_no_trace(shipped: api.Model, folder: Path, capfd: pytest.CaptureFixture[str]):
    model, tokenizer = shipped.network, shipped.tokenizer
    model.train()
    before = (random.getstate(), torch.get_rng_state().tolist(), tokenizer.pad_token)
    measured(model, tokenizer, ZeroShot(corpus="modules", tasks=("grammar",), limit=4), folder)
    assert (random.getstate(), torch.get_rng_state().tolist(), tokenizer.pad_token) == before
    assert model.training
    model.eval()
    assert capfd.readouterr() == ("", "")


def test_a_model_whose_context_is_too_short_is_refused(
    shipped: api.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shipped.network.config, "max_position_embeddings", 16)
    with pytest.raises(TaskError, match=r"needs \d+ tokens .* context is 16 tokens"):
        measured(shipped.network, shipped.tokenizer, ALL.model_copy(update={"limit": 20}), folder)


def test_items_begin_without_bos_where_the_tokenizer_has_none(shipped: api.Model, folder: Path):
    tokenizer = copy.deepcopy(shipped.tokenizer)
    tokenizer.bos_token = None
    metric = ZeroShot(corpus="modules", tasks=("grammar",), limit=4)
    without = metric.model_copy(update={"bos": "none"})
    found = measured(shipped.network, tokenizer, metric, folder)
    assert found == measured(shipped.network, shipped.tokenizer, without, folder)


def test_log_odds_and_choices_are_those_of_one_item_at_a_time(shallow: api.Model, folder: Path):
    """By the measure that decides, in float64; tasks without choices have neither."""
    count = 6
    metric = ALL.model_copy(update={"limit": count})
    both = scores(shallow.network, shallow.tokenizer, metric, folder, batch_size=16)
    means, medians = [], []
    for task, description in ACCURACIES.items():
        if task == "last_word":
            assert not {f"{task}_log_odds", f"{task}_choices"} & both.items.keys()
            assert f"{task}_log_odds" not in both.metrics
            continue
        odds, taken = [], []
        for row in items(folder, task)[:count]:
            likelihoods = [score for score, _ in reference_scores(shallow, row["context"], row["choices"])]
            if description.measure == "acc_norm":
                likelihoods = [one / len(choice) for one, choice in zip(likelihoods, row["choices"], strict=True)]
            by = torch.tensor(likelihoods, dtype=torch.float64)
            wrong = torch.arange(len(by)) != row["answer"]
            odds.append((by[row["answer"]] - by[wrong].logsumexp(0)).item())
            taken.append(float(by.argmax()))
        # Kept to three decimals, of float32 likelihoods that may be in one row with others.
        assert both.items[f"{task}_log_odds"] == pytest.approx(odds, abs=2e-3)
        assert both.items[f"{task}_choices"] == tuple(taken)
        right = [float(odd == row["answer"]) for odd, row in zip(taken, items(folder, task)[:count], strict=True)]
        assert both.items[task] == tuple(right)
        assert both.metrics[f"{task}_log_odds"] == pytest.approx(sum(odds) / count, abs=2e-3)
        means.append(sum(odds) / count)
        medians.append(statistics.median(odds))
    assert both.metrics["log_odds"] == pytest.approx(sum(means) / len(means), abs=2e-3)
    assert both.metrics["log_odds_median"] == pytest.approx(sum(medians) / len(medians), abs=2e-3)


def by_lm_eval(model: api.Model, metric: ZeroShot, folder: Path) -> dict[str, tuple[float, ...]]:
    """What each item scores by the quoted measure, asked and judged by lm-eval."""
    from lm_eval.evaluator import evaluate as run_tasks

    from reproduction.tasks.harness import Harness, choice_scores, load_tasks, set_shots

    names = task_names(metric)
    tasks = load_tasks(folder.resolve(), metric)
    set_shots(tasks, metric.shots)
    harness = Harness(Scorer(model.network, model.tokenizer, metric.bos, batch_size=16))
    found: Any = run_tasks(harness, {"tasks": tasks}, limit=metric.limit, bootstrap_iters=0, log_samples=True)
    judged = {name: tuple(item[TASKS["shipped"][name].measure] for item in found["samples"][name]) for name in names}
    for name in (name for name in names if has_choices(metric, name)):
        measure = TASKS["shipped"][name].measure
        told = [choice_scores(tasks[name], item, alone=False) for item in found["samples"][name]]
        judged[log_odds_of(name)] = tuple(one[f"{measure}.log_odds"] for one in told)
        judged[choices_of(name)] = tuple(one[f"{measure}.choice"] for one in told)
    return judged


@pytest.mark.parametrize("shots", [0, 2])
def test_lm_eval_asks_and_judges_the_same(shallow: api.Model, folder: Path, shots: int):
    metric = ZeroShot(corpus="modules", tasks=(*EIGHT, *COMPLETIONS, "summary"), shots=shots, limit=5)
    assert scores(shallow.network, shallow.tokenizer, metric, folder).items == by_lm_eval(shallow, metric, folder)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("grammar.jsonl", b'{"context": "a", "choices": [" b"], "answer": 0}\n{"context": ', ", line 2 is no JSON"),
        ("grammar.jsonl", b'{"context": "a", "choices": [" b"]}\n', ", line 1, field 'answer': Field required"),
        ("grammar.jsonl", b'{"context": "a", "choices": ["b"], "answer": 1}\n', ", line 1, field 'answer' is none of"),
        ("grammar.jsonl", b'"a"\n', ", line 1, Input should be a valid dictionary"),
        ("grammar.jsonl", None, " cannot be read"),
        ("grammar.examples.jsonl", b'\n{"context": "\xff"}\n', ", line 2 cannot be read (it is not UTF-8"),
        ("grammar.examples.jsonl", None, " cannot be read"),
    ],
)
def test_a_damaged_task_is_named(
    shipped: api.Model, folder: Path, tmp_path: Path, file: str, content: bytes | None, sentence: str
):
    for name in ("grammar.jsonl", "grammar.examples.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    metric = ZeroShot(corpus="modules", tasks=("grammar",), limit=4)
    with pytest.raises(TaskError, match=re.escape(f"{tmp_path / file}{sentence}")):
        measured(shipped.network, shipped.tokenizer, metric, tmp_path)


def test_shipped_tasks_need_no_lm_eval(shipped: api.Model, folder: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    metric = ZeroShot(corpus="modules", tasks=("grammar", "summary"), limit=2)
    assert measured(shipped.network, shipped.tokenizer, metric, folder)["grammar.items"] == 2
    paper = ZeroShot(suite="paper", tasks=("piqa",))
    with pytest.raises(TaskError, match="needs lm-eval; install it with"):
        measured(shipped.network, shipped.tokenizer, paper, folder)


def test_questions_that_share_a_row_do_not_see_each_other(shallow: api.Model):

    text = "Return the largest value of a list, or the default value if the list is empty and a default value is given."
    words = text.split(" ")
    contexts = [" ".join(words[:count]) for count in range(4, 20)] + ["Returns the", "An"]
    pairs = [(context, " " + rest) for context in contexts for rest in ("value", "default value", "list of the values")]
    together = Scorer(shallow.network, shallow.tokenizer, True, 64).log_likelihoods(pairs, ["test"] * len(pairs))
    for (context, rest), (score, _) in zip(pairs, together, strict=True):
        alone, _ = reference_scores(shallow, context, [rest])[0]
        assert score == pytest.approx(alone, abs=1e-3)  # float32 against float64 log-probabilities


@torch.no_grad()
def test_a_choice_that_merges_with_its_context_is_judged_as_the_whole_text_is(shallow: api.Model):
    context, choices = "    return self.items(sorted()", [",", ")", ":", "]"]

    def ids(text: str) -> list[int]:
        return shallow.tokenizer.encode(text, add_special_tokens=False)

    assert min(len(ids(context + choice)) for choice in choices) <= len(ids(context))  # lm-eval's rule leaves nothing
    pairs = [(context, choice) for choice in choices] + [("An", " empty list")]
    found = Scorer(shallow.network, shallow.tokenizer, "text", 64).log_likelihoods(pairs, ["test"] * len(pairs))
    whole = []
    for choice in choices:
        text = torch.tensor([[shallow.tokenizer.bos_token_id, *ids(context + choice)]])
        predicted = shallow.network(text).logits[0, :-1].double().log_softmax(-1)
        whole.append(predicted.gather(1, text[0, 1:, None]).sum().item())
    differences = [score - found[0][0] for score, _ in found[: len(choices)]]
    assert differences == pytest.approx([one - whole[0] for one in whole], abs=1e-3)
    assert all(score < 0 for score, _ in found)


# Command line


def test_tasks_are_listed_and_written_as_a_folder(folder: Path, tmp_path: Path, monkeypatch, capsys):
    assert rotquant(monkeypatch, "tasks") == 0
    output = capsys.readouterr().out
    assert all(name in output for known in TASKS.values() for name in known)
    target = tmp_path / "tasks"
    assert rotquant(monkeypatch, "tasks", "--suite", "shipped", "-o", str(target)) == 0
    assert (target / "grammar.jsonl").read_bytes() == (folder / "grammar.jsonl").read_bytes()
    assert rotquant(monkeypatch, "tasks", "-o", str(target)) == 2
    assert "exists and is not empty; name another place" in capsys.readouterr().err


def test_the_library_has_the_same_accuracies(shallow: api.Model, folder: Path, tmp_path: Path, monkeypatch):
    metric = ZeroShot(corpus="modules", tasks=("grammar", "last_word"), limit=8)
    target = tmp_path / "tasks"
    assert rotquant(monkeypatch, "tasks", "--tasks", "grammar,last_word", "-o", str(target)) == 0
    found = api.zero_shot(shallow, metric.tasks, limit=8, include_path=target, bos="text")["results"]
    expected = measured(shallow.network, shallow.tokenizer, metric, folder)
    assert {name: 100 * found[name]["acc,none"] for name in metric.tasks} == {
        name: pytest.approx(expected[name]) for name in metric.tasks
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "hellaswg"], "no zero-shot task 'hellaswg'; nearest: hellaswag"),
        (["--tasks", "piqa", "--suite", "shipped"], "suite 'shipped' has no task 'piqa'"),
        (["--suite", "glue"], "--suite: Input should be 'paper' or 'shipped'"),
        (["--suite", "shipped", "--task-data", "."], "suite 'shipped' is made from a corpus and takes no path"),
        (["--task-data", "/nowhere", "-o", "out"], "there is no folder /nowhere"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert rotquant(monkeypatch, "tasks", *arguments) == 2
    assert sentence in capsys.readouterr().err
