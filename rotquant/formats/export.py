"""A quantized model as a checkpoint for other runtimes: plain, of dequantized weights, or packed as compressed-tensors.

Plain is what SpinQuant-easy is for (Sec. 4.2): rotated, quantized weights take the place of the original ones and the
forward pass stays as it is. Recipes with transforms at run time, their rotations' or a method's, have no such form.
Quantizers of activations and KV cache are the runtime's business and not in the folder.

compressed-tensors holds what acts at run time too. Where anything does, and the engine is transformers, the folder
names a quantization method of ours. transformers alone, which drops transforms without a word, finds no weights where
there are any: their files have other names then, of which vLLM reads all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import GenerationConfig

from rotquant.formats import compressed
from rotquant.formats.engines import acts_at_run_time, check_engine, check_methods, check_undone, storage
from rotquant.foundation.data import first_problem, merge
from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import atomic_directory, check_output_folder, folder_size, read_json, write_json
from rotquant.foundation.progress import task
from rotquant.models.architectures import Architecture, architecture_of
from rotquant.models.checkpoints import load_config, load_tokenizer, quiet_transformers
from rotquant.models.companions import companions, write_companions
from rotquant.models.integrity import LARGEST_SHARD, check_finite, seal, write_shards
from rotquant.recipes.recipe import RUNTIME_FIELDS, Recipe
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.weights.build import declared_runtime, runtime_quantization
from rotquant.weights.ranges import static_schemes
from rotquant.weights.storage import (
    FORMAT_VERSION,
    QuantizedState,
    StoredTensors,
    load_quantized,
    read_manifest,
    read_quantized,
    state_tensors,
)

#: The quantization method of folders that transformers runs by `rotquant.serving`.
METHOD = "rotquant"
#: Names of weights' files: of those folders, of others with online transforms, and of those that transformers may read.
STEM, TRANSFORMED, PLAIN = "rotquant", "transformed", "model"
RUNS_WITH = "transformers after `import rotquant.serving`: the recipe in `rotquant`, with the quantizers in `running`"
#: What such a folder says of its making, in its quantization_config.
SECTION = ("format_version", "recipe", "seed", "dtype", "versions")
#: What its sealing adds there.
DIGESTS = ("digests", "digest")


@task("exporting")
def export_plain(source: str | Path, output: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        source: a folder that `rotquant quantize` wrote.
        output: a folder that does not exist or is empty.
        dtype: of the weights; default the model's own, in which they are exact.

    Raises:
        RecipeError: the recipe has transforms at run time, or a method of it acts there on more than quantizers.
        ResultError: the output folder holds something, or the source is no quantized model.
        CheckpointError: the source is damaged.
    """
    output = Path(output)
    check_output_folder(output, needed=folder_size(source, "*.safetensors"), inputs=[source])
    check_exportable(read_manifest(source).recipe)
    model, _, _ = load_quantized(source, "cpu", dtype)
    model.generation_config = GenerationConfig()  # which transformers saves whatever the model's own is
    with atomic_directory(output) as temporary, quiet_transformers():
        model.save_pretrained(temporary, max_shard_size=LARGEST_SHARD)
        write_companions(temporary, companions(source))


def check_exportable(recipe: Recipe) -> None:
    """Raise `RecipeError` where the weights are of no use without transforms at run time.

    R3 may stay away: it turns queries and keys alike, so that only the error of a quantized cache depends on it.
    """
    check_undone(recipe, "an ordinary checkpoint cannot hold")
    check_methods(
        recipe,
        "an ordinary checkpoint cannot hold: evaluate the quantized folder itself, or quantize without this method",
    )


