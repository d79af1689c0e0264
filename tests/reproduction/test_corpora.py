"""The corpora: what counts as text, that splits share nothing, and the papers' protocol for windows."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reproduction.corpora import DOCSTRINGS, MODULES, Corpus, modules
from reproduction.corpora import docstrings as module
from reproduction.corpora import packages as installed
from reproduction.run import packing
from reproduction.run.stages.text import expected_hashes
from rotquant.foundation.errors import CorpusError
from rotquant.models.checkpoints import load_tokenizer
from rotquant.recipes.schemes import Calibration
from rotquant.text import (
    CALIBRATION_CHARACTERS,
    CorpusSpec,
    Tokens,
    calibration_samples,
    content_hash,
    corpus_identity,
    evaluation_windows,
    load_rows,
    load_text,
    split_of_file,
    tokenize,
)

LONG = "A sentence that is long enough to count as documentation, number {}."


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path("workflow/resources/models/rq-7b"))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Three invented packages of one file each, installed nowhere: their files are served in place of the real ones."""
    texts = {
        "train": ["shared with test", "only in train", "SHARED  with\ntest"],
        "validation": ["only in validation", "shared with test"],
        "test": ["shared with test", "only in test"],
    }
    files = {}
    for split, names in texts.items():
        functions = "".join(f'def f{i}():\n    """{LONG.format(name)}"""\n' for i, name in enumerate(names))
        files[split] = tmp_path / f"{split}.py"
        files[split].write_text(f'"""Short."""\n{functions}')
    monkeypatch.setattr(module, "PACKAGES", {split: (split,) for split in texts})
    monkeypatch.setattr(module, "package_files", lambda names: [(names[0], files[names[0]])])
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Three invented packages of several files: {split: {file name: words}}, which a test may change."""
    rng = random.Random(0)
    words = {name: [rng.choice("abcdefgh") * 4 + str(rng.randrange(99)) for _ in range(900)] for name in "vwxyz"}
    nearly = [*words["v"][:850], *words["w"][:50]]
    files = {
        "test": {"t1.py": words["v"], "t2.py": words["w"], "short.py": words["w"][:20]},
        "validation": {"v1.py": words["x"], "v2.py": nearly},
        "train": {"r1.py": words["y"], "r2.py": nearly, "r3.py": words["z"], "r4.py": words["z"]},
    }

    def package_files(names):
        written = []
        for name, text in files[names[0]].items():
            (tmp_path / name).write_text(" ".join(text))
            written.append((name, tmp_path / name))
        return written

    monkeypatch.setattr(modules, "PACKAGES", {split: (split,) for split in files})
    monkeypatch.setattr(modules, "package_files", package_files)
    return files


def test_a_source_file_near_one_of_an_earlier_split_is_left_out_and_so_is_a_copy(sources, tmp_path):
    names = {split: modules.module_names(split, tmp_path / "cache") for split in sources}
    assert names == {"test": ["t1.py", "t2.py"], "validation": ["v1.py"], "train": ["r1.py", "r3.py"]}


def test_the_head_of_the_source_files_is_a_prefix_of_them(sources, tmp_path):
    whole = load_rows(MODULES, "train", cache=tmp_path / "cache")
    assert load_rows(MODULES, "train", max_characters=10, cache=tmp_path / "cache") == whole[:1]


def test_signatures_estimate_the_share_of_common_shingles():
    """The share of equal entries has a standard deviation of sqrt(j (1 - j) / 128), at most 0.044; five of them."""
    rng = random.Random(1)
    words = [f"w{rng.randrange(10**6)}" for _ in range(2000)]
    for kept in (200, 1000, 1900):
        other = [*words[:kept], *(f"v{rng.randrange(10**6)}" for _ in range(2000 - kept))]
        first, second = ({tuple(text[i : i + 5]) for i in range(1996)} for text in (words, other))
        exact = len(first & second) / len(first | second)
        equal = modules.signature(" ".join(words)) == modules.signature(" ".join(other))
        assert abs(equal.mean() - exact) < 0.22


def test_no_installed_source_file_of_validation_is_near_one_of_test(tmp_path):
    held_out = [modules.signature(row) for row in load_rows(MODULES, "test")]
    for row in load_rows(MODULES, "validation")[:20]:
        sketch = modules.signature(row)
        assert max((sketch == other).mean() for other in held_out) < modules.NEAR_DUPLICATE


def test_docstrings_come_from_modules_classes_and_functions_in_source_order_and_dedented(tmp_path):
    source = tmp_path / "example.py"
    source.write_text(
        '"""Module.\n\nMore."""\nclass A:\n    """Class\n\n    body.\n    """\n    async def f(self):\n'
        '        """Function."""\n        return """not documentation"""\n'
    )
    assert list(module.file_docstrings(source)) == ["Module.\n\nMore.", "Class\n\nbody.", "Function."]


def test_a_file_that_cannot_be_parsed_has_no_docstrings(tmp_path):
    source = tmp_path / "template.py"
    source.write_text('"""Text."""\ndef {{ name }}(): pass')
    assert list(module.file_docstrings(source)) == []


def test_a_text_that_several_splits_hold_belongs_to_test_alone(packages):
    rows = {split: load_rows(DOCSTRINGS, split, cache=packages) for split in ("train", "validation", "test")}
    assert rows["test"] == [LONG.format("shared with test"), LONG.format("only in test")]
    assert rows["validation"] == [LONG.format("only in validation")]
    assert rows["train"] == [LONG.format("only in train")]


def test_the_cache_gives_the_same_rows_without_reading_the_files_again(packages, monkeypatch):
    first = load_rows(DOCSTRINGS, "train", cache=packages)
    monkeypatch.setattr(module, "package_files", lambda names: pytest.fail("the packages were parsed again"))
    assert load_rows(DOCSTRINGS, "train", cache=packages) == first


def test_a_damaged_cache_file_is_made_again(packages):
    first = load_rows(DOCSTRINGS, "test", cache=packages)
    for file in packages.iterdir():
        file.write_text("[tru")
    assert load_rows(DOCSTRINGS, "test", cache=packages) == first


def test_the_head_of_a_split_is_a_prefix_of_it(packages):
    whole = load_rows(DOCSTRINGS, "test", cache=packages)
    assert load_rows(DOCSTRINGS, "test", max_characters=10, cache=packages) == whole[:1]


def test_no_package_is_in_two_splits_and_none_differs_between_cpu_and_cuda_builds():
    named = [name for names in installed.PACKAGES.values() for name in names]
    assert len(named) == len(set(named))
    assert not [name for name in named if name.startswith(("torch", "nvidia", "cuda", "cupy", "triton"))]


def test_two_extractions_give_the_same_rows(packages, tmp_path):
    assert load_rows(DOCSTRINGS, "train", cache=packages) == load_rows(DOCSTRINGS, "train", cache=tmp_path / "again")


@pytest.mark.parametrize("corpus", [DOCSTRINGS, MODULES], ids=lambda corpus: corpus.name)
def test_the_identity_of_the_installed_test_split_carries_its_hash_and_one_is_recorded(corpus):
    split = corpus_identity(corpus)["splits"]["test"]
    text = load_text(corpus, "test")
    assert split["packages"]["click"]
    assert split["sha256"] == content_hash(text)
    assert split["characters"] == len(text) > 500_000
    assert len(expected_hashes(corpus)["test"]) == 64


def test_an_environment_without_the_packages_is_told_so(tmp_path, monkeypatch):
    nothing = dict.fromkeys(installed.PACKAGES, ("no-such-package",))
    for place in (installed, module, modules):
        monkeypatch.setattr(place, "PACKAGES", nothing)
    for corpus in (DOCSTRINGS, MODULES):
        with pytest.raises(CorpusError, match=r"none of its packages is installed \(no-such-package\)"):
            load_rows(corpus, "test", cache=tmp_path)


def test_importing_the_corpora_loads_neither_torch_nor_datasets():
    heavy = "('torch', 'datasets', 'transformers')"
    code = f"import sys, reproduction.corpora; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def write_rows(folder: Path, kind: str, rows: list[str]) -> None:
    """The same rows as the test split in one of the accepted file types, beside a train split with other text."""
    for split, texts in {"test": rows, "train": ["other"]}.items():
        records = [{"text": text, "id": i} for i, text in enumerate(texts)]
        if kind == "parquet":
            import pandas

            pandas.DataFrame(records).to_parquet(folder / f"{split}-00000-of-00001.parquet")
        elif kind == "txt":
            (folder / f"wiki.{split}.raw.txt").write_text("".join(texts))
        else:
            (folder / f"{split}.{kind}").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "txt"])
def test_local_files_of_every_type_give_the_same_text(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "data"
    folder.mkdir()
    rows = ["", " = Title = \n", "", " First paragraph . \n"]
    write_rows(folder, kind, rows if kind != "txt" else [row or "\n" for row in rows])
    spec = CorpusSpec(name="wikitext2", source="local", path=str(folder))
    assert load_text(spec, "test") == "\n\n".join(rows)


def test_a_row_may_be_written_of_several_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    rows = [{"query": "2 + 2?", "response": "{4}", "kind": "sum"}, {"query": "1?", "response": "one", "kind": "none"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = CorpusSpec(name="maths", source="local", path=str(tmp_path), text_field="Q: {query}\nA: {response}")
    assert load_text(spec, "test") == "Q: 2 + 2?\nA: {4}\n\nQ: 1?\nA: one"
    with pytest.raises(CorpusError, match="no field 'answer'; its fields: query, response, kind"):
        load_text(spec.model_copy(update={"text_field": "{query} {answer}"}), "test")


@pytest.mark.parametrize("text_field", ["{", "{}", "{0}", "{query!r}", "{query:>9}", "{query.upper}", "{query[0]}"])
def test_only_names_of_columns_stand_in_braces(text_field):
    with pytest.raises(ValidationError, match="text_field"):
        CorpusSpec(name="maths", source="local", path="x", text_field=text_field)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_the_splits_of_a_single_file_share_no_row_and_are_all_of_it(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    rows = [f"row {i}\n" for i in range(23)]
    file = tmp_path / f"words.{kind}"
    file.write_text("".join(rows if kind == "txt" else (json.dumps({"text": row}) + "\n" for row in rows)))
    spec = CorpusSpec(name="words", source="local", path=str(file))
    parts = [load_rows(spec, split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [18, 2, 3]
    assert [row for part in parts for row in part] == rows
    assert load_rows(spec, "train", max_characters=5) == rows[:1]
    assert corpus_identity(spec)["splits"]["test"]["share"] == "rows from 90 to 100 % of the file"


def test_a_single_file_that_is_named_for_a_split_is_that_split_alone(tmp_path):
    file = tmp_path / "wiki.test.txt"
    file.write_text("one\ntwo\n")
    spec = CorpusSpec(name="wiki", source="local", path=str(file))
    assert load_rows(spec, "test") == ["one\n", "two\n"]
    assert "share" not in corpus_identity(spec)["splits"]["test"]
    with pytest.raises(CorpusError, match="is the test split by its name, and the train split is asked for"):
        load_rows(spec, "train")


@pytest.mark.parametrize("name", ["valid", "validation", "val", "dev.v2", "my-dev"])
def test_a_single_file_of_validation_text_is_measured_on_and_may_calibrate(tmp_path, name):
    file = tmp_path / f"{name}.txt"
    file.write_text("one\ntwo\n")
    spec = CorpusSpec(name=name, source="local", path=str(file))
    assert split_of_file(spec) == "validation"
    assert load_rows(spec, "validation") == load_rows(spec, "train") == ["one\n", "two\n"]
    with pytest.raises(CorpusError, match="is the validation split by its name, and the test split is asked for"):
        load_rows(spec, "test")


@pytest.mark.parametrize("name", ["words", "testing", "training", "train-and-valid"])
def test_other_files_are_measured_on_as_test_text(tmp_path, name):
    (tmp_path / f"{name}.txt").write_text("one\n")
    assert split_of_file(CorpusSpec(name=name, source="local", path=str(tmp_path / f"{name}.txt"))) == "test"
    assert split_of_file(CorpusSpec(name=name, source="local", path=str(tmp_path))) == "test"


def test_a_split_some_of_whose_shards_are_missing_is_refused_and_a_shard_alone_is_said_to_be_one(tmp_path):
    for index in (0, 2):
        (tmp_path / f"test-0000{index}-of-00003.txt").write_text(f"part {index}\n")
    folder = CorpusSpec(name="mine", source="local", path=str(tmp_path))
    with pytest.raises(CorpusError, match=r"lacks test-00001-of-00003\.txt of 3 shards"):
        load_rows(folder, "test")
    alone = CorpusSpec(name="mine", source="local", path=str(tmp_path / "test-00002-of-00003.txt"))
    assert load_rows(alone, "test") == ["part 2\n"]
    assert corpus_identity(alone)["splits"]["test"]["share"] == "shard 3 of 3"
    (tmp_path / "test-00001-of-00003.txt").write_text("part 1\n")
    assert load_rows(folder, "test") == ["part 0\n", "part 1\n", "part 2\n"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_text_in_another_encoding_is_refused_though_its_bytes_are_letters_and_nuls(tmp_path, encoding):
    file = tmp_path / "words.txt"
    file.write_text("plain words\n" * 20, encoding=encoding)
    with pytest.raises(CorpusError, match=r"is not UTF-8 text .* `iconv -f UTF-16 -t UTF-8` converts"):
        load_rows(CorpusSpec(name="words", source="local", path=str(file)), "test")


def test_the_mark_at_the_head_of_utf_8_is_no_letter(tmp_path):
    (tmp_path / "test.txt").write_text("one\n", encoding="utf-8-sig")
    assert load_rows(CorpusSpec(name="words", source="local", path=str(tmp_path)), "test") == ["one\n"]


def test_a_hub_dataset_that_cannot_be_reached_says_how_to_give_a_local_folder(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    spec = CorpusSpec(name="wikitext2", source="hub", path="Salesforce/wikitext", subset="wikitext-2-raw-v1")
    with pytest.raises(CorpusError, match="give the path of a local copy"):
        load_text(spec, "test")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_datasets_library_draws_its_bars_at_terminals_only(terminal, monkeypatch, capsys):
    import datasets

    disabled = []

    def loaded(*args, **kwargs):
        disabled.append(datasets.are_progress_bars_disabled())
        return [{"text": "a text"}]

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    before = datasets.are_progress_bars_disabled()
    assert load_text(CorpusSpec(name="mine", source="hub", path="owner/name"), "test") == "a text"
    assert disabled == [not terminal]
    assert datasets.are_progress_bars_disabled() is before is False


def test_bad_local_corpora_are_named_in_one_sentence(tmp_path):
    def text_of(split="test", **fields):
        return load_text(CorpusSpec(name="mine", source="local", **fields), split)

    with pytest.raises(CorpusError, match="no folder or file"):
        text_of(path=str(tmp_path / "absent"))
    (tmp_path / "train.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(CorpusError, match=r"no .* file named for the test split; data files there: train\.jsonl"):
        text_of(path=str(tmp_path))
    with pytest.raises(CorpusError, match="no field 'text'; its fields: content"):
        text_of(path=str(tmp_path), split="train")
    with pytest.raises(CorpusError, match="no split 'dev'"):
        text_of(path=str(tmp_path), split="dev")
    (tmp_path / "test.jsonl").write_text('{"text": "x"\n{{{')
    with pytest.raises(CorpusError, match=r"test\.jsonl could not be read"):
        text_of(path=str(tmp_path))
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(CorpusError, match="holds no text"):
        text_of(path=str(tmp_path / "empty.txt"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CorpusError, match="not a parquet, json, jsonl or txt file"):
        text_of(path=str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("fields", [{"source": "local"}, {"path": "x"}, {"sauce": "hub"}])
def test_a_specification_that_fits_no_source_is_refused(fields):
    with pytest.raises(ValidationError):
        CorpusSpec(name="mine", **fields)


def test_text_has_exactly_one_bos_although_the_tokenizer_adds_its_own(tokenizer):
    ids = tokenize("one two", tokenizer).whole
    assert ids.dtype == torch.long
    assert ids[0] == tokenizer.bos_token_id
    assert (ids == tokenizer.bos_token_id).sum() == 1
    assert tokenizer("one two")["input_ids"] == ids.tolist()


def test_where_a_tokenizer_has_no_bos_the_text_begins_without(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.bos_token = None
    tokens = tokenize("one two", without)
    assert tokens.bos is None
    assert torch.equal(tokens.whole, tokenize("one two", tokenizer).whole[1:])
    for bos in ("text", "none"):
        assert torch.equal(evaluation_windows(tokens, 2, bos).flatten(), tokens.ids[: len(tokens.ids) // 2 * 2])
    with pytest.raises(CorpusError, match="no BOS to put at the head of each window"):
        evaluation_windows(tokens, 2, "window")


@pytest.mark.parametrize(
    ("bos", "expected"), [("text", [[9, 0, 1], [2, 3, 4]]), ("window", [[9, 0, 1], [9, 2, 3]]), ("none", [[0, 1, 2]])]
)
def test_bos_stands_where_the_metric_says(bos, expected):
    assert evaluation_windows(Tokens(torch.arange(5), bos=9), 3, bos).tolist() == expected


@given(st.integers(1, 40), st.integers(1, 12))
def test_windows_are_the_text_in_order_without_overlap_and_without_its_tail(n, length):
    ids = Tokens(torch.arange(n))
    if n < length:
        with pytest.raises(CorpusError, match="fewer than one window"):
            evaluation_windows(ids, length)
        return
    windows = evaluation_windows(ids, length)
    assert windows.shape == (n // length, length)
    assert torch.equal(windows.flatten(), ids.ids[: n // length * length])


def test_calibration_samples_are_windows_of_the_text_drawn_by_seed_alone():
    ids = Tokens(torch.arange(100))
    torch.manual_seed(1)
    samples = calibration_samples(ids, Calibration(samples=8, sequence_length=10, seed=3))
    torch.manual_seed(2)
    assert torch.equal(samples, calibration_samples(ids, Calibration(samples=8, sequence_length=10, seed=3)))
    assert not torch.equal(samples, calibration_samples(ids, Calibration(samples=8, sequence_length=10, seed=4)))
    assert torch.equal(samples, samples[:, :1] + torch.arange(10))
    with pytest.raises(CorpusError, match="fewer than one sample"):
        calibration_samples(ids, Calibration(samples=1, sequence_length=101))
    with pytest.raises(CorpusError, match="in which 91 samples of 10 begin, fewer than the 100,000,000"):
        calibration_samples(ids, Calibration(samples=10**8, sequence_length=10))


@pytest.mark.skipif("ROTQUANT_WIKITEXT2" not in os.environ, reason="ROTQUANT_WIKITEXT2 names no WikiText-2 folder")
def test_raw_wikitext2_files_read_as_the_hub_gives_them():
    spec = CorpusSpec(name="wikitext2", source="local", path=os.environ["ROTQUANT_WIKITEXT2"])
    rows = load_rows(spec, "test")
    assert rows[0] == ""
    assert rows[1].startswith(" = ")
    assert rows[1].endswith(" \n")


def test_large_calibration_sets_read_more_of_the_text() -> None:
    assert Calibration().characters == Calibration(samples=16, sequence_length=512).characters == CALIBRATION_CHARACTERS
    assert Calibration(samples=800).characters > 3 * CALIBRATION_CHARACTERS


def test_a_pack_of_packages_is_the_text_that_the_installed_ones_are(tmp_path, monkeypatch):
    few = {"train": ("pathspec", "tabulate"), "validation": ("attrs",), "test": ("click",)}
    for place in (installed, module, modules, packing):
        monkeypatch.setattr(place, "PACKAGES", few)
    heads = [(spec, split, 60_000 if split == "train" else None) for spec in (MODULES, DOCSTRINGS) for split in few]
    try:
        count = packing.pack(tmp_path / "packed", tmp_path / "cache", 60_000)
        here = [load_rows(spec, split, max_characters=head, cache=tmp_path / "cache") for spec, split, head in heads]
        whole = sum(len(installed.package_files(packages)) for packages in few.values())
        assert len(list((tmp_path / "packed").rglob("*.py"))) == count < whole  # of train only a head
        monkeypatch.setenv(installed.CARRIED, str(tmp_path / "packed"))
        forget_packages()
        there = [load_rows(spec, split, max_characters=head, cache=tmp_path / "fresh") for spec, split, head in heads]
        assert there == here
        assert all(here)
        assert all(path.is_relative_to(tmp_path) for _, path in installed.package_files(few["test"]))
        assert {file.name for file in (tmp_path / "fresh").iterdir()} <= {
            file.name for file in (tmp_path / "cache").iterdir()
        }  # named by the versions, which are the same
        monkeypatch.setenv(installed.CARRIED, str(tmp_path / "absent"))
        forget_packages()
        with pytest.raises(CorpusError, match="which is no folder; `rotquant pack` makes one"):
            load_rows(MODULES, "test", cache=tmp_path / "fresh")
    finally:
        forget_packages()


def forget_packages():
    """Where the packages lie is found once in a process."""
    installed.package_files.cache_clear()
    installed._version.cache_clear()


def test_a_mixed_corpus_is_its_parts_with_as_much_text_of_each(tmp_path):
    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("".join(f"{letter * 9}\n" for _ in range(50)))
    parts = tuple(Corpus(name=name, source="local", path=str(tmp_path / name)) for name in ("first", "second"))
    mixed = Corpus(name="both", source="mixed", parts=parts)
    assert load_rows(mixed, "train") == [*load_rows(parts[0], "train"), *load_rows(parts[1], "train")]
    head = load_rows(mixed, "train", max_characters=60)
    assert head == ["a" * 9 + "\n"] * 3 + ["b" * 9 + "\n"] * 3
    assert mixed.sources == parts
    identity = corpus_identity(mixed, ["train"])
    assert [part["name"] for part in identity["parts"]] == ["first", "second"]


def test_only_a_mixed_corpus_has_parts():
    with pytest.raises(ValidationError, match="'mixed' needs parts"):
        Corpus(name="both", source="mixed")
    with pytest.raises(ValidationError, match="takes no parts"):
        Corpus(name="both", source="modules", parts=(MODULES,))
    assert "parts" not in MODULES.model_dump()  # as before there were any: keys of runs stay
