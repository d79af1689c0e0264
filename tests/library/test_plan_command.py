"""`rotquant plan`: from config.json alone, for GPUs that are not here, with errors that are sentences."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from rotquant.costs.disk import disk
from rotquant.costs.memory import peak, phases, training_way
from rotquant.costs.plan import costs_of
from rotquant.costs.time import durations
from rotquant.costs.work import Work, shapes_of
from rotquant.models.architectures import FAMILIES, architecture_of
from rotquant.models.fitting import fitted
from rotquant.models.memory import attention_bytes
from rotquant.models.rotation.matrices import initial_rotations
from rotquant.qat import estimate as estimates
from rotquant.qat.estimate import estimate
from rotquant.qat.method import SelfDistillation
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from tests.helpers.commands import rotquant
from tests.helpers.models import FURTHER, tiny_model

LLAMA = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
LARGE = LlamaConfig(
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a config.json of Llama-2-7B's shape and nothing else."""
    LLAMA.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert rotquant(monkeypatch, "plan", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_only_the_configuration_is_needed(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(monkeypatch, capsys, folder, "--device", "cuda", "--dtype", "bfloat16")
    assert found["parameters"] == 6_738_415_616
    assert found["time"]["complete"]
    assert found["time"]["seconds"] == pytest.approx(55.9, abs=0.1)
    parts = found["disk"]["parts"]
    assert found["disk"]["bytes"] == sum(part["bytes"] for part in parts)
    assert [one["fits"] for one in found["fits"][:2]] == [True, True]
    largest = max(phase["bytes"] for phase in found["device_memory"]["phases"])
    assert found["device_memory"]["peak_bytes"] == largest


def test_the_table_says_what_each_figure_follows_from(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rotquant(monkeypatch, "plan", folder, "--device", "cuda", "--dtype", "bfloat16") == 0
    shown = capsys.readouterr().out
    assert "llama, 6,738,415,616 parameters; quarot in bfloat16 on a GPU" in shown
    assert "128 samples x 2048 tokens x 4,096 features x 2 bytes" in shown
    assert "results/bench/nvidia-h200/quantize-llama-2-7b-quarot.json" in shown
    assert "GPU of 24 GB: fits" in shown


def test_what_is_not_recorded_is_said_to_be_unknown(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rotquant(monkeypatch, "plan", folder, "--method", "omniquant", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "nothing is recorded on a CPU" in shown
    assert "GPU" not in shown


def test_a_recipe_that_changes_no_weight_takes_nothing_on_the_gpu(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(monkeypatch, capsys, folder, "--method", "rtn", "--set", "weights=null", "--device", "cuda")
    assert found["device_memory"]["peak_bytes"] == 0
    assert found["disk"]["bytes"] > 4 * found["parameters"]  # all of it, in float32


def test_a_method_may_be_a_file(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    assert rotquant(monkeypatch, "recipe", "quarot", "--set", "weights.scheme.bits=8", "--format", "yaml") == 0
    file.write_text(capsys.readouterr().out)
    eight = planned(monkeypatch, capsys, folder, "--method", str(file), "--device", "cpu")
    four = planned(monkeypatch, capsys, folder, "--method", "quarot", "--device", "cpu")
    assert eight["recipe"]["weights"]["scheme"]["bits"] == 8
    assert eight["disk"]["bytes"] - four["disk"]["bytes"] == pytest.approx(6_476_005_376 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere"),
        (["MODEL", "--method", "quarrot"], "unknown method 'quarrot'"),
        (["MODEL", "--method", "none.yaml"], "none.yaml does not exist"),
        (["MODEL", "--method", "baseline"], "nothing to plan"),
        (["MODEL", "--set", "weights.scheme.bits=99"], "weights.scheme.bits"),
        (["MODEL", "--device", "tpu"], "unknown device 'tpu'"),
        (["MODEL", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["EMPTY"], "has no config.json"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"MODEL": folder, "EMPTY": str(tmp_path / "empty")}
    assert rotquant(monkeypatch, "plan", *(places.get(one, one) for one in arguments)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("rotquant: ")
    assert sentence in said


def test_a_model_of_the_hub_without_a_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert rotquant(monkeypatch, "plan", "nobody/no-such-model") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the hub cannot be reached for a model of that name" in said


def fits(work: Work) -> dict[str, Any]:
    return {one.gpu: one for one in costs_of(work).fits}


def test_what_does_not_fit_comes_with_the_changes_that_make_it_fit() -> None:
    recipe = override(preset("spinquant-hard"), {"methods": {"spinquant": {"batch_size": 64}}}, "test")
    work = Work(shapes_of(LLAMA), recipe, "float32", "cuda")
    found = fits(work)["24 GB"]
    assert not found.fits
    assert found.changes[0] == "--dtype=bfloat16"
    assert found.then is not None
    assert found.then < found.peak
    assert found.then + 2**30 <= found.memory
    changed = override(recipe, {"methods": {"spinquant": {"batch_size": int(found.changes[1].split("=")[1])}}}, "test")
    assert fits(Work(work.shapes, changed, "bfloat16", "cuda"))["24 GB"].fits


def test_what_no_smaller_amount_makes_fit_says_so() -> None:
    found = fits(Work(shapes_of(LLAMA), preset("rcp"), "bfloat16", "cuda"))["24 GB"]
    assert (found.fits, found.changes, found.then) == (False, (), None)
    assert found.least is not None
    assert found.memory < found.least <= found.peak


def test_a_training_that_is_too_large_for_a_gpu_keeps_a_part_on_the_host() -> None:
    """The H200's figures of `qat.estimate`: 8 sequences of 1,024 tokens took 57.6 GiB of allocated and 68.8 GiB of
    reserved GPU memory, and 98 GiB of the host.

    A card must have what torch reserves and in addition CUDA's context, some 0.5 GiB, so the plan may be above the
    first by up to 2 GiB and never below. The plan of the host also has what is written afterwards, 8 GiB, and knows
    nothing of buffers: 10 %.
    """
    work = Work(shapes_of(LLAMA), preset("rcp"), "bfloat16", "cuda")
    found = fits(work)["80 GB"]
    assert found.fits
    assert found.way == "8 sequences at once, moments and teacher on the host"
    assert 68.8 <= found.peak / 2**30 <= 70.8
    assert found.host / 2**30 == pytest.approx(98, rel=0.1)
    named = {part.name: part.bytes for part in peak(replace(work, memory=found.memory)).parts}
    assert named["student and teacher"] + named["quantizers"] < 57.6 * 2**30
    assert not durations(replace(work, memory=found.memory))[1].whole
    roomy = {one.gpu: one for one in costs_of(work, gpus={"141 GB": 140 * 2**30, "large": 2**40}).fits}
    assert [roomy[name].way for name in ("141 GB", "large")] == ["2 sequences at once", "64 sequences at once"]
    assert roomy["141 GB"].host < found.host


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["rcp", "bitdistiller-rotated", "bitdistiller"])
def test_the_way_of_a_training_is_the_one_that_it_chooses(
    tied: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs for every way, from all of a batch at once to the last one. A rotated model begins untied."""
    monkeypatch.setattr(estimates, "_rate", lambda *_: 1e12)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=4, tie_word_embeddings=tied
    )
    recipe = preset(name)
    (method,) = recipe.methods.values()
    assert isinstance(method, SelfDistillation)
    shapes, begun = shapes_of(config), copy.copy(config)
    begun.tie_word_embeddings = tied and not recipe.fuses_norms
    chosen = set()
    for gibibytes in (8, 12, 16, 18, 24, 30, 40, 80, 200):
        memory = gibibytes * 2**30
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, memory=memory: (memory, memory))
        expected = estimate(begun, recipe, method, torch.device("cuda"), torch.bfloat16)
        way = training_way(Work(shapes, recipe, "bfloat16", "cuda", memory), method)
        assert (way.needed, way.offloaded) == (expected.needed, expected.offloaded)
        assert way.at_once == expected.at_once
        if way.offloaded:  # a plan counts the teacher with the network, which lies on the host from the start
            teacher = 2 * config.num_hidden_layers * shapes.of_layer
            assert way.moments + way.best + teacher == expected.host
        chosen.add((way.at_once, way.offloaded))
    assert {offloaded for _, offloaded in chosen} == {True, False}
    assert {(None, False), (1, True)} <= chosen


def test_a_large_model_is_streamed_through_a_small_gpu_with_hidden_states_on_the_host() -> None:
    recipe = preset("quarot")
    large = Work(shapes_of(LARGE), recipe, "bfloat16", "cuda", 12 * 2**30)
    streamed = costs_of(large)
    assert any(part.name == "hidden states" for part in streamed.host)
    assert streamed.peak.bytes < large.parameters * large.itemsize / 3
    roomy = costs_of(Work(large.shapes, recipe, "bfloat16", "cuda", 79 * 2**30))
    assert not any(part.name == "hidden states" for part in roomy.host)


def test_matrices_of_online_rotations_are_counted() -> None:
    shapes = shapes_of(tiny_model(**FURTHER["gemma3"]).config)
    recipe, _ = fitted(preset("spinquant-hard"), shapes.architecture)
    work = Work(shapes, recipe, "bfloat16", "cuda", 2**34)
    stored = initial_rotations(shapes.architecture, recipe.rotation, 0).online(torch.float32)
    every = sum(tensor.nbytes for tensor in stored.values())
    assert next(part.bytes for part in disk(work) if part.name == "run-time tensors") == every
    found = {phase.name: {part.name: part.bytes for part in phase.parts} for phase in phases(work)}
    assert found["GPTQ"]["online rotations"] == every
    assert found["SpinQuant"]["online rotations"] > 2 * every


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(family: str) -> None:
    shapes = shapes_of(CONFIG_MAPPING[family]())
    rtn = costs_of(Work(shapes, preset("rtn"), "bfloat16", "cuda", 79 * 2**30))
    assert 0 < sum(part.bytes for part in rtn.disk) < 2 * shapes.parameters
    assert all(part.bytes > 0 for part in (*rtn.peak.parts, *rtn.host, *rtn.disk))


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_the_model(tied: bool) -> None:
    model = tiny_model(tied=tied)
    shapes = shapes_of(model.config)
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert shapes.of_layer == layer
    assert shapes.untied - shapes.parameters == (shapes.embedding if tied else 0)


def planned_phases(config: Any, method: str, **changes: Any) -> dict[str, dict[str, int]]:
    recipe = override(preset(method), changes, "test") if changes else preset(method)
    work = Work(shapes_of(config), recipe, "float32", "cuda", 80 * 2**30)
    return {one.name: {part.name: part.bytes for part in one.parts} for one in phases(work)}


GEMMA = CONFIG_MAPPING["gemma3_text"](
    vocab_size=262144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
)


def test_a_large_embedding_comes_to_the_gpu_with_the_text() -> None:
    """It is most of the memory of a narrow model with many tokens: all text is embedded before the first layer runs."""
    little = {"calibration": {"samples": 8, "sequence_length": 512}}
    parts = planned_phases(GEMMA, "gptq", **little)["GPTQ"]
    assert parts["the embedding"] == 4 * 262144 * 640 > sum(parts.values()) / 2
    much = {"calibration": {"samples": 128, "sequence_length": 2048}}
    parts = planned_phases(GEMMA, "gptq", **much)["GPTQ"]  # inputs that are kept outweigh it
    assert "the embedding" not in parts
    assert parts["inputs of mlp_output"] == 4 * 128 * 2048 * 2048


def test_a_method_that_observes_a_whole_layer_keeps_its_moments_and_no_inputs() -> None:
    parts = planned_phases(LLAMA, "awq-128g")["AWQ"]
    assert parts["X^T X of all sites"] == 4 * (3 * 4096**2 + 11008**2)
    assert not any(name.startswith("inputs of") for name in parts)
    assert any(name.startswith("inputs of") for name in planned_phases(LLAMA, "gptq")["GPTQ"])


def test_what_is_not_quantized_is_kept_in_the_checkpoint_s_type_and_copied_while_it_is_saved() -> None:
    config = copy.deepcopy(GEMMA)
    config.dtype = torch.bfloat16
    shapes, recipe = shapes_of(config), preset("rtn")
    floats = shapes.parameters - shapes.quantized_parameters
    for dtype, copies in (("float32", 2), ("bfloat16", 1)):  # in another type, and a file's bytes
        plan = costs_of(Work(shapes, recipe, dtype, "cpu"))
        stored = {part.name: part.bytes for part in plan.disk}
        assert stored["other parameters"] == 2 * floats
        saved = next(part.bytes for part in plan.host if part.name == "what is saved")
        assert saved == 2 * stored["quantized weights"] + copies * 2 * floats


def test_a_rotation_that_leaves_the_residual_stream_alone_turns_no_embedding() -> None:
    turned = {"rotation": {"residual": "none"}}
    largest = 640 * 2048
    assert planned_phases(GEMMA, "quarot-rtn", **turned)["rotation"]["a weight in float64"] == 32 * largest
    assert planned_phases(GEMMA, "quarot-rtn")["rotation"]["a weight in float64"] == 32 * 2**26


NARROW = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
MIB = 2**20


def test_a_gpu_holds_the_scores_of_attention_where_none_is_fused() -> None:
    """SmolLM2-135M's shape, 8 sequences at once: float64 has no fused attention, float32 with grouped queries has."""
    text = {"calibration": {"samples": 64, "sequence_length": 2048}}
    shape = architecture_of(NARROW)
    cuda = torch.device("cuda")
    scores = 2 * 8 * 8 * 9 * 2048**2  # before and after the softmax
    assert scores < attention_bytes(shape, 8, 2048, 8, cuda) < 1.2 * scores
    assert attention_bytes(shape, 8, 2048, 4, cuda) < scores / 10
    parts = planned_phases(NARROW, "quarot", **text)["GPTQ"]
    assert "a batch in the attention" not in parts
    assert "inputs of mlp_output" in parts


@pytest.mark.parametrize(("config", "measured"), [(NARROW, 202), (GEMMA, 213)], ids=["smollm2-135m", "gemma3-270m"])
def test_rounding_on_a_gpu_holds_many_candidates_of_clip_ratios(config: Any, measured: int) -> None:
    parts = planned_phases(config, "rtn")["round-to-nearest"]
    assert sum(parts.values()) == pytest.approx(measured * MIB, rel=0.05)
    chosen = planned_phases(config, "rtn", weights={"clip_search": False})["round-to-nearest"]
    assert sum(chosen.values()) < sum(parts.values()) / 4


def test_a_model_that_writes_its_text_holds_keys_and_values_of_all_sequences_at_once() -> None:
    found = planned_phases(NARROW, "llm-qat")
    assert found["LLM-QAT text"]["keys and values"] == 256 * 1024 * 2 * 30 * 3 * 64 * 4
    assert planned_phases(NARROW, "rcp").keys() > {"RCP text", "RCP"}
    assert "RCP text" not in planned_phases(NARROW, "rcp", methods={"rcp": {"temperature": None}})
    wide = planned_phases(LLAMA, "llm-qat")["LLM-QAT text"]["keys and values"]
    assert wide == 2**34 == 16 * 1024 * 2 * 32 * 4096 * 4  # 16 sequences
