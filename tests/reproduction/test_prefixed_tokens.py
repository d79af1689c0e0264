"""The stand-ins have hardly an outlier token but the first of a text, as notes of PrefixQuant's tables and figures say.

Asked with the tables' own threshold and texts and their first seed; the cards' figures have a lower threshold. A model
that fails here makes the notes of Tables 1, 14 and 15 and of Figures 4 and 7 untrue (workflow/papers/prefixquant).
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from reproduction.corpora import Corpus
from reproduction.identity.run import Run
from reproduction.metrics.outlier_tokens import outlier_tokens
from reproduction.metrics.settings import OutlierTokens
from rotquant import api
from rotquant.methods.prefixed_outliers import PrefixedOutliers
from rotquant.models.checkpoints import load_tokenizer
from rotquant.models.outlier_tokens import detect_prefix, token_maxima
from rotquant.recipes.corpus import Split
from rotquant.text import Tokens, calibration_samples, load_text, tokenize
from tests.helpers.cases import one_in
from tests.helpers.project import REPOSITORY
from tests.helpers.project import shipped_project as project

FOLDER = REPOSITORY / "workflow/resources/models"
#: The models of these tables and figures.
MODELS = ("rq-7b", "rq-13b", "rq-70b", "rq-llama3", "rq-qwen2")
Runs = dict[str, tuple[Run, ...]]


def runs(row: str, *tables: str) -> Runs:
    """The runs of a row by the name of their checkpoint."""
    cells = (cell for name in tables for cell in project().cells(name) if cell.row == row)
    return {Path(cell.runs[0].checkpoint).name: cell.runs for cell in cells}


def test_these_are_the_models_of_the_tables() -> None:
    tables = [f"prefixquant_{name}" for name in ("table1", "table14", "table15", "figure4", "figure7")]
    cells = (cell for name in tables for cell in project().cells(name))
    assert {Path(run.checkpoint).name for cell in cells for run in cell.runs} == {*MODELS}


@cache
def tokens(corpus: Corpus, split: Split, characters: int | None = None) -> Tokens:
    """A text in tokens of the stand-ins, which have one tokenizer."""
    return tokenize(load_text(corpus, split, max_characters=characters), load_tokenizer(FOLDER / MODELS[0]))


@cache
def network(model: str) -> nn.Module:
    return api.load_checkpoint(FOLDER / model, torch.float32, "cpu")[0]


def test_the_models_have_one_tokenizer() -> None:
    assert len({(FOLDER / model / "tokenizer.json").read_bytes() for model in MODELS}) == 1


@pytest.mark.parametrize("model", one_in(3, MODELS))
def test_the_prefix_of_a_stand_in_is_one_token(model: str) -> None:
    run = runs("Prefixed token", "prefixquant_table1")[model][0]
    calibration, method = run.recipe.calibration, run.recipe.methods["prefixed_outliers"]
    assert calibration is not None
    assert isinstance(method, PrefixedOutliers)
    assert method.text is None
    text = tokens(run.corpora[calibration.corpus], "train", calibration.characters)
    samples = calibration_samples(text, calibration, run.seed)
    ratios = token_maxima(network(model), samples).ratios
    assert detect_prefix(ratios, samples, text.bos, method.threshold, **method.rule) == (text.bos,)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_hardly_an_outlier_token_of_the_test_text_stands_elsewhere_than_first(model: str) -> None:
    (run,) = runs("Original", "prefixquant_figure4", "prefixquant_figure7")[model]
    assert isinstance(run.metric, OutlierTokens)
    text = tokens(run.corpora[run.metric.corpus], run.metric.split)
    _, found = outlier_tokens(network(model), text, run.metric, str)
    assert found["others"] <= 1
