"""Formats of what is made of a model: quantized folders, decoders, rotations, states of trainings."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rotquant import api
from rotquant.decoder import convert, save_decoder
from rotquant.decoder.storage import read_decoder_manifest
from rotquant.formats.export import export_compressed, seal_export
from rotquant.foundation.errors import RotquantError
from rotquant.models.companions import GENERATION
from rotquant.models.folders import DECODER_MANIFEST, MANIFEST, kind_of
from rotquant.models.rotation.matrices import (
    Rotations,
    check_made_of,
    initial_rotations,
    load_history,
    load_rotations,
    save_rotations,
)
from rotquant.qat.engine import ShardedCheckpoint
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import RotationScheme
from rotquant.training.state import Checkpoint
from rotquant.weights.build import build_weights
from rotquant.weights.storage import read_manifest, read_method_tensors, read_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.models import TINY_SHAPE, tiny_model
from tests.helpers.sealing import reseal
from tests.trials.fuzz.formats import Format, content_of, kinds

MADE_OF = {"model": "ab", "text": {"name": "text"}, "seed": 0}


def formats(root: Path) -> list[Format]:
    """Of a tiny model that is quantized and converted below `root`."""
    quantized, prefixed, decoder, exported = _made(root)
    manifest, weights = "rotquant.json", "quantized.safetensors"
    return [
        Format("manifests of quantized folders", quantized, kinds(manifest), _manifest, 2.0),
        Format("quantized folders", quantized, kinds(manifest, weights, "config.json", GENERATION), _load, 1.0),
        Format("quantized folders with a prefix", prefixed, kinds(manifest, weights), _read),
        Format("exports to compressed-tensors", exported, kinds("config.json", "rotquant.safetensors"), _load, 1.0),
        Format("manifests of decoders", decoder, kinds("decoder.json"), read_decoder_manifest, 1.5),
        Format("decoders", decoder, kinds("decoder.json", "decoder.safetensors"), _load, 0.7),
        Format("rotations", _rotations(root), kinds("rotations.safetensors"), _rotated, 2.0),
        Format("states of trainings", _states(root), {"state": "safetensors"}, _resumed, 2.0),
        Format("states of shared trainings", _shared(root), kinds(LATEST), _shared_resumed),
    ]


def _made(root: Path) -> tuple[dict[str, bytes], ...]:
    model = tiny_model(**{name: TINY_SHAPE[name] for name in ("hidden_size", "intermediate_size")}, num_layers=1)
    stored = build_weights(model, tiny_tokenizer(), preset("quarot-rtn"), seed=0, progress=False)
    save_quantized(root / "quantized", stored)
    export_compressed(root / "quantized", root / "exported")
    save_decoder(root / "decoder", convert(stored, dtype="float32"), tiny_tokenizer())
    small = tiny_model(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
    calibration = {"samples": 2, "sequence_length": 24}
    recipe = override(preset("prefixquant"), {"rotation": {"heads": False}, "calibration": calibration}, "example")
    tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    texts = dict.fromkeys(recipe.own_texts, tokens)
    made = build_weights(small, tiny_tokenizer(), recipe, seed=0, samples=tokens, texts=texts, progress=False)
    save_quantized(root / "prefixed", made)
    return tuple(content_of(root / name) for name in ("quantized", "prefixed", "decoder", "exported"))


def _sealed(folder: Path) -> None:
    """Make the digests of a folder's manifest those of what is there, so that what comes after them is reached."""
    if not all(path.is_file() or path.is_dir() for path in folder.rglob("*")):
        return  # of a pipe, on which nobody writes, or a device there is no digest
    for name in (MANIFEST, DECODER_MANIFEST):
        with suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
            reseal(folder / name)
    with suppress(RotquantError, ValueError, AttributeError, TypeError, KeyError):
        seal_export(folder)


def _manifest(folder: Path) -> None:
    kind_of(folder)
    read_manifest(folder)


def _load(folder: Path) -> None:
    _sealed(folder)
    api.limits_of(folder)
    api.load(folder)


def _read(folder: Path) -> None:
    _sealed(folder)
    read_quantized(folder)
    read_method_tensors(folder, "prefixed_outliers")
    api.load(folder)


def _rotations(root: Path) -> dict[str, bytes]:
    from rotquant.models.architectures import architecture_of

    drawn: Rotations = initial_rotations(architecture_of(tiny_model()), RotationScheme(), 0)
    history: list[dict[str, Any]] = [{"step": 0, "loss": 1.0, "learning_rate": 0.1}]
    save_rotations(root / "rotations.safetensors", drawn, history, MADE_OF)
    return content_of(root, "rotations.safetensors")


def _rotated(folder: Path) -> None:
    path = folder / "rotations.safetensors"
    load_rotations(path).tensors()
    check_made_of(path, MADE_OF)
    load_history(path)


def _parts() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A layer, and what is kept of its training."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    drawn = torch.Generator().manual_seed(0)
    return layer, {"layer": layer, "optimizer": optimizer, "schedule": schedule, "drawn": drawn, "best": torch.ones(2)}


def _states(root: Path) -> dict[str, bytes]:
    Checkpoint(root / "state", "this one", every=1, seconds=None).save(1, _parts()[1], [{"step": 0, "loss": 1.0}])
    return content_of(root, "state")


def _resumed(folder: Path) -> None:
    layer, parts = _parts()
    Checkpoint(folder / "state", "this one", every=1, seconds=None).load(parts)
    layer(torch.ones(1, 3)).sum().backward()
    parts["optimizer"].step()


LATEST = "state.parts/latest.json"


def _shared(root: Path) -> dict[str, bytes]:
    own = root / "state.parts/step-1.rank-0"
    Checkpoint(own, "this one 0 of 2", every=1, seconds=None).save(1, _parts()[1], [])
    return content_of(root, "state.parts/*") | {LATEST: b'{"step": 1, "processes": 2}'}


def _shared_resumed(folder: Path) -> None:
    whole = Checkpoint(folder / "state", "this one", every=1, seconds=None)
    ShardedCheckpoint(whole, processes=2, rank=0).load(_parts()[1])
