"""Checkpoints: identity that follows content and not place, and one clear sentence for everything that can be wrong."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rotquant.foundation import contents, hub
from rotquant.foundation.errors import CheckpointError, UnsupportedArchitectureError
from rotquant.models.checkpoints import config_of, load_checkpoint, load_tokenizer
from rotquant.models.declared import ROPE_FIELDS
from rotquant.models.deltas import read_delta
from rotquant.models.digests import checkpoint_digest, refuse_other
from rotquant.models.folders import check_kind
from tests.helpers.checkpoints import save_tiny, tiny_tokenizer
from tests.helpers.models import FAMILIES, tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_of_our_own_is_what_its_file_says_in_every_family(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded, text = load_tokenizer(tmp_path), "w3 w14 w15\n\nw92 w65 another"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.bos_token_id == tokenizer.bos_token_id


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_header(folder: Path, change: object) -> None:
    """Rewrite the safetensors header, keeping the data."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_checkpoint_loads_in_the_type_asked_for(folder: Path) -> None:
    model, tokenizer = load_checkpoint(str(folder), torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert tokenizer.bos_token_id == 1
    expected = tiny_model(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in model.state_dict().items())


def test_tied_embeddings_are_not_a_missing_tensor(tmp_path: Path) -> None:
    tiny_model(tied=True).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load_checkpoint(tmp_path, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_sharded_checkpoints_load_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    load_checkpoint(tmp_path, torch.float32)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"incomplete: {shard.name}"):
        load_checkpoint(tmp_path, torch.float32)


def test_the_digest_follows_the_content_and_not_the_place(original: Path, folder: Path) -> None:
    digest = checkpoint_digest(original)
    assert digest == checkpoint_digest(str(folder))
    assert len(digest) == 16
    (folder / "README.md").write_text("not part of the model")
    assert checkpoint_digest(folder) == digest
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert checkpoint_digest(folder) != digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_the_digest_covers_configuration_and_tokenizer(original: Path, folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + "\n" if (folder / name).exists() else "{}")
    assert checkpoint_digest(folder) != checkpoint_digest(original)


def test_large_weights_are_identified_by_their_content_which_is_hashed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a byte changes and size and time of change are set back; what did not change is not read again."""
    monkeypatch.setattr(contents, "_KEPT_BYTES", 10)
    monkeypatch.setattr(contents, "_SETTLED", -1)
    monkeypatch.setenv("ROTQUANT_CACHE", str(folder.parent / "cache"))
    digest, weights = checkpoint_digest(folder), folder / "model.safetensors"
    hashed: list[str] = []
    original = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or original(file, name))
    assert checkpoint_digest(folder) == digest
    assert not hashed
    times, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checkpoint_digest(folder) != digest
    assert [Path(name).name for name in hashed] == ["model.safetensors"]


def test_a_hub_id_is_the_commit_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the network that of the local copy; without one it is unresolved, and nothing is computed under it."""
    name, commit, other = "meta-llama/Llama-2-7b-hf", "a" * 40, "b" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    copy = tmp_path / "models--meta-llama--Llama-2-7b-hf"
    for reference, known in {"main": commit, "v1.0": other}.items():
        (copy / "snapshots" / known).mkdir(parents=True)
        (copy / "refs").mkdir(exist_ok=True)
        (copy / "refs" / reference).write_text(known)
    hub.commit_of.cache_clear()
    assert checkpoint_digest(name) == f"{name}@{commit}"
    assert checkpoint_digest(f"{name}@v1.0") == f"{name}@{other}"
    assert checkpoint_digest(f"{name}@{'c' * 40}") == f"{name}@{'c' * 40}"
    unknown = checkpoint_digest("nobody/nothing")
    assert unknown == "nobody/nothing@unresolved"
    with pytest.raises(CheckpointError, match="nobody/nothing could not be identified"):
        refuse_other("nobody/nothing", unknown)
    hub.commit_of.cache_clear()


def test_a_checkpoint_that_changed_since_the_plan_is_refused(folder: Path) -> None:
    planned = checkpoint_digest(folder)
    refuse_other(str(folder), planned)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="changed since the plan was made"):
        refuse_other(str(folder), planned)


