"""GGUF files read back: every family's logits, tokens by a slow reference, a sentence for what is not understood."""

import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rotquant import api
from rotquant.formats.gguf import export_gguf
from rotquant.foundation.errors import CheckpointError, ResultError, UnsupportedArchitectureError
from rotquant.models import architectures
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.companions import companions
from rotquant.models.digests import checkpoint_digest
from rotquant.models.gguf import importing, network
from rotquant.models.gguf.header import read_header
from rotquant.models.gguf.importing import (
    ORIGIN,
    checked,
    described,
    imported,
    origin_of,
    origin_of_model,
    write_checkpoint,
)
from rotquant.models.gguf.tokenizer import WORDS, _split, rules_of, tokenizer_of, vocabulary_of
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.text import bos_of
from rotquant.weights.build import build_weights
from rotquant.weights.storage import save_quantized
from tests.helpers.commands import rotquant
from tests.helpers.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level_fields,
    letters,
    write_gguf,
)
from tests.helpers.models import AWKWARD, FURTHER, VOCABULARY, tiny_model, tiny_tokens
from tests.helpers.real import real_gguf

#: Without a sliding window, which GGUF does not say of them, and Gemma's scores scaled by the head as llama.cpp's are.
MODELS: dict[str, dict[str, Any]] = {
    **AWKWARD,
    **FURTHER,
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"family": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "mistral": {**AWKWARD["mistral"], "sliding_window": None},
    "qwen2": {**AWKWARD["qwen2"], "use_sliding_window": False},
    "gemma2": {**FURTHER["gemma2"], "query_pre_attn_scalar": 32},
    "gemma3": {**FURTHER["gemma3"], "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 2},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTQUANT_CACHE", str(tmp_path / "cache"))


def test_every_family_that_gguf_knows_is_read() -> None:
    read = {*network.ARCHITECTURES.values(), "mixtral", "mistral"}  # the last two are llama's
    assert read == architectures.FAMILIES.keys()
    assert {str(one["family"]) for one in MODELS.values()} == read


@pytest.mark.parametrize("name", MODELS)
def test_a_models_logits_are_those_of_its_file(name: str, tmp_path: Path) -> None:
    model = tiny_model(**MODELS[name])
    write_checkpoint(write_gguf(tmp_path / "m.gguf", model), tmp_path / "folder", "float32")
    loaded, _ = load_checkpoint(tmp_path / "folder", torch.float32)
    short, long = tiny_tokens(tokens=3), tiny_tokens(tokens=24)  # LongRoPE has two tables
    with torch.no_grad():
        for tokens in (short, long):
            # Llama 3's scaling is told from rounded factors; gains of 1 + w lose the last bits of w.
            torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_integers_become_the_numbers_that_the_package_gguf_gives(kind: str, tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), kind=kind)
    origin = write_checkpoint(file, tmp_path / "folder", "float32")
    loaded, _ = load_checkpoint(tmp_path / "folder", torch.float32)
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors}
    found = loaded.model.layers[1].mlp.down_proj.weight.detach().numpy()
    assert np.array_equal(found, stored["blk.1.ffn_down.weight"])
    assert next(iter(origin.types)) == kind