@task("exporting")
def export_compressed(
    source: str | Path,
    output: str | Path,
    engine: str = "transformers",
    changes: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> str:
    """Write a folder of packed weights that an engine loads, and what acts while it runs.

    Args:
        source: a folder that `rotquant quantize` wrote.
        output: a folder that does not exist or is empty.
        engine: one of `formats.engines.ENGINES`.
        changes: of what acts at run time, as nested data by the recipe's `RUNTIME_FIELDS`; null takes one away.
        dtype: of what is not quantized; default the model's own. Scales stay as they are.

    Returns:
        The quantization method that the folder names: compressed-tensors, or rotquant where only `rotquant.serving`
        runs it.

    Raises:
        RecipeError: the format or the engine cannot say the recipe, before the weights are read where the recipe tells.
        ResultError: the output folder holds something, or the source is no quantized model.
        CheckpointError: the source is damaged.
    """
    source, output = Path(source), Path(output)
    check_output_folder(output, needed=folder_size(source, "*.safetensors"), inputs=[source])
    manifest = read_manifest(source)
    recipe = running(manifest.recipe, changes)
    architecture = check_compressed(recipe, load_config(source), engine)
    compressed.packing()  # which has to be installed before the weights are read
    stored = read_quantized(source)
    kept = {*static_schemes(recipe, architecture)}
    static = {place: qparams for place, qparams in stored.state.static.items() if place[1] in kept}
    state = replace(stored.state, manifest=manifest.model_copy(update={"recipe": recipe}), static=static)
    method = METHOD if engine == "transformers" and acts_at_run_time(recipe) else compressed.METHOD
    config, tensors = _content(
        replace(stored, state=state), manifest.recipe, architecture, method, storage(recipe, engine)
    )
    if dtype is not None:
        tensors = {name: tensor if _kept(name, tensor) else tensor.to(dtype) for name, tensor in tensors.items()}
        check_finite(f"the export of {source} as {dtype}", tensors.items())
        config.get("rotquant", {})["dtype"] = str(dtype).removeprefix("torch.")
    stored.config.quantization_config = config
    stored.config.dtype = dtype or getattr(torch, manifest.dtype)
    load_tokenizer(source)
    with atomic_directory(output) as temporary, quiet_transformers():
        stem = STEM if method == METHOD else TRANSFORMED if config["transform_config"] else PLAIN
        files = write_shards(temporary, tensors, stem)
        if method == METHOD:
            config["weights_file"] = files[0] if len(files) == 1 else f"{STEM}.safetensors.index.json"
        stored.config.save_pretrained(temporary)
        write_companions(temporary, companions(source))
        if method == METHOD:
            seal_export(temporary)
    return method


def seal_export(folder: Path) -> None:
    """Put digests into the section `rotquant` of an export's config.json, as `seal` does into a manifest."""
    path = folder / "config.json"
    config = read_json(path, "configuration")
    sealed = seal(path, sealed_content(config))
    config["quantization_config"]["rotquant"] |= {name: sealed[name] for name in DIGESTS}
    write_json(path, config)


def sealed_content(config: Mapping[str, Any]) -> dict[str, Any]:
    """An export's config.json as `models.integrity` takes a manifest: with the digests beside all else it holds."""
    quantization = config["quantization_config"]
    section = quantization["rotquant"]
    rest = {name: value for name, value in section.items() if name not in DIGESTS}
    whole = {**config, "quantization_config": {**quantization, "rotquant": rest}}
    return {"config": whole, **{name: section[name] for name in DIGESTS if name in section}}


def check_compressed(recipe: Recipe, config: Any, engine: str) -> Architecture:
    """Refuse what compressed-tensors or an engine cannot say, from the recipe and the configuration alone.

    Returns:
        The model's architecture.

    Raises:
        RecipeError: naming the format or the engine, and what would do.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = architecture_of(config)
    check_engine(recipe, architecture, engine)
    if engine != "transformers" or not acts_at_run_time(recipe):
        with torch.device("meta"):
            model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)  # pyright: ignore
        acting = declared_runtime(recipe, architecture)
        described = compressed.describe(recipe, architecture, [], storage(recipe, engine), acting)
        _check_biases(described, (name for name, _ in model.named_parameters()))
    return architecture


def running(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with other quantizers at run time, of the same weights: what methods ask of these counted before.

    Args:
        changes: nested data by `RUNTIME_FIELDS`; null takes a quantizer away.

    Raises:
        RecipeError: they change something else, or make no scheme.
    """
    made = recipe.model_dump(mode="json", include=set(RUNTIME_FIELDS))
    if not changes.keys() <= made.keys():
        raise RecipeError(f"only what acts at run time can change after the weights are made: {', '.join(made)}.")
    new: dict[str, QuantizationScheme | None] = dict.fromkeys(RUNTIME_FIELDS)
    for name, data in merge(made, dict(changes)).items():
        try:
            new[name] = None if data is None else QuantizationScheme.model_validate(data)
        except ValidationError as error:
            raise RecipeError(f"what acts at run time: {name}.{first_problem(error)}.") from None
    return recipe.model_copy(update=new)


def _kept(name: str, tensor: Tensor) -> bool:
    """Whether a tensor keeps its type: codes, scales, and what our loader reads."""
    return (
        not tensor.is_floating_point()
        or tensor.dtype == torch.float8_e4m3fn
        or name.endswith("_scale")
        or name.startswith("rotquant.")
    )


def _content(
    stored: StoredTensors, made: Recipe, architecture: Architecture, method: str, packing: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The quantization_config and all tensors of an export.

    made: the recipe of the weights, of which `stored` may run another.
    """
    linears = [f"model.layers.{i}.{name}" for i in range(architecture.num_layers) for name in architecture.linears]
    ignored = ["lm_head", *(name for name in linears if f"{name}.weight" not in stored.weights)]
    recipe = stored.state.recipe
    dtype = torch.promote_types(getattr(torch, stored.state.manifest.dtype), torch.float32)
    acting = runtime_quantization(recipe, stored.state)
    described = compressed.describe(recipe, architecture, ignored, packing, acting, dtype)
    tensors = dict(stored.floats)
    while stored.weights:  # one at a time in both forms
        name, weight = stored.weights.popitem()
        tensors |= compressed.packed_weight(name, weight, packing == "pack-quantized")
    if method == METHOD:
        section = stored.state.manifest.model_dump(mode="json", include=set(SECTION))
        section |= {"format_version": FORMAT_VERSION, "recipe": made.model_dump(mode="json")}
        acting = recipe.model_dump(mode="json", include=set(RUNTIME_FIELDS))
        ours = {"quant_method": METHOD, "runs_with": RUNS_WITH, "rotquant": section, "running": acting}
        return described.config | ours, tensors | state_tensors(stored.state)
    for name, matrix in described.matrices.items():
        tensors[name] = matrix()
    return described.config, tensors | _input_scales(stored.state, architecture)


def _check_biases(described: compressed.Described, tensors: Iterable[str]) -> None:
    """Refuse a bias of a layer whose input is transformed, which vLLM does not add."""
    groups = described.config["transform_config"].get("config_groups", {}).values()
    targets = [target for group in groups for one in group["apply"] for target in one["targets"]]
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if part == "bias" and compressed.targets_name(targets, layer):
            raise RecipeError(
                f"{name} is a bias of a layer with an online transform, which vLLM 0.33 does not run: export --for "
                "transformers."
            )


def _input_scales(state: QuantizedState, architecture: Architecture) -> dict[str, Tensor]:
    """Static scales of inputs, one for each linear layer, as the format names them."""
    found = {}
    for (layer, name), qparams in state.static.items():
        for linear in architecture.site(name).linears if name not in ("keys", "values") else ():
            place = f"model.layers.{layer}.{linear}.input"
            kind = "global_scale" if getattr(state.recipe.activations, "fp4", None) else "scale"
            found[f"{place}_{kind}"] = qparams.scale.reshape(1).clone()
            if qparams.zero_point is not None:
                found[f"{place}_zero_point"] = (qparams.zero_point.reshape(1) - 128).to(torch.int8)
    return found
