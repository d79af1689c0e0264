"""A plan says what the tables' direct expansion says, is read while nothing changed, and made again when not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.identity import code
from reproduction.identity.names import Results, key_in, names_of, placed
from reproduction.planning import expansion
from reproduction.planning.current import current_plan
from reproduction.run.plan import Plan, read_plan
from reproduction.tables import project as projects
from reproduction.tables.rankings import Ranking
from reproduction.tables.speed.definitions import SpeedTable
from rotquant.foundation.errors import ConfigError, ResultError
from rotquant.foundation.files import short_hash
from tests.helpers import forked
from tests.helpers.project import PUBLISHED, REPOSITORY, TABLES, Copy, packages_in


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """A small project with its own package, whose checkpoints are told apart by what their file says."""

    def digest(path: str) -> str:
        return short_hash(path + (Path(path) / "model").read_text())

    made = Copy(tmp_path)
    for name in ("small", "larger"):
        made.write(f"models/{name}/model", "weights")
    monkeypatch.setattr(projects, "checkpoint_digest", digest)
    monkeypatch.setattr(code, "PACKAGES", packages_in(tmp_path))
    monkeypatch.chdir(tmp_path)
    return made


def test_a_plan_is_the_direct_expansion_of_all_tables(project: projects.Project) -> None:
    made = expansion.make_plan(project, "0" * 16, "0" * 16)
    plan = Plan.model_validate_json(made.model_dump_json())
    assert {key: plan.run(key) for key in plan.runs} == project.runs
    assert {key: (run.weights, plan.run(key).rotation_key) for key, run in plan.runs.items()} == {
        key: (run.weights_key, run.rotation_key) for key, run in project.runs.items()
    }
    for key, weights in plan.weights.items():
        assert (key, weights.rotation) == (plan.run(weights.run).weights_key, plan.run(weights.run).rotation_key)
    assert plan.weights.keys() == project.weights.keys()
    assert plan.rotations.keys() == project.rotations.keys()
    assert plan.tasks.keys() == project.task_sets.keys()
    for name, table in plan.tables.items():
        found = project.table(name)
        classes = found.classes if isinstance(found, Ranking) else ()
        of = [of for one in classes for of in (one.table, one.less) if of] or [name]
        assert [*table.runs] == [*{run.key: None for one in of for cell in project.cells(one) for run in cell.runs}]
    assert plan.names == project.names
    assert {name: [*page.records] for name, page in plan.tables.items() if page.records} == {
        name: list(dict.fromkeys(table.recorded)) for name, table in project.of(SpeedTable).items()
    }


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("config/config.yaml", "seeds", "# other\nseeds"),
        ("workflow/papers/quarot/tables.yaml", "A small table.", "A little table."),
        ("workflow/papers/quarot/published/small.csv", "8.37", "8.38"),
        ("rotquant/recipes/presets.py", '"""', '"""More. ', ),
        ("models/small/model", "weights", "heights"),
    ],
)  # fmt: skip
def test_another_plan_is_made_when_anything_that_it_follows_from_is_edited(
    copy: Copy, path: str, old: str, new: str
) -> None:
    earlier = current_plan(copy.root)
    assert current_plan(copy.root) == earlier
    copy.edit(path, old, new)
    later = current_plan(copy.root)
    assert later.path != earlier.path
    assert (later.runs.keys() != earlier.runs.keys()) == path.startswith("models")
    assert read_plan(earlier.path) == earlier  # which a running workflow may still read
    copy.edit(path, new, old)
    reverted = current_plan(copy.root)
    assert reverted.model_dump(exclude={"inputs"}) == earlier.model_dump(exclude={"inputs"})


def test_a_checkpoint_that_keeps_its_size_and_time_is_still_another(copy: Copy) -> None:
    earlier = current_plan(copy.root)
    file = copy.root / "models/small/model"
    times = file.stat()
    file.write_text("heights")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert current_plan(copy.root).runs.keys() != earlier.runs.keys()


def test_two_configurations_have_two_plans_at_once(copy: Copy) -> None:
    copy.write("mine.yaml", "seeds: [5]")
    default, mine = current_plan(copy.root), current_plan(copy.root, ["mine.yaml"])
    option = current_plan(copy.root, [], {"seeds": [5]})
    assert len({default.path, mine.path, option.path}) == 3
    assert mine.runs == option.runs != default.runs
    assert [read_plan(plan.path) for plan in (default, mine, option)] == [default, mine, option]
    with pytest.raises(ConfigError, match="under this configuration"):
        default.run(next(iter(mine.runs.keys() - default.runs.keys())))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("run", "no table asks for a run 'feed' under this configuration"),
        ("table", "unknown table 'feed'; known: quarot_table1"),
    ],
)
def test_what_a_plan_does_not_hold_is_told_by_its_name(copy: Copy, kind: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        getattr(current_plan(copy.root), kind)("feed")


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "other numbers", "deleted", "list"])
def test_a_damaged_or_foreign_plan_is_made_anew_and_refused_in_a_sentence_by_a_job(copy: Copy, damage: str) -> None:
    plan = current_plan(copy.root)
    text = plan.path.read_text()
    other = current_plan(copy.root, [], {"seeds": [5]}).path.read_text()
    content = {"cut": text[:500], "empty": "", "foreign": other, "other numbers": text.replace("0", "1"), "list": "[]"}
    plan.path.unlink() if damage == "deleted" else plan.path.write_text(content[damage])
    with pytest.raises(ResultError, match="start Snakemake again"):
        read_plan(plan.path)
    assert current_plan(copy.root) == plan
    for notes in copy.root.glob("results/plans/*.seen"):
        notes.write_text(content.get(damage, ""))
    assert current_plan(copy.root) == plan
    assert plan.path.read_text() == text


def test_what_every_command_loads_needs_no_numeric_library() -> None:
    """Each of them costs a second or more at every start, also of `rotquant --help`."""
    script = (
        "import sys; from pathlib import Path; import reproduction.commands\n"
        "from reproduction.sources import load_tables\n"
        "load_tables(Path())\n"
        "print({'matplotlib', 'mlflow', 'pandas', 'scipy', 'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout + done.stderr == "set()\n"


def test_an_unchanged_project_is_not_expanded_again(copy: Copy) -> None:
    for folder in ("models/small", "models/larger"):
        copy.write(f"{folder}/tokenizer.json", "{}")
    script = (
        "import sys; from pathlib import Path; from reproduction.planning.current import current_plan\n"
        "current_plan(Path())\n"
        "print({'reproduction.tables.project', 'rotquant.recipes.recipe', 'torch'} & {*sys.modules})"
    )

    def loaded() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script], env=copy.environment(), cwd=copy.root, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    assert "reproduction.tables.project" in loaded()
    assert loaded() == "set()\n"
    copy.write("workflow/papers/quarot/published/small.csv", PUBLISHED.replace("8.37", "nothing"))
    assert "write a number" in loaded()


def test_tables_in_a_folder_outside_of_the_project_are_planned_and_followed(
    copy: Copy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    (one,) = TABLES["tables"]
    (folder / "numbers").mkdir()
    (folder / "numbers/mine.csv").write_text(PUBLISHED)
    own = {
        **one,
        "id": "mine_bits",
        "published": "numbers/mine.csv",
        "rows": [*one["rows"], {"name": "R", "method": "rtn"}],
    }

    def written(name: str, **fields: Any) -> None:
        table = {**TABLES, "paper": "mine", "tables": [{**own, **fields}]}
        (folder / name).write_text(yaml.safe_dump(table, sort_keys=False))

    written("bits.yaml")
    copy.write("mine.yaml", f"papers: [{os.path.relpath(folder, copy.root)}]")
    assert current_plan(copy.root).tables.keys() == {"quarot_table1"}
    first = current_plan(copy.root, ["mine.yaml"])
    assert first.tables.keys() == {"mine_bits", "quarot_table1"}
    assert first.tables["mine_bits"].runs.keys() > first.tables["quarot_table1"].runs.keys()
    assert current_plan(copy.root, ["mine.yaml"]) == first
    (folder / "numbers/mine.csv").write_text(PUBLISHED.replace("8.37", "8.38"))
    second = current_plan(copy.root, ["mine.yaml"])
    assert second.tables["mine_bits"].definition != first.tables["mine_bits"].definition
    written("more.yaml", id="mine_more")
    assert current_plan(copy.root, ["mine.yaml"]).tables.keys() == {"mine_bits", "mine_more", "quarot_table1"}
    written("more.yaml", id="mine_more", rows=[*one["rows"], {"name": "R", "method": "rtm"}])
    with pytest.raises(ConfigError, match=re.escape(f"{folder}/more.yaml: ") + ".*unknown method 'rtm'"):
        current_plan(copy.root, ["mine.yaml"])


def test_how_recipes_fit_models_is_found_out_once_for_all_configurations_of_one_code(copy: Copy) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    for name in ("small", "larger"):
        copy.write(f"models/{name}/config.json", json.dumps({"model_type": "llama", **sizes, **heads}))
        copy.write(f"models/{name}/tokenizer.json", "{}")
    long = {"name": "Long", "method": "quarot", "recipe": {"calibration": {"sequence_length": 4096}}}

    def code_of(seed: int, module: str) -> str:
        return (
            "import sys; from pathlib import Path; from reproduction.planning.current import current_plan\n"
            f"plan = current_plan(Path(), [], {{'seeds': [{seed}], 'rows': {{'quarot_table1': [{long}]}}}})\n"
            f"print('{module}' in sys.modules, len(plan.runs), *plan.tables['quarot_table1'].remarks)"
        )

    def planned(seed: int) -> str:
        asked = code_of(seed, "rotquant.models.fitting")
        return forked.run("torch", copy.root, copy.environment(), asked)[1]

    said = "4 Not possible here: Long: calibration samples of 4096 tokens exceed the model's context of 64 tokens"
    assert planned(0).startswith(f"True {said}")
    assert copy.run(sys.executable, "-c", code_of(1, "torch"))[1].startswith(f"False {said}")
    (known,) = copy.root.glob("results/plans/*.fits")
    known.write_text(known.read_text()[:-9])
    assert planned(2).startswith(f"True {said}")
    copy.edit("rotquant/models/limits.py", "exceed the model's context", "are more than the model's context")
    assert planned(3).startswith(f"True {said.replace('exceed', 'are more than')}")


def test_plans_that_nobody_read_for_long_are_removed(copy: Copy) -> None:
    old = current_plan(copy.root)
    os.utime(old.path, (0, 0))
    new = current_plan(copy.root, [], {"seeds": [5]})
    assert (old.path.exists(), new.path.exists()) == (False, True)
    assert current_plan(copy.root) == old


@pytest.mark.parametrize("kind", ["runs", "weights", "rotations", "tasks"])
def test_a_result_lies_where_its_kind_key_and_code_say_and_its_key_is_read_off_its_place(
    project: projects.Project, kind: str
) -> None:
    places, keys = Results(Path("elsewhere"), project.names), getattr(project, "task_sets" if kind == "tasks" else kind)
    of = {"runs": places.run, "weights": places.weights, "rotations": places.rotation, "tasks": places.tasks}[kind]
    found = {key: of(key) for key in keys}
    assert len({*found.values()}) == len(keys) > 0
    for key, path in found.items():
        assert re.fullmatch(rf"elsewhere/{kind}/{key}-[0-9a-f]{{8}}(\.json)?", str(path))
        file = path if path.suffix else path / "some.json"
        assert (key_in(path.name), placed(Path("/x/results") / file.relative_to("elsewhere"))) == (
            key,
            (Path("/x/results"), key),
        )
    assert of("0" * 16).name.removesuffix(".json") == "0" * 16  # which no table asks for, and no file is called


def test_a_name_is_of_the_code_of_a_result_and_of_all_that_it_is_computed_on(project: projects.Project) -> None:
    """Of a run on learned rotations: another digest of a stage is another name of what follows it, of nothing else."""
    run = next(run for run in project.runs.values() if run.rotation_key)
    rotation, weights = str(run.rotation_key), str(run.weights_key)

    def names(tasks: dict[str, str], **codes: str) -> dict[str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reproduction.identity.names.stage_digest", lambda stage, _: codes.get(stage, "code"))
            return names_of({run.key: run}, {weights: [run]}, {rotation: [run]}, tasks)

    def other(found: dict[str, str]) -> set[str]:
        return {key for key, name in found.items() if name != earlier[key]}

    earlier = names({})
    assert other(names({})) == set()
    assert other(names({}, rotations="other")) == {rotation, weights, run.key}
    assert other(names({}, weights="other")) == {weights, run.key}
    assert other(names({}, runs="other")) == {run.key}
    assert other(names({run.key: "tasks"})) == {run.key}
