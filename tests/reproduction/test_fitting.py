"""A preset runs on sizes that have no Hadamard matrix, says how, and names all that has to change where it does not."""

import json
import re
from pathlib import Path

import pytest
import torch

from reproduction.words.describe import settings
from rotquant import api
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of
from rotquant.models.fitting import check_fits, fitted
from rotquant.models.rotation.network import basis_at
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import RotationScheme
from tests.helpers.bounds import FLOAT64_BOUND
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.commands import SMALL, rotquant
from tests.helpers.invariance import invariance_error
from tests.helpers.models import FURTHER, tiny_model, tiny_tokens

#: Models that a newcomer tries, made small: family, attention heads, key-value heads. All have tied embeddings.
NEWCOMERS = {
    "6 heads": ("llama", 6, 2),
    "7 heads": ("llama", 7, 1),
    "9 heads, SmolLM2-135M": ("llama", 9, 3),
    "14 heads, Qwen2.5-0.5B": ("qwen2", 14, 2),
    "15 heads, SmolLM2-360M": ("llama", 15, 5),
}


def newcomer(name, **arguments):
    family, heads, kv_heads = NEWCOMERS[name]
    sizes = {"hidden_size": 16 * heads, "num_heads": heads, "num_kv_heads": kv_heads, "num_layers": 1}
    return tiny_model(family, tied=True, **sizes, **arguments)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("newcomers")
    for index, name in enumerate(NEWCOMERS):
        newcomer(name, dtype=torch.bfloat16).save_pretrained(root / str(index))
        tiny_tokenizer().save_pretrained(root / str(index))
    return {name: str(root / str(index)) for index, name in enumerate(NEWCOMERS)}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return str(save_words(tmp_path_factory.mktemp("text") / "words.txt", 2000))


@pytest.mark.parametrize("name", NEWCOMERS)
def test_what_a_preset_becomes_keeps_the_logits(name):
    model = newcomer(name, dtype=torch.float64)
    recipe, sentence = fitted(preset("quarot"), architecture_of(model))
    assert recipe == override(preset("quarot"), {"rotation": {"heads": False}}, "test")
    assert sentence.endswith("(number of attention heads), so the recipe runs as with --set rotation.heads=false.")
    assert invariance_error(model, recipe.rotation, seed=0, input_ids=tiny_tokens()) <= FLOAT64_BOUND


def test_every_matrix_that_is_missing_has_a_substitute_that_keeps_the_logits():
    model = tiny_model(hidden_size=92, num_heads=2, num_kv_heads=1, intermediate_size=8 * 107, dtype=torch.float64)
    recipe, sentence = fitted(preset("quarot"), architecture_of(model))
    assert recipe.rotation == RotationScheme(residual="orthogonal", values="orthogonal", keys=False, mlp=8)
    assert "size 92 (hidden size), 46 (head dimension), 856 (intermediate size), so" in sentence
    assert "online heads, R4 in blocks of 8 in float32" in settings(recipe)
    assert invariance_error(model, recipe.rotation, seed=0, input_ids=tiny_tokens()) <= FLOAT64_BOUND


