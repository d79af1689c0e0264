"""Costs that are predicted: disk space as shipped models take it, memory as records have it, times as they were."""

from pathlib import Path

import pytest
import torch

from reproduction.benchmarks.costs import time_records
from reproduction.benchmarks.records import BENCH, CellRecord, read_record
from reproduction.benchmarks.shapes import shape_config
from rotquant import api
from rotquant.costs.disk import disk
from rotquant.costs.memory import phases
from rotquant.costs.time import durations, records
from rotquant.costs.ways import way_of
from rotquant.costs.work import Work, shapes_of
from rotquant.foundation.files import folder_size, read_object
from rotquant.models.checkpoints import load_config
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.text import corpus_spec
from tests.helpers.checkpoints import with_few_layers
from tests.helpers.project import REPOSITORY

MODELS = REPOSITORY / "workflow/resources/models"
H200 = REPOSITORY / BENCH / "nvidia-h200"
#: Of predicted bytes of a folder: texts in it are estimated, a prefix's length is not known.
OF_DISK = 0.005
#: Of predicted peaks: what is small beside the parts that are counted.
OF_MEMORY = 0.05
#: Of recorded peaks: the estimate by which a training chooses its way is 7 to 25 % above them.
ABOVE = 0.26

PRESETS = {"BitDistiller": "bitdistiller", "BitDistiller rotated": "bitdistiller-rotated", "RCP": "rcp"}
PARTS = {"prefix": "prefixed outlier tokens", "grid": "grid search", "tuning": "block-wise fine-tuning"}


def cells(table: str, benchmark: str) -> list[CellRecord]:
    record = read_record(H200 / f"{table}.json", table)
    return [cell for cell in record.cells if cell.benchmark == benchmark and cell.quantities]


#: Of grids that are searched: how many points they have changes what is stored, not how much.
FEW_POINTS = {"grid_weights": {"steps": 2}, "grid_scales": {"samples": 2, "coarse": 2, "fine": 2}}


