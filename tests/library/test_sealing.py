"""A folder of ours runs as what was written, or not at all: nothing of what makes its network changes by itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rotquant import api
from rotquant.decoder import convert, save_decoder
from rotquant.decoder.storage import read_decoder_manifest
from rotquant.formats.export import export_compressed, export_plain
from rotquant.formats.gguf import export_gguf
from rotquant.formats.reading import check_export
from rotquant.foundation.errors import CheckpointError, RotquantError
from rotquant.models.checkpoints import load_tokenizer
from rotquant.weights.storage import read_manifest, save_quantized
from tests.helpers.sealing import reseal
from tests.helpers.weights import ROTATED_GPTQ, build

#: Each kind of folder, the file that holds its digests, and what checks everything but tensors.
KINDS = {
    "quantized": ("rotquant.json", read_manifest),
    "decoder": ("decoder.json", read_decoder_manifest),
    "export": ("config.json", check_export),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed")
    stored = build(ROTATED_GPTQ)
    save_quantized(root / "quantized", stored, source={"checkpoint": "tiny"})
    save_decoder(root / "decoder", convert(stored), load_tokenizer(root / "quantized"), {"seed": 0})
    export_compressed(root / "quantized", root / "export")
    return root


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(made: Path, tmp_path: Path, kind: str) -> Path:
    return Path(shutil.copytree(made / kind, tmp_path / kind))


def edits(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of nested data with another one for it; None takes it away."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        here = (*path, key)
        yield here, None
        if isinstance(value, dict | list):
            yield from edits(value, here)
        elif isinstance(value, bool) or value is None:
            yield here, not value
        else:
            yield here, value * 2 + 1 if isinstance(value, int | float) else f"{value}x"


def edited(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    new = json.loads(json.dumps(data))
    place = new
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return new


def test_no_value_of_a_manifest_can_be_changed_or_left_out(folder: Path, kind: str) -> None:
    name, check = KINDS[kind]
    written = json.loads((folder / name).read_text())
    check(folder)
    passed = []
    for path, value in edits(written):
        (folder / name).write_text(json.dumps(edited(written, path, value)))
        try:
            check(folder)
        except (RotquantError, KeyError):  # the latter where an export does not name its kind any more
            continue
        passed.append((path, value))
    assert passed == []
    (folder / name).write_text(json.dumps(written, indent=7, sort_keys=True))
    check(folder)  # how it is written makes no difference


def test_no_file_beside_a_manifest_can_be_changed_taken_away_or_added(folder: Path, kind: str) -> None:
    name, _ = KINDS[kind]
    (folder / "README.md").write_text("a card, which nothing reads")
    expected = api.load(folder).network
    assert expected is not None
    for path in sorted(folder.iterdir()):
        if path.name in (name, "README.md"):
            continue
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=r"was changed|is damaged"):
            api.load(folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=r"is missing|is not there|no config\.json|no weights"):
            api.load(folder)
        path.write_bytes(content)
    for added in ("chat_template.jinja", "added_tokens.json", "other.safetensors"):
        (folder / added).write_text("{}")
        with pytest.raises(CheckpointError, match=f"{added} came after the folder was written"):
            api.load(folder)
        (folder / added).unlink()
    api.load(folder)


def test_an_edited_recipe_is_neither_converted_nor_exported(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "quantized", tmp_path / "quantized"))
    recipe = json.loads((folder / "rotquant.json").read_text())["recipe"]
    content = json.loads((folder / "rotquant.json").read_text()) | {"recipe": recipe | {"rotation": None}}
    (folder / "rotquant.json").write_text(json.dumps(content))
    for use in (export_plain, export_compressed, export_gguf):
        with pytest.raises(CheckpointError, match="to change it on purpose, quantize again, with --set"):
            use(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"rotquant\.json is damaged or was changed"):
        convert(folder)
    reseal(folder / "rotquant.json")
    assert read_manifest(folder).recipe.rotation is None


def test_transformers_refuses_an_export_whose_recipe_was_edited(made: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import rotquant.serving  # noqa: F401  # the method

    folder = Path(shutil.copytree(made / "export", tmp_path / "export"))
    content = json.loads((folder / "config.json").read_text())
    content["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="to change it on purpose, export again"):
        AutoModelForCausalLM.from_pretrained(folder)