def test_blocks_mix_the_features_of_a_block_and_no_others():
    scheme, architecture = RotationScheme(mlp=28), architecture_of(tiny_model(intermediate_size=84))
    basis = basis_at(architecture, scheme.transforms, "errors", {}, "mlp_output")
    x = torch.zeros(1, 84, dtype=torch.float64)
    x[0, 30] = 28**0.5
    turned = basis.apply(x)
    assert torch.equal(turned.abs() > 0.5, (torch.arange(84) // 28 == 1)[None])
    assert torch.allclose(basis.undo(turned), x)


def test_what_fits_or_was_chosen_stays_as_it_is():
    fits, nine = architecture_of(tiny_model()), architecture_of(newcomer("9 heads, SmolLM2-135M"))
    assert fitted(preset("quarot"), fits) == (preset("quarot"), "")
    assert fitted(preset("quarot"), nine, fixed={"heads"}) == (preset("quarot"), "")
    assert fitted(preset("spinquant-hard"), nine) == (preset("spinquant-hard"), "")
    with pytest.raises(RecipeError, match=r"size 9 .*--set rotation\.heads=false\.$"):
        check_fits(preset("quarot"), nine)


@pytest.mark.parametrize("name", NEWCOMERS)
def test_a_newcomers_model_is_quantized_and_evaluated(name, folders, text, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "quantized"
    arguments = ["quantize", folders[name], "-o", str(folder), "--method", "quarot", "--corpus", text, *SMALL]
    assert rotquant(monkeypatch, *arguments) == 0
    note, found = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"note: this \w+ model has no Hadamard matrix of size \d+ .* --set rotation.heads=false\.", note
    )
    assert "quarot: 7 weights quantized" in found
    assert json.loads((folder / "rotquant.json").read_text())["recipe"]["rotation"]["heads"] is False
    evaluate = ["evaluate", str(folder), "--corpus", text, "--sequence-length", "32", "--device", "cpu"]
    assert rotquant(monkeypatch, *evaluate) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_newcomers_model_is_diagnosed(folders, text, tmp_path, monkeypatch, capsys):
    record = tmp_path / "diagnosis.json"
    arguments = ["diagnose", folders["15 heads, SmolLM2-360M"], "--corpus", text, "--device", "cpu", "-o", str(record)]
    assert rotquant(monkeypatch, *arguments, "--sequence-length", "32", "--max-windows", "2") == 0
    assert "size 15 (number of attention heads)" in " ".join(capsys.readouterr().out.split())
    result = json.loads(record.read_text())
    assert result["note"].endswith("--set rotation.heads=false.")
    assert "quarot-rtn" in result["perplexity"]


def test_all_that_has_to_change_is_one_line_to_paste(folders, text, tmp_path, monkeypatch, capsys):
    model, folder = folders["9 heads, SmolLM2-135M"], tmp_path / "quantized"
    arguments = ["quantize", model, "-o", str(folder), "--method", "quarot-128g", "--corpus", text, *SMALL]
    assert rotquant(monkeypatch, *arguments, "--set", "rotation.heads=true") == 2
    said = capsys.readouterr().err.strip()
    assert "exceeds" in said
    pasted = re.findall(r"--set \S+=[^\s.]+", said)
    assert [option.partition(" ")[2] for option in pasted] == [
        "rotation.heads=false",
        "weights.scheme.group_size=96",
        "activations.group_size=96",
    ]
    assert rotquant(monkeypatch, *arguments, *" ".join(pasted).split()) == 0
    assert capsys.readouterr().out.count("\n") == 1  # nothing else was changed
    assert not Path(f"{folder}.unfinished").exists()


def test_the_library_warns_of_what_a_name_became(folders):
    with pytest.warns(UserWarning, match="runs as with --set rotation.heads=false"):
        model = api.quantize(folders["7 heads"], "quarot-rtn")
    assert model.recipe.rotation.heads is False


@pytest.mark.parametrize("name", ["quarot", "spinquant-hard"])
def test_what_takes_the_place_of_r1_is_named(name):
    gemma = architecture_of(tiny_model(**FURTHER["gemma3"]))
    recipe, sentence = fitted(preset(name), gemma)
    assert "R1) pass (online rotations of what q, k, v and gate, up read take its place), so the recipe" in sentence
    assert "rotation.residual=none --set rotation.inputs=" in sentence
    learned = " learned from randomized Hadamard" if name == "spinquant-hard" else ""
    places = (f"R1 of attention's input{learned}", f"R1 of the MLP's input{learned}")
    assert f"online {', '.join(places)}, " in settings(recipe)
    assert "inputs" not in preset(name).rotation.model_dump()  # keys of other models' runs stay
    with pytest.raises(RecipeError, match=r"--set rotation\.residual=none --set rotation\.inputs="):
        check_fits(fitted(preset(name), gemma, fixed={"residual"})[0], gemma)
    with pytest.raises(RecipeError, match="set residual to none"):
        override(preset(name), {"rotation": {"inputs": "hadamard"}}, "test")


def test_a_hidden_size_without_hadamard_matrix_has_blocks_or_a_dense_matrix_at_the_inputs():
    gemma = architecture_of(tiny_model(**FURTHER["gemma3"] | {"hidden_size": 92}))
    assert fitted(preset("quarot"), gemma)[0].rotation.inputs == 4
    assert fitted(preset("spinquant-hard"), gemma)[0].rotation.inputs == "orthogonal"
    assert "size 92 (hidden size)" in fitted(preset("quarot"), gemma)[1]
    assert fitted(override(preset("quarot"), {"rotation": {"residual": "orthogonal"}}, ""), gemma)[0].rotation == (
        RotationScheme(residual="none", inputs="orthogonal")
    )


def test_a_scaling_in_the_norms_and_a_transform_after_them_are_no_pair():
    with pytest.raises(RecipeError, match=r"smoothquant scales features that rotation\.inputs mixes"):
        override(preset("smoothquant"), {"rotation": {"residual": "none", "inputs": "hadamard"}}, "test")
