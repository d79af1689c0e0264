"""Configuration files: what lies on top of what, what stands alone, and what is wrong said with its file and key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.reading.written import read_yaml
from reproduction.sources import load_project
from reproduction.tables.configuration import DEFAULT, Config, Slot, load_config, plain
from reproduction.tables.resolution import resolve, resolve_metric
from rotquant.foundation.data import merge
from rotquant.foundation.errors import CheckpointError, ConfigError, RotquantError
from rotquant.models.digests import refuse_other
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.text import UNREAD
from tests.helpers.hostile import LAUGHS
from tests.helpers.models import tiny_model
from tests.helpers.project import CONFIG, REPOSITORY, TABLES, Copy, checkpoints_by_name

PAPER = REPOSITORY / "config/paper.yaml"


@pytest.fixture
def names_for_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are told apart by name, so that tables expand without any."""
    checkpoints_by_name(monkeypatch)


@pytest.fixture
def copy(tmp_path: Path, names_for_digests: None) -> Copy:
    """A small project."""
    return Copy(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A small project for many tests, which add files and leave its own as they are."""
    return Copy(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def small(shared: Copy, names_for_digests: None) -> Copy:
    """The shared project."""
    return shared


def expand(copy: Copy, *texts: str) -> Config:
    """The configuration of a project with files of these texts on top, once all tables are expanded under it."""
    paths = [copy.root / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    project = load_project(paths, root=copy.root)
    assert project.runs
    return project.config


def test_a_later_file_changes_the_keys_that_it_names_and_null_removes_them() -> None:
    merged = merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": None, "e": 3}, "d": [2]})
    assert plain(merged) == {"a": {"b": 1, "e": 3}, "d": [2]}


@pytest.mark.parametrize("key", ["methods", "unrotated"])
def test_a_setting_of_a_method_is_null_only_where_that_removes_one(copy: Copy, key: str) -> None:
    expand(copy, f"{key}: {{rcp: {{temperature: 0.5}}}}", f"{key}: {{rcp: {{temperature: null}}}}")
    sentence = rf"{key}\.rcp\.temperature: null removes what a file before sets, and none does: leave it out\."
    with pytest.raises(ConfigError, match=sentence):
        expand(copy, f"{key}: {{rcp: {{temperature: null}}}}")


def test_recipes_that_rotate_nothing_have_settings_of_their_own_on_top_of_the_methods(copy: Copy) -> None:
    said = {
        "methods": {"bitdistiller": {"weight_lr": 0.125, "epochs": 2}},
        "unrotated": {"bitdistiller": {"weight_lr": 0.25}},
    }
    slots = {"Llama-2-7B": {"unrotated": {"bitdistiller": {"weight_lr": 0.5}}}}
    config = expand(copy, json.dumps({**said, "slots": slots}))

    def rate(name: str, slot: str, row: dict[str, Any]) -> tuple[float, int]:
        recipe = override(preset(name), row, "test")
        settings = resolve(recipe, config.slot(slot), "test", row).methods["bitdistiller"].model_dump()
        return settings["weight_lr"], settings["epochs"]

    assert (
        rate("bitdistiller-rotated", "Llama-2-7B", {}) == rate("bitdistiller-rotated", "Llama-2-13B", {}) == (0.125, 2)
    )
    assert (rate("bitdistiller", "Llama-2-7B", {}), rate("bitdistiller", "Llama-2-13B", {})) == ((0.5, 2), (0.25, 2))
    assert rate("bitdistiller", "Llama-2-13B", {"methods": {"bitdistiller": {"weight_lr": 0.75}}}) == (0.75, 2)


def test_a_small_file_lies_on_top_of_the_default(copy: Copy) -> None:
    config = expand(copy, "seeds: [5]", "slots: {Llama-2-7B: {checkpoint: mine, batch_size: 3}}")
    assert config.seeds == (5,)
    assert (config.slot("Llama-2-7B").checkpoint, config.slot("Llama-2-7B").batch_size) == ("mine", 3)
    assert config.slot("Llama-2-7B").methods == config.slot("Llama-2-13B").methods == CONFIG["methods"]
    assert config.slot("Llama-2-13B").checkpoint == "models/larger"


def test_nothing_of_the_default_reaches_a_file_that_stands_alone(copy: Copy) -> None:
    before = load_config([PAPER], copy.root)

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: other(inner) for key, inner in value.items()} | {"leak": "leak"}
        return [other(inner) for inner in value] if isinstance(value, list) else "leak"

    copy.set_config(other(read_yaml(REPOSITORY / DEFAULT)))
    assert load_config([PAPER], copy.root) == before
    copy.set_config({})
    assert load_config([PAPER], copy.root) == before
    with pytest.raises(ConfigError):
        load_config(root=copy.root)


def test_a_small_file_lies_on_top_of_one_that_stands_alone(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("methods: {spinquant: {steps: 7}}")
    paper, changed = load_config([PAPER], REPOSITORY), load_config([PAPER, small], REPOSITORY)
    for name, slot in changed.slots.items():
        assert slot.methods == merge(paper.slot(name).methods, {"spinquant": {"steps": 7}})
    with pytest.raises(ConfigError, match=r"config/paper\.yaml stands alone, so .*small\.yaml before it would change"):
        load_config([small, PAPER], REPOSITORY)


def test_a_slot_without_group_sizes_takes_the_papers(copy: Copy) -> None:
    own = {"Llama-2-7B": {"group_sizes": {128: 16}}}
    config = expand(copy, json.dumps({"slots": own}))
    assert config.slot("Llama-2-7B").scaled("group_sizes", 128) == 16
    assert config.slot("Llama-2-13B").scaled("group_sizes", 128) == 128
    with pytest.raises(ConfigError, match=r"slots\.Llama-2-7B\.group_sizes has nothing for the paper's 64"):
        config.slot("Llama-2-7B").scaled("group_sizes", 64)


def test_groups_with_tables_have_a_section_of_their_own_in_which_0_is_a_row(copy: Copy) -> None:
    own = {
        name: {"group_sizes": {128: 4}, "table_groups": {128: size}}
        for name, size in (("Llama-2-7B", 0), ("Llama-2-13B", 16))
    }
    config = expand(copy, json.dumps({"slots": own}))
    found = {
        (slot, method): resolve(preset(method), config.slot(slot), "test").rounded.scheme
        for slot in own
        for method in ("rcp", "awq-128g")
    }
    assert found["Llama-2-7B", "rcp"].granularity == "channel"
    assert found["Llama-2-7B", "rcp"].group_size is None
    assert found["Llama-2-13B", "rcp"].group_size == 16
    assert found["Llama-2-7B", "awq-128g"].group_size == found["Llama-2-13B", "awq-128g"].group_size == 4


def test_amounts_of_text_that_a_row_says_become_those_of_the_slot_and_its_other_settings_stand(copy: Copy) -> None:
    own = {"texts": {"sequence_length": {2048: 32}, "samples": {800: 5, 4: 99}}}
    config = expand(copy, json.dumps({**own, "slots": {"Llama-2-7B": {"texts": {"samples": {800: 6}}}}}))
    calibration = {"samples": 800, "sequence_length": 2048}
    said = {
        "calibration": calibration,
        "methods": {"spinquant": {"steps": 25, "text": {"samples": 800, "sequence_length": 1024}}},
    }
    recipe = override(preset("spinquant-hard"), said, "test")
    for name, samples in (("Llama-2-7B", 6), ("Llama-2-13B", 5)):
        resolved = resolve(recipe, config.slot(name), "test", said)
        assert resolved.calibration == recipe.calibration.model_copy(update={"samples": samples, "sequence_length": 32})
        settings = resolved.methods["spinquant"].model_dump()
        assert (settings["text"]["samples"], settings["text"]["sequence_length"], settings["steps"]) == (
            samples,
            1024,
            25,
        )
    unsaid = resolve(preset("spinquant-hard"), config.slot("Llama-2-13B"), "test").methods["spinquant"]
    assert unsaid.model_dump()["text"]["samples"] == 4  # the configuration's own number stands


def test_a_slot_says_where_bos_stands_in_all_of_its_texts_but_those_of_rows_that_say_it_themselves(copy: Copy) -> None:
    own = {"bos": "none", "slots": {"Llama-2-7B": {"bos": "window"}}}
    config = expand(copy, json.dumps(own))
    for name, bos in (("Llama-2-7B", "window"), ("Llama-2-13B", "none")):
        slot = config.slot(name)
        found = resolve(preset("spinquant-hard"), slot, "test")
        assert {found.calibration.bos, found.learned_by[1].bos} == {bos}
        assert resolve_metric({"kind": "perplexity"}, slot, "test").bos == bos
        tasks = resolve_metric({"kind": "zero_shot", "corpus": "modules"}, slot, "test")
        assert tasks.bos == ("none" if bos == "none" else "text")  # an item is a text of its own
        said = {"calibration": {"bos": "text"}, "methods": {"spinquant": {"text": {"bos": "text"}}}}
        row = resolve(override(preset("spinquant-hard"), said, "test"), slot, "test", said)
        assert {row.calibration.bos, row.learned_by[1].bos} == {"text"}
        assert resolve_metric({"kind": "perplexity", "bos": "text"}, slot, "test").bos == "text"
        assert resolve_metric({"kind": "outlier_tokens"}, slot, "test").bos == "none"  # it seeks them in text alone


def test_without_a_place_of_bos_recipes_and_metrics_are_as_they_are(copy: Copy) -> None:
    config = load_project(root=copy.root).config
    assert config.slot("Llama-2-7B").bos is None
    recipe = resolve(preset("spinquant-hard"), config.slot("Llama-2-7B"), "test").model_dump(mode="json")
    assert "bos" not in recipe["calibration"]
    assert "bos" not in recipe["methods"]["spinquant"]["text"]


def test_a_hub_id_is_told_from_a_mistyped_path(copy: Copy) -> None:
    project = load_project(root=copy.root)
    copy.write("models/small/config.json", "{}")
    local = {name: str(copy.root / name) for name in ("models/small", "models/smal", "a/b/c", "./a")}
    hub = {name: name for name in ("meta-llama/Llama-2-7b-hf", "models/smal@main")}
    for name, path in {**local, **hub}.items():
        assert project.checkpoint_path(name) == path


def test_the_workflow_and_the_commands_see_one_configuration(tmp_path: Path) -> None:
    """Through Snakemake's --configfile and --config, though it merges files before a workflow sees them."""
    copy = Copy(tmp_path)
    alone = {**CONFIG, "standalone": True, "methods": {"spinquant": {"steps": 9, "batch_size": 1}}}
    copy.write("with spaces/it's alone.yaml", yaml.safe_dump(alone))
    copy.write("small.yaml", "slots: {Llama-2-7B: {batch_size: 3}}")
    files = ["with spaces/it's alone.yaml", "small.yaml"]
    copy.planned("reports/quarot_table1.md", "--configfile", *files, "--config", "seeds=[4]", "dtype=float16")
    (resolved,) = tmp_path.glob("results/config/*.yaml")
    seen = load_config([resolved], tmp_path)
    said = load_config([tmp_path / file for file in files], tmp_path, {"seeds": ["4"], "dtype": "float16"})
    assert seen == said.model_copy(update={"layers": seen.layers})
    assert (seen.seeds, seen.dtype, seen.slot("Llama-2-7B").batch_size) == ((4,), "float16", 3)
    assert seen.slot("Llama-2-7B").methods == {
        "spinquant": {"steps": 9, "batch_size": 1}
    }  # and no `text` of the default


BAD = [
    ("device: gpu", "device: Input should be 'cpu', 'cuda' or 'auto' (given 'gpu'; nearest: cpu)"),
    ("seeds: []", "seeds: List should have at least 1 item, not 0"),
    ("seeds: [0, 1, 0]", "seeds: a seed occurs twice (given [0, 1, 0])"),
    ("seeds: [0, -1]", "seeds.1: Input should be greater than or equal to 0 (given -1)"),
    (
        "seeds: [99999999999999999999]",
        "seeds.0: Input should be less than 9223372036854775808 (given",
    ),
    (f"seeds: {[*range(51)]}", "seeds: List should have at most 50 items"),
    ("trials: 1001", "trials: Input should be less than or equal to 1000 (given 1001)"),
    (LAUGHS, "line 6: with its aliases filled in this has more than 100,000 values"),
    (f"a: {'x' * 2_000_000}", "has 2,000,003 characters, and YAML is read of at most 2,000,000"),
    ("seeds: &a [1]\ndtypes: {<<: [*a, *a]}", "is not valid YAML: line 1, column 8: expected a mapping"),
    ("device: 2026-13-45", "is not valid YAML: month must be in 1..12"),
    ("seeds: 3", "seeds: Input should be a list (given 3)"),
    ("seeds: null", "config/config.yaml + 0.yaml: seeds is missing"),
    ("trials: 0", "trials: Input should be greater than 0 (given 0)"),
    ("sedes: [0]", "0.yaml: unknown field 'sedes'; nearest: seeds"),
    ("standalone: true", "0.yaml: device is missing"),
    ("slots: {Llama-2-7b: {checkpoint: models/small}}", "slots.Llama-2-7b: unknown slot; nearest: Llama-2-7B"),
    (
        "slots: {Llama-2-7b: {compute: false}}",
        "0.yaml: slots.Llama-2-7b.checkpoint is missing; nearest: Llama-2-7B",
    ),
    ("slots: {Llama-2-7B: {chekpoint: x}}", "slots.Llama-2-7B: unknown field 'chekpoint'; nearest: checkpoint"),
    ("slots: {Llama-2-7B: {batch_size: 0}}", "slots.Llama-2-7B.batch_size: Input should be greater than 0 (given 0)"),
    ("slots: {Llama-2-7B: {group_sizes: {a: 8}}}", "slots.Llama-2-7B.group_sizes.a: Input should be a valid integer"),
    (
        "slots: {Llama-2-7B: {evaluation: {max_windows: 0}}}",
        "0.yaml: slots.Llama-2-7B.evaluation.max_windows: Input should be greater than 0 (given 0)",
    ),
    ("evaluation: {sequence_length: 1}", "evaluation.sequence_length: Input should be greater than 1 (given 1)"),
    (
        "evaluation: {sequence_lenght: 16}",
        "evaluation: unknown field 'sequence_lenght'; nearest: sequence_length",
    ),
    (
        "slots: {Llama-2-7B: {batch_size: true}}",
        "batch_size: Input should be a valid integer (given True)",
    ),
    (
        "methods: {spinquant: {learning_rate: 5e-3}}",
        "number (given '5e-3', which is text in YAML: write it without",
    ),
    (
        "methods: {spinquant: {text: {samples: true}}}",
        "methods.spinquant.text.samples: Input should be a valid integer",
    ),
    ("methods: {spinquant: {stepz: 3}}", "methods.spinquant: unknown field 'stepz'; nearest: steps"),
    ("methods: {omniqant: {steps: 3}}", "methods: unknown method 'omniqant'; nearest: omniquant"),
    ("slots: {Llama-2-7B: {methods: {awq: {grid: 0}}}}", "0.yaml: slots.Llama-2-7B.methods.awq.grid: Input should be"),
    (
        "methods: {spinquant: {gradient: scalse}}",
        "should be 'errors' or 'scales' (given 'scalse'; nearest: scales)",
    ),
    (
        "methods: {spinquant: {learning_rate: .nan}}",
        "spinquant.learning_rate: Input should be a finite number (given nan)",
    ),
    (
        "methods: {spinquant: {learning_rate: .inf}}",
        "spinquant.learning_rate: Input should be a finite number (given inf)",
    ),
    (
        "corpora: {wikitex2: {name: a, source: docstrings}}",
        "corpora.wikitex2: unknown corpus; nearest: wikitext2",
    ),
    (
        "corpora: {wikitext2: {source: web}}",
        "corpora.wikitext2.source: Input should be 'modules', 'docstrings', 'hub', 'local' or 'mixed'",
    ),
    ("corpora: {wikitext2: {path: null}}", "corpora.wikitext2: corpus 'text': source 'local' needs a path"),
    ("corpora: {wikitext2: {path: txet}}", "corpora.wikitext2.path: there is no folder or file txet"),
    (
        "corpora: {wikitext2: {name: 2026-11-22}}",
        "corpora.wikitext2.name: Input should be a valid string (given datetime.date(2026, 11, 22))",
    ),
    ("zero_shot: {corpus: wikitex2}", "zero_shot.corpus: unknown corpus 'wikitex2'; nearest: wikitext2"),
    (
        "slots: {Llama-2-7B: {zero_shot: {corpus: c5}}}",
        "slots.Llama-2-7B.zero_shot.corpus: unknown corpus 'c5'; known: wikitext2",
    ),
    ("papers: [mine]", "0.yaml: papers: mine is no folder: name one that has YAML files with tables"),
    ("papers: [config/config.yaml]", "0.yaml: papers: config/config.yaml is no folder"),
    ("papers: [..]", "0.yaml: papers: .. is this project's folder or around it: name one of its own for your tables"),
    ("papers: [text]", "0.yaml: papers: text has no YAML file: write tables there, as docs/tables.md says"),
    ("papers: mine", "0.yaml: papers: Input should be a list (given 'mine')"),
    ("papers: ['']", "0.yaml: papers.0: String should have at least 1 character"),
    ("tracking: our project", "tracking: use true, false, or the project's name: letters, digits, '-', '_' and '.'"),
    ("tracking: 1", "tracking: use true, false, or the project's name"),
    ("seeds: [0]\ndevice: cpu\nseeds: [1]", "line 3: the key 'seeds' occurs twice in one mapping"),
    ("methods:\n  {spinquant: {steps: 3,\n   steps: 4}}", "line 3: the key 'steps' occurs twice in one mapping"),
    ("slots: &a {Llama-2-7B: *a}", "line 1: an alias stands inside of what it names"),
    ("methods: !!python/name:os.system {}", "is not valid YAML: line 1, column 10: could not determine a constructor"),
    ("seeds: [0", "is not valid YAML"),
    ("- seeds", "must hold a mapping of keys to values"),
    ("", "must hold a mapping of keys to values"),
    ("[" * 5000, "is n"),  # "nested too deeply", or "not valid YAML" where the parser counts brackets
]


@pytest.mark.parametrize(("text", "sentence"), BAD, ids=[text[:60] for text, _ in BAD])
def test_what_is_wrong_is_one_sentence_with_its_file_and_key(small: Copy, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(small, text)
    assert "0.yaml" in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_a_merged_mapping_holds_too_is_no_second_one(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("first: &first {a: 1, b: 2}\nsecond: &second {<<: *first, b: 3}\nthird: {<<: *second, a: 4}")
    assert read_yaml(path)["third"] == {"a": 4, "b": 3}


@pytest.mark.parametrize(
    ("name", "why"), [("none.yaml", "does not exist"), ("", "is a folder, where a file is to be read")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / name} {why}"):
        load_config([tmp_path / name], REPOSITORY)


def test_a_checkpoint_that_is_not_here_may_be_named_by_its_digest(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    slot = {"checkpoint": "results/models/small", "digest": "0123456789abcdef"}
    copy.set_config({**CONFIG, "slots": dict.fromkeys(CONFIG["slots"], slot)})
    project = load_project(root=tmp_path)
    assert {run.checkpoint_digest for run in project.runs.values()} == {slot["digest"]}
    with pytest.raises(CheckpointError, match="results/models/small"):
        refuse_other(project.checkpoint_path(slot["checkpoint"]), slot["digest"])


def test_a_text_that_is_not_here_may_be_named_by_its_digests(copy: Copy) -> None:
    digests = {"test": "ab", "train[:9]": "cd"}
    corpus = {"name": "texts", "source": "local", "path": str(copy.root / "texts"), "digests": digests}
    path = copy.root / "away.yaml"
    path.write_text(json.dumps({"corpora": {"wikitext2": corpus}}), encoding="utf-8")
    project = load_project([path], root=copy.root)
    assert project.text(("wikitext2", "test", None)) == "ab"
    assert project.text(("wikitext2", "train", 9)) == "cd"
    assert project.text(("wikitext2", "train", None)) == UNREAD
    assert len({project.config.corpora["wikitext2"], project.config.corpora["wikitext2"]}) == 1  # it has a hash
    (copy.root / "texts").mkdir()
    (copy.root / "texts/test.txt").write_text("What is here counts, whatever was said of it.\n")
    assert load_project([path], root=copy.root).text(("wikitext2", "test", None)) not in ("ab", UNREAD)


def test_a_checkpoint_of_settings_alone_gives_sizes_beside_its_digest(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    folder = tmp_path / "results/models/small"
    tiny_model().config.save_pretrained(folder)
    slot = {"checkpoint": "results/models/small", "digest": "0123456789abcdef"}
    copy.set_config({**CONFIG, "slots": dict.fromkeys(CONFIG["slots"], slot)})
    project = load_project(root=tmp_path)
    assert {run.checkpoint_digest for run in project.runs.values()} == {slot["digest"]}
    assert project.config.slot("Llama-2-7B").hidden_size == tiny_model().config.hidden_size


@pytest.mark.parametrize(
    ("slot", "sentence"),
    [
        (
            {"checkpoint": "models/smal"},
            "0.yaml: slots.Llama-2-7B.checkpoint: model folder",
        ),  # no hub id: models/ is here
        ({"checkpoint": "a/b/c"}, "0.yaml: slots.Llama-2-7B.checkpoint: model folder"),
        ({"checkpoint": "models"}, "0.yaml: slots.Llama-2-7B.checkpoint: "),
        ({"digest": "0123456789abcdef"}, "0.yaml: slots.Llama-2-7B.digest: the digest of "),
    ],
)
def test_a_checkpoint_that_is_not_there_is_found_before_any_job(
    tmp_path: Path, slot: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RotquantError) as caught:
        expand(with_checkpoints(tmp_path), json.dumps({"slots": {"Llama-2-7B": slot}}))
    assert sentence in str(caught.value)
    assert ".yaml" not in str(caught.value).partition(sentence)[0]  # no table is to blame


def with_checkpoints(root: Path, method: str = "quarot") -> Copy:
    """A project whose two checkpoints have 32 features, and one row of a method next to the baseline."""
    copy = Copy(root)
    for name in ("small", "larger"):
        shutil.copytree(REPOSITORY / "workflow/resources/models/rq-7b", root / "models" / name)
        config = tiny_model(hidden_size=32, intermediate_size=64, num_heads=2).config
        copy.write(f"models/{name}/config.json", config.to_json_string())
    rows = [{"name": "Baseline", "method": "baseline"}, {"name": "QuaRot", "method": method}]
    copy.set_tables({**TABLES, "tables": [{**TABLES["tables"][0], "rows": rows}]})
    return copy


@pytest.mark.parametrize(
    ("slot", "sentence"),
    [
        ({"group_sizes": {128: 33}}, "the group size 33 of weights and 33 of activations exceeds the inputs"),
        ({}, "set group_sizes or outlier_features of the slot."),
        ({"outlier_features": {256: 40}}, "outliers.features is 40, but attention_input has only 32 features"),
    ],
)
def test_a_row_that_does_not_fit_a_checkpoints_widths_is_told_before_any_job(
    tmp_path: Path, slot: dict[str, Any], sentence: str
) -> None:
    copy = with_checkpoints(tmp_path, "quik" if "outlier_features" in slot else "quarot-128g")
    copy.write("0.yaml", json.dumps({"slots": {"Llama-2-7B": slot, "Llama-2-13B": {"compute": False}}}))
    project = load_project([copy.root / "0.yaml"], root=copy.root)
    assert {cell.row for cell in project.cells("quarot_table1")} == {"Baseline"}
    (remark,) = project.remarks(project.table("quarot_table1"))
    assert remark.startswith("Not possible here: QuaRot: ")
    assert sentence in remark


def test_a_configuration_adds_rows_to_a_table_and_the_table_is_as_it_was_without_it(small: Copy) -> None:
    rows = {"quarot_table1": [{"name": "Mine", "method": "rtn", "columns": {"Llama-2-7B": {"keys": None}}}]}
    small.write("rows.yaml", json.dumps({"rows": rows}))
    project = load_project([small.root / "rows.yaml"], small.root)
    assert [cell.row for cell in project.cells("quarot_table1")][::2] == ["Baseline", "QuaRot", "Mine"]
    assert [row.name for row in load_project(root=small.root).table("quarot_table1").rows] == ["Baseline", "QuaRot"]
    for changes, sentence in (
        ({"name": "QuaRot"}, "rows.yaml: rows.quarot_table1: rows: a row name occurs twice"),
        ({"columns": {"Llama": {}}}, "unknown column 'Llama'"),
        ({"method": None}, "a row has a method, or is like another"),
    ):
        small.write("rows.yaml", json.dumps({"rows": {"quarot_table1": [{**rows["quarot_table1"][0], **changes}]}}))
        with pytest.raises(ConfigError, match=sentence):
            load_project([small.root / "rows.yaml"], small.root)
    small.write("rows.yaml", json.dumps({"rows": {"quarot_table1": [{"name": "Mine", "method": "rtm"}]}}))
    with pytest.raises(ConfigError, match=r"^rows\.yaml: rows\.quarot_table1: unknown method 'rtm'; nearest: rtn"):
        load_project([small.root / "rows.yaml"], small.root).cells("quarot_table1")
    small.write("rows.yaml", json.dumps({"rows": {"quarot_tabel1": []}}))
    with pytest.raises(ConfigError, match=r"rows\.quarot_tabel1: unknown table of runs; nearest: quarot_table1"):
        load_project([small.root / "rows.yaml"], small.root)


def test_the_width_of_the_hubs_model_is_asked_where_a_size_follows_from_it(
    small: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    (small.root / "hub").mkdir(exist_ok=True)
    small.write("hub/config.json", json.dumps({"hidden_size": 576}))
    found = lambda name, revision: asked.append((name, revision)) or small.root / "hub/config.json"  # noqa: E731
    monkeypatch.setattr("reproduction.tables.configuration.settings_of", found)
    slot = {"slots": {"Llama-2-7B": {"checkpoint": "owner/name@v1", "outlier_width": 4096}}}
    small.write("hub.yaml", json.dumps(slot))
    assert load_config([small.root / "hub.yaml"], small.root).slot("Llama-2-7B").scaled("outlier_features", 256) == 36
    assert asked == [("owner/name", "v1")]
    unknown = Slot(name="Llama-2-7B", checkpoint="owner/name", outlier_width=4096)
    with pytest.raises(ConfigError, match=r"hidden size of owner/name, .*; give its folder as checkpoint, or"):
        unknown.scaled("outlier_features", 256)


def test_single_tables_take_a_number_of_seeds_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("table_seeds: {quarot_table1: 5, spinquant_figure4: 4}")
    project = load_project([tmp_path / "good.yaml"], root=REPOSITORY)
    drawn = {
        name: {run.seed for cell in project.cells(name) for run in cell.runs}
        for name in ("quarot_table1", "quarot_table2", "spinquant_figure4")
    }
    assert drawn == {"quarot_table1": {*range(5)}, "quarot_table2": {0, 1, 2}, "spinquant_figure4": {*range(4)}}
    (tmp_path / "bad.yaml").write_text("table_seeds: {quarot_tabel1: 5}")
    with pytest.raises(
        ConfigError, match=r"table_seeds\.quarot_tabel1: unknown table of runs; nearest: quarot_table1,"
    ):
        load_project([tmp_path / "bad.yaml"], root=REPOSITORY)