def test_many_rows_and_many_files_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model("mixtral"))
    write_checkpoint(file, tmp_path / "one", "float32")
    monkeypatch.setattr(importing, "_AT_ONCE", 100)
    monkeypatch.setattr(importing, "_SHARD", 50_000)
    write_checkpoint(file, tmp_path / "many", "float32")
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 2
    (first, _), (second, _) = (load_checkpoint(tmp_path / name, torch.float32) for name in ("one", "many"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_exported_is_imported(family: str, tmp_path: Path) -> None:
    """Merged rotations and integers, written as numbers: the same logits and the same tokens."""
    pytest.importorskip("gguf")
    scheme = {"bits": 4, "symmetric": True, "granularity": "channel", "group_size": None}
    alone = dict.fromkeys(("activations", "attention_output", "keys", "values"))
    changes = {"methods": {"spinquant": None, "gptq": None}, "weights": {"scheme": scheme}, **alone}
    recipe, tokenizer = override(preset("spinquant-easy"), changes, "test"), with_a_merge()
    if family == "llama":  # words as SmolLM2's
        tokenizer.backend_tokenizer.pre_tokenizer = _split(WORDS["smollm"])
    save_quantized(tmp_path / "q", build_weights(tiny_model(family), tokenizer, recipe, seed=0))
    export_gguf(tmp_path / "q", tmp_path / "m.gguf", torch.float32)
    write_checkpoint(tmp_path / "m.gguf", tmp_path / "folder", "float32")
    quantized, tokens = api.load(tmp_path / "q"), tiny_tokens()
    loaded, again = load_checkpoint(tmp_path / "folder", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, quantized.network(tokens).logits, rtol=1e-4, atol=1e-5)
    text = "A!! B!, 12 </s>!"
    assert again(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", WORDS)
def test_the_rules_of_words_are_told_from_a_tokenizer_as_they_make_one(name: str) -> None:
    rules, plain = WORDS[name], json.loads(_split(WORDS[name]).__getstate__())
    found = rules_of(plain)
    assert found is not None
    assert (WORDS[found].pattern, WORDS[found].digits) == (rules.pattern, rules.digits)
    last = plain["pretokenizers"][-1] if "pretokenizers" in plain else plain
    last["trim_offsets"] = not last["trim_offsets"]  # which moves no token
    assert rules_of(plain) == found
    last["add_prefix_space"] = True
    assert rules_of(plain) is None


def with_a_merge() -> PreTrainedTokenizerFast:
    """`byte_level` with one merge, of two exclamation marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 4]
    names = ["<unk>", "<s>", "</s>", *alphabet, "!!"]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [("!", "!")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# --- tokenizers


TEXTS = [
    "Hello world",
    " spaces at both ends  ",
    "I'm WE'LL they'D don\u2019t 12345 3.14 \u00bd",
    "\n\n\tdef f(x):\n\t\treturn  x\n",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600 \U0001f469\u200d\U0001f467",
    "CamelCaseHTTPServer snake_case --- !!!",
    "a <|end|> b<|end|> c",
    "",
]


def trained(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a kind's rules, put together here as tokenizer.json of its models has them."""
    rules = WORDS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rules.whole_words))
    tokenizer.normalizer = normalizers.NFC() if rules.nfc else None
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.pattern)
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules.digits else []
    first += [pre_tokenizers.Split(Regex(rules.pattern), "isolated")] if rules.pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", "<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *TEXTS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def in_file(tmp_path: Path, fields: dict[str, Any], **more: Any) -> Path:
    """A file with a tokenizer; its network has too few tokens, which only a whole import asks about."""
    return write_gguf(tmp_path / "m.gguf", tiny_model(), fields, **more)


def read(file: Path) -> Any:
    return tokenizer_of(vocabulary_of(read_header(file)), 512)


@pytest.mark.parametrize("name", WORDS)
def test_byte_level_tokenizers_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = trained(name)
    found = read(in_file(tmp_path, byte_level_fields(tokenizer, name, bos_token_id=1, eos_token_id=2)))
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert found(text, add_special_tokens=False)["input_ids"] == ids
        assert found.decode(ids) == tokenizer.decode(ids)
        assert found(text)["input_ids"] == ([1, *ids] if WORDS[name].bos else ids)


