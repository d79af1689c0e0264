"""Tables as data: equal cells are one run, slots scale the papers' numbers, and a wrong name is one clear sentence."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reproduction.identity.code import STAGES, code_files, stage_digest, stage_entries
from reproduction.planning.expansion import make_plan
from reproduction.sources import load_project, sources
from reproduction.tables import project as projects
from reproduction.tables.configuration import plain
from reproduction.tables.fitting import Fitting
from reproduction.tasks.suites import DEFAULT_TASKS
from rotquant.foundation.data import merge
from rotquant.foundation.errors import ConfigError, RecipeError, RotquantError
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from tests.helpers.models import tiny_model
from tests.helpers.project import CONFIG, REPOSITORY, TABLES, Copy, checkpoints_by_name, shipped_project


@pytest.fixture(autouse=True)
def digests_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are told apart by name, so that tables expand without any."""
    checkpoints_by_name(monkeypatch)


def changed(data: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """A copy of nested data with one place changed."""
    data = copy.deepcopy(data)
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return data


def load(root: Path, tables_data: dict[str, Any] = TABLES, config: dict[str, Any] = CONFIG) -> projects.Project:
    project = Copy(root)
    project.set_tables(tables_data)
    project.set_config(config)
    return load_project(root=root)


def test_table_1_is_seven_rows_by_three_models_with_three_seeds_for_all_but_the_baseline(
    project: projects.Project,
) -> None:
    cells = project.cells("quarot_table1")
    assert len(cells) == 7 * 3
    assert {(cell.row, len(cell.runs)) for cell in cells} == {
        ("Baseline", 1),
        *((row, 3) for row in ("SmoothQuant", "OmniQuant", "QUIK-4B", "Atom-128G", "QuaRot", "QuaRot-128G")),
    }
    runs = {run.key: run for cell in cells for run in cell.runs}
    assert len(runs) == 3 * (1 + 6 * 3)
    stored = {run.weights_key for run in runs.values()} - {None}
    assert len(stored) == 3 * 6 * 3
    assert all(run.weights_key == key for key in stored for run in project.weights[key])


def test_published_values_belong_to_their_cells(project: projects.Project) -> None:
    published = project.published(project.table("quarot_table1"))
    assert published["QuaRot", "Llama-2-70B", "perplexity"].value == 3.79
    assert published["SmoothQuant", "Llama-2-70B", "perplexity"].value is None
    assert len(published) == 21


def test_group_sizes_and_outliers_are_the_slots(project: projects.Project) -> None:
    slot = project.config.slot("Llama-2-7B")
    cells = {(cell.row, cell.column): cell.runs[0].recipe for cell in project.cells("quarot_table1")}
    grouped = cells["QuaRot-128G", "Llama-2-7B"]
    assert grouped.weights.scheme.group_size == grouped.activations.group_size == slot.scaled("group_sizes", 128)
    assert cells["QUIK-4B", "Llama-2-7B"].methods["outliers"].features == slot.scaled("outlier_features", 256)
    assert cells["QuaRot", "Llama-2-7B"].calibration.samples == slot.calibration["samples"]
    paper = shipped_project("config/paper.yaml")
    cells = {(cell.row, cell.column): cell.runs[0].recipe for cell in paper.cells("quarot_table1")}
    assert cells["QuaRot-128G", "Llama-2-70B"].weights.scheme.group_size == 128
    assert cells["QUIK-4B", "Llama-2-70B"].methods["outliers"].features == 256
    assert cells["QuaRot", "Llama-2-7B"].calibration.sequence_length == 2048


def test_equal_cells_of_two_tables_are_one_run(tmp_path: Path) -> None:
    second = {**TABLES["tables"][0], "id": "quarot_table3"}
    second["rows"] = [{"name": "Baseline", "method": "baseline"}, {"name": "Renamed", "method": "quarot-rtn"}]
    second |= {"published": "published/other.csv", "claims": []}
    project = Copy(tmp_path)
    project.write("workflow/papers/quarot/published/other.csv", "row,column,metric,value,unit\n")
    project.set_tables({**TABLES, "tables": [*TABLES["tables"], second]})
    loaded = load_project(root=tmp_path)
    keys = [[run.key for cell in loaded.cells(name) for run in cell.runs] for name in loaded.tables]
    assert keys[0] == keys[1]
    assert len(loaded.runs) == 6


def test_runs_that_differ_at_run_time_only_share_their_weights(tmp_path: Path) -> None:
    rows = [
        {"name": "Baseline", "method": "baseline"},
        {"name": "QuaRot", "method": "quarot-rtn"},
        {"name": "A8", "method": "quarot-rtn", "recipe": {"activations": {"bits": 8}}},
    ]
    project = load(tmp_path, changed(TABLES, "tables", 0, "rows", to=rows))
    assert len(project.runs) == 2 * (1 + 2 + 2)
    assert [len(runs) for runs in project.weights.values()] == [2] * (2 * 2)  # columns x seeds


def test_a_model_is_small_if_it_is_a_folder_here_of_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's job of one asks for little."""
    project = load(tmp_path)
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "models/small/model.safetensors").write_bytes(bytes(100))
    assert project.is_small("models/small")
    assert not project.is_small("owner/large")
    monkeypatch.setattr("reproduction.tables.project.SMALL", 100)
    assert not load_project(root=tmp_path).is_small("models/small")


