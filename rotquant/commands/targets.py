"""What a model is quantized for, and whether that takes it: the exporters' own checks, asked before any work."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from rotquant.foundation.errors import RecipeError
from rotquant.recipes.recipe import Recipe

Target = Literal["vllm", "transformers", "any", "gguf", "plain", "decoder"]
TARGETS: tuple[Target, ...] = get_args(Target)


def _known(target: str | None) -> str | None:
    if target is not None and target not in TARGETS:
        raise RecipeError(f"nothing is exported for {target!r}: choose {', '.join(TARGETS)}.")
    return target


For = Annotated[
    str | None,
    typer.Option(
        "--for",
        callback=_known,
        help="Refuse now what could not be exported then: vllm, transformers or any (compressed-tensors), gguf, plain, "
        "or decoder (`rotquant convert`).",
    ),
]


def check_target(target: str, recipe: Recipe, config: Any, folder: Path | None = None) -> None:
    """Refuse a recipe or a model that cannot be exported, by the check that the export begins with.

    Args:
        target: one of `TARGETS`.
        config: the model's configuration.
        folder: of the model, whose tokenizer a GGUF file takes; None where it is not here.

    Raises:
        RecipeError, CheckpointError: as the export would.
    """
    if target == "decoder":
        from rotquant.decoder.conversion import check_convertible

        check_convertible(recipe, config)
    elif target == "gguf":
        from rotquant.formats.gguf import check_gguf, check_tokenizer

        check_gguf(recipe, config)
        if folder is not None:
            check_tokenizer(folder)
    elif target == "plain":
        from rotquant.formats.export import check_exportable

        check_exportable(recipe)
    else:
        from rotquant.formats.export import check_compressed

        check_compressed(recipe, config, target)