def sentencepiece() -> dict[str, Any]:
    """A small SentencePiece vocabulary in which longer pieces may have the worse score."""
    whole = ["he", "el", "lo", "ll", "hel", "hell", "hello", "\u2581h", "\u2581hello", "\u2581w", "or", "ld", "wor"]
    whole += ["world", "\u2581world", "\u2581a", "ab", "aba", "bab", "\u00e9t", "\u2581b"]
    single = [*"helowrdabt", "\u2581", "\u00e9"]
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *whole, *single]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * (len(whole) + len(single))
    ranks = np.random.default_rng(0).permutation(len(whole) + len(single)).tolist()
    scores = [0.0] * 5 + [0.0] * 256 + [-float(rank) for rank in ranks]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def merged(text: str, fields: dict[str, Any]) -> list[int]:
    """SentencePiece's rule: of neighbours that make a token, the first of the best score are merged."""
    ids, scores = {token: place for place, token in enumerate(fields["tokens"])}, fields["scores"]
    parts = list(text.replace(" ", "\u2581"))
    while True:
        known = [(i, ids[a + b]) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        pairs = [(scores[token], -i) for i, token in known]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return [one for part in parts for one in ([ids[part]] if part in ids else [5 + byte for byte in part.encode()])]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[bool, Any]]:
    """Fields of a SentencePiece tokenizer, and the tokenizer with and without a space before a text."""
    fields, folder = sentencepiece(), tmp_path_factory.mktemp("pieces")
    found = {}
    for space in (True, False):
        file = write_gguf(folder / f"{space}.gguf", tiny_model(), {**fields, "add_space_prefix": space})
        found[space] = read(file)
    return fields, found


@given(text=st.text("helowrdab\u00e9 t?\u4f60", max_size=30), space=st.booleans())
def test_sentencepiece_merges_by_score(pieces: tuple[dict[str, Any], dict[bool, Any]], text: str, space: bool) -> None:
    fields, tokenizers = pieces
    expected = []
    for index, part in enumerate(text.split("  ")):  # a token that users defined is cut out first
        expected += [4] if index else []
        expected += merged(" " + part if space and part else part, fields)
    assert tokenizers[space](text)["input_ids"] == [1, *expected]


def test_special_tokens_in_a_text_are_special_and_a_space_comes_before_what_follows(
    pieces: tuple[dict[str, Any], dict[bool, Any]],
) -> None:
    fields, tokenizers = pieces
    hello = fields["tokens"].index("\u2581hello")
    assert tokenizers[True]("hello<|end|>hello", add_special_tokens=False)["input_ids"] == [hello, 3, hello]
    assert tokenizers[True].decode([hello, hello]) == "hello hello"
    assert tokenizers[True].decode([hello, 5 + 0xE4, 5 + 0xBD, 5 + 0xA0]) == "hello\u4f60"


def test_the_ends_and_bos_of_a_text(tmp_path: Path) -> None:
    """BOS and EOS as the file says; Qwen2's has no BOS unless a chat's template begins with it."""
    fields = sentencepiece()
    both = read(in_file(tmp_path, {**fields, "add_eos_token": True}))
    assert both("hello")["input_ids"][:: len(both("hello")["input_ids"]) - 1] == [1, 2]
    without = read(in_file(tmp_path, {**fields, "add_bos_token": False}))
    assert bos_of(without) == 1
    assert without("hello")["input_ids"][0] != 1
    fields = {**letters(VOCABULARY), "pre": "qwen2"}
    assert bos_of(read(in_file(tmp_path, fields))) is None
    assert bos_of(read(in_file(tmp_path, {**fields, "add_bos_token": True}))) == 1
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    chat = read(in_file(tmp_path, {**fields, "add_bos_token": False}, settings={"tokenizer.chat_template": template}))
    assert chat.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"
    assert chat("A")["input_ids"][0] != 1


def test_generation_settings_end_at_every_token_that_ends_a_text(tmp_path: Path) -> None:
    fields = letters(VOCABULARY)
    fields["tokens"][10:12], fields["token_type"][10:12] = ["<end_of_turn>", "<|im_end|>"], [CONTROL, NORMAL]
    fields["tokens"][-1] = "#$"
    file = write_gguf(tmp_path / "m.gguf", tiny_model(), {**fields, "merges": ["# $"], "eot_token_id": 5})
    write_checkpoint(file, tmp_path / "folder")
    settings = json.loads((tmp_path / "folder/generation_config.json").read_text())
    assert settings == {"bos_token_id": 1, "eos_token_id": [2, 5, 10]}  # <|im_end|> is a word there


