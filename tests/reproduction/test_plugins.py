"""A method from outside: one file of another package and an entry point; tables, pages and commands know it then.

And inside: no module but a method's own names one, so that a further method is one file.
"""

import ast
import functools
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from reproduction.identity.code import stage_digest
from reproduction.identity.names import MODEL
from reproduction.run.results import RunResult, write_result
from reproduction.run.stages.runs import measure_run
from reproduction.run.stages.weights import compute_weights
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.tables import TableFile
from rotquant.foundation.errors import RecipeError
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import find_method, override
from rotquant.recipes.registry import built_in_names, method_names
from rotquant.weights.actions import Hooks, hooks
from rotquant.weights.build import build_weights, quantized_forward
from rotquant.weights.storage import load_quantized, save_quantized
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.commands import printed_perplexity, rotquant
from tests.helpers.models import FURTHER, VOCABULARY, tiny_model, tiny_tokens
from tests.helpers.project import CONFIG, REPOSITORY, TABLES, Copy
from tests.helpers.reports import page

HALVING = '''"""A toy: weights are made smaller by a power of two, and inputs larger at run time."""

from typing import Annotated, ClassVar

from pydantic import Field

from rotquant.recipes.recipe import Method, Recipe
from rotquant.recipes.transforms import Transform


class Halving(Method):
    """Halving (Nobody 2026): every weight is halved, and every input doubled."""

    name: ClassVar[str] = "halving"
    actions: ClassVar[str] = __name__
    title: ClassVar[str] = "Halving"
    source: ClassVar[str] = "Nobody 2026, Eq. 0"
    roles: ClassVar[frozenset[str]] = frozenset({"transformation"})
    acts_at_run_time: ClassVar[bool] = True

    times: Annotated[int, Field(gt=0)] = 1
    """How often."""

    @classmethod
    def presets(cls):
        return {"halved-rtn": halved_rtn}

    def describe(self, recipe):
        return f"weights halved {self.times} times"


def apply(settings, stage):
    import torch

    from rotquant.models.architectures import decoder_layers

    for layer in decoder_layers(stage.model):
        for site in stage.architecture.sites:
            for name in site.linears:
                layer.get_submodule(name).weight.data.mul_(0.5**settings.times)
    for site, shape in tensors(settings, stage.architecture).items():
        stage.tensors[site] = torch.full(shape, 0.5**settings.times)


def tensors(settings, architecture):
    return {site.name: (architecture.num_layers, site.features) for site in architecture.sites}


def runtime(settings, quantization, tensors):
    about = {"name": "halving", "kind": "scaling", "online": True}
    return quantization.with_transforms([Transform(location=x, tensors=(x,), **about) for x in tensors], tensors)


def halved_rtn() -> Recipe:
    """Round-to-nearest of halved weights: as good as of whole ones."""
    scheme = {"bits": 4, "granularity": "channel"}
    return Recipe.model_validate({"methods": {"halving": {}}, "weights": {"scheme": scheme}})
'''


def install(folder: Path, entry: str, module: str = HALVING, name: str = "halving_method") -> None:
    """A package as an installer leaves it: a module, and beside it what it registers."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(module)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rotquant.methods]\n{entry}\n")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Methods are looked for anew, now and afterwards."""
    for cached in (find_method, preset):
        cached.cache_clear()
    yield monkeypatch
    for cached in (find_method, preset):
        cached.cache_clear()
    for module in ("halving_method", "dither_method"):
        sys.modules.pop(module, None)


@pytest.fixture
def halving(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "halving = halving_method:Halving")
    fresh.syspath_prepend(str(tmp_path / "site"))


