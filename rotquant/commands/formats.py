"""`rotquant export` and `import-gguf`: models in the formats of other runtimes, and whether one takes a recipe."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import MADE, Changes, Quantized, WrittenDtype, changes_of
from rotquant.commands.outputs import FILE, Writes
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import OutputKind, check_output_file, check_output_folder, folder_size, read_json
from rotquant.foundation.progress import task
from rotquant.models.folders import GGUF
from rotquant.models.gguf.importing import DTYPE, IMPORTED, checked, write_checkpoint
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.devices import torch_dtype

_TYPES = ("float32", "float16", "bfloat16")
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


@answers({**MADE, "format": "", "for": "the engine", "quant_method": "what the folder asks for", "notes": ""})
def export(
    model: Quantized,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder to write, or with --format gguf a file."),
        Writes(
            lambda given: GGUF if given["form"] == "gguf" else OutputKind("empty"),
            folder=lambda given: given["form"] != "gguf",
        ),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="plain: dequantized weights; compressed-tensors: packed, and what acts on them; gguf: for llama.cpp.",
        ),
    ] = "plain",
    engine: Annotated[
        str,
        typer.Option(
            "--for",
            help="Of compressed-tensors: transformers (with `import rotquant.serving`), vllm, or any, which is what "
            "both run without rotquant.",
        ),
    ] = "transformers",
    dtype: WrittenDtype = None,
    changes: Changes = None,
) -> CommandResult:
    """Write a quantized MODEL as a checkpoint that other runtimes load.

    A plain one has dequantized weights, for recipes without transforms at run time, such as spinquant-easy; activations
    and KV cache are left to the runtime. With --format compressed-tensors weights stay packed; --set changes what acts
    at run time, e.g. --set keys=null --set values=null. GGUF takes recipes without transforms at run time too; integers
    stay integers in blocks of 32 where their groups allow it, and --dtype writes dequantized numbers.

    Example: `rotquant export quantized/ -o served/ --format compressed-tensors --for vllm`
    """
    if form not in ("plain", "compressed-tensors", "gguf"):
        raise RecipeError(f"no format is called {form!r}: choose plain, compressed-tensors or gguf.")
    if form != "compressed-tensors" and (changes or engine != "transformers"):
        raise RecipeError("--for and --set are about what acts at run time: add --format compressed-tensors.")
    if form == "gguf":
        check_output_file(output)
    else:
        check_output_folder(output, needed=folder_size(model, "*.safetensors"))
    with task("starting"):
        from rotquant.formats.export import export_compressed, export_plain, running
        from rotquant.models.companions import TAKEN, TOKENIZER, left_out, left_out_note
        from rotquant.weights.storage import read_manifest

    kind = None if dtype is None else torch_dtype(dtype)
    how, method, notes = "exported", None, ()
    if form == "plain":
        export_plain(model, output, kind)
    elif form == "gguf":
        from rotquant.formats.gguf import export_gguf

        how = f"exported, weights as {export_gguf(model, output, kind)}"
    else:
        wanted = changes_of(changes)
        recipe = running(read_manifest(model).recipe, wanted)
        inputs, weights = recipe.activations, recipe.weights
        method = export_compressed(model, output, engine, wanted, kind)
        if method != "rotquant" and inputs is not None and inputs.dynamic:
            notes = (
                "note: the engine chooses dynamic scales of inputs, max|x| / 7.5 for 4 bits where here it is / 7.",
            )
        integers = inputs is not None and inputs.type == "int"
        if engine == "vllm" and integers and weights is not None and weights.scheme.bits < 8:
            notes += ("note: vLLM 0.26 ran 4-bit weights without quantizing their inputs: compare its answer to ours.",)
        if method != "rotquant" and read_json(output / "config.json")["quantization_config"]["transform_config"]:
            notes += (
                "note: vLLM 0.33 runs online transforms on one GPU, and of no layer with a bias.",
                "note: transformers ignores online transforms and finds no weights here: it takes --for transformers.",
            )
        how += ", for transformers after `import rotquant.serving`" if method == "rotquant" else ""
    size = output.stat().st_size if form == "gguf" else folder_size(output)
    data = {"model": str(model), "output": str(output), "bytes": size, "format": form, "quant_method": method}
    said = f"{model}: {how}; {output}, {size / 2**20:.1f} MiB"
    left = left_out(model, TOKENIZER if form == "gguf" else TAKEN)
    notes = (*left_out_note(model, left), *notes)
    data |= {"for": engine if form == "compressed-tensors" else None, "left_out": left, "notes": notes}
    return CommandResult(data, (*notes, said))


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
