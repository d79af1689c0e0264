"""`rotquant convert` and `generate`: a quantized model as a decoder on real integers, and text from it."""

from pathlib import Path
from typing import Annotated

import typer

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Converted, Device, Quantized
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import CheckpointError, RecipeError
from rotquant.foundation.files import check_output_folder, folder_size
from rotquant.foundation.progress import task
from rotquant.models.folders import DECODER
from rotquant.tensors.devices import torch_device


@answers(
    {
        "model": "",
        "output": "the folder",
        "layers": "",
        "bytes": "of the folder",
        "window": "of its attention",
        "left_out": "files of the model that are not copied",
    }
)
def convert(
    model: Quantized,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write."), Writes(DECODER, folder=True)],
    dtype: Annotated[
        str, typer.Option(help="Floating-point type of all that is not an integer: float16, bfloat16 or float32.")
    ] = "float16",
) -> CommandResult:
    """Turn a fake-quantized MODEL into a decoder that multiplies its integers: CUDA kernels on a GPU, torch elsewhere.

    Example: `rotquant convert quantized/ -o decoder/`, then `rotquant evaluate decoder/`
    """
    if dtype not in ("float16", "bfloat16", "float32"):
        raise RecipeError(f"a decoder cannot be of type {dtype!r}; use float16, bfloat16 or float32.")
    check_output_folder(output, DECODER, needed=folder_size(model, "*.safetensors") // 2)
    with task("starting"):
        from rotquant.decoder import conversion, save_decoder
        from rotquant.models.checkpoints import load_tokenizer
        from rotquant.models.companions import companions, left_out, left_out_note
        from rotquant.weights.storage import read_manifest

    manifest = read_manifest(model)
    with task("converting"):
        decoder = conversion.convert(model, dtype=dtype)
    origin = manifest.model_dump(mode="json", include={"recipe", "seed", "source", "versions"})
    save_decoder(output, decoder, load_tokenizer(model), origin, companions(model))
    size, layers, window = folder_size(output), decoder.config.layers, decoder.config.window
    context = "" if window is None else f"; texts of up to {window} tokens, the window of its attention"
    data = {"model": str(model), "output": str(output), "layers": layers, "bytes": size, "window": window}
    said = f"{model}: {layers} layers converted; {output}, {size / 2**20:.1f} MiB{context}"
    left = left_out(model)
    return CommandResult(data | {"left_out": left}, (*left_out_note(model, left), said))


@answers(
    {
        "model": "",
        "prompt": "",
        "text": "what continues it",
        "tokens": "their ids, with the end-of-text token where one came",
        "ended": "whether one came",
    }
)
def generate(
    model: Converted,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    device: Device = "auto",
) -> CommandResult:
    """Continue a text greedily with a converted MODEL, to its end or by --tokens.

    A text ends at the tokens that its generation_config.json names, or at the tokenizer's EOS.

    Example: `rotquant generate decoder/ --prompt "Returns the sum of" --tokens 32`
    """
    with task("starting"):
        from rotquant.decoder import Generation, load_decoder
        from rotquant.models.generation import end_tokens
        from rotquant.models.limits import ModelLimits
        from rotquant.models.simulation.prefix import after_prefix
        from rotquant.text import tokenize

    with task("loading the model"):
        stored = load_decoder(model, torch_device(device))
    if stored.tokenizer is None:
        raise CheckpointError(f"{model} has no tokenizer: convert the model again.")
    read = tokenize(prompt, stored.tokenizer)
    ids = after_prefix(stored.decoder, read.whole, read.bos) if len(read.ids) else read.whole
    if not len(ids):
        raise RecipeError("the prompt is empty, and the tokenizer has no BOS to begin with: give some text.")
    config = stored.decoder.config
    limits = ModelLimits(config.max_positions, config.vocabulary)
    limits.check(ids, "a prompt")
    capacity = len(ids) + tokens
    what = "the prefix, the prompt and its continuation" if config.prefix else "the prompt and its continuation"
    limits.check_length(config.prefix + capacity, what)
    ends = end_tokens(stored.generation_config, stored.tokenizer)
    with task(f"writing at most {tokens} tokens"):
        new = Generation(stored.decoder, 1, capacity).generate(ids[None], tokens, ends)[0].tolist()
    ended = new[-1] in ends
    text = str(stored.tokenizer.decode(new[:-1] if ended else new))
    data = {"model": str(model), "prompt": prompt, "text": text, "tokens": new, "ended": ended}
    return CommandResult(data, (f"{prompt}{text}",))
