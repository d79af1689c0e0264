"""What the library computes, to the last bit, before and after a change that must not alter it.

`python -m tests.frozen_library FILE --record` quantizes tiny models of all families by all presets, and writes digests
of stored tensors, the simulation's logits, the decoder's float64 logits and exported tensors, or a refusal's sentence.
Without `--record` it compares: each difference is printed, and the exit status is 1. `--only` takes a part.

Digests hold on one machine and installation alone, so none is committed.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rotquant.decoder import convert
from rotquant.formats.export import export_compressed, export_plain
from rotquant.formats.gguf import export_gguf
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import read_json, write_text
from rotquant.foundation.progress import shown_on
from rotquant.models.architectures import architecture_of
from rotquant.models.fitting import check_fits, fitted
from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import Recipe, override
from rotquant.weights.actions import hooks
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import byte_level
from tests.helpers.families import SAMPLES, method
from tests.helpers.models import AWKWARD, FURTHER, tiny_model, tiny_tokens

SHAPES = AWKWARD | FURTHER
#: For each seed the size of groups, of which kernels and GGUF take the second, and the engine of the packed export.
SEEDS = ((4, "transformers"), (32, "vllm"))
#: What vLLM does not read.
_UNREAD = {"keys": None, "values": None, "activations": None}

Facts = dict[str, str]


def cases() -> dict[str, Callable[[], Facts]]:
    """For each shape, preset and seed a function that computes its digests, by a name."""
    names = [name for name in all_presets() if name != "baseline"]
    return {
        f"{shape} {name} {seed}": lambda shape=shape, name=name, seed=seed: facts(shape, name, seed)
        for shape in SHAPES
        for name in names
        for seed in range(len(SEEDS))
    }


def facts(shape: str, name: str, seed: int) -> Facts:
    """The digests of one case, or what is said in their place."""
    group, engine = SEEDS[seed]
    model, found = tiny_model(**SHAPES[shape], seed=seed), Facts()
    recipe = _grouped(method(name), group)
    try:
        recipe, _ = fitted(recipe, architecture_of(model))
        check_fits(recipe, architecture_of(model))
        learned = hooks(recipe.learned_by[0]).learn_rotations(model, recipe, seed, SAMPLES) if recipe.learner else None
        texts = dict.fromkeys(recipe.own_texts, SAMPLES)
        rotations = learned and learned.rotations
        stored = build_weights(model, byte_level(), recipe, seed, SAMPLES, texts=texts, rotations=rotations)
    except RotquantError as error:
        return {"refused": str(error)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_quantized(folder / "model", stored)
        found["stored"] = _of_files(folder / "model")

        def simulated() -> str:
            loaded, _, state = load_quantized(folder / "model")
            with quantized_forward(loaded, state.recipe, state), torch.no_grad():
                return _digest({"logits": loaded(tiny_tokens(), use_cache=False).logits})

        def decoded() -> str:
            decoder = convert(folder / "model", dtype="float64")
            return _digest({"logits": decoder.logits(tiny_tokens(tokens=decoder.config.window or 12))})

        def exported(export: Callable[[Path, Path], object]) -> str:
            export(folder / "model", folder / export.__name__)
            return _of_files(folder / export.__name__)

        def packed(source: Path, output: Path) -> None:
            export_compressed(source, output, engine, {} if engine == "transformers" else _UNREAD)

        def blocks(source: Path, output: Path) -> None:
            export_gguf(source, output, torch.float16 if engine == "transformers" else None)

        found |= {
            "simulation": _told(simulated),
            "decoder": _told(decoded),
            "plain": _told(lambda: exported(export_plain)),
            "packed": _told(lambda: exported(packed)),
            "gguf": _told(lambda: exported(blocks)),
        }
    return found


def _grouped(recipe: Recipe, size: int) -> Recipe:
    """A recipe whose groups of weights have another size."""
    scheme = recipe.weights.scheme if recipe.weights else None
    if scheme is None or scheme.group_size is None:
        return recipe
    return override(recipe, {"weights": {"scheme": {"group_size": size}}}, "")


def _told(find: Callable[[], str]) -> str:
    """A digest, or the sentence of a refusal without the folder's name."""
    try:
        return find()
    except RotquantError as error:
        return re.sub(r"/\S*/", "", str(error))


def _of_files(place: Path) -> str:
    """Digest of the tensors of a folder and of what its config.json says of quantization, or of a file's bytes."""
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()[:16]
    tensors: dict[str, Tensor] = {}
    for path in sorted(place.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {f"{path.name}: {name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    said = read_json(place / "config.json").get("quantization_config", {})
    return _digest(tensors, {name: said[name] for name in said if name not in ("versions", "version", "digest")})


def _digest(tensors: Mapping[str, Tensor], said: object = None) -> str:
    """SHA-256 of names, types, shapes and bytes of tensors: 16 hexadecimal digits."""
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def computed(only: str) -> Iterator[tuple[str, Facts]]:
    """The facts of the cases whose names a regular expression finds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, find in cases().items():
        if re.search(only, name):
            with shown_on():
                yield name, find()


def main() -> int:
    """Record or compare; the exit status says whether something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON of digests")
    parser.add_argument("--record", action="store_true", help="write the file, or add cases to it")
    parser.add_argument("--only", default="", help='regular expression of cases, "SHAPE PRESET SEED"')
    told = parser.parse_args()
    known: dict[str, Facts] = read_json(told.file) if told.file.exists() else {}
    differ, count, started = 0, 0, time.perf_counter()
    for name, found in computed(told.only):
        count += 1
        before = known.get(name, {})
        for what in dict.fromkeys([*before, *found]):
            if not told.record and before.get(what) != found.get(what):
                differ += 1
                print(f"{name}: {what}: was {before.get(what)}, is {found.get(what)}", flush=True)
        if told.record:
            known[name] = found
    if told.record:
        write_text(told.file, json.dumps(known, indent=0) + "\n")
    print(f"{count} cases, {differ} differences, {time.perf_counter() - started:.0f} s")
    return int(differ > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
