"""Self-distillation: its gradients against quantizers built into the modules, kills, stops, and what is stored."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotquant.foundation.environment import SHARED_TEXTS
from rotquant.foundation.errors import RecipeError, RotquantError
from rotquant.models.architectures import embedding, lm_head
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import on_device
from rotquant.qat import training, writing
from rotquant.qat.engine import Engine
from rotquant.qat.loss import cakld_reference
from rotquant.qat.steps import BestParameters
from rotquant.qat.student import Distillation, linears_of
from rotquant.qat.training import Training
from rotquant.qat.writing import write, written_once
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.tensors.codebook_compression import in_float16
from rotquant.training.state import Checkpoint
from rotquant.weights.build import quantized_forward
from rotquant.weights.context import QuantizationContext
from tests.helpers.cases import each_once, one_in, only
from tests.helpers.interrupting import Interrupted, MortalCheckpoint
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.offloading import only_what_is_fetched
from tests.helpers.qat import KINDS, TEXT, build, name_of, recipe


def begun(of, model, engine=None):
    """A training before its first step, in a model that is rotated as the recipe says."""
    if of.rotation is not None:
        rotate(model, of.rotation, 0)
    context = QuantizationContext(model, of, None, 0, torch.device("cpu"), None, texts={name_of(of): TEXT})
    return Training(context, of.methods[name_of(of)], engine or Engine(torch.device("cpu")))


class Built(torch.nn.Module):
    """A quantizer as a parametrization."""

    def __init__(self, quantizer):
        super().__init__()
        self.quantizer = quantizer

    def forward(self, weight):
        return self.quantizer(weight)


def reference_gradients(of, family, quantizers, confidence):
    """Gradients of the first batch of all samples by autograd, with quantizers as parametrizations and whole logits."""
    student, teacher = (tiny_model(family, dtype=torch.float64) for _ in range(2))
    for model in (student, teacher):
        if of.rotation is not None:
            rotate(model, of.rotation, 0)
    for index, name, layer in linears_of(student):
        parametrize.register_parametrization(layer, "weight", Built(quantizers[index, name]))
    running = RuntimeQuantization(of.transforms, of.activations, of.keys, of.values)
    with wrap(student, running), wrap(teacher, RuntimeQuantization(of.transforms)):
        with torch.no_grad():
            target = teacher(TEXT, use_cache=False).logits
        cakld_reference(student(TEXT, use_cache=False).logits, target, confidence).loss.backward()

    def plain(name):
        name = name.replace("parametrizations.weight.original", "weight")
        return name.replace("parametrizations.weight.0.quantizer", "quantizer")

    return {plain(name): parameter.grad for name, parameter in student.named_parameters()}


@pytest.mark.parametrize(("family", "kind"), each_once(FAMILIES, ["ldp", "nf3_ldp", "learned_range"]))
def test_gradients_are_those_of_the_quantized_network(family, kind):
    of, found = recipe(kind, epochs=1, batch_size=8, confidence=0.3), {}
    model = tiny_model(family, dtype=torch.float64)
    work = begun(of, model)

    def keep(*_):
        for name, parameter in model.named_parameters():
            found[name], parameter.grad = parameter.grad.clone(), None  # the step then changes nothing

    hook = register_optimizer_step_pre_hook(keep)
    try:
        work.run()
    finally:
        hook.remove()
    expected = reference_gradients(of, family, work.quantizers, 0.3)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        # float64, but quantizers compute in float32 with their own parameters, and norms of transformers too
        torch.testing.assert_close(
            gradient.double(), expected[name].double(), rtol=1e-4, atol=1e-7, msg=lambda t, name=name: f"{name}: {t}"
        )


def test_the_confidence_is_the_teachers_and_the_loss_that_of_both_parts():
    of = recipe(epochs=1)
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        shares = model(TEXT).logits[:, :-1].softmax(-1).gather(-1, TEXT[:, 1:, None])
    record = build(of, model).history[0]
    expected = shares.mean().item() * record["reverse_kl"] + (1 - shares.mean().item()) * record["forward_kl"]
    assert record["loss"] == pytest.approx(expected, rel=1e-6)  # the teacher is rotated: norms compute in float32
    other = build(recipe(epochs=1, confidence=0.9)).history[0]
    assert other["loss"] == pytest.approx(0.9 * other["reverse_kl"] + 0.1 * other["forward_kl"], rel=1e-12)


def test_the_confidence_may_be_the_mean_of_the_teachers_largest_probabilities():
    with torch.no_grad():
        largest = tiny_model(dtype=torch.float64)(TEXT).logits[:, :-1].softmax(-1).amax(-1).mean().item()
    record = build(recipe("range", epochs=1, confidence="largest")).history[0]
    expected = largest * record["reverse_kl"] + (1 - largest) * record["forward_kl"]
    assert record["loss"] == pytest.approx(expected, rel=1e-6)


def test_the_teacher_writes_the_text_after_its_first_tokens():
    """Against decoding whole sequences anew for each token, with equal draws."""
    of = recipe("range", temperature=0.7, prompt=6)
    work = begun(of, tiny_model(dtype=torch.float64))
    found = work._written(tiny_model(dtype=torch.float64), TEXT)
    generator, expected = torch.Generator().manual_seed(0), TEXT[:, :6]
    with torch.no_grad():
        while expected.shape[1] < TEXT.shape[1]:
            logits = tiny_model(dtype=torch.float64)(expected).logits[:, -1].float() / 0.7
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            expected = torch.cat([expected, drawn], 1)
    assert torch.equal(found, expected)
    assert not torch.equal(found, TEXT)
    assert torch.equal(begun(recipe("range"), tiny_model())._written(tiny_model(), TEXT), TEXT)
    assert build(of).history != build(recipe("range")).history


def test_the_best_step_on_samples_that_are_not_trained_on_is_kept():
    of = recipe("range", validation_share=0.25, validate_every=1, epochs=8, weight_lr=0.1)
    model = tiny_model(dtype=torch.float64)
    work = begun(of, model)
    losses = [record["validation_loss"] for record in work.run()]
    assert torch.equal(torch.cat([work.validation, work.ids]), TEXT)
    assert len(work.ids) == 6
    best = losses.index(min(losses)) + 1
    # A training that ends at the best step has its weights at the end, and so does the longer one.
    shorter = tiny_model(dtype=torch.float64)
    begun(override(of, {"methods": {name_of(of): {"epochs": best}}}, "test"), shorter).run()
    for parameter, other in zip(model.parameters(), shorter.parameters(), strict=True):
        assert torch.equal(parameter, other)

    kept = BestParameters(model)
    for loss, weight in ((3.0, 1.0), (1.0, 2.0), (2.0, 3.0)):
        with torch.no_grad():
            model.lm_head.weight.fill_(weight)
        kept.measured(loss)
    kept.restore()
    assert (model.lm_head.weight == 2.0).all()


def test_gradients_are_cut_at_a_norm_and_keep_their_direction():
    def gradients(most):
        found, model = [], tiny_model(dtype=torch.float64)
        hook = register_optimizer_step_pre_hook(
            lambda *_: found.extend(p.grad.double().flatten() for p in model.parameters())
        )
        try:
            begun(recipe(epochs=1, batch_size=8, gradient_norm=most), model).run()
        finally:
            hook.remove()
        return torch.cat(found)

    whole = gradients(None)
    assert whole.norm() > 1e-3
    torch.testing.assert_close(gradients(1e-3), whole / whole.norm() * 1e-3, rtol=1e-6, atol=1e-12)
    assert torch.equal(gradients(1e6), whole)


@pytest.mark.parametrize("clips_queries", [False, True])
def test_weights_of_queries_and_keys_are_clipped_by_the_setting_alone(clips_queries):
    work = begun(recipe("range", clips_queries=clips_queries), tiny_model(dtype=torch.float64))
    before = {(index, name): layer.weight.clone() for index, name, layer in linears_of(work.model)}
    work._begin(resumed=False)
    for index, name, layer in linears_of(work.model):
        whole = name.endswith(("q_proj", "k_proj")) and not clips_queries
        assert torch.equal(layer.weight, before[index, name]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_records_say_what_is_learned(kind):
    record = build(recipe(kind, epochs=1), tiny_model(num_layers=1, dtype=torch.float64)).history[-1]
    learned = {
        "range": set(),
        "authors": set(),
        "nf3": set(),
        "learned_range": {"clip_high", "clip_low"},
        "nf3_ldp": {"clip_high", "clip_low", "centre"},
    }.get(kind, {"clip_high", "clip_low", "partition_1", "partition_2", "partition_3", "from_uniform"})
    rates = {"quantizer_gradient"} if learned and kind != "nothing" else set()
    rates |= {"validation_loss"} if kind == "authors" else set()
    assert set(record) == {"step", "loss", "reverse_kl", "forward_kl", "weight_gradient"} | rates | learned
    assert all(0 < record[name] < 1 for name in learned - {"from_uniform"})
    moved = record.get("from_uniform", 0.0) > 1e-6
    assert moved == (kind in ("ldp", "ramp", "n2uq", "factorized"))
    if "partition_1" in learned:
        assert sum(record[f"partition_{place}"] for place in (1, 2, 3)) == pytest.approx(1.0)


def test_a_batch_may_pass_in_parts_and_layers_may_be_computed_again(monkeypatch):
    of, trained = recipe(epochs=2), []
    ways = [(None, 2**31, 2**29), (1, 2**31, 2**29), (3, 0, 2**29), (None, 0, 0)]
    for at_once, kept, states in ways:
        monkeypatch.setitem(training.KEPT_BYTES, "cpu", kept)
        monkeypatch.setitem(training._STATE_BYTES, "cpu", states)
        model = tiny_model(dtype=torch.float64)
        history = begun(of, model, Engine(torch.device("cpu"), at_once)).run()
        trained.append((history[-1]["loss"], torch.nn.utils.parameters_to_vector(model.parameters()).detach()))
    for loss, weights in trained[1:]:
        assert loss == pytest.approx(trained[0][0], rel=1e-6)
        # AdamW's first steps of 1e-3 turn on the signs of gradients; float64 leaves those of next to nothing open.
        assert (weights - trained[0][1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["ldp", "authors"])
def test_moments_and_teacher_on_the_host_change_no_bit_even_of_a_killed_training(kind, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(training._STATE_BYTES, "cpu", 0)  # the teacher runs in every step
    monkeypatch.setattr("rotquant.training.offload._TILE", 512)
    of, about, device = recipe(kind), (tmp_path / "file", "this", 2), torch.device("cpu")
    straight, found = tiny_model(), tiny_model()
    expected = begun(of, straight).run()
    killed = begun(of, tiny_model(), Engine(device, offloads=True))
    killed.context.checkpoint = MortalCheckpoint(*about, lives=iter(range(4)))
    with pytest.raises(Interrupted):
        killed.run()
    resumed = begun(of, found, Engine(device, offloads=True))
    resumed.context.checkpoint = Checkpoint(*about)
    with only_what_is_fetched() as there:
        assert resumed.run() == expected
    assert set(there) == {2}
    assert all(torch.equal(*pair) for pair in zip(straight.parameters(), found.parameters(), strict=True))


# Before the first checkpoint there is none whose content could depend on the kind.
@pytest.mark.parametrize(("kind", "lives"), [*one_in(3, ((kind, 4) for kind in KINDS)), ("ldp", 2)])
def test_a_killed_training_continues_with_equal_bits(kind, lives, tmp_path: Path):
    """Two layers where `lives` is 2; the search before the first step, in each layer, is most of the time."""
    of, about = recipe(kind), (tmp_path / "file", "this", 2)
    model = partial(tiny_model, num_layers=2 if lives == 2 else 1)
    straight = build(of, model())
    with pytest.raises(Interrupted):
        build(of, model(), checkpoint=MortalCheckpoint(*about, lives=iter(range(lives))))
    assert about[0].exists() == (lives == 4)
    resumed = build(of, model(), checkpoint=Checkpoint(*about))
    assert resumed.history == straight.history
    assert len(resumed.history) == (3 if kind == "authors" else 6)  # two samples of eight are held out
    for name, weight in straight.weights.items():
        assert torch.equal(weight.codes, resumed.weights[name].codes)
        assert torch.equal(weight.levels, resumed.weights[name].levels)
    assert all(torch.equal(*pair) for pair in zip(straight.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_and_leaves_the_last_good_checkpoint(broken, tmp_path: Path, monkeypatch):
    of, checkpoint = recipe(), Checkpoint(tmp_path / "file", "this", every=1)
    forward, passed = Distillation.forward, iter(range(3))

    def failing(*arguments):
        found = forward(*arguments)
        if next(passed, None) is not None:
            return found
        if broken == "loss":
            return found._replace(loss=found.loss * torch.nan)
        found.loss.register_hook(lambda gradient: gradient * torch.inf)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "forward", failing)
        with pytest.raises(RotquantError, match=r"gradient is (nan|inf) at step 3: .*weight_lr.*quantizer_lr"):
            build(of, checkpoint=checkpoint)
    assert len(build(of, checkpoint=checkpoint).history) == 6  # from step 3 on, whose beginning is whole
    assert build(of).history == build(of, checkpoint=checkpoint).history


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*one_in(2, ((kind, torch.float32) for kind in KINDS)), ("ldp", torch.float64), ("range", torch.bfloat16)],
)
def test_stored_codes_and_tables_are_the_weights_that_were_trained(kind, dtype):
    of, layers = recipe(kind, epochs=1), 2 if dtype == torch.float64 else 1
    model = tiny_model(num_layers=layers, dtype=dtype)
    work = begun(of, model)
    work.run()
    frozen = {
        (index, name): work.quantizers[index, name].freeze(layer.weight) for index, name, layer in linears_of(model)
    }
    trained = {
        (index, name): work.quantizers[index, name](layer.weight).detach() for index, name, layer in linears_of(model)
    }
    stored = build(of, tiny_model(num_layers=layers, dtype=dtype))
    assert stored.model.dtype == dtype
    for index, name, layer in linears_of(stored.model):
        weight = stored.weights[f"model.layers.{index}.{name}.weight"]
        assert torch.equal(weight.dequantize(dtype), layer.weight)
        assert torch.equal(weight.codes, frozen[index, name].codes)
        assert torch.equal(weight.levels, in_float16(frozen[index, name]).levels)
        # What the kernels read is float16, 11 bits of the largest level of a table.
        largest = trained[index, name].abs().max()
        assert (weight.dequantize(torch.float64) - trained[index, name].double()).abs().max() <= 2**-10 * largest
        assert weight.codes.dtype == torch.uint8
        assert weight.codes.max() < 2**weight.bits


def kept_loss(of):
    """CAKLD of the stored model on text that it was not trained on."""
    stored, text = build(of, tiny_model(), tiny_tokens(batch=64)), tiny_tokens(batch=32, seed=9)
    with torch.no_grad():
        target = tiny_model()(text).logits
        with quantized_forward(stored.model, of, stored.state):
            return cakld_reference(stored.model(text, use_cache=False).logits, target, 0.3).loss.item()


@pytest.mark.parametrize("kind", only(["ldp"], ["range", "nf3_ldp", "ldp"]))
def test_training_takes_back_what_rounding_costs_on_text_that_it_has_not_seen(kind):
    amounts = {"text": {"samples": 64, "sequence_length": 24}, "batch_size": 8, "schedule": "cosine"}
    untrained = kept_loss(recipe(kind, **amounts, epochs=1, weight_lr=1e-12))
    # A tenth at least: four epochs of 64 short samples, from clips that the search has chosen well already.
    assert kept_loss(recipe(kind, **amounts, epochs=4)) < 0.9 * untrained


def test_factorized_weights_are_another_basis_of_the_same_network():
    """The first loss is the fused one's, and gradients are its gradients turned; AdamW then goes other ways."""
    fused, beside = (build(recipe(kind)).history for kind in ("ldp", "factorized"))
    for name in ("loss", "reverse_kl", "forward_kl", "weight_gradient", "quantizer_gradient"):
        assert beside[0][name] == pytest.approx(fused[0][name], rel=1e-5)  # norms compute in float32
    assert beside[-1]["loss"] != pytest.approx(fused[-1]["loss"], rel=1e-5)


