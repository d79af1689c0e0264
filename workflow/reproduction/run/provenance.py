"""What run files and records say of how a number was made, checked as they are read: pages and tracking print it.

Everything may be missing, since records of other versions say less, and more is let through; but what is there is of
its type, so that a damaged record is told apart when it is read and not when a page is half written.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


def _is_date(text: str) -> str:
    if text != "-":
        datetime.fromisoformat(text)
    return text


class TextRecord(_Part):
    """A text that was read. expected_sha256: the hash that was recorded for a corpus of installed packages."""

    characters: int
    sha256: str
    expected_sha256: str | None = None


class CorpusRecord(_Part):
    """A corpus, and what was read of it by split."""

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
    """When, where and by which code something was made, and of which texts."""

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
    corpora: dict[str, CorpusRecord] = Field(default_factory=dict)
    tasks: TasksRecord | None = None


Loss = float | Literal["nan", "inf", "-inf"]
"""A number of a training, as JSON has it where it is none."""


class LengthRecord(_Part):
    """How long the samples of a text were, in tokens."""

    sequence_length: int | Literal["-"] = "-"


class LearningRecord(_Part):
    """With which settings rotations were learned, as far as pages print them."""

    network: str = "-"
    steps: int | Literal["-"] = "-"
    batch_size: int | Literal["-"] = "-"
    text: LengthRecord = Field(default_factory=LengthRecord)


class RotationProvenance(Provenance):
    """The same of learned rotations. key: their name; first, last: numbers of those steps of their learning."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    checkpoint: str = "-"
    seed: int | Literal["-"] = "-"
    learning: LearningRecord = Field(default_factory=LearningRecord)
    first: dict[str, Loss] = Field(default_factory=dict)
    last: dict[str, Loss] = Field(default_factory=dict)


class WeightsProvenance(Provenance):
    """The same of stored weights. digests: of their files. bits_per_weight: by part and in `total`."""

    rotation: RotationProvenance | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    bits_per_weight: dict[str, float] = Field(default_factory=dict)


def told(record: dict[str, Any], kind: type[Provenance] = Provenance) -> dict[str, Any]:
    """A record as a page prints it; where it says less, it has what stands for that."""
    return kind.model_validate(record).model_dump()
