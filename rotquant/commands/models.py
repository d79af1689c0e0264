"""`rotquant quantize`, `export` and `evaluate`: one model from the command line."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers, note_and_sentences
from rotquant.commands.formats import For, check_target
from rotquant.commands.options import (
    MADE,
    AnyCorpus,
    AnyModel,
    Bos,
    Changes,
    Checkpoint,
    Device,
    Dtype,
    LoadedDtype,
    Method,
    Samples,
    Seed,
    SequenceLength,
    Split,
    changed,
    chosen_split,
    named_corpus,
    named_recipe,
    place_of_bos,
    rotation_fields,
    with_options,
)
from rotquant.commands.outputs import FILE, Writes
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import OutputKind, check_output_file, check_output_folder, folder_size
from rotquant.foundation.progress import task
from rotquant.metrics import lm_eval
from rotquant.models.folders import QUANTIZED
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import Perplexity
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import BOS, NO_BOS, bos_of, check_split

if TYPE_CHECKING:
    from rotquant import api
    from rotquant.metrics.cost import QuantizationCost
    from rotquant.weights.storage import StoredModel


@answers(
    {
        **MADE,
        "method": "",
        "note": "where the rotation was changed to fit",
        "weights": "how many",
        "seconds": "by stage",
        "check": "perplexity in full_precision and quantized, kl in nats, flips in percent, tokens, metric; or null",
    }
)
def quantize(
    model: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write."), Writes(QUANTIZED, folder=True)],
    method: Method = "quarot",
    changes: Changes = None,
    corpus: AnyCorpus = None,
    samples: Samples = None,
    sequence_length: SequenceLength = None,
    bos: Bos = None,
    rotations: Annotated[
        Path | None,
        typer.Option(help="File of learned rotations: read where it exists, else written; continues what it began."),
        Writes(OutputKind("a file of rotations", lambda _: True)),  # one that is there is read
    ] = None,
    target: For = None,
    check: Annotated[
        bool,
        typer.Option(
            help="Say at the end what it cost, perplexity and KL divergence from full precision, on two windows of at "
            "most 512 tokens of the validation split (or test split) of --corpus, where that is named and has one."
        ),
    ] = True,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> CommandResult:
    """Rotate and quantize MODEL into a folder that `rotquant evaluate` and `rotquant.api.load` read.

    --corpus is what it is calibrated on, where METHOD reads text.

    Example: `rotquant quantize MODEL --corpus text/ -o quantized/ --samples 64 --sequence-length 512`

    Methods that train take their papers' amounts of work, for a small model far too many: `--method llm-qat --set
    methods.llm_qat.samples=256 --set methods.llm_qat.sequence_length=128 --set methods.llm_qat.steps=128 --set
    methods.llm_qat.learning_rate=5e-4`
    """
    recipe = with_options(named_recipe(method), samples, sequence_length, changes, bos)
    if recipe.is_baseline:
        raise RecipeError("the baseline changes nothing, so there is nothing to write; evaluate the model itself.")
    bits = recipe.weights.scheme.bits if recipe.weights else 16
    least = folder_size(model, "*.safetensors") * bits // 32  # of a float32 checkpoint; nothing is known of the hub's
    check_output_folder(output, QUANTIZED, needed=least)
    if rotations is not None:
        _check_rotations(rotations, output)
    spec = named_corpus(corpus) if corpus or recipe.reads_text else None
    if spec is not None and recipe.reads_text:
        check_split(spec, "train")
    with task("starting"):
        from rotquant import api
        from rotquant.models.checkpoints import load_config, local_folder
        from rotquant.models.companions import left_out, left_out_note

    place = local_folder(model)
    left = left_out(place)
    recipe, changed_to_fit = recipe_for(place, method, samples, sequence_length, changes, bos)
    if target is not None:
        check_target(target, recipe, load_config(place), place)
    if changed_to_fit:
        typer.echo(f"note: {changed_to_fit}")
    quantized = api.quantize(
        model,
        recipe,
        corpus=spec,
        seed=seed,
        device=torch_device(device),
        dtype=torch_dtype(dtype),
        rotations=rotations,
        placed=False,  # it is saved, not run
        check=api.check_metric(place, spec) if check and spec else None,
    )
    quantized.save(output)
    stored = cast("StoredModel", quantized.stored)
    size = folder_size(output)
    learned = stored.manifest.source.get("rotation", {})
    seconds = ({"learning": learned["seconds"]} if "seconds" in learned else {}) | stored.seconds
    stages = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    found = f"{method}: {len(stored.weights)} weights quantized ({stages}); {output}, {size / 2**20:.1f} MiB"
    data = {"model": model, "output": str(output), "bytes": size, "method": method, "note": changed_to_fit}
    data |= {"left_out": left, "weights": len(stored.weights), "seconds": seconds, "check": None}
    shown, judged = [*left_out_note(model, left), found], {}
    if (cost := quantized.cost(torch_device(device))) is not None:
        data["check"] = cost.as_data()
        judged = {"perplexity of the quantized model": cost.quantized, "KL divergence": cost.kl}
        shown += cost_in_words(cost, f"`rotquant diagnose {model}` shows what costs it{_way_out(place, recipe)}.")
    return CommandResult(data, tuple(shown), judged=judged)


def cost_in_words(cost: "QuantizationCost", advice: str) -> list[str]:
    """What quantization costs, and a sentence with advice where that is out of the ordinary."""
    metric, windows = cost.metric, cost.tokens // (cost.metric.sequence_length - 1)
    said = [
        f"cost: perplexity {cost.full_precision:.4g} in full precision, {cost.quantized:.4g} quantized, KL divergence "
        f"{cost.kl:.3g} nats a token, on {windows} windows of {metric.sequence_length} tokens of "
        f"{metric.corpus} {metric.split}"
    ]
    if cost.is_extraordinary:
        said.append(
            f"KL divergence of {cost.kl:.2f} nats is out of the ordinary, 4 bits usually cost less than 1: {advice}"
        )
    return said


def _way_out(place: Path, recipe: Recipe) -> str:
    """The end of a sentence: options that would cost less and that this model and recipe take, or nothing."""
    from rotquant import api

    inputs, weights = recipe.activations, recipe.weights
    ways: list[tuple[str, Callable[[], Recipe]]] = []
    if recipe.rotation is None and inputs is not None:
        ways.append(("--method quarot", lambda: api.limits_of(place).shorten(preset("quarot"))))
    for path, scheme in (("activations", inputs), ("weights.scheme", weights and weights.scheme)):
        if scheme is not None and scheme.bits < 8:
            option = f"{path}.bits={min(8, 2 * scheme.bits)}"
            ways.append((f"--set {option}", lambda option=option: changed(recipe, [option])))
    for words, make in ways:
        with suppress(RecipeError):
            api.fit(place, make())
            return f"; `{words}` costs less"
    return ""


def recipe_for(
    place: Path,
    method: str,
    samples: int | None,
    sequence_length: int | None,
    changes: list[str] | None,
    bos: str | None = None,
) -> tuple[Recipe, str]:
    """The recipe of a preset or file as a model allows it, with what the command line says, and a sentence on what
    changed to fit: nothing that an option names."""
    from rotquant import api

    recipe = api.limits_of(place).shorten(named_recipe(method))
    return api.fit(place, with_options(recipe, samples, sequence_length, changes, bos), rotation_fields(changes))


def _check_rotations(rotations: Path, output: Path) -> None:
    """Refuse a file of rotations that cannot be written, or that the output folder would replace."""
    if output.resolve() in rotations.resolve().parents:
        raise ResultError(f"{rotations} lies in {output}, which will be replaced; name a file outside of it.")
    check_output_file(rotations)


@answers(
    {
        "model": "",
        "metric": "its settings",
        "perplexity": "exp of nll",
        "nll": "nats per token",
        "nll_standard_error": "over windows",
        "tokens": "predicted",
        "windows": "",
        "text": "digest and share of what was read",
        "note": "",
        "results": "of tasks: what lm-eval says of each",
        "versions": "of tasks",
        "n-shot": "by task",
        "n-samples": "by task",
    },
    file=True,
)
def evaluate(
    model: AnyModel,
    corpus: AnyCorpus = None,
    split: Split = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per window. Default: what model and tokenizer allow, at most 2048."),
    ] = None,
    max_windows: Annotated[int | None, typer.Option(min=1, help="So many, spread evenly. Default: all.")] = None,
    bos: Bos = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="In place of perplexity: lm-eval's tasks, separated by commas; `lm_eval ls tasks` lists them."
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each item. Default: as the task says.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help="Only the first items of each task: a number, or below 1 a share.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            help="A folder of task definitions, lm-eval's YAML; data files are looked up in it, and Python functions "
            "that it names are run."
        ),
        FILE,
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(help="A folder of data in place of the hub: files TASK.jsonl, .json or .parquet."),
        FILE,
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows or items per forward pass.")] = 8,
    device: Device = "auto",
    dtype: LoadedDtype = None,
) -> CommandResult:
    """Measure MODEL: a plain checkpoint as it is, a quantized folder with its online transforms and quantizers.

    Examples: `rotquant evaluate quantized/ --corpus wikitext2`, `rotquant evaluate quantized/ --tasks piqa,arc_easy`
    """
    asked = (num_fewshot, limit, include_path, task_data)
    if tasks is None and any(option is not None for option in asked):
        raise RecipeError(
            "--num-fewshot, --limit, --include-path and --task-data say how tasks are asked: add --tasks."
        )
    kind = None if dtype is None else torch_dtype(dtype)
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",")]
        if not all(names):
            raise RecipeError("--tasks has an empty name: separate tasks by single commas.")
        lm_eval.check_tasks(names, include_path, task_data, num_fewshot)
        with task("starting"):
            from rotquant import api
            from rotquant.models.checkpoints import local_folder

        loaded = api.load(local_folder(model), device=torch_device(device), dtype=kind)
        options: dict[str, Any] = {"limit": None if limit is None else int(limit) if limit >= 1 else limit}
        options |= {"num_fewshot": num_fewshot, "include_path": include_path, "task_data": task_data}
        found = api.zero_shot(loaded, names, **options, batch_size=batch_size, bos=cast(BOS | None, bos))
        return _of_tasks(model, found, _without_bos(loaded) if bos in ("text", "window") else "")
    spec = named_corpus(corpus)
    part = chosen_split(split, spec)
    with task("starting"):
        from rotquant import api
        from rotquant.models.checkpoints import local_folder
        from rotquant.text import corpus_identity, load_text

    place = local_folder(model)
    length = api.limits_of(place).length(sequence_length)
    shape: dict[str, Any] = {"sequence_length": length, "max_windows": max_windows, "bos": place_of_bos(bos)}
    settings = Perplexity(corpus=spec.name, split=part, **shape)
    loaded = api.load(place, device=torch_device(device), dtype=kind)
    text = load_text(spec, settings.split)
    result = api.perplexity(loaded, spec, settings, text=text, batch_size=batch_size)
    read = corpus_identity(spec, [settings.split], texts={settings.split: text})
    metrics = result.as_metrics() | {"text": read} | ({"note": result.note} if result.note else {})
    short, *sentences = note_and_sentences(result.note)
    notes = "".join(f"; {note}" for note in (read["splits"][part].get("share"), short) if note)
    windows = f"{result.windows} windows of {settings.sequence_length} tokens{notes}"
    shown = (f"{model}: {result} on {spec.name} {part} ({windows})", *sentences)
    data = {"model": model, "metric": settings.model_dump(mode="json"), **metrics}
    return CommandResult(data, shown, judged={"perplexity": result.perplexity})


def _of_tasks(model: str, found: dict[str, Any], note: str) -> CommandResult:
    """The answer about tasks: lm-eval's numbers, shares and not percent, as it writes them."""
    heads = ("task", "version", "n-shot", "items", "metric", "value", "stderr")
    table, judged = Table(*(Column(head, no_wrap=True) for head in heads), title=model), {}
    for name, results in found["results"].items():
        about = (str(found["versions"].get(name, "")), str(found["n-shot"].get(name, "")))
        items = str(found["n-samples"].get(name, {}).get("effective", ""))
        for key, value in results.items():
            metric, _, rule = key.partition(",")
            if isinstance(value, str) or not rule or metric.endswith("_stderr"):
                continue
            error = results.get(f"{metric}_stderr,{rule}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            table.add_row(name, *about, items, metric if rule == "none" else key, f"{value:.4f}", shown)
            judged[f"{name} {metric}"] = value
    data = {"model": model, **{key: found[key] for key in ("results", "versions", "n-shot", "n-samples")}}
    return CommandResult(data, (table, *filter(None, [note])), judged=judged)


def _without_bos(model: "api.Model") -> str:
    """Why items have no BOS of their own where one is asked for; nothing where they have one."""
    from rotquant.models.simulation.prefix import BOS_OF_PREFIX, prefix_holds

    bos = bos_of(model.tokenizer)
    return NO_BOS if bos is None else BOS_OF_PREFIX if prefix_holds(model.network, bos) else ""