# --- what is refused


def with_settings(data: bytes, names: list[bytes]) -> bytes:
    """A file with more settings, each a byte, before its own."""
    (count,) = struct.unpack("<Q", data[16:24])
    added = (struct.pack("<Q", len(name)) + name + struct.pack("<IB", 0, 1) for name in names)
    return data[:16] + struct.pack("<Q", count + len(names)) + b"".join(added) + data[24:]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"GGML" + data[4:], "is no GGUF file"),
        (lambda data: data[:-1000], r"is truncated: [\d,]+ bytes where its header promises"),
        (lambda data: data[:200], "it ends within its header"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "of version 1, and versions 2 and 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "of the other byte order"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "is truncated or damaged"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "is truncated or damaged"),
        (lambda data: data[:24] + struct.pack("<Q", 2**62) + data[32:], "it ends within its header"),
        (lambda data: with_settings(data, 2 * [b"x" * 300]), "is truncated or damaged .the setting 'x{100}' twice"),
    ],
)
def test_a_damaged_file_is_a_sentence(change: Callable[[bytes], bytes], sentence: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model())
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=sentence):
        checked(file)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"general.architecture": "mamba"}, "is of the architecture 'mamba', and those that are read are llama, qwen2"),
        ({"split.count": 3}, "is one of 3 parts of a model: join them by `llama-gguf-split --merge`"),
        ({"llama.block_count": None}, "does not say llama.block_count, which has to be a whole number above zero"),
        ({"llama.block_count": 3}, r"is incomplete: it has no tensor blk\.2\.attn_output\.weight"),
        ({"llama.block_count": 1}, r"has the tensor blk\.1\.attn_k\.weight, which has no place"),
        ({"llama.attention.head_count_kv": [2, 2]}, "says .2, 2. for llama.attention.head_count_kv"),
        ({"llama.feed_forward_length": 90}, r"blk\.0\.ffn_\w+\.weight has shape .*, and its settings ask for"),
        (
            {"llama.attention.sliding_window": 8},
            "the setting llama.attention.sliding_window, which is not understood",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "says yarn for llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 8}, "says 8 for llama.rope.dimension_count"),
        ({"tokenizer.ggml.model": None}, "lacks tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "t5"}, "has a tokenizer of kind 't5'"),
        ({"tokenizer.ggml.pre": "poro"}, "splits text into words by llama.cpp's rules 'poro'"),
        ({"tokenizer.ggml.pre": None}, "lacks tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["x y"]}, "has merges of what are no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "do not fit, or are not unique"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "names the token 1000 of 96"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "has something else in tokenizer.ggml.bos_token_id"),
    ],
)
def test_what_is_not_understood_is_a_sentence(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model(), settings=settings)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=sentence):
        checked(file)


def test_a_tensor_that_is_missing_or_of_a_type_without_numbers_is_a_sentence(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model(), without=("output_norm.weight",))
    with pytest.raises(CheckpointError, match=r"it has no tensor output_norm\.weight"):
        checked(file)
    gguf: Any = pytest.importorskip("gguf")
    data = write_gguf(tmp_path / "n.gguf", tiny_model()).read_bytes()
    place = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    for kind, sentence in (
        (gguf.GGMLQuantizationType.I32, "of type I32, which the package gguf does not"),
        (250, "250"),
    ):
        (tmp_path / "n.gguf").write_bytes(data[:place] + struct.pack("<I", kind) + data[place + 4 :])
        with pytest.raises(CheckpointError, match=sentence):
            checked(tmp_path / "n.gguf")


