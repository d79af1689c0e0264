"""Training: the loss falls, an interruption changes nothing, and what is written can be loaded and compared."""

import json

import pytest
import torch
from pydantic import ValidationError

from reproduction.corpora import MODULES
from reproduction.shipped.data import prepare_data
from reproduction.shipped.recipe import TrainingConfig
from reproduction.shipped.trainer import Trainer, build_model
from reproduction.shipped.trainer import train_model as train
from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.models.architectures import architecture_of
from tests.helpers.watching import long_work

RECIPE = {
    "name": "tiny",
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vocab_size": 300,
    "sequence_length": 32,
    "bos_fraction": 0.5,
    "batch_size": 4,
    "steps": 20,
    "warmup_steps": 4,
    "learning_rate": 0.01,
    "log_every": 5,
    "validate_every": 10,
    "validation_windows": 4,
}


#: A Phi-3 of the same widths, and a Llama whose head is its embedding.
VARIANTS = {
    "phi3": {"model_type": "phi3"},
    "tied": {"tie_word_embeddings": True, "head_dim": 16, "rope_theta": 500000.0},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, n in {"train": 400, "validation": 60}.items():
        lines = "".join(f"The {i % 7} quick brown foxes jump over {i % 5} lazy dogs.\n" for i in range(n))
        (folder / f"{split}.txt").write_text(lines)
    return {"name": "foxes", "source": "local", "path": str(folder), "separator": ""}


@pytest.fixture(scope="module")
def config(corpus):
    return TrainingConfig.model_validate({**RECIPE, "corpus": corpus})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def trained(config, data_dir, tmp_path_factory):
    """An uninterrupted training: its folder and its curve."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return folder, train(config, folder, data_dir=data_dir)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_twenty_steps_lower_the_loss_and_the_held_out_perplexity(trained):
    _, curve = trained
    losses = [loss for _, loss in curve["loss_by_step"]]
    assert losses[-1] < losses[0] - 0.5
    assert [step for step, _ in curve["validation_perplexity_by_step"]] == [10, 20]
    assert curve["validation_perplexity"] < 300 * 0.8  # Below a uniform guess over the vocabulary.


def test_an_interrupted_training_ends_in_the_same_bits(config, data_dir, trained, tmp_path):
    folder, curve = trained
    assert train(config, tmp_path / "tiny", data_dir=data_dir, stop_after=7) is None
    assert not (tmp_path / "tiny").exists()
    assert (tmp_path / "tiny.state.safetensors").is_file()
    resumed = train(config, tmp_path / "tiny", data_dir=data_dir)
    assert resumed["loss_by_step"] == [tuple(point) for point in curve["loss_by_step"]]
    ours, theirs = weights(tmp_path / "tiny"), weights(folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not (tmp_path / "tiny.state.safetensors").exists()


def test_a_training_starts_on_shorter_samples_and_counts_their_tokens(config, data_dir, tmp_path):
    short = {"steps": 12, "sequence_length": 8, "batch_size": 16}
    recipe = TrainingConfig.model_validate({**config.model_dump(), "short_start": short})
    data = prepare_data(recipe, data_dir)
    trainer, plain = (Trainer(one, data, "cpu", compile=False) for one in (recipe, config))
    assert [tuple(trainer.draw_batch(step).shape) for step in (0, 11, 12, 19)] == [(16, 9), (16, 9), (4, 33), (4, 33)]
    assert trainer.draw_batch(12).equal(plain.draw_batch(12))
    assert train(recipe, tmp_path / "tiny", data_dir=data_dir, stop_after=11) is None  # interrupted within the start
    resumed, whole = (train(recipe, tmp_path / name, data_dir=data_dir) for name in ("tiny", "whole"))
    assert resumed["loss_by_step"] == whole["loss_by_step"]
    assert resumed["tokens"] == recipe.tokens == 12 * 16 * 8 + 8 * 4 * 32


def test_training_says_how_far_it_is_with_its_last_loss_and_perplexity(
    config, data_dir, trained, tmp_path, monkeypatch, capsys
):
    with long_work(monkeypatch):
        train(config, tmp_path / "tiny", data_dir=data_dir, stop_after=12)
    said = capsys.readouterr().err
    _, curve = trained
    losses, perplexities = dict(curve["loss_by_step"]), dict(curve["validation_perplexity_by_step"])
    assert f"training tiny: step 12 of 12, loss {losses[10]:.3f}, perplexity {perplexities[10]:.2f}, " in said


def test_a_resume_file_of_another_recipe_is_refused(config, data_dir, tmp_path):
    train(config, tmp_path / "tiny", data_dir=data_dir, stop_after=1)
    other = config.model_copy(update={"learning_rate": 0.02})
    with pytest.raises(ResultError, match="belongs to another learning"):
        train(other, tmp_path / "tiny", data_dir=data_dir)


def test_the_folder_is_a_bf16_llama_with_its_tokenizer_recipe_and_card(config, trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, curve = trained
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert not model.config.tie_word_embeddings
    assert model.config.head_dim == 8
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    assert tokenizer("The")["input_ids"][0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert TrainingConfig.model_validate(json.loads((folder / "recipe.json").read_text())) == config
    assert json.loads((folder / "curve.json").read_text())["validation_perplexity"] == curve["validation_perplexity"]
    card = (folder / "MODEL_CARD.md").read_text()
    assert card.startswith("# tiny\n")
    assert card.index("<!-- diagnose:start -->") < card.index("<!-- diagnose:end -->")


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_architectures_train_and_load_as_what_the_recipe_says(variant, config, data_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = {"model": config.model.model_copy(update=VARIANTS[variant]), "steps": 12}
    curve = train(config.model_copy(update=settings), tmp_path / variant, data_dir=data_dir)
    (_, first), *_, (_, last) = curve["loss_by_step"]
    assert last < first
    model = AutoModelForCausalLM.from_pretrained(tmp_path / variant)
    shape = settings["model"]
    assert model.config.model_type == shape.model_type
    assert model.config.rope_parameters["rope_theta"] == shape.rope_theta
    assert architecture_of(model).head_dim == shape.head_dim
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == shape.tie_word_embeddings
    assert getattr(model.config, "sliding_window", None) is None
    assert model.config.pad_token_id is None


def test_the_tokenizer_gives_back_any_text(config, data_dir):
    tokenizer = prepare_data(config, data_dir).tokenizer
    text = "  Indented\n\tcode: naïve  日本 \u200b🦊 <s> not a tag"
    plain = text.replace("<s>", "(s)")  # The spelling of a special token is that token, as in Llama's tokenizer.
    assert tokenizer.decode(tokenizer(plain, add_special_tokens=False)["input_ids"]) == plain


def test_the_tokenizer_and_the_encoded_text_are_the_same_every_time(config, data_dir, tmp_path):
    first, second = prepare_data(config, data_dir), prepare_data(config, tmp_path)
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    assert (first.train == second.train).all()
    assert first.provenance == second.provenance


def test_samples_depend_on_seed_and_step_alone_and_the_asked_share_begins_with_bos(config, data_dir):
    data = prepare_data(config, data_dir)
    large = config.model_copy(update={"batch_size": 2000})
    torch.manual_seed(0)
    batch = Trainer(large, data, "cpu", compile=False).draw_batch(3)
    torch.manual_seed(1)
    trainer = Trainer(large, data, "cpu", compile=False)
    assert torch.equal(batch, trainer.draw_batch(3))
    assert not torch.equal(batch, trainer.draw_batch(4))
    assert batch.shape == (2000, config.sequence_length + 1)
    share = (batch[:, 0] == data.tokenizer.bos_token_id).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.06)  # Five standard deviations of 2000 fair draws.


def test_initial_weights_depend_on_the_seed_and_leave_global_random_state_alone(config):
    before = torch.get_rng_state()
    first, again = build_model(config), build_model(config)
    other = build_model(config.model_copy(update={"seed": 1}))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_learning_rate_warms_up_linearly_and_ends_at_its_floor(config):
    rates = [config.learning_rate_at(step) for step in range(config.steps + 1)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.01 * config.final_learning_rate_ratio)


def test_a_recipe_file_with_an_unknown_or_impossible_key_names_it(tmp_path):
    file = tmp_path / "recipe.yaml"
    for text, match in {
        "name: x\nstepz: 3": "stepz|model",
        "name: [": "not valid YAML",
        "name: x\nmodel: {hidden_size: -1}": r"model\.hidden_size",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=match):
            TrainingConfig.from_yaml(file)
    with pytest.raises(ConfigError, match="does not exist"):
        TrainingConfig.from_yaml(tmp_path / "absent.yaml")
    for match, change in {
        "multiple of num_key_value_heads": {"num_key_value_heads": 3},
        "must be the hidden_size of a phi3 model": {"model_type": "phi3", "head_dim": 16},
        "exceeds model.max_position_embeddings 4": {"max_position_embeddings": 4},
    }.items():
        with pytest.raises(ValidationError, match=match):
            TrainingConfig.model_validate({**RECIPE, "model": {**RECIPE["model"], **change}})
    for match, change in {"leaves none of the 20 steps": {"steps": 20}, "exceeds": {"sequence_length": 4096}}.items():
        short = {"steps": 10, "sequence_length": 8, "batch_size": 4, **change}
        with pytest.raises(ValidationError, match=match):
            TrainingConfig.model_validate({**RECIPE, "short_start": short})


@pytest.mark.parametrize("name", ["rq-7b", "rq-13b", "rq-70b", "rq-phi3", "rq-llama3", "rq-qwen2"])
def test_a_shipped_model_is_what_its_recipe_says(name):
    from pathlib import Path

    root = Path(__file__).parents[2]
    config = TrainingConfig.from_yaml(root / "config" / "training" / f"{name}.yaml")
    folder = root / "workflow" / "resources" / "models" / name
    assert TrainingConfig.model_validate(json.loads((folder / "recipe.json").read_text())) == config
    assert config.corpus == MODULES
    expected = {parameter: tensor.shape for parameter, tensor in build_model(config).state_dict().items()}
    if config.model.tie_word_embeddings:
        del expected["lm_head.weight"]  # A file of safetensors holds a shared weight once.
    stored = weights(folder)
    assert {parameter: tensor.shape for parameter, tensor in stored.items()} == expected
    assert all(tensor.dtype == torch.bfloat16 and torch.isfinite(tensor).all() for tensor in stored.values())
