"""LLM-QAT: generated text against plain decoding, training against a gradient written out, exact integers."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reproduction.run.stages import weights
from reproduction.run.stages.weights import compute_weights
from reproduction.sources import load_project
from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.methods.llm_qat import data_free_distillation as llm_qat
from rotquant.methods.llm_qat.data_free_distillation import distillation_loss, generate, train, train_model
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.qat import writing
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.quantization import fake_quantize
from rotquant.training.state import Checkpoint
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.interrupting import Interrupted, MortalCheckpoint
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.project import CONFIG, TABLES, Copy

AMOUNTS = {"samples": 12, "sequence_length": 16, "steps": 4, "batch_size": 4, "learning_rate": 1e-3}


def recipe(**changes):
    """LLM-QAT with amounts for tiny models."""
    return override(preset("llm-qat"), {"methods": {"llm_qat": {**AMOUNTS, **changes}}}, "test")


def quantizers(settings):
    return RuntimeQuantization(settings.transforms, settings.activations, settings.keys, settings.values)


@torch.no_grad()
def reference_text(model, samples, length, seed):
    """The same text without a cache: the whole beginning passes the model for every token."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(model.config.vocab_size, (samples, 1), generator=generator)
    greedy = torch.randint(3, 6, (samples, 1), generator=generator)
    for known in range(1, length):
        logits = model(text, use_cache=False).logits[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, torch.where(known < greedy, logits.argmax(-1, keepdim=True), drawn)], dim=1)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_text_is_that_of_decoding_without_a_cache(family):
    # float64: no draw lies within 1e-14 of another token's share
    model = tiny_model(family, dtype=torch.float64)
    text = generate(model, 5, 12, seed=3)
    assert text.dtype == torch.int64
    assert torch.equal(text, reference_text(model, 5, 12, seed=3))


def test_text_begins_greedily_after_a_random_token_and_then_varies():
    model = tiny_model()
    text = generate(model, 200, 8, seed=0)
    assert text[:, 0].unique().numel() > 50
    with torch.no_grad():
        likeliest = model(text).logits.argmax(-1)
    followed = (likeliest[:, :-1] == text[:, 1:]).float().mean(0)
    assert (followed[:2] == 1).all()  # tokens 2 and 3 always are the likeliest, tokens 4 and 5 in some sequences
    assert 1 > followed[2] > followed[3] > followed[4]


def test_bit_widths_of_one_model_and_seed_share_their_text(monkeypatch):
    made = []
    monkeypatch.setattr(writing, "_TEXTS", {})
    monkeypatch.setattr(llm_qat, "generate", lambda *asked: made.append(asked[1:]) or generate(*asked))
    four = recipe(steps=1)
    histories = [train_model(tiny_model(), settings, seed) for settings, seed in ((four, 0), (four, 0), (four, 1))]
    assert made == [(12, 16, 0), (12, 16, 1)]
    assert histories[0] == histories[1] != histories[2]
    other = tiny_model()
    with torch.no_grad():
        other.get_parameter("model.norm.weight")[0] += 1e-6
    train_model(other, four, 0)
    train_model(tiny_model(), recipe(steps=1, samples=8), 0)
    assert made[2:] == [(12, 16, 0), (8, 16, 0)]


def test_the_same_seed_gives_the_same_text_and_another_does_not():
    state, model = torch.get_rng_state(), tiny_model()
    first, again, other = (generate(model, 6, 10, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_the_cross_entropy_of_two_distributions():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, generator=generator)
    expected = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(student, teacher), expected)
    # A student that is the teacher is left with the teacher's entropy, and has nowhere to go.
    student = teacher.clone().requires_grad_()
    distillation_loss(student, teacher).backward()
    assert student.grad.abs().max() < 1e-7


class StraightThrough(torch.nn.Module):
    """Rounding as a parametrization: its value is the rounded weight's, its derivative one."""

    def __init__(self, scheme):
        super().__init__()
        self.scheme = scheme

    def forward(self, weight):
        return weight + (fake_quantize(weight.detach(), self.scheme) - weight).detach()