def test_factorized_training_leaves_a_model_with_r1_fused():
    of = recipe("factorized", weight_lr=1e-12, quantizer_lr=1e-12)
    fused, beside = (build(of_) for of_ in (recipe("ldp", weight_lr=1e-12, quantizer_lr=1e-12), of))
    for part in (embedding, lm_head):
        torch.testing.assert_close(part(beside.model).weight, part(fused.model).weight, rtol=1e-9, atol=1e-9)


def test_a_tied_embedding_without_rotation_stays_tied():
    stored = build(recipe("range"), tiny_model(tied=True))
    assert lm_head(stored.model).weight is embedding(stored.model).weight


def refusal(changes, base="rcp"):
    with pytest.raises(RecipeError) as error:
        override(preset(base), changes, "test")
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_what_does_not_fit_is_refused_in_one_sentence():
    assert "2 and 3 bits" in refusal({"weights": {"scheme": {"bits": 4}}})
    assert "between two ends" in refusal({"weights": {"scheme": {"symmetric": True}}}, "bitdistiller")
    assert "only 4" in refusal({"methods": {"rcp": {"text": {"samples": 4}}}})
    exact = {"methods": {"rcp": {"quantizer": "lwc_exact"}}, "weights": {"scheme": {"bits": 3}}}
    assert "lwc_exact has 2 bits" in refusal(exact)
    assert "of which 8 are trained on" in refusal({"methods": {"rcp": {"text": {"samples": 10}, "batch_size": 9}}})
    assert "shorter prompts" in refusal({"methods": {"rcp": {"text": {"sequence_length": 32}}}})
    assert "n2uq has 2 bits" in refusal({"methods": {"rcp": {"quantizer": "n2uq"}}, "weights": {"scheme": {"bits": 3}}})
    assert "R1" in refusal({"methods": {"rcp": {"factorized": True}}, "rotation": None})
    assert "clip_search" in refusal({"weights": {"clip_search": True}})
    of = recipe()
    with pytest.raises(RecipeError, match=r"groups of 10 do not divide the 64 features of attention_input"):
        build(override(of, {"weights": {"scheme": {"group_size": 10}}}, "test"))
    with pytest.raises(RecipeError, match="exceed the model's context"):
        build(recipe(text={"samples": 8, "sequence_length": 1000}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_trains_as_the_host_does(kind, dtype):
    of = recipe(kind, temperature=None)  # a GPU draws another text, whose first loss is another by some 5 %
    host, gpu = (build(of, tiny_model(dtype=dtype), device=device) for device in ("cpu", "cuda"))
    # 4-bit inputs beside a border turn: by products in TF32 (2 % of the loss), more by a model of bfloat16, whose
    # student a GPU multiplies in bfloat16 and a CPU in float32.
    tolerance = 5e-2 if dtype == torch.float32 else 0.1
    assert gpu.history[0]["loss"] == pytest.approx(host.history[0]["loss"], rel=tolerance)
    assert gpu.history[-1]["loss"] < gpu.history[0]["loss"]
    for index, name, layer in linears_of(gpu.model):
        weight = gpu.weights[f"model.layers.{index}.{name}.weight"]
        assert weight.codes.device.type == layer.weight.device.type == "cpu"
        assert torch.equal(weight.dequantize(dtype), layer.weight)


@pytest.mark.gpu
def test_a_gpu_writes_the_likeliest_tokens_of_the_host_and_draws_its_own():
    model, prompts = tiny_model(dtype=torch.float64), TEXT[:, :6]

    def written(device, greedy):
        until = torch.full((len(prompts), 1), greedy)
        with on_device(model, device):
            return write(model, prompts, 24, torch.Generator().manual_seed(0), greedy=until)

    assert torch.equal(written("cuda", 24), written("cpu", 24))
    assert torch.equal(written("cuda", 0), written("cuda", 0))
    assert not torch.equal(written("cuda", 0), written("cpu", 0))


def test_text_of_one_kind_of_device_is_not_taken_for_that_of_another():
    model, places, made = tiny_model(), [torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cpu")], []
    for place in places:
        written_once(model, place, "this test's", lambda place=place: made.append(place) or TEXT)
    assert made == places[:2]


def test_text_is_written_once_by_processes_that_share_a_folder(tmp_path, monkeypatch):
    model, place, made = tiny_model(), torch.device("cpu"), []
    monkeypatch.setenv(SHARED_TEXTS, str(tmp_path))

    def asked(about):
        writing._TEXTS.clear()  # as in another process
        return written_once(model, place, about, lambda: made.append(about) or TEXT)

    assert torch.equal(asked("one"), TEXT)
    assert torch.equal(asked("one"), TEXT)
    asked("other")
    assert made == ["one", "other"]
    monkeypatch.setenv(SHARED_TEXTS, "")
    asked("one")
    assert made == ["one", "other", "one"]


def test_clips_begin_by_the_rounding_that_the_settings_name():
    def lost(rounding):
        """What rounding the first layer's weights adds to the outputs at the start."""
        of = recipe(start_rounding=rounding, start_target="weight")
        work = begun(of, tiny_model(dtype=torch.float64))
        work._begin(resumed=False)
        with torch.no_grad():
            weight = work.model.model.layers[0].self_attn.q_proj.weight
            hidden = work.model.model.layers[0].input_layernorm(work.model.model.embed_tokens(TEXT[:4]))
            difference = work.quantizers[0, "self_attn.q_proj"](weight) - weight
            return (hidden @ difference.T).square().sum(), work.quantizers[0, "self_attn.q_proj"].gamma.detach()

    (of_own, clips), (of_uniform, others) = lost("own"), lost("uniform")
    assert not torch.equal(clips, others)
    assert of_own < of_uniform


def test_clips_begin_as_equation_6_prints():
    """Read literally: the shares at which Eq. 1's rounding is nearest to the clipped weight, pair by pair."""
    work = begun(recipe(start_target="clipped", start_rounding="uniform"), tiny_model(dtype=torch.float64))
    work._begin(resumed=False)
    layer = work.model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(work.model.model.embed_tokens(TEXT[:4])).flatten(0, 1)
        weight = layer.self_attn.q_proj.weight
        quantizer = work.quantizers[0, "self_attn.q_proj"]
        for row, group in [(0, 0), (5, 1), (17, 3)]:
            own, read = weight[row, 16 * group :][:16], hidden[:, 16 * group :][:, :16]

            def error(high, low, own=own, read=read):
                least, most = low * own.min(), high * own.max()
                scale = (most - least) / 3
                zero = -(least / scale).round()
                rounded = (((own / scale).round() + zero).clamp(0, 3) - zero) * scale
                return (read @ (rounded - own.clamp(least, most))).square().sum().item()

            grid = [1 - step / 20 for step in range(10)]
            found = [quantizer.gamma[row, group].sigmoid().item(), quantizer.beta[row, group].sigmoid().item()]
            best = min(error(high, low) for high in grid for low in grid)
            # The whole range starts at a share of 0.99, whose logit is finite.
            chosen = [min(grid, key=lambda share, end=end: abs(min(share, 0.99) - end)) for end in found]
            assert error(*chosen) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("kind", "still"), [("lwc_exact", ("s1", "s2")), ("nothing", ("gamma", "beta", "s1", "s2"))])
def test_parameters_that_are_not_learned_stay_where_they_begin(kind, still):
    of = recipe(kind)
    begin = begun(of, tiny_model(dtype=torch.float64))
    begin._begin(resumed=False)
    end = begun(of, tiny_model(dtype=torch.float64))
    end.run()
    for place, quantizer in end.quantizers.items():
        for name, parameter in quantizer.named_parameters():
            before = begin.quantizers[place].get_parameter(name)
            assert torch.equal(parameter, before) == (name in still)


def test_the_rate_of_weights_follows_the_cache_where_it_is_not_given():
    def rate(name, **changes):
        of = override(preset(name), changes, "test")
        (method,) = of.methods.values()
        return dict(method.budget(of).rates)["weight_lr"]

    for name in ("rcp", "bitdistiller", "bitdistiller-rotated"):
        assert rate(name) == rate(name, values=None) == 1e-6
        assert rate(name, keys=None, values=None) == 8e-7
    assert rate("rcp", keys=None, values=None, methods={"rcp": {"weight_lr": 3e-4}}) == 3e-4
