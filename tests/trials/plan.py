"""Trial of `rotquant plan`: peak memory and disk space that quantizing takes, against what was planned.

On a GPU the peak of each phase is what torch allocates there, on a CPU the process's resident memory; disk space is
that of the folder. Rotations are learned before phases are measured, and have recorded peaks. Models are random, of
several families' shapes and few layers, each quantized in a process of its own. With ROTQUANT_REAL_MODELS, a folder of
real models, these are quantized too.
"""

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from shutil import copy
from typing import Any

import torch

from rotquant.costs.memory import total
from rotquant.costs.plan import WorkCosts, costs_of
from rotquant.costs.work import Work, shapes_of
from rotquant.foundation.files import folder_size
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.tensors.devices import torch_dtype
from tests.trials.trial import REPOSITORY, Trial, run

#: Of what is measured: how far a plan may be from it.
TOLERANCE = 0.25
#: Bytes that a plan of a GPU's memory may be off in any case: of small peaks libraries and their kernels have a part.
LITTLE = 2**28
TOKENIZER = REPOSITORY / "workflow/resources/models/rq-7b"


@dataclass(frozen=True)
class Case:
    """A model, a folder or the name of a shape, and a preset with changes."""

    model: str
    method: str
    changes: dict[str, Any]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.method} of {Path(self.model).name} in {self.dtype}"


@dataclass(frozen=True)
class Done:
    """Bytes, planned and measured, of the memory of each phase or of a process and of the disk, and seconds."""

    memory: dict[str, tuple[int, int]]
    disk: tuple[int, int]
    seconds: float
    parts: str


#: Random models: family and sizes. The first are wide with a small vocabulary, the others narrow with a large one.
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "wide-llama": ("llama", {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}),
    "llama": ("llama", {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}),
    "qwen2": ("qwen2", {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}),
    "gemma3": ("gemma3_text", {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4}),
    "small": ("llama", {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}),
}
VOCABULARIES = {"wide-llama": 32000, "llama": 128256, "qwen2": 151936, "gemma3": 262144, "small": 32000}
_TEXT = {"calibration": {"samples": 64, "sequence_length": 2048}}
_STEPS = {"steps": 3, "batch_size": 2, "text": {"samples": 8, "sequence_length": 1024}}
ON_A_GPU = (
    Case("wide-llama", "quarot", _TEXT, "bfloat16"),
    Case("llama", "rtn", {}, "bfloat16"),
    Case("llama", "awq-128g", _TEXT, "bfloat16"),
    Case("llama", "spinquant-hard", {**_TEXT, "methods": {"spinquant": _STEPS}}, "bfloat16"),
    Case("qwen2", "quarot", _TEXT),
    Case("qwen2", "smoothquant", _TEXT),
    Case("gemma3", "quarot-rtn", {}),
    Case("gemma3", "gptq", _TEXT),
    Case("small", "llm-qat", {"methods": {"llm_qat": {"samples": 64, "steps": 4, "batch_size": 2}}}, "bfloat16"),
    Case("small", "rcp", {"methods": {"rcp": {"epochs": 1, "batch_size": 2, "text": _STEPS["text"]}}}, "bfloat16"),
)
_LITTLE = {"calibration": {"samples": 16, "sequence_length": 256}}
_FEW_STEPS = {**_STEPS, "text": {"samples": 8, "sequence_length": 128}}
ON_A_CPU = (
    Case("small", "rtn", {}),
    Case("small", "quarot", _LITTLE),
    Case("small", "awq-128g", _LITTLE),
    Case("gemma3", "quarot-rtn", {}),
    Case("qwen2", "gptq", _LITTLE, "bfloat16"),
    Case(
        "small",
        "spinquant-easy",
        {**_LITTLE, "methods": {"spinquant": {**_STEPS, "text": {"samples": 8, "sequence_length": 128}}}},
    ),
)