def small(name: str, **changes: object) -> Recipe:
    """A preset on little text, in groups that suit narrow models."""
    recipe = preset(name)
    text = {"calibration": {"samples": 2, "sequence_length": 64}} if recipe.calibration else {}
    groups = {"weights": {"scheme": {"group_size": 16}}} if recipe.rounded.scheme.group_size else {}
    return override(recipe, {**text, **groups, **changes}, "test")


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("rq-7b", small("quarot")),
        ("rq-7b", small("awq-128g")),
        ("rq-7b", small("prefixquant", methods=FEW_POINTS)),
        ("rq-7b", small("quik", methods={"outliers": {"features": 16}})),
        ("rq-llama3", small("quarot-rtn", weights={"scheme": {"bits": 3}})),
        ("rq-phi3", small("rtn")),
        ("rq-qwen2", small("quip-sharp")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.methods) or "rtn",
)
@pytest.mark.long
def test_predicted_disk_space_is_what_a_shipped_model_takes(model: str, recipe: Recipe, tmp_path: Path) -> None:
    folder = MODELS / model
    if recipe.methods:  # slow on a CPU
        folder = with_few_layers(folder, 1 if "quip" in recipe.methods else 3, tmp_path / "short")
    recipe, _ = api.fit(folder, recipe)
    text = tmp_path / "text.txt"
    text.write_text((REPOSITORY / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    api.quantize(folder, recipe, corpus=corpus_spec(str(text)), dtype=torch.bfloat16).save(tmp_path / "model")
    work = Work(shapes_of(load_config(folder)), recipe, "bfloat16", "cpu")
    predicted = sum(part.bytes for part in disk(work, folder))
    assert predicted == pytest.approx(folder_size(tmp_path / "model"), rel=OF_DISK)


def test_a_checkpoint_of_three_bits_is_as_large_as_its_record_says() -> None:
    """RCP Table 6: all files of Llama-2-7B with NormalFloat tables, in bfloat16; the scores of a page that has no
    manifest."""
    path = REPOSITORY / BENCH / "amd-epyc-with-2-cores/rcp_table6.json"
    cell = next(
        cell
        for cell in read_record(path, "rcp_table6").cells
        if cell.arguments["shape"] == "llama-2-7b" and cell.arguments["quantizer"] == "nf3"
    )
    recipe = override(preset("bitdistiller"), {"weights": {"scheme": {"bits": 3}}}, "test")
    work = Work(shapes_of(shape_config("llama-2-7b")), recipe, "bfloat16", "cuda")
    assert sum(part.bytes for part in disk(work)) == pytest.approx(cell.quantities["bytes"].value, rel=OF_DISK)


def predicted(
    shape: str,
    recipe: Recipe,
    phase: str,
    layers: int | None = None,
    *,
    memory: int = 141 * 2**30,
    resident: bool = False,
) -> int:
    """Bytes of the phases whose names begin so, the most of them."""
    work = Work(shapes_of(shape_config(shape, layers)), recipe, "bfloat16", "cuda", memory, resident)
    return max(found.bytes for found in phases(work) if found.name.startswith(phase))


def test_predicted_memory_of_gptq_is_the_recorded_peak() -> None:
    data = read_object(H200 / "quantize-llama-2-7b-quarot.json", "record")
    assert predicted("llama-2-7b", preset("quarot"), "GPTQ") == pytest.approx(data["peak_gpu_bytes"], rel=OF_MEMORY)


def test_predicted_memory_of_learning_rotations_is_the_recorded_peak() -> None:
    found = cells("spinquant_table15", "learn")
    for cell in found:
        settings = {"batch_size": cell.arguments["batch_size"]}
        recipe = override(preset("spinquant-hard"), {"methods": {"spinquant": settings}}, "test")
        recorded = cell.quantities["all_peak_bytes"].value
        assert predicted(cell.arguments["shape"], recipe, "SpinQuant") == pytest.approx(recorded, rel=OF_MEMORY)
    assert len({cell.arguments["shape"] for cell in found}) > 5


def test_predicted_memory_of_training_is_above_the_recorded_peak() -> None:
    """On a GPU with room for all of a batch at once, as records of large models follow from fewer layers.

    The estimate must not be below a peak, or a training would begin that ends without memory. It has a GiB of libraries
    that torch does not count, and the activations in float32, though most of them are bfloat16.
    """
    found = cells("rcp_table8", "distill")
    for cell in found:
        a = cell.arguments
        recipe = preset(PRESETS[a["method"]])
        ((name, method),) = recipe.methods.items()
        settings = {"batch_size": a["batch_size"], "text": {"sequence_length": a["tokens"]}, "validation_share": 0.0}
        recipe = override(recipe, {"methods": {name: settings}}, "test")
        recorded = cell.quantities["peak_bytes"].value
        estimated = predicted(a["shape"], recipe, method.title, memory=2**40)
        assert recorded < estimated < (1 + ABOVE) * recorded
    assert len(found) > 10


def test_predicted_memory_of_prefixquant_is_the_recorded_peak() -> None:
    """On models of one or two layers, which lay on the GPU."""
    found = cells("prefixquant_table10", "prefixquant")
    for cell in found:
        a, tuned = cell.arguments, cell.arguments["part"] == "tuning"
        recipe = preset("prefixquant-tuned" if tuned else "prefixquant")
        layers = a["layers"][0 if tuned else 1]
        bytes_ = predicted(a["shape"], recipe, PARTS[a["part"]], layers, resident=True)
        assert bytes_ == pytest.approx(cell.quantities["peak_bytes"].value, rel=OF_MEMORY)
    assert len(found) == 6


def test_the_library_s_times_are_those_of_the_records() -> None:
    assert list(records()) == time_records(REPOSITORY), "write them again: rotquant bench costs"


def planned(shape: str, recipe: Recipe, dtype: str = "bfloat16") -> dict[str, float | None]:
    work = Work(shapes_of(shape_config(shape)), recipe, dtype, "cuda", 141 * 2**30)
    return {one.name: one.seconds for one in durations(work)}


def test_a_recorded_time_is_predicted_as_it_was() -> None:
    data = read_object(H200 / "quantize-llama-2-7b-quarot.json", "record")["seconds"]
    assert planned("llama-2-7b", preset("quarot")) == {"rotation": data["rotation"], "GPTQ": data["GPTQ"]}
    cell = next(cell for cell in cells("spinquant_table15", "learn") if cell.arguments["shape"] == "llama-2-13b")
    found = planned("llama-2-13b", preset("spinquant-hard"))["SpinQuant"]
    assert found == pytest.approx(cell.quantities["seconds"].value)


def test_time_grows_with_steps_parameters_and_further_text() -> None:
    once = planned("llama-2-7b", preset("spinquant-hard"))["SpinQuant"]
    twice = planned("llama-2-7b", override(preset("spinquant-hard"), {"methods": {"spinquant": {"steps": 200}}}, "t"))
    assert once is not None
    assert once < twice["SpinQuant"] < 2 * once  # its set-up is taken once
    text = {"calibration": {"samples": 256}}
    assert planned("llama-2-7b", override(preset("quarot"), text, "t"))["GPTQ"] == pytest.approx(2 * 51.5436, rel=1e-4)
    less = {"calibration": {"samples": 8}}
    assert planned("llama-2-7b", override(preset("quarot"), less, "t"))["GPTQ"] == pytest.approx(51.5436, rel=1e-4)
    sizes = [shapes_of(shape_config(shape)).quantized_parameters for shape in ("llama-2-70b", "llama-2-13b")]
    large, measured = (planned(shape, preset("quarot"))["GPTQ"] for shape in ("llama-2-70b", "llama-2-13b"))
    assert large == pytest.approx(measured * sizes[0] / sizes[1])


def test_a_time_without_a_record_is_not_known() -> None:
    assert planned("llama-2-7b", preset("omniquant")) == {"OmniQuant": None}
    assert planned("llama-2-7b", preset("quarot"), "float32") == {"rotation": None, "GPTQ": None}


def test_how_methods_work_follows_from_their_roles() -> None:
    """What each holds in memory depends on it."""
    expected = {
        "spinquant-hard": {"spinquant": "network", "gptq": "sites"},
        "rcp": {"rcp": "training"},
        "llm-qat": {"llm_qat": "training"},
        "omniquant": {"omniquant": "blocks"},
        "duquant-lwc": {"duquant": "stream", "lwc": "blocks"},
        "prefixquant": {"prefixed_outliers": "stream", "grid_weights": "sites", "grid_scales": "stream"},
        "prefixquant-tuned": {"prefixed_outliers": "stream", "block_ap": "blocks"},
        "cushioncache": {"cushioncache": "network"},
        "quip-sharp": {"quip": "sites"},
        "qoq": {"qoq": "layers"},
        "awq": {"awq": "layers"},
        "atom-128g": {"outliers": "stream", "gptq": "sites"},
    }
    for name, ways in expected.items():
        recipe = preset(name)
        assert {one: way_of(method, recipe) for one, method in recipe.methods.items()} == ways
