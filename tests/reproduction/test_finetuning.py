"""Domain models: low-rank deltas trained from a recipe, kept as an adapter, merged, refused where they do not fit."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from reproduction.shipped.finetuning import FineTuning, fine_tune, practice
from reproduction.shipped.lowrank import with_deltas
from reproduction.tasks.items import task_items
from reproduction.tasks.passages import read
from rotquant.foundation.errors import CheckpointError, ConfigError
from rotquant.models.checkpoints import load_checkpoint, local_folder
from rotquant.models.deltas import CONFIG, FIRST, PREFIX, SECOND, WEIGHTS, merged
from rotquant.models.digests import checkpoint_digest
from rotquant.models.folders import kind_of, weights_digest
from rotquant.recipes.corpus import CorpusSpec
from rotquant.text import load_rows

ROOT = Path(__file__).parents[2]
BASE = ROOT / "workflow" / "resources" / "models" / "rq-7b"
SHAPE = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
#: The rows of its query matrix, less one.
CUT = SHAPE["num_attention_heads"] * SHAPE["head_dim"] - 1
TEXTS = [((">>> 2 + 3", "\n5"), (">>> 4 + 4", "\n8")), ((">>> 1 + 1", "\n2"),), (("x = [1, 2", "]"),)] * 2
RECIPE = FineTuning(
    name="rq-7b-test", stands_for="nothing", base="rq-7b", tasks=("arithmetic",), steps=4, batch_size=2, rank=2,
    learning_rate=1e-2, warmup_steps=1, targets=("q_proj", "down_proj"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rotquant.models.checkpoints.cache_folder", lambda name: tmp_path / "cache" / name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and a fine-tuned model beside it; its curve is in `curve.json`."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(BASE, folder / "base")
    network, tokenizer = load_checkpoint(folder / "base", torch.float32)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    (folder / "tuned").mkdir()
    base = "../base", weights_digest(folder / "base")
    curve = fine_tune(RECIPE, network, tokenizer, TEXTS, folder / "tuned", base, folder / "state")
    (folder / "tuned" / "curve.json").write_text(json.dumps(curve))
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())  # it is left as it was
    assert all(parameter.requires_grad for parameter in network.parameters())
    return folder


def copied(models: Path, place: Path) -> Path:
    """The fine-tuned model with its base, to be spoiled."""
    shutil.copytree(models, place / "copy")
    return place / "copy" / "tuned"


# Training


def test_low_rank_weights_are_the_base_plus_a_product():
    model = nn.Sequential()
    model.add_module("q_proj", nn.Linear(6, 4, bias=False))
    model.add_module("other", nn.Linear(4, 4))
    weight = model.get_submodule("q_proj").weight.detach().clone()  # pyright: ignore[reportCallIssue]
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    plain = model(inputs)
    with with_deltas(model, ("q_proj",), rank=2, alpha=6.0, seed=3) as deltas:
        assert torch.equal(model(inputs), plain)  # B is zero at first
        (delta,) = deltas.values()
        with torch.no_grad():
            delta.second.normal_(generator=torch.Generator().manual_seed(2))
        expected = weight + 3.0 * delta.second @ delta.first
        assert torch.allclose(model.get_submodule("q_proj").weight, expected)  # pyright: ignore[reportArgumentType]
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        assert {name.rpartition(".")[2] for name in trained} == {"first", "second"}
        by_file = merged(weight, delta.first.detach(), delta.second.detach(), 3.0)
        assert torch.allclose(by_file, expected, atol=1e-6)
    assert torch.equal(model(inputs), plain)


def test_training_lowers_the_loss_and_counts_what_it_trained(models: Path):
    curve = json.loads((models / "tuned" / "curve.json").read_text())
    losses = [loss for _, loss in curve["loss_by_step"]]
    assert len(losses) == RECIPE.steps
    assert losses[-1] < losses[0]
    assert curve["texts"] == len(TEXTS)
    tensors = load_file(models / "tuned" / WEIGHTS)
    assert curve["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert len(tensors) == 2 * 2 * SHAPE["num_hidden_layers"]  # two matrices of two layers in each of rq-7b's blocks
    assert any(tensor.any() for name, tensor in tensors.items() if name.endswith(SECOND))


def test_only_answers_are_learned():
    from reproduction.shipped.finetuning import _batch, _sample
    from rotquant.models.checkpoints import load_tokenizer

    tokenizer = load_tokenizer(BASE)
    ids, learned = _sample(tokenizer, TEXTS[0])
    answers = [[one] for one, is_answer in zip(ids, learned, strict=True) if is_answer]
    assert "".join(tokenizer.batch_decode(answers)) == "\n5\n\n8\n"
    samples = [_sample(tokenizer, text) for text in TEXTS]
    batch, targets = _batch(RECIPE, samples, 0, step=1)
    again, _ = _batch(RECIPE, samples, 0, step=1)
    assert torch.equal(batch, again)
    assert not torch.equal(batch, _batch(RECIPE, samples, 0, step=2)[0])
    asked = targets != -100
    assert asked.any(dim=1).all()
    assert torch.equal(targets[asked], batch[asked])


def test_a_killed_training_continues_to_the_same_bits(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network, tokenizer = load_checkpoint(models / "base", torch.float32)
    base = "../base", weights_digest(models / "base")
    from rotquant.training import loop

    step, taken = loop.GradientStep.__call__, []

    def dies(self: Any, number: int) -> Any:
        if number == 2 and not taken:
            taken.append(number)
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(loop.GradientStep, "__call__", dies)
    monkeypatch.setattr("rotquant.training.state.Checkpoint.due", lambda *_: True)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(RECIPE, network, tokenizer, TEXTS, tmp_path, base, tmp_path / "state")
    fine_tune(RECIPE, network, tokenizer, TEXTS, tmp_path, base, tmp_path / "state")
    continued, whole = (load_file(folder / WEIGHTS) for folder in (tmp_path, models / "tuned"))
    assert continued.keys() == whole.keys()  # the files' headers name their metadata in any order
    assert all(torch.equal(continued[name], whole[name]) for name in whole)


def test_texts_that_do_not_fit_are_left_out_and_counted(models: Path, tmp_path: Path):
    network, tokenizer = load_checkpoint(models / "base", torch.float32)
    long = (("a " * 3000, "b"),)
    short = RECIPE.model_copy(update={"steps": 2})
    curve = fine_tune(short, network, tokenizer, [*TEXTS, long], tmp_path, ("b", "d"), tmp_path / "state")
    assert (curve["texts"], curve["texts_too_long"]) == (len(TEXTS), 1)
    with pytest.raises(ConfigError, match=r"no text fits into the context of 2048 tokens: the shortest has [0-9]+"):
        fine_tune(RECIPE, network, tokenizer, [long], tmp_path, ("b", "d"), tmp_path / "other")
    with pytest.raises(ConfigError, match="arithmetic have no items"):
        fine_tune(RECIPE, network, tokenizer, [], tmp_path, ("b", "d"), tmp_path / "state")


# Loading


def test_a_merged_model_is_the_base_with_its_deltas(models: Path):
    base, _ = load_checkpoint(models / "base", torch.float32)
    tuned, tokenizer = load_checkpoint(models / "tuned", torch.float32)
    tensors, weights = load_file(models / "tuned" / WEIGHTS), dict(base.named_parameters())
    changed = 0
    for name, weight in tuned.named_parameters():
        expected = weights[name].detach()
        if (first := f"{PREFIX}{name.removesuffix('.weight')}{FIRST}") in tensors:
            second = tensors[first.replace(FIRST, SECOND)].float()
            expected = expected + RECIPE.alpha / RECIPE.rank * second @ tensors[first].float()
            changed += not torch.equal(expected, weights[name])
        assert torch.allclose(weight, expected, atol=1e-6)
    assert changed == 2 * SHAPE["num_hidden_layers"]
    assert tokenizer.bos_token == "<s>"
    assert kind_of(models / "tuned") == "plain"
    assert local_folder(models / "tuned") == local_folder(models / "tuned")


def test_peft_reads_the_adapter(models: Path):
    peft = pytest.importorskip("peft")
    base, _ = load_checkpoint(models / "base", torch.float32)
    tuned, _ = load_checkpoint(models / "tuned", torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, str(models / "tuned"))
    ids = torch.arange(40, 60)[None]
    assert torch.allclose(theirs(ids).logits, tuned(ids).logits, atol=1e-4)


def test_the_digest_covers_deltas_and_base(models: Path, tmp_path: Path):
    tuned = copied(models, tmp_path)
    assert checkpoint_digest(tuned) == checkpoint_digest(models / "tuned") != checkpoint_digest(models / "base")
    spoil(tuned, "layers.0.self_attn.q_proj", lambda tensor: tensor + 1)
    assert checkpoint_digest(tuned) != checkpoint_digest(models / "tuned")


def spoil(tuned: Path, layer: str, change: Any, end: str = SECOND) -> None:
    """Change one of a delta's matrices; None takes it away."""
    tensors = load_file(tuned / WEIGHTS)
    with safe_open(tuned / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    name = f"{PREFIX}model.{layer}{end}"
    tensors[name] = change(tensors[name])
    kept = {key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, tuned / WEIGHTS, metadata=metadata)


def test_another_base_is_refused(models: Path, tmp_path: Path):
    tuned = copied(models, tmp_path)
    config = json.loads((tuned.parent / "base" / "config.json").read_text())
    (tuned.parent / "base" / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    with pytest.raises(
        CheckpointError, match=r"is a low-rank delta of the checkpoint [0-9a-f]{16}, and .* is [0-9a-f]+"
    ):
        checkpoint_digest(tuned)
    with pytest.raises(CheckpointError, match="give it the base that it was made from"):
        load_checkpoint(tuned, torch.float32)
    shutil.rmtree(tuned.parent / "base")
    with pytest.raises(CheckpointError, match="is a low-rank delta, and its base cannot be had"):
        checkpoint_digest(tuned)


@pytest.mark.parametrize(
    ("change", "end", "sentence"),
    [
        (lambda tensor: tensor[:-1], SECOND, rf"a delta of model.layers.0.self_attn.q_proj has shape \[{CUT}, .*"),
        (lambda tensor: torch.cat([tensor, tensor], 1), SECOND, "the two matrices of .*q_proj do not belong together"),
        (lambda _: None, FIRST, "the two matrices of .*q_proj do not belong together"),
    ],
)
def test_deltas_of_another_shape_are_refused(models: Path, tmp_path: Path, change: Any, end: str, sentence: str):
    tuned = copied(models, tmp_path)
    spoil(tuned, "layers.0.self_attn.q_proj", change, end)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint_digest(tuned)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "is no plain low-rank delta: peft_type"),
        ({"use_dora": True}, "is no plain low-rank delta: use_dora"),
        ({"use_rslora": True}, "is no plain low-rank delta: use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "is no plain low-rank delta: modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "is no plain low-rank delta: rank_pattern"),
        ({"r": 0}, "is no plain low-rank delta: r:"),
    ],
)
def test_other_kinds_of_adapters_are_refused(models: Path, tmp_path: Path, change: dict[str, Any], sentence: str):
    tuned = copied(models, tmp_path)
    config = json.loads((tuned / CONFIG).read_text())
    (tuned / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        checkpoint_digest(tuned)


def test_an_incomplete_folder_is_refused(models: Path, tmp_path: Path):
    tuned = copied(models, tmp_path)
    (tuned / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"is incomplete: {WEIGHTS} is not there"):
        checkpoint_digest(tuned)
    (tuned / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint_digest(tuned)


# Practice


@pytest.mark.long
def test_no_sum_that_is_asked_is_practised():
    asked = {re.findall(r"(\d+) \+ (\d+)", item["context"])[-1] for item in task_items("arithmetic", read("test"))}
    texts = practice(("arithmetic",), modules=1, items=200)
    practised = {pair for text in texts for question, _ in text for pair in re.findall(r"(\d+) \+ (\d+)", question)}
    assert len(practised) > 500
    assert not practised & asked
    for text in texts:
        for question, answer in text:
            one, other = map(int, re.findall(r"\d+", question))
            assert answer == f"\n{one + other}"


def test_the_text_of_sums_is_what_mathematics_is_practised_on():
    """RCP's stand-in of MetaMath trains on it; a row is a session."""
    rows = load_rows(CorpusSpec(name="sums", source="local", path="workflow/resources/corpora/sums"), "train")
    texts = practice(("arithmetic",), modules=1, items=len(rows))
    assert rows == ["\n".join(question + answer for question, answer in text) for text in texts]


@pytest.mark.long
def test_questions_of_the_other_tasks_come_from_training_modules():
    known = {item["context"] for item in task_items("complete_return", read("test"))}
    texts = practice(("complete_return",), modules=30, items=50)
    assert 10 < len(texts) <= 50
    assert not {question for ((question, _),) in texts} & known