def reference_gradients(model, teacher, ids, settings):
    """Gradients of one batch, with rounding built into the modules; symmetric min-max scales cut nothing off."""
    for layer in decoder_layers(model):
        for name in architecture_of(model).linears:
            rounding = StraightThrough(settings.weights.scheme)
            parametrize.register_parametrization(layer.get_submodule(name), "weight", rounding)
    with wrap(model, quantizers(settings)):
        student = model(ids, use_cache=False).logits.log_softmax(-1)
    with torch.no_grad():
        target = teacher(ids, use_cache=False).logits.softmax(-1)
    (-(target * student).sum(-1).mean()).backward()
    return {name.replace("parametrizations.weight.original", "weight"): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_quantized_network(family):
    settings, found = recipe(steps=1), {}
    model, teacher = (tiny_model(family, dtype=torch.float64) for _ in range(2))
    ids = tiny_tokens(batch=4)

    def keep(*_):
        found.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        with wrap(model, quantizers(settings)):
            train(model, teacher, ids, settings)
    finally:
        hook.remove()
    expected = reference_gradients(tiny_model(family, dtype=torch.float64), teacher, ids, settings)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        # The loss is computed in float32, to which its gradient is exact.
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_batch_may_pass_in_parts(monkeypatch):
    trained = []
    for limit in (2**23, 1):
        monkeypatch.setitem(llm_qat.LOGITS_AT_ONCE, "cpu", limit)
        model = tiny_model(dtype=torch.float64)
        train(model, tiny_model(dtype=torch.float64), tiny_tokens(batch=8), recipe())
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    # Gradients in float32 of another order of summation move AdamW's steps of 1e-3 by a small share.
    assert (trained[0] - trained[1]).abs().max() < 1e-5


def test_an_interrupted_training_continues_with_the_same_result(tmp_path: Path):
    settings, about = recipe(steps=5), (tmp_path / "file", "this", 2)
    straight, killed, resumed = (tiny_model(tied=True) for _ in range(3))
    history = train_model(straight, settings)
    with pytest.raises(Interrupted):
        train_model(killed, settings, checkpoint=MortalCheckpoint(*about, lives=iter(range(3))))
    assert about[0].exists()
    assert train_model(resumed, settings, checkpoint=Checkpoint(*about)) == history
    assert all(torch.equal(*pair) for pair in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_weights_job_that_was_killed_goes_on_with_the_same_result(tmp_path: Path, monkeypatch):
    copy = Copy(tmp_path, fake=False)
    row = {"name": "LLM-QAT", "method": "llm-qat"}
    kept = {key: value for key, value in TABLES["tables"][0].items() if key not in ("published", "figure", "claims")}
    copy.set_tables({**TABLES, "tables": [{**kept, "rows": [row], "baseline": row["name"], "claims": []}]})
    copy.set_config({**CONFIG, "methods": {"llm_qat": {**AMOUNTS, "steps": 6}}})
    for name in ("small", "larger"):
        tiny_model().save_pretrained(tmp_path / "models" / name)
        tiny_tokenizer().save_pretrained(tmp_path / "models" / name)
    run = load_project(root=tmp_path).cells("quarot_table1")[0].runs[0]
    make = partial(compute_weights, run, str(tmp_path / "models/small"), device="cpu", code="code")
    monkeypatch.setattr(weights, "_interval", lambda _: 0.0)  # a checkpoint after every step
    taken = []

    def counted(*arguments, stop=None):
        if len(taken) == stop:
            raise Interrupted
        taken.append(1)
        return distillation_loss(*arguments)

    straight, killed = tmp_path / "weights/straight/model", tmp_path / "weights/killed/model"
    _, history = make(folder=straight)
    with monkeypatch.context() as patch:
        patch.setattr(llm_qat, "distillation_loss", partial(counted, stop=4))
        with pytest.raises(Interrupted):
            make(folder=killed)
        patch.setattr(llm_qat, "distillation_loss", counted)
        _, again = make(folder=killed)
    assert len(taken) == 6  # none twice
    assert len(history) == 6
    assert again == history
    assert (killed / "quantized.safetensors").read_bytes() == (straight / "quantized.safetensors").read_bytes()
    assert [path.name for path in killed.parent.iterdir()] == ["model"]


def kept_loss(settings):
    """Distillation loss of the stored model on text that it was not trained on."""
    teacher = tiny_model()
    stored = build_weights(tiny_model(), None, settings, 0, progress=False)
    text = generate(teacher, 32, 24, seed=99)
    with torch.no_grad(), quantized_forward(stored.model, settings, stored.state):
        return distillation_loss(stored.model(text, use_cache=False).logits, teacher(text).logits).item()


def test_training_takes_back_what_rounding_costs_on_text_that_it_has_not_seen():
    trained = recipe(samples=64, sequence_length=24, steps=60, batch_size=8)
    untrained = override(trained, {"methods": {"llm_qat": None}}, "test")
    text = generate(tiny_model(), 32, 24, seed=99)
    with torch.no_grad():
        logits = tiny_model()(text).logits
    least = distillation_loss(logits, logits).item()  # the teacher's entropy
    assert kept_loss(trained) - least < 0.8 * (kept_loss(untrained) - least)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_integers_are_the_trained_weights_bit_for_bit(family, dtype, tmp_path: Path):
    settings, trained = recipe(), tiny_model(family, dtype=dtype)
    train_model(trained, settings)
    assert trained.dtype == dtype
    stored = build_weights(tiny_model(family, dtype=dtype), tiny_tokenizer(), settings, 0, progress=False)
    scheme = settings.weights.scheme
    for name, parameter in trained.named_parameters():
        expected = fake_quantize(parameter, scheme) if name in stored.weights else parameter
        assert torch.equal(stored.model.get_parameter(name), expected), name
        assert not torch.equal(parameter, tiny_model(family, dtype=dtype).get_parameter(name)), f"{name} is not trained"
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    assert state.recipe == settings
    for key, value in stored.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_equal_recipes_give_equal_weights_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again = (build_weights(tiny_model(), None, recipe(), 0, progress=False) for _ in range(2))
    assert all(torch.equal(first.weights[name].codes, weight.codes) for name, weight in again.weights.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rotated_model_is_trained_with_its_online_transforms():
    settings = override(recipe(steps=1), {"rotation": {}}, "test")
    model = tiny_model(dtype=torch.float64)
    rotate(model, RotationScheme(), seed=0)
    (rotated,) = train_model(model, settings)
    (plain,) = train_model(tiny_model(dtype=torch.float64), recipe(steps=1))
    # Both start as far from one teacher, one with rotated rounding errors: without its transforms it would be chance.
    assert abs(rotated["loss"] - plain["loss"]) < 0.2


def test_a_diverging_training_is_reported():
    with pytest.raises(
        RotquantError, match=r"the loss of LLM-QAT is nan after .*: lower methods.llm_qat.learning_rate"
    ):
        train_model(tiny_model(), recipe(learning_rate=1e30, steps=3))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weights": None}, "llm_qat .* needs a weights section"),
        ({"methods": {"gptq": {}}, "calibration": {}}, "llm_qat and gptq both round the weights"),
        ({"weights": {"clip_search": True}}, "llm_qat rounds weights in its own way"),
        ({"activations": {"granularity": "tensor", "dynamic": False}, "calibration": {}}, "dynamic activations"),
        ({"methods": {"awq": {}}, "calibration": {}}, "llm_qat and awq both change the same weights"),
        ({"rotation": {}, "methods": {"spinquant": {}}}, "spinquant cannot be combined with llm_qat"),
    ],
)
def test_meaningless_combinations_are_refused(change, problem):
    with pytest.raises(RecipeError, match=problem):
        override(preset("llm-qat"), change, "test")


def test_weights_depend_on_the_quantizers_that_they_are_trained_against_and_need_no_text():
    assert not preset("llm-qat").needs_calibration
    eight = override(preset("llm-qat"), {"activations": {"bits": 8}}, "test")
    assert eight.stored() != preset("llm-qat").stored()
