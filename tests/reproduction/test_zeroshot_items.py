"""The items and examples of the shipped tasks: equal bytes everywhere, fair choices, nothing from elsewhere."""

import ast
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from reproduction.claims.guessing import COMMONEST
from reproduction.corpora import MODULES, Corpus
from reproduction.tasks import TASKS, folders, identity, prepare, shipped
from reproduction.tasks.passages import Module, Passage
from reproduction.tasks.settings import ZeroShot
from rotquant.foundation.errors import TaskError
from rotquant.text import load_rows
from tests.helpers.zeroshot_items import ALL, CHOICES, COMPLETIONS, examples, items


@pytest.fixture(scope="module")
def folder() -> Path:
    """In the user's cache: making the tasks takes half a minute."""
    return prepare(ALL)


@pytest.fixture(scope="module")
def validation() -> str:
    """The modules of the validation packages."""
    return "\n".join(load_rows(MODULES, "validation"))


#: What `rotquant diagnose` asks.
EIGHT = tuple(TASKS["shipped"])[:8]
RECORDED = Path("workflow/resources/models/tasks.json")
SUFFIXES = ("jsonl", "examples.jsonl", "yaml")


#: All tasks, of every eighth module: of all of them the record's hashes say the same (the test below).
BUILD = """
import sys, pathlib
from reproduction.tasks import shipped
from reproduction.tasks.passages import PassageSource, read

shipped.read = lambda split: PassageSource(read(split).modules[::8])
shipped.build(pathlib.Path(sys.argv[1]))
"""


