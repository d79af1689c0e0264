"""The stand-ins have hardly an outlier token but the first of a text, as notes of PrefixQuant's tables and figures say.

Asked with the tables' own threshold, texts and seeds; the cards' figures have a lower threshold. A model that fails
here makes the notes of Tables 1, 14 and 15 and of Figures 4 and 7 untrue (workflow/papers/prefixquant).
"""

from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch

from reproduction.identity.run import Run
from reproduction.metrics.outlier_tokens import outlier_tokens
from reproduction.tables.project import Project, load_project
from rotquant import api
from rotquant.methods.prefixed_outliers import PrefixedOutliers
from rotquant.models.checkpoints import load_tokenizer
from rotquant.models.outlier_tokens import detect_prefix, token_maxima
from rotquant.recipes.schemes import OutlierTokens
from rotquant.text import load_text, tokenize
from tests import cards
from tests.helpers.project import REPOSITORY

#: Of the slots that stand in these tables and figures, those that the notes are of; rq-70b is narrower and has more.
MODELS = ("rq-7b", "rq-13b", "rq-llama3", "rq-qwen2")
Runs = dict[str, tuple[Run, ...]]


@cache
def project() -> Project:
    return load_project(root=REPOSITORY)


def runs(row: str, *tables: str) -> Runs:
    """The runs of a row by the name of their checkpoint."""
    cells = (cell for name in tables for cell in project().cells(name) if cell.row == row)
    return {Path(cell.runs[0].checkpoint).name: cell.runs for cell in cells}


def test_these_are_the_models_of_the_tables() -> None:
    tables = [f"prefixquant_{name}" for name in ("table1", "table14", "table15", "figure4", "figure7")]
    cells = (cell for name in tables for cell in project().cells(name))
    assert {Path(run.checkpoint).name for cell in cells for run in cell.runs} == {*MODELS, "rq-70b"}


@pytest.mark.parametrize("model", MODELS)
def test_the_prefix_of_a_stand_in_is_one_token(model: str) -> None:
    network, _ = api.load_checkpoint(cards.MODELS / model, torch.float32, "cpu")
    tokenizer = load_tokenizer(cards.MODELS / model)
    for run in runs("Prefixed token", "prefixquant_table1")[model]:
        calibration, method = run.recipe.calibration, run.recipe.methods["prefixed_outliers"]
        assert calibration is not None
        assert isinstance(method, PrefixedOutliers)
        assert method.text is None
        samples = api.calibration_tokens(run.corpora[calibration.corpus], calibration, tokenizer, run.seed)
        ratios, bos = token_maxima(network, samples).ratios, network.config.bos_token_id
        assert detect_prefix(ratios, samples, bos, method.threshold, **method.rule) == (bos,), run.seed


@pytest.mark.parametrize("model", MODELS)
def test_hardly_an_outlier_token_of_the_test_text_stands_elsewhere_than_first(model: str) -> None:
    (run,) = runs("Original", "prefixquant_figure4", "prefixquant_figure7")[model]
    assert isinstance(run.metric, OutlierTokens)
    network, _ = api.load_checkpoint(cards.MODELS / model, torch.float32, "cpu")
    tokenizer = load_tokenizer(cards.MODELS / model)
    tokens = tokenize(load_text(run.corpora[run.metric.corpus], run.metric.split), tokenizer)
    _, found = outlier_tokens(network, tokens, run.metric, lambda token: cast("str", tokenizer.decode(token)))
    assert found["others"] <= 1
