"""`rotquant families` says what the code does: each cell against what is refused or computed."""

import re
from pathlib import Path

from typer.testing import CliRunner

from rotquant.commands.root import cli
from rotquant.models.architectures import FAMILIES
from tests.helpers.models import FURTHER, tiny_model


def rows(*arguments: str) -> dict[str, list[str]]:
    result = CliRunner().invoke(cli, ["families", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in result.output.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_every_known_family_is_listed_with_what_works() -> None:
    shown = rows()
    assert set(shown) == set(FAMILIES)
    assert shown["llama"][:8] == ["yes"] * 5 + ["all", "yes", "plain, packed, with R1, R2"]
    assert shown["mistral"][6] == "up to 4096 tokens"
    assert shown["qwen3"][5:7] == ["all but omniquant, qoq", "yes"]
    assert shown["mixtral"][:8] == ["yes"] * 5 + ["rtn, gptq, outliers, quip", "no", "plain, with R1, R2"]
    assert shown["gemma2"][:8] == ["no", *["yes"] * 4, "rtn, gptq, outliers, quip", "no", "plain, packed, with R2"]


def test_a_model_of_nine_heads_has_no_transform_across_them(tmp_path: Path) -> None:
    tiny_model(**FURTHER["smollm-135m"]).save_pretrained(tmp_path / "model")
    assert rows(str(tmp_path / "model"))["llama"][:5] == ["yes", "yes", "no", "yes", "yes"]
