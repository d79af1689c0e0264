"""Projects that trials run on, and the digests by which two of them are compared."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from rotquant.foundation.data import merge
from rotquant.foundation.files import canonical_json, file_digest, short_hash
from tests.helpers.project import CONFIG, TABLES, Copy
from tests.trials.trial import REPOSITORY

REPORT = "reports/quarot_table1.md"
#: A configuration of one shipped model with one seed: half a minute, all rows of Table 1.
ONE_COLUMN: dict[str, Any] = {
    "seeds": [0],
    "slots": {name: {"compute": False} for name in ("Llama-2-13B", "Llama-2-70B")},
}


def mechanics(root: Path) -> Copy:
    """A small project whose computing stages are stand-ins: seconds to compute, and all of the workflow is real."""
    return Copy(root)


def tiny(root: Path, **changes: Any) -> Copy:
    """A project of two tiny random models, a table of three rows and one seed, computed for real in half a minute.

    Args:
        changes: of its configuration.
    """
    project = Copy(root, fake=False)
    _make_checkpoints(project)
    rows = [
        {"name": "Baseline", "method": "baseline"},
        {"name": "QuaRot-128G", "method": "quarot-128g"},
        {"name": "SpinQuant", "method": "spinquant-hard"},
    ]
    (table,) = TABLES["tables"]
    published = "row,column,metric,value,unit\nBaseline,Llama-2-7B,perplexity,5.47,ppl\n"
    project.write("workflow/papers/quarot/published/small.csv", published)
    project.set_tables({**TABLES, "tables": [{**table, "rows": rows, "claims": []}]})
    slots = {name: {**slot, "group_sizes": {128: 16}} for name, slot in CONFIG["slots"].items()}
    project.set_config(merge(merge(CONFIG, {"slots": slots, "seeds": [0]}), changes))
    return project


def _make_checkpoints(project: Copy) -> None:
    """Two random Llama models with a tokenizer of 96 words, and text of these words."""
    from tests.helpers.checkpoints import tiny_tokenizer
    from tests.helpers.models import VOCABULARY, tiny_model  # torch, which other projects do without

    generator = random.Random(0)
    for split in ("train", "test"):
        words = [f"w{generator.randrange(3, VOCABULARY)}" for _ in range(2000)]
        project.write(f"text/{split}.txt", " ".join(words))
    for name, width in (("small", 32), ("larger", 64)):
        folder = project.root / "models" / name
        tiny_model(hidden_size=width, num_layers=1, num_heads=2, num_kv_heads=1).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)


def shipped(root: Path) -> Copy:
    """This project itself with its shipped models, a link to them: the default job is its Table 1."""
    project = Copy(root, fake=False, small=False)
    shutil.rmtree(root / "workflow/resources")
    (root / "workflow/resources").symlink_to(REPOSITORY / "workflow/resources")
    return project


def digests(root: Path) -> dict[str, str]:
    """What was computed in a project, without when and where: of each run, of all stored tensors, of each table.

    Two projects have computed the same where these are equal.
    """
    found = {}
    for path in sorted(root.glob("results/runs/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        said = {part: data.get(part) for part in ("key", "run", "metrics", "samples", "texts", "arrays")}
        found[f"run {path.stem}"] = short_hash(canonical_json(said))
    for kind, record in (("weights", "weights.json"), ("rotations", "rotation.json")):
        for path in sorted(root.glob(f"results/{kind}/*/{record}")):
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found[f"{kind} {path.parent.name}"] = short_hash(canonical_json(told.get("digests") or told["digest"]))
    for path in sorted(root.glob("results/tables/*.csv")):
        found[f"table {path.stem}"] = str(file_digest(path))
    return found


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """The names of what differs between two digests of projects."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def difference(one: dict[str, str], other: dict[str, str]) -> str:
    """The same in order, as text; empty where nothing differs."""
    return ", ".join(sorted(differing(one, other)))
