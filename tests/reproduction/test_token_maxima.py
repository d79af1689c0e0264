"""Largest magnitudes of tokens: what a plain forward pass shows, of the text alone, before it is quantized."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from reproduction.identity.run import Run
from reproduction.metrics.settings import MaximaByToken
from reproduction.metrics.token_maxima import STATISTICS, TENSORS, summary, token_maxima
from reproduction.run.stages import measures
from reproduction.tables.quantities import quantities
from rotquant.foundation.errors import CorpusError, RecipeError
from rotquant.models.architectures import architecture_of, decoder_layers
from rotquant.models.rotation.fusing import rotate
from rotquant.models.simulation.prefix import compute_prefix
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme
from rotquant.recipes.transforms import at
from rotquant.tensors.hadamard import hadamard_matrix
from rotquant.text import Tokens
from tests.helpers.models import FAMILIES, tiny_model, tiny_tokens
from tests.helpers.prefixes import IDS, WHOLE, behind

LENGTH, WINDOWS = 16, 5
TEXT = Tokens(tiny_tokens(1, LENGTH * WINDOWS + 3, seed=4)[0], bos=1)
KINDS = ("inputs", "attention")
#: Both sides compute in float64 with transformers' float32 norms and rotary tables, in batches of other sizes.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def metric(tensors: str = "inputs", **fields: object) -> MaximaByToken:
    return MaximaByToken(tensors=tensors, sequence_length=LENGTH, **fields)


def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, num_layers=3, dtype=torch.float64, **WHOLE.get(family, {}))


def cut() -> Tensor:
    return TEXT.ids[: LENGTH * WINDOWS].view(WINDOWS, LENGTH)


@torch.no_grad()
def by_hand(model: PreTrainedModel, windows: Tensor, skip: int = 0) -> dict[str, list[Tensor]]:
    """M of every site and layer, window by window: hooks on whole forward passes, the first tokens skipped."""
    found: dict[str, list[Tensor]] = {site.name: [] for site in architecture_of(model).sites}
    for layer in decoder_layers(model):
        for site in architecture_of(model).sites:
            seen: list[Tensor] = []
            linear = layer.get_submodule(site.linears[0])
            hook = linear.register_forward_pre_hook(lambda _m, x, seen=seen: seen.append(x[0][0, skip:].abs().amax(1)))
            for window in windows:
                model(window[None], use_cache=False)
            hook.remove()
            found[site.name].append(torch.stack(seen))
    return found


@torch.no_grad()
def attention_by_hand(model: PreTrainedModel, windows: Tensor, turn: Tensor | None = None) -> dict[str, list[Tensor]]:
    """The same of Q, K and V of a Llama: projections of each layer's normed input, RoPE, and R3 as a matrix."""
    found: dict[str, list[Tensor]] = {name: [] for name in TENSORS["attention"]}
    size = model.config.head_dim
    for layer in decoder_layers(model):
        inputs: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []
        hook = layer.self_attn.register_forward_pre_hook(
            lambda _m, _a, k, inputs=inputs: inputs.append((k["hidden_states"], k["position_embeddings"])),
            with_kwargs=True,
        )
        model(windows, use_cache=False)
        hook.remove()
        ((x, (cos, sin)),) = inputs
        q, k, v = (
            getattr(layer.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, size)).transpose(1, 2) for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if turn is not None:
            q, k = q @ turn, k @ turn
        for name, part in zip(found, (q, k, v), strict=True):
            found[name].append(part.abs().amax(dim=(1, 3)))
    return found


