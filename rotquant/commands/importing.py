"""`rotquant import-gguf`: a GGUF file as a folder that every command and transformers read."""

from pathlib import Path
from typing import Annotated

import typer

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.outputs import FILE, Writes
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import check_output_folder, folder_size
from rotquant.models.gguf.importing import DTYPE, IMPORTED, checked, write_checkpoint

_TYPES = ("float32", "float16", "bfloat16")


@answers(
    {
        "model": "",
        "output": "the folder",
        "bytes": "of the folder",
        "family": "",
        "parameters": "",
        "origin": "the file: file, sha256, name, types (shares of weights), bits_per_weight, dtype",
    }
)
def import_gguf(
    model: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file of llama.cpp."), FILE],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write."), Writes(IMPORTED, folder=True)],
    dtype: Annotated[str, typer.Option(help=f"Floating-point type of the weights: {', '.join(_TYPES)}.")] = DTYPE,
) -> CommandResult:
    """Dequantize a GGUF FILE into a plain checkpoint: config.json, safetensors and tokenizer.

    Every command that takes a plain checkpoint takes the file itself, too, and saves what it is in the cache.

    Example: `rotquant import-gguf model.gguf -o model/`, then `rotquant evaluate model/`
    """
    if dtype not in _TYPES:
        raise RecipeError(f"weights cannot be written as {dtype!r}; use {', '.join(_TYPES)}.")
    source = checked(model)
    check_output_folder(output, IMPORTED, needed=source.size(dtype))
    origin = write_checkpoint(model, output, dtype)
    family, size = source.network.config["model_type"], folder_size(output)
    data = {"model": str(model), "output": str(output), "bytes": size, "family": family}
    data |= {"parameters": source.parameters, "origin": origin.model_dump(mode="json")}
    said = f"{output}: {family} of {source.parameters:,} parameters, {size / 2**20:.1f} MiB, {origin}"
    return CommandResult(data, (said,))