def test_other_factors_of_frequencies_are_refused(tmp_path: Path) -> None:
    model = tiny_model(**FURTHER["llama-3.1"])
    file = write_gguf(tmp_path / "m.gguf", model)
    data = file.read_bytes()
    factors = checked(file).header.tensors["rope_freqs.weight"]
    file.write_bytes(data[: factors.start] + struct.pack("<f", 3.0) + data[factors.start + 4 :])
    with pytest.raises(CheckpointError, match="that are not Llama 3's scaling"):
        checked(file)


# --- a file wherever a model is named


def test_a_file_is_a_model_wherever_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_gguf(tmp_path / "m.gguf", tiny_model(), kind="Q8_0"))
    text = tmp_path / "text.txt"
    text.write_text("ABC, " * 2000)
    corpus = ["--corpus", str(text)]
    assert rotquant(monkeypatch, "import-gguf", file, "-o", str(tmp_path / "folder")) == 0
    assert "dequantized to bfloat16 from m.gguf (SHA-256 " in capsys.readouterr().out
    evaluate = ["--max-windows", "2", "--sequence-length", "32", "--device", "cpu", "--json", *corpus]
    answers = {}
    for model in (file, str(tmp_path / "folder")):
        assert rotquant(monkeypatch, "evaluate", model, *evaluate) == 0
        answers[model] = json.loads(capsys.readouterr().out)
    first, second = answers.values()
    assert first["perplexity"] == second["perplexity"]
    assert [*first["origins"].values()] == [*second["origins"].values()]
    quantize = ["--method", "quarot-rtn", "-o", str(tmp_path / "q"), "--device", "cpu", *corpus]
    assert rotquant(monkeypatch, "quantize", file, *quantize) == 0
    assert f"{file}: dequantized to bfloat16 from m.gguf" in capsys.readouterr().out
    compare = [file, str(tmp_path / "q"), "--sequence-length", "32", "--max-windows", "2", "--device", "cpu", *corpus]
    assert rotquant(monkeypatch, "compare", *compare) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("dequantized to bfloat16 from m.gguf") == 2
    assert rotquant(monkeypatch, "plan", file, "--device", "cpu") == 0
    assert api.limits_of(file).vocabulary == VOCABULARY


def test_an_imported_file_is_imported_once_and_has_its_folders_digest(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model())
    assert not [*described(file).glob("*.safetensors")]
    folder = imported(file)
    when = (folder / "model.safetensors").stat().st_mtime_ns
    assert imported(file) == folder
    assert described(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == when
    assert checkpoint_digest(file) == checkpoint_digest(folder)
    assert origin_of_model(file) == origin_of(folder)
    file.unlink()
    write_gguf(file, tiny_model(seed=1))
    assert imported(file) != folder


def test_the_cache_has_to_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model())
    monkeypatch.setattr(importing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ResultError, match="make room, or set ROTQUANT_CACHE"):
        imported(file)


def test_the_origin_goes_along_and_damage_to_it_is_a_sentence(tmp_path: Path) -> None:
    write_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model()), tmp_path / "folder")
    assert ORIGIN in companions(tmp_path / "folder")
    (tmp_path / "folder" / ORIGIN).write_text('{"file": 3}')
    with pytest.raises(CheckpointError, match=f"{ORIGIN} is damaged"):
        origin_of(tmp_path / "folder")


# --- pretrained models


RECORDED = json.loads((Path(__file__).parent / "llama_cpp_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_pretrained_models_tokens_are_llama_cpps(name: str) -> None:
    """Recorded from llama.cpp (xllamacpp 2026.10), which read special tokens in a text as such.

    Left out of Qwen2's: text that is not NFC, which llama.cpp does not normalize, and the word </s>, which it takes for
    the end of a text wherever a vocabulary has it.
    """
    tokenizer = read(real_gguf(name))
    for text, ids in RECORDED[name]:
        assert tokenizer(text)["input_ids"] == ids, text