def expected(maxima: dict[str, list[Tensor]]) -> tuple[dict[str, float], dict[str, dict[str, list[float]]]]:
    """Ratios and statistics by sorting."""
    arrays: dict[str, dict[str, list[float]]] = {}
    metrics: dict[str, float] = {}
    for name, layers in maxima.items():
        ordered = [sorted(layer.flatten().tolist()) for layer in layers]
        middle = [values[(len(values) - 1) // 2] for values in ordered]  # torch's median: the lower of two
        parts = [[values[-rank] for values in ordered] for rank in (1, 2, 3)]
        arrays[name] = dict(zip(STATISTICS, [*parts, middle, [values[0] for values in ordered]], strict=True))
        metrics[f"{name}_top"] = max(a / b for a, b in zip(parts[0], middle, strict=True))
        metrics[f"{name}_bottom"] = max(a / b for a, b in zip(middle, [v[0] for v in ordered], strict=True))
    return metrics, arrays


def check(found: tuple[dict, dict], maxima: dict[str, list[Tensor]]) -> None:
    metrics, arrays = expected(maxima)
    assert found[0] == pytest.approx(metrics, rel=1e-5)
    assert found[1]["maxima"].keys() == arrays.keys()
    for name, statistics in arrays.items():
        for statistic, numbers in statistics.items():
            one = torch.tensor(found[1]["maxima"][name][statistic])
            torch.testing.assert_close(one, torch.tensor(numbers), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_a_plain_forward_pass(family: str) -> None:
    model = model_of(family)
    check(token_maxima(model, TEXT, metric()), by_hand(model, cut()))


@pytest.mark.parametrize("rotated", [False, True])
def test_queries_and_keys_are_behind_rope_and_r3(rotated: bool) -> None:
    model, scheme = model_of(), RotationScheme(heads=False)
    plain = attention_by_hand(model, cut())
    if not rotated:
        check(token_maxima(model, TEXT, metric("attention")), plain)
        return
    rotate(model, scheme, seed=0)
    size = model.config.head_dim
    turn = hadamard_matrix(size).double() / size**0.5
    with wrap(model, RuntimeQuantization(transforms=scheme.transforms)):
        found = token_maxima(model, TEXT, metric("attention"), scheme.transforms)
        unturned = token_maxima(model, TEXT, metric("attention"), at(scheme.transforms, "across_heads", "mlp_output"))
        hand = attention_by_hand(model, cut(), turn)
    check(found, hand)
    assert unturned[1]["maxima"]["value"] == found[1]["maxima"]["value"]
    assert unturned[1]["maxima"]["key"] != found[1]["maxima"]["key"]


@torch.no_grad()
def test_the_input_of_down_proj_is_behind_r4() -> None:
    model, scheme = model_of(), RotationScheme()
    rotate(model, scheme, seed=0)
    with wrap(model, RuntimeQuantization(transforms=scheme.transforms)):
        with_r4 = token_maxima(model, TEXT, metric(), scheme.transforms)
        check(with_r4, by_hand(model, cut()))
    without = token_maxima(model, TEXT, metric())
    first = "attention_input"  # of the first layer, which no online transform has reached
    assert without[1]["maxima"][first]["top_1"][0] == with_r4[1]["maxima"][first]["top_1"][0]
    assert without[1]["maxima"]["mlp_output"]["top_1"][0] != with_r4[1]["maxima"]["mlp_output"]["top_1"][0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensors", KINDS)
def test_a_prefix_is_none_of_the_text(family: str, tensors: str) -> None:
    model = model_of(family)
    prefix = compute_prefix(model, IDS)
    alone = token_maxima(model, TEXT, metric(tensors))
    with wrap(model, RuntimeQuantization(prefix=prefix)):
        found = token_maxima(model, TEXT, metric(tensors))
    assert found[0] != alone[0]
    if tensors == "inputs":
        check(found, by_hand(model, behind(cut()), skip=len(IDS)))
    elif family == "llama":
        hand = attention_by_hand(model, behind(cut()))
        check(found, {name: [layer[:, len(IDS) :] for layer in layers] for name, layers in hand.items()})


def test_one_loud_token_is_the_top_and_a_silent_one_the_least() -> None:
    model = model_of()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(1.0)
    loud, _ = token_maxima(model, TEXT, metric())
    assert 1 < loud["attention_input_top"] < 4
    hook = model.model.layers[1].input_layernorm.register_forward_hook(
        lambda _m, _x, y: y * torch.where(torch.arange(LENGTH) == 5, 100.0, 1.0)[None, :, None]
    )
    louder, arrays = token_maxima(model, TEXT, metric())
    hook.remove()
    assert louder["attention_input_top"] > 50
    assert max(arrays["maxima"]["attention_input"]["top_1"]) == arrays["maxima"]["attention_input"]["top_1"][1]


def test_windows_are_spread_over_the_text_and_may_begin_with_bos() -> None:
    model = model_of()
    two = token_maxima(model, TEXT, metric(max_windows=2))
    check(two, by_hand(model, cut()[[0, 2]]))
    head = torch.cat([torch.tensor([1]), TEXT.ids])[: LENGTH * WINDOWS].view(WINDOWS, LENGTH)
    check(token_maxima(model, TEXT, metric(bos="text")), by_hand(model, head))


@pytest.mark.parametrize("tensors", KINDS)
def test_looking_leaves_the_model_as_it_was(tensors: str) -> None:
    model = model_of()
    before = model(cut(), use_cache=False).logits
    token_maxima(model, TEXT, metric(tensors))
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(cut(), use_cache=False).logits, before)


@pytest.mark.parametrize("tensors", KINDS)
def test_a_broken_network_is_a_result(tensors: str) -> None:
    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[TEXT.ids[3]] = math.inf
    metrics, _ = token_maxima(model, TEXT, metric(tensors))
    assert all(map(math.isnan, metrics.values()))
    assert all(map(math.isnan, summary(torch.tensor([1.0, math.nan, 3.0, 2.0]))))
    assert summary(torch.tensor([[4.0, 1.0], [3.0, 2.0]])) == [4.0, 3.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("tensors", KINDS)
def test_it_measures_the_quantities_that_tables_print(tensors: str) -> None:
    metrics, _ = token_maxima(model_of(), TEXT, metric(tensors))
    assert metrics.keys() == {quantity.name for quantity in quantities(metric(tensors))}


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(ValidationError, match="greater than 2"):
        MaximaByToken(sequence_length=2)
    with pytest.raises(CorpusError, match="83 tokens, fewer than one window of 96"):
        token_maxima(model_of(), TEXT, MaximaByToken(sequence_length=96))
    eager = model_of()
    eager.config._attn_implementation = "eager"
    with pytest.raises(RecipeError, match="load the model with it"):
        token_maxima(eager, TEXT, metric("attention"))


def test_a_recipe_that_quantizes_what_is_looked_at_is_refused() -> None:
    recipe = {"keys": QuantizationScheme(bits=4, granularity="head").model_dump()}
    corpora = {"wikitext2": {"name": "words", "source": "local", "path": "words.txt"}}
    run = Run.model_validate(
        {
            "checkpoint": "model",
            "checkpoint_digest": "0" * 16,
            "recipe": recipe,
            "metric": metric().model_dump(),
            "corpora": corpora,
            "seed": 0,
            "dtype": "float32",
        }
    )
    subject = measures.Subject(run, model_of(), None, lambda *_: (TEXT, {}), model_of, 8)
    with pytest.raises(RecipeError, match="looks at what is not quantized: leave keys out of the recipe"):
        measures.token_maxima(run.metric, subject)
    open_run = run.model_copy(update={"recipe": run.recipe.model_copy(update={"keys": None})})
    measured = measures.token_maxima(run.metric, measures.Subject(open_run, *list(vars(subject).values())[1:]))
    assert measured.metrics == token_maxima(model_of(), TEXT, metric())[0]