def test_digests_need_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from rotquant.models.digests import checkpoint_digest; checkpoint_digest(sys.argv[1]); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_tensor(folder: Path) -> None:
    edit_header(folder, lambda header: header.update(extra=header.pop("model.layers.1.mlp.up_proj.weight")))


def list_entry(folder: Path) -> None:
    """Tensors' entries as lists, which the library reads as well."""

    def change(header: dict) -> None:
        header |= {name: [*one.values()] for name, one in header.items() if name != "__metadata__"}

    edit_header(folder, change)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def large_id(folder: Path, token: str) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"][token] = 2**31
    path.write_text(json.dumps(content))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def drop_field(folder: Path, name: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def quantized(folder: Path) -> None:
    (folder / "rotquant.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, r"model\.safetensors is truncated or damaged \("),
        (damage_header, r"is truncated or damaged \("),
        (empty, r"is truncated or damaged \("),
        (list_entry, r"is truncated or damaged \(a tensor's entry is no JSON object\)"),
        (only_pickles, "holds only pickled weights"),
        (no_weights, "model.safetensors is missing"),
        (drop_tensor, "it lacks model.layers.1.mlp.up_proj.weight"),
        (lambda f: edit_config(f, hidden_size=32, head_dim=16), "has shape .* expected"),
        (lambda f: edit_config(f, num_hidden_layers=3), "it lacks model.layers.2"),
        (lambda f: edit_config(f, num_hidden_layers=1), "it has an unknown tensor model.layers.1"),
        (lambda f: edit_config(f, hidden_size="wide"), r"config\.json is damaged: hidden_size: .* \(given 'wide'\)"),
        (lambda f: edit_config(f, num_hidden_layers=0), "num_hidden_layers: Input should be greater than 0"),
        (lambda f: edit_config(f, intermediate_size=-96), "intermediate_size: Input should be greater than 0"),
        (lambda f: edit_config(f, vocab_size=None), "vocab_size: Input should be a valid integer"),
        (lambda f: edit_config(f, num_key_value_heads=3), "4 heads cannot share 3 key-value heads evenly"),
        (lambda f: edit_config(f, head_dim=15), "a head of an odd number of features"),
        (lambda f: edit_config(f, rms_norm_eps=float("nan")), r"config\.json is damaged: it has the number NaN"),
        (lambda f: edit_config(f, sliding_window=0), "sliding_window: Input should be greater than 0"),
        (lambda f: edit_config(f, num_hidden_layers=10**9), "asks for 18,432,000,006,144 weights or more"),
        (lambda f: edit_config(f, hidden_size=2**40), "does not fit its config.json, which asks for"),
        (lambda f: edit_config(f, hidden_act="shout"), "damaged: hidden_act: 'shout' is no activation"),
        (lambda f: edit_config(f, rope_parameters={"rope_type": "helix"}), "the rope_type 'helix' is unknown"),
        (lambda f: drop_field(f, "num_attention_heads"), "num_attention_heads is missing"),
        (lambda f: edit_config(f, id2label={str(i): "a" for i in range(10**5)}), "a classifier's table id2label"),
        (lambda f: edit_config(f, num_labels=10**6), "num_labels"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json is damaged: it is no JSON object"),
        (lambda f: (f / "config.json").write_text("[" * 10**5), r"config\.json is damaged: it is nested too deeply"),
        (no_tokenizer, "has no tokenizer"),
        (damage_tokenizer, "the tokenizer in .* cannot be loaded"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "the tokenizer in .* cannot be loaded: TypeError"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be loaded: KeyError 'added_tokens'"),
        (lambda f: large_id(f, "w9"), r"tokenizer\.json is damaged: a token has the id 2147483648, and ids are below"),
        (lambda f: (f / "tokenizer_config.json").write_text("null"), "damaged: it is no JSON object"),
        (lambda f: (f / "generation_config.json").write_text("3"), "generation_config.json is damaged: it is no JSON"),
        (no_config, "it has no config.json"),
        (damage_config, r"config\.json is damaged"),
        (quantized, "holds quantized weights already"),
        (
            lambda f: (f / "decoder.json").write_text("{}"),
            "is a converted decoder: give the checkpoint",
        ),
    ],
)
def test_every_defect_is_one_sentence(folder: Path, damage: object, sentence: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_checkpoint(folder, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_low_rank_deltas_name_no_base_that_can_be_no_path(tmp_path: Path) -> None:
    told = {"peft_type": "LORA", "base_model_name_or_path": "a\0b", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"is no plain low-rank delta: base_model_name_or_path: .*\.$"):
        read_delta(tmp_path)


def test_an_unknown_family_is_named_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="gpt2")
    with pytest.raises(UnsupportedArchitectureError, match=r"'gpt2'.*llama"):
        load_checkpoint(folder, torch.float32)


def test_code_of_a_checkpoint_is_never_run(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    load_checkpoint(folder, torch.float32)  # the built-in class of the family is used


def test_a_missing_folder_and_a_file_are_told_apart(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(folder / "nowhere" / "deep", torch.float32)
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        checkpoint_digest(folder / "model.safetensors")


@pytest.mark.parametrize("command", ["the checkpoint itself", "its limits"])
def test_a_mistyped_path_is_not_taken_for_a_hub_id(
    original: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def asked(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    monkeypatch.chdir(original.parent.parent)
    mistyped = f"{original.parent.name}/{original.name}y"
    with pytest.raises(
        CheckpointError, match=f"does not exist; nearest: {original.parent.name}/tiny;.*is {mistyped}@main"
    ) as caught:
        config_of(mistyped) if command == "its limits" else load_checkpoint(mistyped, torch.float32)
    assert "checkpoint:" not in str(caught.value)


def test_an_unreachable_hub_says_how_to_give_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError, match=r"is no folder here, and the hub cannot be reached.*give its folder"
    ) as caught:
        load_checkpoint("owner/model", torch.float32)
    assert "\n" not in str(caught.value)


def test_each_kind_of_folder_says_what_to_run_first(folder: Path, tmp_path: Path) -> None:
    for kind, file in (("quantized", "rotquant.json"), ("decoder", "decoder.json")):
        shutil.copytree(folder, tmp_path / kind)
        (tmp_path / kind / "model.safetensors").rename(tmp_path / kind / f"{kind}.safetensors")
        (tmp_path / kind / file).write_text("{}")
    expected = {
        ("copy", "quantized"): f"is a plain checkpoint: quantize it first, `rotquant quantize {folder} -o quantized`",
        ("copy", "decoder"): "is a plain checkpoint: quantize and convert it first",
        ("quantized", "decoder"): "is a quantized model: convert it first, `rotquant convert ",
        ("quantized", "plain"): "holds quantized weights already",
        ("decoder", "plain"): "give the checkpoint that it was made from",
        ("decoder", "quantized"): "give the quantized folder that it was made from",
        ("nowhere", "plain"): "does not exist",
    }
    for (place, wanted), sentence in expected.items():
        with pytest.raises(CheckpointError, match=sentence):
            check_kind(tmp_path / place, wanted)
    for place, kind in (("copy", "plain"), ("quantized", "quantized"), ("decoder", "decoder")):
        check_kind(tmp_path / place, kind)


def test_every_rotary_embedding_of_transformers_is_known() -> None:
    assert {*ROPE_FIELDS} == {"default", "su", *ROPE_INIT_FUNCTIONS}
