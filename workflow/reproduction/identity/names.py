"""Names and places of results: a key, and a digest of the code and the parts that a result is computed with.

What a name is of never changes, so a result that exists is current, wherever it was computed. Another version of the
code has other names, and the results of both stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.identity.code import stage_digest
from rotquant.foundation.files import canonical_json, short_hash

if TYPE_CHECKING:
    from reproduction.identity.run import Run  # recipes take time to load, and most readers of a plan need none

#: Where results lie in a project.
RESULTS = Path("results")
#: The record in the folder of stored weights, their tensors, and the files in the folder of learned rotations.
WEIGHTS_RECORD, MODEL = "weights.json", "model"
ROTATION_RECORD, ROTATIONS_FILE, HISTORY_FILE = "rotation.json", "rotations.safetensors", "history.json"
#: Hexadecimal digits of the digest in a name.
DIGITS = 8

Members = Mapping[str, Sequence["Run"]]
"""The runs on something, by its key."""


def names_of(
    runs: Mapping[str, "Run"], weights: Members, rotations: Members, tasks: Mapping[str, str]
) -> dict[str, str]:
    """The name of each result by its key.

    Args:
        runs: by key. weights, rotations: the runs on each. tasks: for a run of zero-shot tasks, the content of these.
    """
    found = {key: _named(key, stage_digest("rotations", on[0].recipe)) for key, on in rotations.items()}
    for key, on in weights.items():
        found[key] = _named(key, stage_digest("weights", on[0].recipe), found.get(on[0].rotation_key or ""))
    for key, run in runs.items():
        found[key] = _named(key, stage_digest("runs", run.recipe), found.get(run.weights_key or ""), tasks.get(key))
    return found


def _named(key: str, *parts: Any) -> str:
    return f"{key}-{short_hash(canonical_json(parts), DIGITS)}"


def key_in(name: str) -> str:
    """The key in a name."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class Results:
    """Where results lie.

    root: the folder `results`. names: of files and folders, by key (`names_of`).
    """

    root: Path
    names: Mapping[str, str]

    def run(self, key: str) -> Path:
        """The file of a run."""
        return self.root / "runs" / f"{self._name(key)}.json"

    def weights(self, key: str) -> Path:
        """The folder of stored weights: how they were made, the history of a training, and the tensors in `model`."""
        return self.root / "weights" / self._name(key)

    def rotation(self, key: str) -> Path:
        """The folder of learned rotations. Its record of how they were learned is written last."""
        return self.root / "rotations" / self._name(key)

    def tasks(self, key: str) -> Path:
        """The record of a set of zero-shot tasks, written when their definitions and data exist and are checked."""
        return self.root / "tasks" / f"{self._name(key)}.json"

    def _name(self, key: str) -> str:
        """A key that no table asks for is a name that no file has."""
        return self.names.get(key, key)


def placed(path: Path) -> tuple[Path, str]:
    """The folder of results, and the key, of a result's file: RESULTS/KIND/NAME.json or RESULTS/KIND/NAME/FILE."""
    name = path if path.parent.parent.name == RESULTS.name else path.parent
    return name.parent.parent, key_in(name.name.removesuffix(".json"))
