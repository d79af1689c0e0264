"""Good and bad inputs on disk: models, folders, texts and files that tables of the command line's inputs name.

Each is small and made once in a test session; a test may read them but leaves them as they are.
"""

import json
import random
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from rotquant import api
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.text import CorpusSpec
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.hostile import make_hostile
from tests.helpers.models import VOCABULARY, tiny_model


def make_places(root: Path) -> dict[str, str]:
    """Make everything below `root`; the paths by name."""
    root.mkdir()
    model = root / "model"
    tiny_model(dtype=torch.bfloat16).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    places = {
        "model": model,
        "quoted": Path(shutil.copytree(model, root / "it's a [bold]model['x'] :key:")),
        "linked": _link(root / "linked", model),
        "project": _project(root / "project"),
        **_texts(root),
        **_quantized(root, model),
        **_damaged(root, model),
        **make_hostile(root, model),
        **_outputs(root),
    }
    return {name: str(path) for name, path in places.items()}


def snapshot(*roots: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything below some folders: equal where nothing was written."""
    found = (path for root in roots for path in (root, *root.rglob("*")))
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}


def _project(root: Path) -> Path:
    """A project without results: links to this one's configuration and workflow."""
    root.mkdir()
    for name in ("config", "workflow"):
        _link(root / name, Path(name).resolve())
    return root


def _link(link: Path, target: Path) -> Path:
    link.symlink_to(target)
    return link


def _texts(root: Path) -> dict[str, Path]:
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=6000)
    lines = [" ".join(words[start : start + 10]) + "\n" for start in range(0, len(words), 10)]
    files: dict[str, str | bytes] = {
        "text.txt": "".join(lines),
        "short.txt": "w3 w4 w5\n",
        "spaced 'text' [1].txt": "".join(lines),
        "few.txt": "".join(lines[:30]),
        "empty.txt": "",
        "blank.txt": "\n\n \n",
        "latin.txt": "caf\xe9\n".encode("latin-1"),
        "named.test.txt": "".join(lines),
        "nojson.jsonl": '{"text": "w3"}\n{{{',
        "nofield.jsonl": '{"content": "w3"}\n',
        "noparquet.parquet": "w3",
        "torn-runs.parquet": "w3",
        "config.yaml": "device: toaster\n",
        "recipe.yaml": "name: mine\nstepz: 3\n",
    }
    for name, content in files.items():
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    pq.write_table(pa.table({"text": ["w3"]}), root / "columns-runs.parquet")
    files["columns-runs.parquet"] = ""
    return {re.split(r"\W", name)[0]: root / name for name in files}


def _quantized(root: Path, model: Path) -> dict[str, Path]:
    """The model quantized, and converted."""
    recipe = override(preset("quarot-rtn"), {"rotation": {"heads": False}}, "the test's recipe")
    quantized = api.quantize(model, recipe, corpus=CorpusSpec(name="text", source="local", path=str(root / "text.txt")))
    quantized.save(root / "quantized")
    return {"quantized": root / "quantized"}


def _damaged(root: Path, model: Path) -> dict[str, Path]:
    """Copies of the model, each with one defect."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(model, root / name))

    truncated = copy("truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    remote = copy("remote")
    config = json.loads((remote / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (remote / "config.json").write_text(json.dumps(config))
    (remote / "code.py").write_text("open('executed', 'w').close()\n")
    return {"truncated": truncated, "pickled": pickled, "remote": remote, **_wrong_content(root, model)}


def _wrong_content(root: Path, model: Path) -> dict[str, Path]:
    """Copies of the model, and of the quantized one, whose files can be read and say what cannot be."""
    names = ("infinite", "layerless", "listed", "wordless", "foreign")
    made = {name: Path(shutil.copytree(model, root / name)) for name in names}
    tensors = load_file(made["infinite"] / "model.safetensors")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, made["infinite"] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (made["layerless"] / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))
    (made["listed"] / "config.json").write_text("[]")
    (made["wordless"] / "tokenizer.json").write_text("{}")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w3 w4"])  # one token, beyond the embedding
    tokenizer.save_pretrained(made["foreign"])
    made["flipped"] = Path(shutil.copytree(root / "quantized", root / "flipped"))
    weights = made["flipped"] / "quantized.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    return made


def _outputs(root: Path) -> dict[str, Path]:
    """Places that an output cannot go to."""
    folder = root / "precious"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    file = root / "file"
    file.write_text("mine")
    return {"precious": folder, "file": file}
