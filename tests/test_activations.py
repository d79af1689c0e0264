"""Activation magnitudes: read where the linear layers read, unchanged by looking, flattened by rotation, drawn."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from rotquant import project as projects
from rotquant.activations import magnitudes
from rotquant.errors import CorpusError, RecipeError, ResultError
from rotquant.files import short_hash
from rotquant.project import Project, load_project
from rotquant.provenance import environment
from rotquant.reporting import heatmaps, tables
from rotquant.results import RunResult, run_path, write_result
from rotquant.rotation import fuse_norms, rotate
from rotquant.schemes import Magnitudes, QuantizationScheme, RotationScheme
from rotquant.wrapping import Wrapping, wrap
from tests.models import FAMILIES, tiny_model, tiny_tokens
from tests.project import Copy

METRIC = Magnitudes(tokens=16)
TOKENS = tiny_tokens(1, 40)[0]
FIGURE = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {
            "id": "quarot_figure1",
            "title": "magnitudes",
            "section": "1",
            "caption": "Magnitudes.",
            "metrics": [{"kind": "magnitudes", "tokens": 4}],
            "columns": ["Llama-2-7B", "Llama-2-13B"],
            "baseline": "Before",
            "rows": [{"name": "Before", "method": "baseline"}, {"name": "After", "method": "quarot-rtn"}],
            "claims": [],
            "figure": {"kind": "magnitudes", "caption": "Magnitudes."},
        }
    ],
}


def matrix(arrays: dict) -> torch.Tensor:
    return torch.tensor(arrays["magnitudes"])


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_what_the_feed_forward_block_reads_in_the_middle_layer(family: str) -> None:
    model = tiny_model(family, num_layers=3)
    norm_outputs = []
    middle = model.model.layers[1].post_attention_layernorm
    hook = middle.register_forward_hook(lambda _module, _inputs, output: norm_outputs.append(output))
    with torch.no_grad():
        model(TOKENS[None, :16])
    hook.remove()
    metrics, arrays = magnitudes(model, TOKENS, METRIC)
    expected = norm_outputs[0][0].abs()
    assert arrays["layer"] == 1
    # Four significant digits: relative error at most half a unit of the fourth.
    torch.testing.assert_close(matrix(arrays), expected, rtol=5e-4, atol=0)
    assert metrics["largest"] == expected.max().item()
    assert metrics["median"] == expected.median().item()
    assert metrics["peak_ratio"] == pytest.approx(metrics["largest"] / metrics["median"])


def test_looking_leaves_the_model_as_it_was() -> None:
    model = tiny_model().train()
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    magnitudes(model, TOKENS, METRIC)
    assert model.training
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks


@pytest.mark.parametrize("site", ["attention_input", "attention_output", "mlp_input", "mlp_output"])
def test_every_site_has_its_width(site: str) -> None:
    _, arrays = magnitudes(tiny_model(), TOKENS, METRIC.model_copy(update={"site": site, "layer": 0}))
    assert matrix(arrays).shape == (16, 96 if site == "mlp_output" else 64)


def test_rotation_turns_the_input_and_takes_the_outlier_channel_away() -> None:
    model = tiny_model()
    with torch.no_grad():  # one loud channel of the residual stream, as trained models have
        model.model.embed_tokens.weight[:, 5] = 40.0
    fuse_norms(model)  # so that both readings differ by Q alone
    before, loud = magnitudes(model, TOKENS, METRIC)
    rotate(model, RotationScheme(), seed=0)
    with wrap(model, Wrapping(rotation=RotationScheme())):
        after, flat = magnitudes(model, TOKENS, METRIC)
    assert matrix(loud).argmax(dim=1).unique().tolist() == [5]
    # An orthogonal Q keeps each token's norm; the rounding is 5e-4 at most.
    torch.testing.assert_close(matrix(loud).norm(dim=1), matrix(flat).norm(dim=1), rtol=1e-3, atol=0)
    assert after["peak_ratio"] < before["peak_ratio"] / 5


def test_a_quantizer_before_the_site_is_seen() -> None:
    model = tiny_model()
    with wrap(model, Wrapping(activations=QuantizationScheme(bits=4))):
        _, arrays = magnitudes(model, TOKENS, METRIC)
    assert all(len(row.unique()) <= 9 for row in matrix(arrays))  # |-8| to |7|


def test_a_broken_network_is_a_result() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[TOKENS[3]] = math.inf
    metrics, _ = magnitudes(model, TOKENS, METRIC)
    assert math.isnan(metrics["peak_ratio"])


def test_bad_requests_are_one_sentence() -> None:
    model = tiny_model()
    with pytest.raises(RecipeError, match=r"no site 'ffn'; known: attention_input, "):
        magnitudes(model, TOKENS, METRIC.model_copy(update={"site": "ffn"}))
    with pytest.raises(RecipeError, match=r"no layer 2; the model's 2 are 0 to 1\."):
        magnitudes(model, TOKENS, METRIC.model_copy(update={"layer": 2}))
    with pytest.raises(CorpusError, match="40 tokens, fewer than one window of 64"):
        magnitudes(model, TOKENS, METRIC.model_copy(update={"tokens": 64}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(projects, "checkpoint_digest", lambda path: short_hash(Path(path).name))
    Copy(tmp_path).set_tables(FIGURE)
    return load_project(root=tmp_path)


def compute(project: Project, arrays: dict) -> None:
    """Write the figure's run files, all with the same arrays."""
    numbers = {"peak_ratio": 8.0, "largest": 4.0, "median": 0.5}
    for run in project.runs.values():
        record = {**environment(), "code_digest": "0123456789abcdef", "seconds": 1.0}
        write_result(project.root / run_path(run.key), RunResult(run, numbers, record, None, arrays))


def draw(project: Project) -> bytes:
    table, path = project.table("quarot_figure1"), project.root / "figure.svg"
    heatmaps.magnitudes(project, table, tables.collect(project, table)[0], path)
    return path.read_bytes()


def test_the_figure_has_a_panel_per_cell_and_is_the_same_for_the_same_data(project: Project) -> None:
    compute(project, {"magnitudes": [[0.5, 4.0, 0.4], [0.1, 3.9, math.nan]], "layer": 1})
    first = draw(project)
    assert draw(project) == first
    images = ElementTree.fromstring(first).iter("{http://www.w3.org/2000/svg}image")
    assert len(list(images)) == 4 + 1  # and the colour bar


def test_wide_maps_keep_their_outlier_channels() -> None:
    wide = torch.zeros(2, 4096)
    wide[:, 1234] = 9.0
    assert heatmaps.narrowed(wide.numpy()).max(axis=1).tolist() == [9.0, 9.0]
    assert heatmaps.narrowed(wide.numpy()).shape == (2, 512)
    assert heatmaps.narrowed(wide[:, :700].numpy()).shape == (2, 350)


def test_a_run_file_without_magnitudes_is_named(project: Project) -> None:
    compute(project, {})
    with pytest.raises(ResultError, match="holds no magnitudes"):
        draw(project)