@pytest.fixture
def project(tmp_path: Path, halving: None, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A table with a row of the method, on a tiny model."""
    copy = Copy(tmp_path / "project", fake=False)
    rows = [{"name": "Baseline", "method": "baseline"}, {"name": "Halved", "method": "halved-rtn"}]
    kept = {key: value for key, value in TABLES["tables"][0].items() if key not in ("published", "figure")}
    copy.set_tables({**TABLES, "tables": [{**kept, "rows": rows, "columns": ["Llama-2-7B"], "claims": []}]})
    copy.set_config({**CONFIG, "methods": {"halving": {"times": 3}}})
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=400)
    for split in ("train", "validation", "test"):
        copy.write(f"text/{split}.txt", "\n".join(words))
    for name in ("small", "larger"):
        tiny_model().save_pretrained(copy.root / "models" / name)
        tiny_tokenizer().save_pretrained(copy.root / "models" / name)
    monkeypatch.chdir(copy.root)
    return load_project(root=copy.root)


@pytest.mark.usefixtures("halving")
def test_a_registered_method_is_listed_and_shown_with_its_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert method_names() == (*built_in_names(), "halving")
    assert "halved-rtn" in all_presets()
    assert rotquant(monkeypatch, "methods") == 0
    listed = capsys.readouterr().out
    assert "Round-to-nearest of halved weights: as good as of whole ones." in listed
    assert "Halving (Nobody 2026): every weight is halved, and every input doubled. [Nobody 2026, Eq. 0]" in listed
    assert rotquant(monkeypatch, "recipe", "halved-rtn") == 0
    assert re.search(r"methods.halving.times +│ 1 +│ 1 +│ How often.", capsys.readouterr().out)


def test_a_table_computes_and_describes_a_registered_method(project: Project) -> None:
    cells = project.cells("quarot_table1")
    recipe = cells[1].runs[0].recipe
    assert recipe.methods["halving"].model_dump() == {"times": 3}  # as the configuration says
    for run in (run for cell in cells for run in cell.runs):
        folder = project.results.weights(run.weights_key) / MODEL if run.weights_key else None
        checkpoint = project.checkpoint_path(run.checkpoint)
        record = None
        if folder is not None:
            record, history = compute_weights(run, checkpoint, folder, "cpu", stage_digest("weights", recipe))
            assert history == []
        found, provenance = measure_run(run, checkpoint, folder, "cpu", 2, stage_digest("runs", run.recipe))
        for made in filter(None, (record, provenance)):
            assert made["versions"].get("halving_method") == ("1.0" if run.recipe.methods else None)
            assert made["versions"].keys() >= {"rotquant", "torch"}
        write_result(project.results.run(run.key), RunResult(run, found.metrics, provenance, record, found.arrays))
    shown = page(project)
    assert "weights halved 3 times; weights 4-bit symmetric per channel, RTN" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("- Versions: "))
    packages = [one.split()[0] for one in line.removeprefix("- Versions: ").split(", ")]
    assert "halving_method" in packages
    assert len(packages) == len(set(packages))  # though the unquantized run has none of the method's package


@pytest.mark.usefixtures("halving")
def test_what_a_registered_method_stores_acts_at_run_time_before_and_after_loading(tmp_path: Path) -> None:
    plain, halved = override(preset("halved-rtn"), {"methods": {"halving": None}}, "test"), preset("halved-rtn")
    outputs = {}
    for name, recipe in {"plain": plain, "halved": halved}.items():
        stored = build_weights(tiny_model(), tiny_tokenizer(), recipe, 0, progress=False)
        with torch.no_grad(), quantized_forward(stored.model, recipe, stored.state):
            outputs[name] = stored.model(tiny_tokens()).logits
    assert torch.equal(outputs["plain"], outputs["halved"])  # powers of two are exact
    assert "Halving" in stored.manifest.seconds
    assert stored.manifest.versions["halving_method"] == "1.0"
    save_quantized(tmp_path / "model", stored)
    model, _, state = load_quantized(tmp_path / "model")
    assert state.tensors.keys() == {"halving"}
    assert set(state.tensors["halving"]["mlp_output"].flatten().tolist()) == {0.5}
    with torch.no_grad(), quantized_forward(model, halved, state):
        assert torch.equal(model(tiny_tokens()).logits, outputs["plain"])


def test_the_command_line_quantizes_by_a_registered_method(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, found = str(project.root / "models/small"), {}
    for name, change in {"plain": "methods.halving=null", "halved": "methods.halving.times=2"}.items():
        command = ["quantize", model, "-o", name, "--method", "halved-rtn", "--set", change, "--device", "cpu"]
        assert rotquant(monkeypatch, *command) == 0
        text = ["--corpus", "text", "--sequence-length", "16", "--device", "cpu"]
        assert rotquant(monkeypatch, "evaluate", name, *text) == 0
        found[name] = printed_perplexity(capsys.readouterr().out)
    assert found["plain"] == found["halved"]
    wrong = ["quantize", model, "-o", "wrong", "--method", "halved-rtn", "--set", "methods.halving.times=0"]
    assert rotquant(monkeypatch, *wrong) != 0
    assert "methods.halving.times: Input should be greater than 0 (given 0)" in capsys.readouterr().err


def test_the_guides_method_passes_the_guides_test_and_stands_in_the_guides_table(
    tmp_path: Path, fresh: pytest.MonkeyPatch
) -> None:
    guide = (REPOSITORY / "docs/method.md").read_text(encoding="utf-8")
    method, tests = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (table,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    if "dither" not in built_in_names():  # as in the clone of somebody who follows the guide
        install(tmp_path / "site", "dither = dither_method:Dither", method, "dither_method")
        fresh.syspath_prepend(str(tmp_path / "site"))
    namespace: dict[str, object] = {}
    exec(compile(tests, "docs/method.md", "exec"), namespace)
    found = [value for name, value in namespace.items() if name.startswith("test_") and callable(value)]
    assert len(found) == 2
    for test in found:
        test()
    (one,) = TableFile.model_validate(yaml.safe_load(table)).tables
    recipes = {row.name: row.computed(row.name) for row in one.rows}
    assert recipes["Half a step"].methods["dither"].model_dump() == {"width": 0.5}
    assert recipes["RTN"].methods == {}
    (sources,) = re.findall(r"```\n(- source.*?)```", guide, re.DOTALL)
    data = preset("dither").model_dump(mode="json")
    for field, value in (pair for said in yaml.safe_load(sources) for pair in said["settings"].items()):
        assert functools.reduce(dict.__getitem__, field.split("."), data) == value
    with pytest.raises(RecipeError, match=r"set weights\.scheme\.granularity to channel"):
        override(preset("dither"), {"weights": {"scheme": {"granularity": "group", "group_size": 4}}}, "test")


@pytest.mark.parametrize(
    ("entry", "module", "sentence"),
    [
        ("halving = halving_method:Halfing", HALVING, "'halving' of the package halving_method cannot be imported"),
        ("halving = halving_method:Halving", "import nothing_of_this_name", "cannot be imported from halving_method"),
        ("halving = halving_method:Recipe", HALVING, "is no subclass of rotquant.recipes.recipe.Method"),
        ("halving = halving_method:Halving", HALVING.replace("    source:", "    other:"), "does not say its source"),
        ("halving = halving_method:Halving", HALVING.replace("    actions:", "    other:"), "does not say its actions"),
        ("halfing = halving_method:Halving", HALVING, "calls itself 'halving'"),
        ("gptq = halving_method:Halving", HALVING, "has the name of a built-in method"),
    ],
)
def test_a_registered_method_with_a_defect_is_one_sentence(
    entry: str, module: str, sentence: str, tmp_path: Path, fresh: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", entry, module)
    fresh.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(RecipeError, match=re.escape(sentence)) as error:
        all_presets()
    assert "\n" not in str(error.value)


#: Changes of the toy that make its module another than its class says, and the sentence on each.
WRONG_MODULES = {
    "not said": ("    acts_at_run_time", "    other", "acts at run time: set Halving.acts_at_run_time"),
    "misspelt": (
        "def apply(",
        "def aply(",
        "has a function aply in halving_method, and no hook is called so; nearest: ",
    ),
    "renamed": ("def runtime(settings,", "def at_work(settings,", "a function at_work in halving_method, and no hook"),
    "other arguments": ("def apply(settings, stage)", "def apply(stage)", "other arguments than (settings, context)"),
    "nothing at run time": ("def runtime(settings,", "def _runtime(settings,", "has neither runtime nor attach"),
    "nothing at all": ("def ", "def _", "has no function apply"),
}


@pytest.mark.parametrize("case", WRONG_MODULES)
def test_a_module_that_does_not_do_what_its_class_says_is_one_sentence_before_the_work(
    case: str, tmp_path: Path, fresh: pytest.MonkeyPatch
) -> None:
    old, new, sentence = WRONG_MODULES[case]
    head, actions = HALVING.split("def apply", 1)
    module = head.replace(old, new) + ("def apply" + actions.split("def halved_rtn")[0]).replace(old, new)
    if case == "nothing at all":
        module = module.replace("def _presets", "def presets").replace("acts_at_run_time: ClassVar[bool] = True", "")
    recipe = "def halved_rtn" + HALVING.split("def halved_rtn")[1]
    install(tmp_path / "site", "halving = halving_method:Halving", module + recipe)
    fresh.syspath_prepend(str(tmp_path / "site"))
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RecipeError, match=re.escape(sentence)) as error:
        build_weights(model, None, preset("halved-rtn"), 0, progress=False)
    assert "\n" not in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_every_built_in_method_has_hooks_that_its_class_allows() -> None:
    methods = {name: method for make in all_presets().values() for name, method in make().methods.items()}
    assert {"gptq", "outliers", "spinquant", "prefixed_outliers", "rcp"} <= methods.keys()
    assert all(isinstance(hooks(method), Hooks) for method in methods.values())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_rounding_that_leaves_a_weight_as_it_was_stores_nothing(
    family: str, tmp_path: Path, fresh: pytest.MonkeyPatch
) -> None:
    """Of a layer's last linear layers, which are an expert's where there are experts."""
    guide = (REPOSITORY / "docs/method.md").read_text(encoding="utf-8")
    (method, _) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    forgetful = method.replace("in context.architecture.sites", "in context.architecture.sites[:-1]")
    forgetful = forgetful.replace("    source:", '    layers: ClassVar = frozenset({"experts"})\n    source:')
    install(tmp_path / "site", "dither = dither_method:Dither", forgetful, "dither_method")
    fresh.syspath_prepend(str(tmp_path / "site"))
    model = tiny_model(**FURTHER["mixtral"]) if family == "mixtral" else tiny_model()
    with pytest.raises(
        RecipeError, match=r"dither leaves \d+ of \d+ weights without integers, such as .*\.0\..*weight"
    ):
        build_weights(model, None, preset("dither"), 0, progress=False)


def test_importing_methods_and_the_registry_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from rotquant.recipes.recipe import find_method; "
        "from rotquant.recipes.registry import method_names; "
        "[find_method(name) for name in method_names()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


#: Data of the papers and what times their methods: presets, benchmarks by name. `outliers` is also the kind of a
#: metric, and what `RuntimeQuantization` calls the split features.
MAY_NAME = {
    "rotquant/recipes/presets.py": set(built_in_names()),
    "rotquant/formats/gptq.py": {"gptq", "awq"},  # formats of other libraries
    "rotquant/models/folders.py": {"gptq", "awq"},
    "workflow/reproduction/benchmarks/learning.py": {"spinquant", "gptq", "block_ap"},
    "workflow/reproduction/benchmarks/distillation.py": {"rcp", "bitdistiller"},
    "workflow/reproduction/benchmarks/registry.py": {
        "spinquant",
        "gptq",
        "prefixed_outliers",
        "grid_weights",
        "grid_scales",
        "block_ap",
        "rcp",
        "bitdistiller",
    },
}


def test_no_module_outside_of_methods_names_a_method() -> None:
    named: dict[str, set[str]] = {}
    for path in sorted((REPOSITORY / "rotquant").rglob("*.py")):
        place = path.relative_to(REPOSITORY).as_posix()
        if place.startswith("rotquant/methods/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = node.value
            elif isinstance(node, ast.ImportFrom):
                said = (node.module or "").removeprefix("rotquant.methods.").partition(".")[0]
            if said in set(built_in_names()) - {"outliers"} - MAY_NAME.get(place, set()):
                named.setdefault(place, set()).add(said)
    assert named == {}
