"""Provenance in run files and records, validated when read: pages and tracking print it.

Every field may be missing, since records of other versions have fewer, and further fields are allowed. Existing fields
must have their type, so that a damaged record is detected when it is read and not when a page is half written.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from reproduction.identity.run import Run
from rotquant.models.gguf.importing import Origin, origin_of_model

#: What the KL divergence of a quantized run is from, its `reference`. Runs without are from before prefixes counted.
PLAIN, WITH_PREFIX = "full precision", "full precision with the same prefix"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


def _is_date(text: str) -> str:
    if text != "-":
        datetime.fromisoformat(text)
    return text


class TextRecord(_Part):
    """A text that was read. expected_sha256: the recorded hash of a corpus from installed packages."""

    characters: int
    sha256: str
    expected_sha256: str | None = None


class CorpusRecord(_Part):
    """A corpus, and the text that was read by split."""

    name: str
    source: str = ""
    path: str | None = None
    splits: dict[str, TextRecord]


class TaskRecord(_Part):
    """A zero-shot task. sha256: of its local file."""

    sha256: str | None = None


class TasksRecord(_Part):
    """The zero-shot tasks that a run answered."""

    suite: str
    lm_eval: str | None
    tasks: dict[str, TaskRecord]


class Provenance(_Part):
    """Time, machine, code and texts of a result."""

    date: Annotated[str, AfterValidator(_is_date)] = "-"
    git_commit: str | None = None
    git_dirty: bool | None = None
    versions: dict[str, str | None] = Field(default_factory=dict)
    python: str = "-"
    platform: str = "-"
    cpu: str = "-"
    gpu: str | None = None
    threads: int = 1
    code_digest: str = "-"
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    peak_bytes: Annotated[int, Field(ge=0)] | None = None
    """Largest memory of making weights or rotations (`environment.largest_memory`)."""
    corpora: dict[str, CorpusRecord] = Field(default_factory=dict)
    tasks: TasksRecord | None = None
    reference: str | None = None
    """What its KL divergence is from (`PLAIN`, `WITH_PREFIX`)."""
    origin: Origin | None = None
    """The GGUF file that the checkpoint was dequantized from."""


Loss = float | Literal["nan", "inf", "-inf"]
"""A number of a training; JSON stores nan and inf as text."""


class LengthRecord(_Part):
    """Lengths of the samples of a text, in tokens."""

    sequence_length: int | Literal["-"] = "-"


class LearningRecord(_Part):
    """Settings with which rotations were learned, as far as pages print them."""

    network: str = "-"
    steps: int | Literal["-"] = "-"
    batch_size: int | Literal["-"] = "-"
    text: LengthRecord = Field(default_factory=LengthRecord)


class RotationProvenance(Provenance):
    """Provenance of learned rotations. key: their name; first, last: numbers of those steps of their learning."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    checkpoint: str = "-"
    seed: int | Literal["-"] = "-"
    learning: LearningRecord = Field(default_factory=LearningRecord)
    first: dict[str, Loss] = Field(default_factory=dict)
    last: dict[str, Loss] = Field(default_factory=dict)


class WeightsProvenance(Provenance):
    """Provenance of stored weights. digests: of their files. bits_per_weight: by part and in `total`.

    stages: seconds of each.
    """

    rotation: RotationProvenance | None = None
    stages: dict[str, float] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)
    bits_per_weight: dict[str, float] = Field(default_factory=dict)


def of_checkpoint(run: Run, place: str) -> dict[str, Any]:
    """What a record says of a run's checkpoint: where it lies, its digest, and the GGUF file that it was."""
    origin = origin_of_model(place)
    known = {"checkpoint": run.checkpoint, "checkpoint_digest": run.checkpoint_digest}
    return known if origin is None else known | {"origin": origin.model_dump(mode="json")}


def told(record: dict[str, Any], kind: type[Provenance] = Provenance) -> dict[str, Any]:
    """A record for a page, with defaults for missing fields."""
    return kind.model_validate(record).model_dump()