@pytest.mark.parametrize("path", ["../../../secret.csv", "/etc/passwd"])
@pytest.mark.parametrize("place", [("published",), ("columns", 0, "published")])
def test_published_values_lie_below_the_file_that_names_them(
    place: tuple[str | int, ...], path: str, tmp_path: Path
) -> None:
    columns = [{"name": "Llama-2-7B", "slot": "Llama-2-7B"}]
    data = changed(changed(TABLES, "tables", 0, "columns", to=columns), "tables", 0, *place, to=path)
    with pytest.raises(ConfigError, match=f"workflow/papers/quarot: published of .* names the file '{path}'"):
        load(tmp_path, data)


def test_quantities_follow_the_suite_of_the_configuration(tmp_path: Path) -> None:
    data = changed(TABLES, "tables", 0, "metrics", to=[{"kind": "zero_shot"}])
    project = load(tmp_path, data)
    shipped = [quantity.name for quantity in project.quantities(project.table("quarot_table1"))]
    paper = load(tmp_path / "paper", data, {**CONFIG, "zero_shot": {"suite": "paper"}})
    six = [quantity.name for quantity in paper.quantities(paper.table("quarot_table1"))]
    assert six == ["average", "piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "lambada_openai"]
    assert shipped[0] == "average"
    assert set(shipped) & set(six) == {"average"}


def test_a_metric_stands_once_in_a_table(tmp_path: Path) -> None:
    twice = [{"kind": "perplexity", "corpus": "wikitext2"}] * 2
    with pytest.raises(ConfigError, match="metrics: one metric occurs twice"):
        load(tmp_path, changed(TABLES, "tables", 0, "metrics", to=twice))


LEARNING = {
    "id": "quarot_table1",
    "rows": [
        {"name": "Baseline", "method": "baseline"},
        {"name": "Learned", "method": "spinquant-hard", "recipe": {"methods": {"gptq": None}}},
        {"name": "Ten", "method": "spinquant-hard", "recipe": {"methods": {"spinquant": {"steps": 10}}}},
    ],
    "claims": [],
}


def learning_tables(**fields: Any) -> dict[str, Any]:
    """A table with learned rotations, whose fields may be changed."""
    (table,) = TABLES["tables"]
    table = {key: value for key, value in table.items() if key not in ("figure", "published")}
    return {**TABLES, "tables": [{**table, **LEARNING, **fields}]}


def test_amounts_of_learning_are_the_slots_where_the_row_does_not_say_its_own(tmp_path: Path) -> None:
    config = merge(CONFIG, {"slots": {"Llama-2-13B": {"methods": {"spinquant": {"text": {"samples": 2}}}}}})
    project = load(tmp_path, learning_tables(), config)
    found = {(cell.row, cell.column): cell.runs[0].recipe.learner for cell in project.cells("quarot_table1")}
    assert found["Learned", "Llama-2-7B"].model_dump(include={"steps", "batch_size"}) == {"steps": 3, "batch_size": 2}
    texts = {
        place: (learning.text.samples, learning.text.sequence_length) for place, learning in found.items() if learning
    }
    assert texts["Learned", "Llama-2-7B"] == texts["Ten", "Llama-2-7B"] == (4, 16)
    assert texts["Learned", "Llama-2-13B"] == (2, 16)
    assert (found["Ten", "Llama-2-7B"].steps, found["Ten", "Llama-2-7B"].batch_size) == (10, 2)


def test_amounts_of_calibration_are_the_slots_where_the_row_does_not_say_its_own(tmp_path: Path) -> None:
    rows = [
        {"name": "Baseline", "method": "baseline"},
        {"name": "Five", "method": "quarot", "recipe": {"calibration": {"samples": 5}}},
    ]
    project = load(tmp_path, learning_tables(rows=rows))
    texts = {
        (text.samples, text.sequence_length)
        for text in (run.recipe.calibration for run in project.runs.values())
        if text
    }
    assert texts == {(5, CONFIG["calibration"]["sequence_length"])}


def test_steps_that_a_preset_sets_to_zero_stay_zero(tmp_path: Path) -> None:
    config = merge(CONFIG, {"methods": {"rotation_calibration": {"steps": 7, "vectors": 5}}})
    rows = [{"name": "Baseline", "method": "baseline"}, *({"name": one, "method": one} for one in ("offq", "dfrot"))]
    project = load(tmp_path, learning_tables(rows=rows), config)
    found = {cell.row: cell.runs[0].recipe.learner for cell in project.cells("quarot_table1")}
    assert {name: (one.steps, one.vectors) for name, one in found.items() if one} == {"offq": (0, 5), "dfrot": (7, 5)}


def test_a_table_with_a_share_of_the_text_reads_less_of_every_text(tmp_path: Path) -> None:
    rows = [{"name": "Baseline", "method": "baseline"}, {"name": "DartQuant", "method": "dartquant"}]
    whole, less = (
        load(tmp_path / str(share), learning_tables(rows=rows, text_share=share)).cells("quarot_table1")
        for share in (1.0, 0.5)
    )
    assert [run.key for run in whole[0].runs] == [run.key for run in less[0].runs]
    one, other = (cells[-1].runs[0].recipe for cells in (whole, less))
    assert one.calibration
    assert other.calibration
    assert other.calibration.samples == max(1, round(one.calibration.samples / 2))
    assert one.learner
    assert other.learner
    assert one.learner.own_text
    assert other.learner.own_text
    assert other.learner.own_text.samples == max(1, round(one.learner.own_text.samples / 2))


def test_learned_rotations_are_found_by_their_key(tmp_path: Path) -> None:
    project = load(tmp_path, learning_tables())
    assert len(project.rotations) == 2 * 2 * 2  # two rows, models and seeds
    for key, runs in project.rotations.items():
        assert {run.rotation_key for run in runs} == {key}


@pytest.mark.parametrize(
    ("repeats", "trials", "seeds"),
    [("once", 4, (0,)), ("seeds", 4, (0, 1)), ("trials", 4, (0, 1, 2, 3)), ("trials", None, (0, 1))],
)
def test_a_table_says_how_often_what_is_random_is_repeated(
    tmp_path: Path, repeats: str, trials: int | None, seeds: tuple[int, ...]
) -> None:
    project = load(tmp_path, learning_tables(repeats=repeats), plain({**CONFIG, "trials": trials}))
    cells = {cell.row: tuple(run.seed for run in cell.runs) for cell in project.cells("quarot_table1")}
    assert cells == {"Baseline": (0,), "Learned": seeds, "Ten": seeds}


def test_a_table_names_the_tasks_of_each_suite_and_a_slot_its_own(tmp_path: Path) -> None:
    metric = {"kind": "zero_shot", "tasks": {"paper": ["boolq", "piqa"]}}
    paper = {**CONFIG, "zero_shot": {"suite": "paper"}}
    own = {**CONFIG, "zero_shot": {"suite": "paper", "tasks": ["arc_easy"]}}
    expected = [(CONFIG, DEFAULT_TASKS["shipped"]), (paper, ("boolq", "piqa")), (own, ("arc_easy",))]
    for number, (config, tasks) in enumerate(expected):
        project = load(tmp_path / str(number), learning_tables(metrics=[metric]), config)
        assert project.cells("quarot_table1")[0].metric.tasks == tasks


def test_a_column_takes_its_numbers_from_another_table_and_its_recipe_from_the_row(tmp_path: Path) -> None:
    columns = [{"name": "1.0", "slot": "Llama-2-7B"}, {"name": "0.9", "slot": "Llama-2-7B"}]
    clipped = {"name": "QuaRot", "method": "quarot-rtn", "columns": {"0.9": {"activations": {"clip_ratio": 0.5}}}}
    data = changed(TABLES, "tables", 0, "columns", to=columns)
    data = changed(data, "tables", 0, "rows", to=[{"name": "Baseline", "method": "baseline"}, clipped])
    data["tables"][0]["columns"][0]["published"] = "published/other.csv"
    other = "row,column,metric,value,unit\nQuaRot,1.0,perplexity,6.1,ppl\nQuaRot,2.0,perplexity,7,ppl\n"
    project = Copy(tmp_path)
    project.write("workflow/papers/quarot/published/small.csv", "row,column,metric,value,unit\n")
    project.write("workflow/papers/quarot/published/other.csv", other)
    project.set_tables(data)
    loaded = load_project(root=project.root)
    clips = {cell.column: cell.runs[0].recipe.activations.clip_ratio for cell in loaded.cells("quarot_table1")[2:]}
    assert clips == {"1.0": 0.9, "0.9": 0.5}
    published = loaded.published(loaded.table("quarot_table1")).items()
    assert {place: number.value for place, number in published} == {("QuaRot", "1.0", "perplexity"): 6.1}


def test_a_slot_that_is_not_computed_drops_its_column(tmp_path: Path) -> None:
    project = load(tmp_path, config=changed(CONFIG, "slots", "Llama-2-13B", "compute", to=False))
    assert {cell.column for cell in project.cells("quarot_table1")} == {"Llama-2-7B"}


def test_a_column_without_a_slot_and_a_text_that_is_not_defined_are_left_out_in_a_sentence(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    project.write("workflow/papers/quarot/published/small.csv", "row,column,metric,value,unit\n")
    (table,) = TABLES["tables"]
    plain = {key: value for key, value in table.items() if key not in ("figure", "claims")}
    of_c4 = {**plain, "id": "quarot_table3", "metrics": [{"kind": "perplexity", "corpus": "c4"}]}
    mine = {**plain, "id": "quarot_table4", "columns": ["My model"]}
    both = {**plain, "columns": ["Llama-2-7b", "Llama-2-13B"]}
    project.set_tables({**TABLES, "tables": [both, of_c4, mine]})
    plan = make_plan(load_project(root=tmp_path), "0" * 16, "0" * 16)
    assert plan.tables.keys() == {"quarot_table1"}
    assert plan.table("quarot_table1").remarks == (
        "Left out: column Llama-2-7b: this configuration has no slot 'Llama-2-7b'; nearest: Llama-2-7B, Llama-2-13B.",
    )
    with pytest.raises(ConfigError, match=r"Baseline, QuaRot: corpus 'c4' is not defined under corpora"):
        plan.table("quarot_table3")
    with pytest.raises(ConfigError, match="quarot_table4: this configuration has no slot 'My model'"):
        plan.table("quarot_table4")


def test_what_a_text_is_where_its_name_does_not_say_it_is_a_note_and_in_no_key(tmp_path: Path) -> None:
    project = Copy(tmp_path)
    before = load_project(root=tmp_path)
    project.set_config(changed(CONFIG, "corpora", "wikitext2", "about", to="Letters stand for it."))
    after = load_project(root=tmp_path)
    table = after.table("quarot_table1")
    assert after.remarks(table) == (*before.remarks(table), "Text wikitext2: Letters stand for it.")
    assert after.runs.keys() == before.runs.keys()


def test_a_row_is_adapted_to_a_models_sizes_and_one_that_cannot_run_there_is_known_without_weights(
    tmp_path: Path,
) -> None:
    """14 heads have no Hadamard matrix: a preset goes without the transform across heads, a row that asks for it is not
    possible, and neither is a group that is wider than the rows, a calibration text longer than the context, or windows
    that stay in full precision."""
    project = Copy(tmp_path)
    project.write("models/small/config.json", tiny_model(hidden_size=112, num_heads=14).config.to_json_string())
    groups = {"activations": {"granularity": "group", "group_size": 200}}
    kept = {"kept_first": 100, "kept_recent": 2000}
    (table,) = TABLES["tables"]
    rows = [
        *table["rows"],
        {"name": "Heads", "method": "quarot-rtn", "recipe": {"rotation": {"heads": True}}},
        {"name": "Groups", "method": "quarot-rtn", "recipe": groups},
        {"name": "Long", "method": "quarot", "recipe": {"calibration": {"sequence_length": 4096}}},
        {"name": "Kept", "method": "quarot-rtn", "recipe": {"keys": kept, "values": kept}},
    ]
    project.set_tables({**TABLES, "tables": [{**table, "columns": ["Llama-2-7B"], "rows": rows}]})
    project.write("workflow/papers/quarot/published/small.csv", "row,column,metric,value,unit\n")
    loaded = load_project(root=tmp_path)
    cells = {cell.row: cell.runs[0].recipe.rotation for cell in loaded.cells("quarot_table1")}
    assert cells.keys() == {"Baseline", "QuaRot"}
    assert cells["QuaRot"] == preset("quarot-rtn").rotation.model_copy(update={"heads": False})
    impossible = loaded.expanded("quarot_table1").impossible
    assert impossible["Heads", "Llama-2-7B"].endswith("no Hadamard matrix of size 14 (number of attention heads).")
    assert "the group size 200 of activations exceeds" in impossible["Groups", "Llama-2-7B"]
    assert "samples of 4096 tokens exceed the model's context" in impossible["Long", "Llama-2-7B"]
    assert "which are all of windows of" in impossible["Kept", "Llama-2-7B"]
    plan = make_plan(loaded, "0" * 16, "0" * 16)
    remarks = plan.table("quarot_table1").remarks
    assert [remark.partition(": this llama")[0] for remark in remarks[4:]] == ["Adapted to the model: QuaRot"]
    assert all(remark.startswith("Not possible here: ") for remark in remarks[:4])
    # what reads the plan asks no model, and finds the same runs
    fits = {name: Fitting.model_validate(one) for name, one in json.loads(plan.model_dump_json())["fits"].items()}
    again = load_project(root=tmp_path, fits=fits)
    assert again.runs.keys() == loaded.runs.keys()
    assert again.remarks(again.table("quarot_table1")) == loaded.remarks(loaded.table("quarot_table1"))


ROW = ("tables", 0, "rows", 1)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ((*ROW, "method"), "quorat", "unknown method 'quorat'; nearest: quarot"),
        ((*ROW, "recipe"), {"weights": {"scheme": {"bits": 9}}}, "weights.scheme.bits"),
        ((*ROW, "recipe"), {"activations": {"clip_ratio": 1.5}}, "activations.clip_ratio"),
        ((*ROW, "recipe"), {"wieghts": None}, "wieghts"),
        ((*ROW, "recipe"), {"methods": {"spinqant": None}}, "unknown method 'spinqant'; nearest: spinquant"),
        (
            (*ROW, "recipe"),
            {"methods": {"spinquant": {"stepz": 3}}},
            "rows.QuaRot.recipe.methods.spinquant: unknown field 'stepz'; nearest: steps",
        ),
        (
            ("tables", 0, "metrics", 0, "kind"),
            "perplexty",
            "(given 'perplexty'; nearest: perplexity)",
        ),
        (
            ("tables", 0, "metrics", 0, "windows"),
            4,
            "quarot_table1.metrics.0: unknown field 'windows'; nearest: max_windows",
        ),
        (("tables", 0, "metrics"), [{"kind": "zero_shot", "tasks": ["pika"]}], "suite 'shipped' has no task 'pika'"),
        (("tables", 0, "caption_"), "x", "tables.quarot_table1: unknown field 'caption_'; nearest: caption"),
        (("tables", 0, "baseline"), "FP16", "unknown row 'FP16'"),
        (("tables", 0, "claims", 0, "mechanism", "better", "row"), "Quarot", "unknown row 'Quarot'; nearest: QuaRot"),
        (
            ("tables", 0, "claims", 0, "experiment"),
            {"cause": "Six bits", "target": "quarot_tabel1", "check": {"better": {"rows": ["QuaRot", "RTN"]}}},
            "table quarot_table1, claim 1, experiment: unknown target 'quarot_tabel1'; nearest: quarot_table1",
        ),
        (
            ("tables", 0, "claims", 0, "experiment"),
            {"cause": "Six bits", "target": "quarot_table1", "check": {"better": {"rows": ["QuaRot", "RTN"]}}},
            "table quarot_table1, claim 1, experiment: quarot_table1 computes no row 'RTN'",
        ),
        (
            ("tables", 0, "claims", 0, "experiment"),
            {"cause": "Six bits", "check": {"better": {"rows": ["QuaRot", "Quarot"]}}},
            "unknown row 'Quarot'; nearest: QuaRot",
        ),
        (
            ("tables", 0, "claims", 0, "experiment"),
            {"cause": "Chance", "check": {"better": {"rows": ["QuaRot", "Baseline"]}}},
            "an experiment names a row, a column or a quantity that the claim itself does not",
        ),
        (
            ("tables", 0, "claims", 0, "mechanism"),
            {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "percent": 2.0}},
            "a mechanism is a direction; the bound of no_worse belongs to `setting` or `fact`",
        ),
        (
            ("tables", 0, "claims", 0, "mechanism"),
            None,
            "a claim has a mechanism, a setting or a fact",
        ),
        (("tables", 0, "published"), "published/none.csv", "published/none.csv do not exist"),
        ((*ROW, "columns"), {"Llama-2-7b": {}}, "unknown column 'Llama-2-7b'; nearest: Llama-2-7B"),
        ((*ROW, "metrics"), {"zero_shot": {}}, "the table measures no 'zero_shot'"),
        (ROW, {"name": "QuaRot"}, "rows.QuaRot: a row has a method, or is like another"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, path: tuple, value: Any, sentence: str) -> None:
    project = Copy(tmp_path)
    project.set_tables(changed(TABLES, *path, to=value))
    if path[-1] == "columns":  # the published values would name the columns too
        project.write("workflow/papers/quarot/published/small.csv", "row,column,metric,value,unit\n")
    with pytest.raises((ConfigError, RecipeError)) as caught:
        load_project(root=tmp_path).cells("quarot_table1")
    assert sentence in str(caught.value)
    assert "workflow/papers/quarot/" in str(caught.value) or "experiment" in path
    assert "\n" not in str(caught.value)


def test_unknown_names_bring_the_nearest_ones(project: projects.Project) -> None:
    with pytest.raises(ConfigError, match="unknown table 'quarot_tabel1'; nearest: quarot_table1"):
        project.table("quarot_tabel1")


def test_outside_of_a_project_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RotquantError, match="not inside a rotquant project"):
        load_project()


