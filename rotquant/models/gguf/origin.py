"""Where a checkpoint that was dequantized from a GGUF file came from: a small file that goes along with its copies.

Such a checkpoint is what the file's integers are, not what its publisher trained, so every number of it says so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rotquant.foundation.data import first_problem
from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import read_object

#: Name of the file in a folder.
ORIGIN = "gguf_origin.json"
#: A type of fewer of the weights is not named in a sentence.
_NAMED = 0.005

_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Origin(BaseModel):
    """A GGUF file that a checkpoint was dequantized from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str
    """Its name, without its folder."""
    sha256: Annotated[str, Field(pattern="[0-9a-f]{64}")]
    """Of its content."""
    name: str = ""
    """What it calls its model."""
    types: Mapping[str, _Share]
    """Shares of the weights by gguf's names of their types, the largest first."""
    bits_per_weight: Annotated[float, Field(gt=0.0)]
    """Bits of all tensors over all weights."""
    dtype: str
    """Floating-point type of the folder that was written."""

    def __str__(self) -> str:
        """What it is, as the end of a sentence."""
        types = ", ".join(f"{kind} {share:.0%}" for kind, share in self.types.items() if share >= _NAMED)
        return (
            f"dequantized to {self.dtype} from {self.file} (SHA-256 {self.sha256[:12]}; {types}; "
            f"{self.bits_per_weight:.2f} bits a weight)"
        )


def origin_of(folder: str | Path) -> Origin | None:
    """The GGUF file that a folder's weights, or those that they were made from, were dequantized from; None of others.

    Raises:
        CheckpointError: the folder's file that says so is damaged.
    """
    path = Path(folder) / ORIGIN
    if not path.is_file():
        return None
    content: dict[str, Any] = read_object(path, "origin", CheckpointError)
    try:
        return Origin.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_problem(error, content)}.") from None
