"""Tasks of lm-eval on a model in memory have the numbers of lm-eval's own command line."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rotquant import api
from rotquant.formats.export import export_plain
from rotquant.foundation.errors import KernelError, RecipeError, TaskError
from rotquant.metrics import lm_eval
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from tests.helpers.checkpoints import save_tiny, tiny_tokenizer
from tests.helpers.commands import rotquant
from tests.helpers.families import method

CHOICES = """task: which_word
dataset_path: json
dataset_kwargs: {data_files: {test: which_word.jsonl, train: which_word.examples.jsonl}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """task: next_words
dataset_path: json
dataset_kwargs: {data_files: {test: which_word.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["w5"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def rows(start: int, count: int) -> str:
    """Items whose four choices are of different length."""
    found = []
    for item in range(start, start + count):
        words = [f"w{3 + (7 * item + 11 * place) % 90}" for place in range(12)]
        choices = [" ".join(words[place : place + 1 + place % 3]) for place in range(4)]
        found.append({"context": " ".join(words[item % 5 :]), "choices": choices, "answer": item % 4})
    return "".join(f"{json.dumps(row)}\n" for row in found)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "which_word.yaml").write_text(CHOICES)
    (folder / "next_words.yaml").write_text(WRITTEN)
    (folder / "which_word.jsonl").write_text(rows(0, 24))
    (folder / "which_word.examples.jsonl").write_text(rows(100, 4))
    return folder


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 4-bit weights, beside an export of it that transformers reads alone."""
    place = tmp_path_factory.mktemp("models")
    recipe = override(method("rtn"), dict.fromkeys(("activations", "keys", "values")), "")
    api.quantize(save_tiny(place / "model"), recipe).save(place / "quantized")
    export_plain(place / "quantized", place / "plain", torch.float32)
    return place / "quantized"


@pytest.fixture(autouse=True)
def few_built_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of lm-eval's own tasks leave two: to read the definitions of all takes five seconds, each time."""
    from lm_eval.tasks import manager  # which imports what takes seconds

    place = tmp_path_factory.mktemp("lm_eval")
    for name in ("humaneval", "piqa"):
        shutil.copytree(Path(manager.__file__).with_name(name), place / name)
    monkeypatch.setattr(manager, "__file__", str(place / "manager.py"))
    lm_eval._built_in.cache_clear()
    yield
    lm_eval._built_in.cache_clear()


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of each task, by name and measure."""
    return {f"{task} {key}": value for task, found in results.items() for key, value in found.items() if "," in key}


def test_numbers_are_those_of_lm_evals_own_command_line(
    tasks: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval._cli import HarnessCLI

    asked = ["--tasks", "which_word,next_words", "--batch_size", "5", "--device", "cpu", "--limit", "20"]
    model = ["--model", "hf", "--model_args", f"pretrained={quantized.with_name('plain')},dtype=float32"]
    theirs = ["lm_eval", "run", *model, *asked, "--include_path", ".", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", theirs)
    with monkeypatch.context() as there:
        there.chdir(tasks)
        command_line = HarnessCLI()
        command_line.execute(command_line.parse_args())
    (file,) = tmp_path.rglob("results_*.json")
    record = tmp_path / "ours.json"
    options = ["--tasks", "which_word,next_words", "--limit", "20", "--batch-size", "5", "--include-path", str(tasks)]
    assert rotquant(monkeypatch, "evaluate", str(quantized), *options, "--device", "cpu", "-o", str(record)) == 0
    ours, expected = (
        numbers(json.loads(record.read_text())["results"]),
        numbers(json.loads(file.read_text())["results"]),
    )
    assert ours == expected
    assert {"which_word acc,none", "which_word acc_norm,none", "next_words exact_match,none"} <= ours.keys()
    assert 0 < ours["which_word acc,none"] < 1


def test_shots_limit_and_bos_reach_the_evaluation(tasks: Path, quantized: Path) -> None:
    model = api.load(quantized)
    usual = api.zero_shot(model, ["which_word"], include_path=tasks)
    assert usual["n-samples"]["which_word"]["effective"] == 24
    few = api.zero_shot(model, ["which_*"], num_fewshot=2, limit=7, include_path=tasks)
    assert (few["n-shot"]["which_word"], few["n-samples"]["which_word"]["effective"]) == (2, 7)
    seen: list[int] = []
    hook = model.network.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0][0, 0].item()), with_kwargs=True
    )
    for bos, first in (("text", True), ("none", False)):
        seen.clear()
        api.zero_shot(model, ["which_word"], limit=2, include_path=tasks, bos=bos)
        assert ({*seen} == {model.tokenizer.bos_token_id}) == first, bos
    hook.remove()


def test_a_prefix_that_holds_bos_takes_the_items_own(tasks: Path, tmp_path: Path) -> None:
    recipe = method("prefixquant", bits=8)
    model = api.quantize(save_tiny(tmp_path / "model"), recipe, corpus=_words(tmp_path))
    model.network.config.bos_token_id, ids = 1, []
    model.network.register_forward_pre_hook(lambda _, args, kwargs: ids.append(args[0][0, 0].item()), with_kwargs=True)
    from rotquant.models.simulation.prefix import prefix_holds

    api.zero_shot(model, ["which_word"], limit=2, include_path=tasks, bos="text")
    assert (1 in ids) != prefix_holds(model.network, 1)


def _words(place: Path) -> Any:
    from rotquant.recipes.corpus import CorpusSpec
    from tests.helpers.checkpoints import save_words

    return CorpusSpec(name="words", source="local", path=str(save_words(place / "words.txt", 2000)))


@pytest.mark.long
def test_data_of_a_folder_takes_the_place_of_a_tasks_own(quantized: Path, tmp_path: Path) -> None:
    """lm-eval's own task, asked about rows of this machine."""
    lines = [{"goal": f"w{i} w4", "sol1": f"w{i + 1}", "sol2": f"w{i + 2} w9", "label": i % 2} for i in range(5, 15)]
    (tmp_path / "piqa.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model = api.load(quantized)
    found = api.zero_shot(model, ["piqa"], task_data=tmp_path)
    assert found["n-samples"]["piqa"]["effective"] == 10
    right = 0
    for line in lines:
        scores = []
        for choice in (line["sol1"], line["sol2"]):
            context = model.tokenizer.encode(f"Question: {line['goal']}\nAnswer:")
            ids = context + model.tokenizer.encode(f" {choice}")
            logits = model.network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scores.append(sum(logits[place - 1, ids[place]].item() for place in range(len(context), len(ids))))
        right += scores.index(max(scores)) == line["label"]
    assert found["results"]["piqa"]["acc,none"] == right / 10
    with pytest.raises(TaskError, match=r"'piqa' has no examples for 2 shots: expected .*piqa\.examples\.jsonl"):
        api.zero_shot(model, ["piqa"], task_data=tmp_path, num_fewshot=2)


def test_what_cannot_be_asked_is_said_in_a_sentence(tasks: Path, quantized: Path, tmp_path: Path) -> None:
    model = api.load(quantized)
    with pytest.raises(RecipeError, match="lm-eval has no task 'which_wrod'; nearest: which_word"):
        api.zero_shot(model, ["which_wrod"], include_path=tasks)
    with pytest.raises(RecipeError, match=r"tasks are named twice: which_word, which_word"):
        api.zero_shot(model, ["which_word", "which_*"], include_path=tasks)
    with pytest.raises(TaskError, match=r"could not ask piqa .*--task-data"):
        api.zero_shot(model, ["piqa"])  # no network under test
    with pytest.raises(TaskError, match=r"could not ask piqa .*--task-data"):
        lm_eval.check_tasks(["piqa"])  # before a model is loaded, where the hub is not asked
    (tmp_path / "humaneval.jsonl").write_text('{"prompt": "w5", "test": "w6", "entry_point": "w7", "task_id": "w8"}\n')
    with pytest.raises(TaskError, match="the measure 'code_eval' is a program on the hub, which is not run here"):
        api.zero_shot(model, ["humaneval"], task_data=tmp_path)


def test_a_misspelt_task_is_refused_before_lm_evals_definitions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "_manager", lambda *_: pytest.fail("the definitions are read"))
    for names in (["piqa", "piqqa"], ["piqqa*"]):
        with pytest.raises(RecipeError, match=r"lm-eval has no task 'piqqa\*?'; nearest: piqa"):
            lm_eval.check_tasks(names)
    assert {"piqa", "humaneval", "leaderboard", "hendrycks_math"} <= {*lm_eval.written_names()}


@pytest.mark.long
def test_all_of_lm_evals_tasks_are_among_the_names_that_are_read_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # which left two of the tasks
    lm_eval._built_in.cache_clear()
    assert {*lm_eval._built_in().all_tasks} <= {*lm_eval.written_names()}


def test_outputs_that_are_not_finite_have_no_accuracy(
    tasks: Path, quantized: Path, monkeypatch, tmp_path: Path
) -> None:
    model = api.load(quantized)
    with torch.no_grad():
        model.network.lm_head.weight.fill_(torch.nan)
    for name in ("which_word", "next_words"):
        found = numbers(api.zero_shot(model, [name], limit=2, include_path=tasks)["results"])
        assert found
        assert all(value != value for value in found.values() if not isinstance(value, str))


def test_a_decoder_answers_as_the_model_that_it_was_made_of(tasks: Path, tmp_path: Path) -> None:
    from rotquant.decoder import convert, save_decoder

    recipe = override(preset("quarot-rtn"), {"weights": {"clip_search": False}}, "")
    api.quantize(save_tiny(tmp_path / "model"), recipe).save(tmp_path / "quantized")
    save_decoder(tmp_path / "decoder", convert(tmp_path / "quantized", dtype="float32"), tiny_tokenizer())
    found = [
        numbers(
            api.zero_shot(api.load(tmp_path / name), ["which_word", "next_words"], limit=6, include_path=tasks)[
                "results"
            ]
        )
        for name in ("quantized", "decoder")
    ]
    assert found[0] == found[1]
    network = api.load(tmp_path / "decoder").network
    with pytest.raises(KernelError, match="no do_sample"):
        network.generate(torch.tensor([[1]]), do_sample=True)