def test_equal_packages_give_equal_bytes(folder: Path, tmp_path: Path):
    # Processes with other hash seeds: no order of a set may reach an item.
    for seed in ("7", "8"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", BUILD, str(tmp_path / seed)]
        subprocess.run(command, check=True, env=environment, timeout=600)
    files = sorted(file.name for file in folder.iterdir())
    assert files == sorted(f"{name}.{suffix}" for name in TASKS["shipped"] for suffix in SUFFIXES)
    assert all((tmp_path / "7" / name).read_bytes() == (tmp_path / "8" / name).read_bytes() for name in files)
    assert sorted(file.name for file in (tmp_path / "7").iterdir()) == files
    assert all(len(items(tmp_path / "7", name)) > 50 for name in TASKS["shipped"])


def test_every_interpreter_makes_the_recorded_tasks(folder: Path):
    """By the locked packages; results from another machine are of other items else.

    Who changes a rule or a package records them anew: `identity` writes the same into results/tasks/<key>.json.
    """
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    found = identity(ALL.model_copy(update={"shots": 5}), folder)["tasks"]
    told = {name: {part: one[part] for part in ("items", "sha256", "examples")} for name, one in found.items()}
    if shipped.fingerprint() != recorded["fingerprint"]:
        pytest.skip("other packages or rules than those of the record")
    assert told == recorded["tasks"]


def test_the_record_is_of_the_present_rules():
    assert json.loads(RECORDED.read_text(encoding="utf-8"))["version"] == shipped.GENERATOR_VERSION


def test_an_f_string_is_one_unit_where_tokenize_takes_it_apart(monkeypatch: pytest.MonkeyPatch):
    """As Python 3.12 and later do: the tokens of f"a{b!r}" and of one that does not end, by hand."""
    text = "def f(b):\n    return f'a{b}' + f'{c\n"
    parts = [
        (tokenize.NAME, "return", 4),
        (101, "f'", 11),
        (102, "a", 13),
        (tokenize.OP, "{", 14),
        (tokenize.NAME, "b", 15),
        (tokenize.OP, "}", 16),
        (103, "'", 17),
        (tokenize.OP, "+", 19),
        (101, "f'", 21),
        (tokenize.OP, "{", 23),
        (tokenize.NAME, "c", 24),
    ]

    def apart(_: object) -> Iterator[tokenize.TokenInfo]:
        for kind, string, column in parts:
            yield tokenize.TokenInfo(kind, string, (2, column), (2, column + len(string)), "")
        raise tokenize.TokenError("EOF in multi-line statement", (3, 0))

    names = {101: "FSTRING_START", 102: "FSTRING_MIDDLE", 103: "FSTRING_END"}
    monkeypatch.setattr(tokenize, "tok_name", tokenize.tok_name | names)
    monkeypatch.setattr(tokenize, "generate_tokens", apart)
    module = Module("def f(b):\n    pass\n")
    function = next(node for node in module.nodes if isinstance(node, ast.FunctionDef))
    found = [
        (one.kind, one.text, text[one.start : one.start + len(one.text)])
        for one in Passage(text, module, function).lexemes
    ]
    assert found == [
        (tokenize.NAME, "return", "return"),
        (tokenize.STRING, "f'a{b}'", "f'a{b}'"),
        (tokenize.OP, "+", "+"),
    ]


@pytest.mark.parametrize("task", CHOICES)
def test_choices_are_distinct_and_the_true_one_is_anywhere_among_them(folder: Path, task: str):
    rows = items(folder, task)
    choices = round(100 / (TASKS["shipped"][task].chance or 100))
    assert all(len(set(row["choices"])) == choices for row in rows)
    assert len({row["context"] for row in rows}) == len(rows) >= 1000
    # Positions follow from hashes, so each is a binomial draw: within four standard deviations of its expectation.
    counts = Counter(row["answer"] for row in rows)
    expected = len(rows) / choices
    assert all(abs(counts[i] - expected) < 4 * (expected * (1 - 1 / choices)) ** 0.5 for i in range(choices))


@pytest.mark.parametrize("task", CHOICES)
@pytest.mark.parametrize("rank", [0, -1])
def test_the_length_of_a_choice_does_not_give_it_away(folder: Path, task: str, rank: int):
    """Taking the shortest choice or the longest one is no better than guessing."""
    rows = items(folder, task)
    share = 0.0
    for row in rows:
        lengths = [len(choice) for choice in row["choices"]]
        asked = sorted(lengths)[rank]
        share += (lengths[row["answer"]] == asked) / lengths.count(asked) / len(rows)
    chance = 1 / len(rows[0]["choices"])
    assert share < chance + 4 * (chance * (1 - chance) / len(rows)) ** 0.5


def test_the_last_word_occurs_before_in_its_passage(folder: Path):
    for row in items(folder, "last_word"):
        assert row["word"].strip() in row["context"]


@pytest.mark.parametrize("task", COMMONEST)
def test_the_commonest_answer_is_as_common_as_claims_take_it(folder: Path, task: str):
    """And every task whose answer is written has one."""
    assert {*COMMONEST} == {name for name, one in TASKS["shipped"].items() if one.chance == 0}
    rows = items(folder, task)
    ((_, count),) = Counter(row["word" if task == "last_word" else "text"] for row in rows).most_common(1)
    assert 100 * count / len(rows) == pytest.approx(COMMONEST[task], abs=0.5)  # other packages have other items


def test_names_to_choose_from_stand_before(folder: Path):
    for task in ("parameter", "mentioned"):
        for row in items(folder, task):
            assert all(re.search(rf"\b{choice.strip()}\b", row["context"]) for choice in row["choices"])


def test_each_mark_is_the_answer_equally_often(folder: Path):
    counts = Counter(row["choices"][row["answer"]].strip() for row in items(folder, "grammar")[:300])
    assert set(counts) == {")", "]", ",", ":"}
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("task", COMPLETIONS)
def test_what_is_to_be_completed_is_short_and_one_line(folder: Path, task: str):
    rows = items(folder, task)
    assert len(rows) >= 1000
    assert all(1 < len(row["text"]) <= 25 and "\n" not in row["text"] for row in rows)


@pytest.mark.parametrize(("task", "tokens"), [("recall_512", 512), ("recall_1024", 1024), ("recall_2048", 2048)])
def test_a_recalled_name_stands_in_its_definition_alone(folder: Path, task: str, tokens: int):
    for row in items(folder, task):
        name, *others = (row["choices"][row["answer"]].strip(), *(one.strip() for one in row["choices"]))
        definition, _, rest = row["context"].partition("\n\n\n")
        assert re.search(rf"\b{name}\b", definition)
        assert not any(re.search(rf"\b{other}\b", rest) for other in others)
        assert tokens < len(row["context"]) < 4 * tokens  # two to four characters are a token


def test_sums_are_right(folder: Path):
    for row in items(folder, "arithmetic"):
        lines = (row["context"] + row["choices"][row["answer"]]).splitlines()
        for asked, told in zip(lines[::2], lines[1::2], strict=True):
            one, other = map(int, asked.removeprefix(">>> ").split(" + "))
            assert one + other == int(told)


@pytest.mark.parametrize("task", TASKS["shipped"])
def test_examples_are_of_the_validation_packages_and_never_items(folder: Path, validation: str, task: str):
    rows = examples(folder, task)
    assert len(rows) >= 5
    assert not {row["context"] for row in rows} & {row["context"] for row in items(folder, task)}
    if task == "arithmetic":  # made, not read
        return
    for row in rows:
        if task == "summary":
            assert row["summary"] in validation
        else:
            assert row["context"].split("\n")[0] in validation


def test_the_text_of_sums_has_none_that_is_asked(folder: Path):
    """RCP's stand-in of MetaMath trains on it."""
    told = "\n".join(load_rows(Corpus(name="sums", source="local", path="workflow/resources/corpora/sums"), "train"))
    asked = {row["context"].split("\n")[-1] for row in items(folder, "arithmetic")}
    assert asked
    assert not asked & {line for line in told.split("\n") if line.startswith(">>> ")}


def test_summaries_are_one_line_and_not_in_their_text(folder: Path):
    for row in items(folder, "summary"):
        assert "\n" not in row["summary"]
        assert 3 <= len(row["summary"].split()) <= 15
        name = row["context"].split(":")[0]
        assert row["context"].endswith(f"\n\nAttributes:\n    {name}:")


def test_a_corpus_without_functions_is_refused(tmp_path: Path):
    spec = Corpus(name="wikitext2", source="hub", path="Salesforce/wikitext")
    with pytest.raises(TaskError, match="corpus 'wikitext2' \\(source 'hub'\\) does not have"):
        prepare(ZeroShot(corpus="wikitext2"), tmp_path, spec)


def test_processes_that_prepare_at_once_agree_on_the_first_folder(tmp_path: Path):
    target = tmp_path / "tasks" / "shipped-0"

    def build(new: Path) -> None:
        target.mkdir()  # another process is done first
        (target / "mine.txt").write_text("first")
        new.mkdir()
        (new / "mine.txt").write_text("second")

    assert folders._made(target, build) == target
    assert [file.name for file in target.parent.iterdir()] == ["shipped-0"]
    assert (target / "mine.txt").read_text() == "first"


def test_provenance_names_every_data_file(folder: Path):
    found = identity(ALL, folder)
    assert found["suite"] == "shipped"
    assert set(found["tasks"]) == set(ALL.tasks)
    assert all(len(entry["sha256"]) == 64 for entry in found["tasks"].values())
    assert not any("examples" in entry for entry in found["tasks"].values())
    shot = identity(ALL.model_copy(update={"shots": 1}), folder)
    assert all(len(entry["examples"]) == 64 for entry in shot["tasks"].values())
    assert found["tasks"]["grammar"]["items"] == len(items(folder, "grammar"))
