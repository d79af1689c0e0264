"""`rotquant families` says what the code does: each answer against what is refused or computed."""

import json
from itertools import product
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rotquant.commands.root import cli
from rotquant.models.architectures import FAMILIES
from rotquant.recipes.presets import all_presets
from tests.helpers.models import FURTHER, tiny_model


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["families", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def answers(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))["families"]


def test_every_known_family_is_listed_with_what_each_method_does_there() -> None:
    found = answers()
    assert set(found) == set(FAMILIES)
    assert found["llama"]["rotations"] == ["R1", "R2", "heads", "R3", "R4"]
    assert (found["llama"]["convert"], found["llama"]["export"]) == ("yes", "plain, packed, with R1, R2")
    assert found["olmo2"]["rotations"] == ["R1_attention", "R1_mlp", "R2", "heads", "R3", "R4"]
    assert found["mistral"]["convert"] == "up to 4096 tokens"
    assert found["mixtral"]["export"] == "plain, with R1, R2"
    for family, about in found.items():
        assert set(about["methods"]) == set(all_presets()), family
    refused = {(f, name) for f, about in found.items() for name, what in about["methods"].items() if what[:3] == "no:"}
    of_experts = ("cushioncache", "flatquant", "flatquant-gptq", "wush")
    assert refused == {("olmo2", "smoothquant"), *product(("mixtral", "qwen3_moe"), of_experts)}
    assert found["olmo2"]["methods"]["smoothquant"].endswith("take duquant, whose division acts online.")
    assert found["gemma3_text"]["methods"]["quarot"].startswith("yes: this gemma3_text model has norms after attention")
    assert found["gemma3_text"]["methods"]["prefixquant"].startswith("yes")  # texts are as long as its window allows


def test_words_fit_eighty_columns_and_name_every_exception() -> None:
    shown = run()
    assert max(map(len, shown.splitlines())) <= 80
    assert f"of {len(all_presets()) * len(FAMILIES)} pairs of a method and a family work" in shown
    assert "SmoothQuant" in shown


def test_a_model_of_nine_heads_has_no_transform_across_them(tmp_path: Path) -> None:
    tiny_model(**FURTHER["smollm-135m"]).save_pretrained(tmp_path / "model")
    (about,) = answers(str(tmp_path / "model")).values()
    assert about["rotations"] == ["R1", "R2", "R3", "R4"]
    assert "the recipe runs as with --set rotation.heads=false" in about["methods"]["quarot"]
    assert about["methods"]["quarot-128g"].startswith("no: ")  # groups of 128 of 96 features
    assert "the group size 128" in about["methods"]["quarot-128g"]