def body(trial: Trial) -> None:
    """Plan and quantize each case, one after the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [*(ON_A_GPU if device == "cuda" else ON_A_CPU), *_real()]
    with tempfile.TemporaryDirectory() as place:
        for case in cases[: 2 if trial.quick else None]:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                done = pool.submit(_quantize, case, device, Path(place), trial.seed).result()
            trial.say(f"{case}: {done.parts}")
            for what, (planned, measured) in {**done.memory, "disk space": done.disk}.items():
                off = planned / measured - 1
                trial.figure(
                    f"{what} of {case}", f"{planned / 2**20:,.0f} planned, {measured / 2**20:,.0f} MiB, {off:+.0%}"
                )
                little = LITTLE if device == "cuda" and what in done.memory else 0
                near = abs(planned - measured) <= max(TOLERANCE * measured, little)
                trial.check("memory and disk space are planned nearly", near, f"{what} of {case}: {off:+.0%}")
            trial.figure(f"seconds of {case}", round(done.seconds, 1))


def _real() -> Iterator[Case]:
    """Real models, where there are some."""
    root = os.environ.get("ROTQUANT_REAL_MODELS")
    for folder in sorted(Path(root).glob("*/config.json")) if root else ():
        for method, changes in (("quarot", _TEXT), ("rtn", {})):
            yield Case(str(folder.parent), method, changes)


def _quantize(case: Case, device: str, place: Path, seed: int) -> Done:
    """Make the model where it is random, plan, quantize and save."""
    from rotquant import api

    folder = Path(case.model) if Path(case.model).is_dir() else _random(case.model, place)
    recipe, _ = api.fit(folder, _changed(api.limits_of(folder).shorten(preset(case.method)), case.changes))
    size = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    work = Work(shapes_of(api.config_of(folder)), recipe, case.dtype, device, size)  # pyright: ignore[reportArgumentType]
    plan = costs_of(work, folder)
    text, output = _text(place, seed), place / f"quantized-{case.method}-{Path(case.model).name}"
    started = time.perf_counter()
    quantized = api.quantize(
        folder, recipe, corpus=text, seed=seed, device=device, dtype=torch_dtype(case.dtype), placed=False
    )
    quantized.save(output)
    seconds = time.perf_counter() - started
    if device == "cuda":
        assert quantized.stored is not None
        memory = {name: (_planned(plan, name), peak) for name, peak in quantized.stored.manifest.peak_bytes.items()}
        parts = plan.peak.parts
    else:
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory = {"memory": (total(plan.host), resident)}
        parts = plan.host
    words = f"{plan.peak.name}: " + ", ".join(f"{part.name} {part.bytes / 2**20:,.0f}" for part in parts)
    return Done(memory, (total(plan.disk), folder_size(output)), seconds, words)


def _planned(plan: WorkCosts, name: str) -> int:
    """Bytes that torch allocates in a phase and in the writing of its text, without the libraries' own."""
    found = [phase.parts for phase in plan.device if phase.name in (name, f"{name} text")]
    return max(total(part for part in parts if part.name != "libraries") for parts in found)


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    return override(recipe, changes, "trial") if changes else recipe


def _random(name: str, place: Path) -> Path:
    """A folder of a random model of a shape in bfloat16, made in a process that ends before memory is measured."""
    folder = place / name
    if not folder.exists():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(_make, name, folder).result()
    return folder


def _make(name: str, folder: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, sizes = SHAPES[name]
    heads = sizes["num_attention_heads"]
    more = {"head_dim": 256, "num_key_value_heads": 1} if "gemma" in family else {"num_key_value_heads": heads // 2}
    config = CONFIG_MAPPING[family](
        **sizes, **more, vocab_size=VOCABULARIES[name], num_hidden_layers=2, max_position_embeddings=2048
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER.glob("tokenizer*"):
        copy(file, folder)


def _text(place: Path, seed: int) -> CorpusSpec:
    """A text of random words, long enough for all samples."""
    file = place / "train.txt"
    if not file.exists():
        numbers = torch.randint(10**6, (400_000,), generator=torch.Generator().manual_seed(seed))
        file.write_text("\n".join(map(str, numbers.tolist())))
    return CorpusSpec(name="random", source="local", path=str(file))


if __name__ == "__main__":
    run("plan", __doc__.splitlines()[0], body)