def test_expanding_tables_and_rendering_them_imports_no_torch() -> None:
    modules = (
        "reproduction.sources, reproduction.identity.code, reproduction.commands.runs, reproduction.scoreboard.page"
    )
    code = f"import {modules}, sys; reproduction.sources.sources(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_stages_hold_what_they_use_and_not_what_uses_them() -> None:
    recipe = preset("spinquant-hard")
    files = {stage: _modules(*stage_entries(stage, recipe)) for stage in STAGES}
    built = {"rotquant/methods/gptq/columns", "rotquant/models/rotation/fusing", "rotquant/tensors/quantization"}
    assert built <= files["weights"]
    assert "rotquant/metrics/perplexity" in files["runs"]
    for stage in ("weights", "runs"):
        assert not {name for name in files[stage] if "reporting" in name or "commands" in name}
        assert not {"reproduction/tables/tables", "reproduction/identity/code", "reproduction/run/plan"} & files[stage]
    for output in sources()["runs"].code.values():
        assert not {"rotquant/methods/gptq/columns", "reproduction/run/stages/runs"} & _modules(*output)
    plain, full = preset("quarot-rtn"), preset("quarot")
    assert stage_digest("weights", full) != stage_digest("weights", plain)  # only the one needs rotquant.methods.gptq
    assert stage_digest("weights", plain) == stage_digest("weights", preset("rtn"))
    learned = preset("spinquant-hard")
    drawn = override(learned, {"methods": {"spinquant": None}}, "test")
    # An edit of Cayley SGD leaves stored weights alone: what was learned comes to them as a file.
    assert stage_digest("weights", learned) == stage_digest("weights", drawn) == stage_digest("weights", full)
    assert {"rotquant/tensors/stiefel", "rotquant/methods/spinquant/__init__"} <= files["rotations"]
    assert len({stage_digest(stage) for stage in STAGES}) == len(STAGES)


def _modules(*entries: str) -> set[str]:
    """What code digests hash, as paths below the folders of packages, without suffixes."""
    return {
        path.as_posix().rpartition("/workflow/")[2].removeprefix(f"{REPOSITORY}/")[:-3] for path in code_files(*entries)
    }
