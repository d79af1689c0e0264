"""A model reads no longer texts and no other tokens than its configuration says, whatever stretches its embedding."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reproduction.metrics.magnitudes import magnitudes
from reproduction.metrics.outliers import outlier_statistics
from reproduction.metrics.settings import SNR, Magnitudes, MaximaByToken, Outliers
from reproduction.metrics.snr import end_to_end_snr
from reproduction.metrics.token_maxima import token_maxima as maxima_by_token
from rotquant.api import limits_of
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.methods.llm_qat.data_free_distillation import generate
from rotquant.methods.spinquant.cayley_training import learn_rotations
from rotquant.metrics.diagnostics import measure_costs
from rotquant.metrics.perplexity import perplexity
from rotquant.models.limits import ModelLimits, advised_length
from rotquant.models.outlier_tokens import token_maxima
from rotquant.models.stream import capture_layer_inputs
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity
from rotquant.text import Tokens
from tests.helpers.models import VOCABULARY, tiny_model, tiny_tokens

TEXT = Tokens(tiny_tokens(1, 1200)[0])
LONG = 513


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 4096),
        ({"rope_type": "default", "rope_theta": 10000.0}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_the_context_counts_what_stretches_it(rope: dict[str, Any] | None, context: int) -> None:
    config = SimpleNamespace(vocab_size=10, max_position_embeddings=4096, rope_parameters=rope)
    assert ModelLimits.of(config).context == context


def test_a_sliding_window_does_not_limit_the_text() -> None:
    assert ModelLimits.of(tiny_model("mistral", sliding_window=6).config).context == 512


def test_the_usual_length_is_the_papers_or_the_context() -> None:
    assert ModelLimits(4096, 10).length() == ModelLimits(None, 10).length() == 2048
    assert ModelLimits(512, 10).length() == ModelLimits(512, 10).length(512) == 512
    assert ModelLimits(4096, 10).length(3000) == 3000
    with pytest.raises(RecipeError, match="exceed the model's context of 512"):
        ModelLimits(512, 10).length(513)


def test_texts_are_no_longer_than_the_tokenizer_advises_unless_asked_for() -> None:
    advised = ModelLimits(2048, 10, advised_length(512))
    assert advised.length() == advised.shorten(preset("quarot")).calibration.sequence_length == 512
    assert advised.length(2048) == 2048
    assert {advised_length(told) for told in (10**30, 1e30, None, "512", -1)} == {None}


@pytest.mark.parametrize("name", ["rq-7b", "rq-13b", "rq-70b", "rq-llama3", "rq-phi3", "rq-qwen2"])
def test_a_shipped_model_is_measured_on_texts_as_long_as_it_was_trained_on(name: str) -> None:
    folder = Path("workflow/resources/models") / name
    trained = json.loads((folder / "recipe.json").read_text())["sequence_length"]
    assert limits_of(folder).length() == trained == 2048


def test_a_methods_texts_are_shortened_and_nothing_else_is() -> None:
    recipe = preset("spinquant-hard")
    short = ModelLimits(64, 10).shorten(recipe)
    assert short.calibration.sequence_length == short.methods["spinquant"].text.sequence_length == 64
    assert ModelLimits(64, 10).shorten(preset("llm-qat")).methods["llm_qat"].sequence_length == 64
    assert ModelLimits(10**6, 10).shorten(recipe) == recipe
    assert short.model_copy(update={"methods": {}, "calibration": None}) == recipe.model_copy(
        update={"methods": {}, "calibration": None}
    )
    assert ModelLimits(64, 10).shorten(Recipe()) == Recipe()


DOORS = {
    "perplexity": lambda model, text, n: perplexity(model, text, Perplexity(sequence_length=n)),
    "snr": lambda model, text, n: end_to_end_snr(model, model, text, SNR(sequence_length=n)),
    "magnitudes": lambda model, text, n: magnitudes(model, text, Magnitudes(tokens=n)),
    "outliers": lambda model, text, n: outlier_statistics(model, text, Outliers(tokens=n)),
    "outlier tokens": lambda model, text, n: token_maxima(model, text.ids[None, :n]),
    "maxima by token": lambda model, text, n: maxima_by_token(model, text, MaximaByToken(sequence_length=n)),
    "diagnosis": lambda model, text, n: measure_costs(
        lambda: model, text, Perplexity(sequence_length=n, max_windows=1), text.ids[None, :8]
    ),
    "calibration": lambda model, text, n: capture_layer_inputs(model, text.ids[None, :n]),
    "learning": lambda model, text, n: learn_rotations(model, preset("spinquant-hard"), 0, text.ids[None, :n]),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_lets_longer_texts_or_other_tokens_in(door: str) -> None:
    with pytest.raises(RecipeError, match="of 513 tokens exceed the model's context of 512 tokens"):
        DOORS[door](tiny_model(), TEXT, LONG)
    foreign = Tokens(torch.full_like(TEXT.ids, VOCABULARY))
    with pytest.raises(CheckpointError, match=f"gives token {VOCABULARY}.*the tokenizer belongs to another model"):
        DOORS[door](tiny_model(), foreign, 32)


def test_a_model_writes_no_longer_texts_than_its_context() -> None:
    with pytest.raises(RecipeError, match="LLM-QAT trains on of 513 tokens exceed"):
        generate(tiny_model(), 2, LONG, seed=0)
