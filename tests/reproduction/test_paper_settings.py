"""Under config/paper.yaml every method and every cell of every table has the papers' settings, field by field."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.metrics.settings import SNR
from reproduction.tables.project import Cell, Project
from reproduction.tables.resolution import with_less_text
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import Perplexity
from tests.helpers.project import shipped_project

_SAID = yaml.safe_load((Path(__file__).parent / "paper_settings.yaml").read_text(encoding="utf-8"))
STATEMENTS = [statement for statement in _SAID if "paper" not in statement]
OF_TABLES = [statement for statement in _SAID if "paper" in statement]

#: Checkpoints of the papers' models on the Hugging Face hub, by slot.
CHECKPOINTS = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "Mistral-7B": "mistralai/Mistral-7B-v0.3",  # SpinQuant Table 9
    "Llama-3-8B-Instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "Llama-3-70B-Instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "Qwen-2-7B": "Qwen/Qwen2-7B",
    "Phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
    "Llama-1-7B": "huggyllama/llama-7b",
    "WizardCoder-7B": "WizardLMTeam/WizardCoder-Python-7B-V1.0",
    "MetaMath-7B": "meta-math/MetaMath-7B-V1.0",
    "Llama-2-7B-chat-4k": "meta-llama/Llama-2-7b-chat-hf",
    "Llama-2-7B-Instruct-32k": "togethercomputer/Llama-2-7B-32K-Instruct",
}
QUAROT_TASKS = ("piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "lambada_openai")  # Table 2
SPINQUANT_TASKS = (  # Sec. 4
    *("arc_easy", "arc_challenge", "boolq", "piqa", "social_iqa", "hellaswag", "openbookqa", "winogrande"),
)
PRESETS = all_presets()
PREFIXQUANT_TASKS = ("winogrande", "hellaswag", "arc_challenge", "arc_easy", "piqa")  # Sec. 6.1
RCP_TASKS = ("piqa", "hellaswag", "winogrande", "arc_challenge")  # Table 13
TASKS = {"quarot": QUAROT_TASKS, "spinquant": SPINQUANT_TASKS, "prefixquant": PREFIXQUANT_TASKS, "rcp": RCP_TASKS}
#: What a method's authors have for a model, whatever the table: rates of PrefixQuant Sec. 6.1 and RCP Table 8, alpha of
#: SmoothQuant's repository.
SLOWER = {"block_ap": {"scale_lr": 2e-5, "weight_lr": 2e-6}}


def distilled(**settings: int) -> dict[str, dict[str, int]]:
    return dict.fromkeys(("rcp", "bitdistiller"), settings)


OF_MODELS = {
    "Llama-2-70B": {"smoothquant": {"alpha": 0.9}},
    "Mistral-7B": {"smoothquant": {"alpha": 0.8}},
    "Llama-3-70B": SLOWER,
    "Llama-3-70B-Instruct": SLOWER,
    "Llama-2-13B": distilled(batch_size=256),
    "Llama-3-8B": distilled(batch_size=32),
    "Llama-3.2-1B": distilled(epochs=16, batch_size=32),
    "Llama-3.2-3B": distilled(batch_size=32),
}
OWN_REPORTS = ("switches", "budget", "causes", "learning")
INSTRUCTED_TASKS = {("mmlu",): 5, ("tldr",): 1}  # SpinQuant Sec. A.10, RCP Table 2: examples in the prompt
#: RCP Sec. 5.1, in the prompt of each model: tasks that are asked of models of one domain.
DOMAIN_TASKS = {
    *(("humaneval",), ("gsm8k",)),
    ("hotpotqa", "multifieldqa_en", "triviaqa", "2wikimqa", "musique", "samsum", "passage_count"),
}


@pytest.fixture(scope="module")
def project() -> Project:
    return shipped_project("config/paper.yaml")


def flat(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested data as ("section.field", value), without those that are None."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", value


def stated(method: str) -> dict[str, Any]:
    """All that the statements say of a method; no two speak of the same field."""
    found: dict[str, Any] = {}
    for statement in STATEMENTS:
        if method in statement["methods"]:
            assert not found.keys() & statement["settings"].keys(), (method, statement["source"])
            found |= statement["settings"]
    return found


def resolved(project: Project, method: str) -> Recipe:
    """The recipe of the first row of any table that takes a method as it is; else, of one that changes it least."""
    rows = [
        (len(dict(flat(row.recipe))) + len(row.recipe) + len(row.columns) + bool(row.bits), table.id, row)
        for table in project.of(RunTable).values()
        for row in table.rows
        if row.method == method
    ]
    _, table, row = min(rows, key=lambda found: found[:2])
    (cell, *_) = (cell for cell in project.cells(table) if cell.row == row.name)
    return cell.runs[0].recipe


def test_statements_name_methods_and_sources() -> None:
    assert all(statement["source"] and statement["settings"] for statement in STATEMENTS)
    assert {method for statement in STATEMENTS for method in statement["methods"]} == PRESETS.keys() - {"baseline"}


@pytest.mark.parametrize("method", PRESETS)
def test_every_field_of_a_method_is_stated(method: str) -> None:
    assert dict(flat(preset(method).model_dump(mode="json"))) == stated(method)


def test_no_row_of_any_table_is_changed_by_the_configuration(project: Project) -> None:
    """So each has its method's settings but for what the table says itself: no amount, rate or size is another's."""
    for table in project.of(RunTable).values():
        for cell in project.cells(table.id):
            row = table.row(cell.row)
            said = row.computed("test", cell.column)
            rates = OF_MODELS.get(table.column(cell.column).slot, {})
            said = override(said, {"methods": {name: rates[name] for name in rates if name in said.methods}}, "test")
            if not said.needs_calibration:
                said = said.model_copy(update={"calibration": None})
            if table.text_share < 1:
                said = with_less_text(said, table.text_share, "test")
            assert cell.runs[0].recipe == said, (table.id, cell.row)


@pytest.mark.parametrize("statement", OF_TABLES, ids=lambda statement: statement["source"])
def test_what_is_said_of_a_papers_tables_holds_in_every_cell(project: Project, statement: dict[str, Any]) -> None:
    """Of fields that a cell has: weights alone have no inputs whose granularity anything could be said of."""
    checked = 0
    for table in project.of(RunTable).values():
        for cell in project.cells(table.id) if table.paper == statement["paper"] else ():
            slot = table.column(cell.column).slot
            if table.row(cell.row).method not in statement["methods"] or slot not in statement.get("slots", [slot]):
                continue
            if table.label in OWN_REPORTS:  # whose rows are the alternatives
                continue
            recipe = dict(flat(cell.runs[0].recipe.model_dump(mode="json")))
            if not recipe.keys() & {"activations.bits", "weights.scheme.bits"}:
                continue
            for field, value in statement["settings"].items():
                section = field.partition(".")[0]
                if section == "attention_output":
                    section = "activations"  # it has to be there where inputs are quantized
                if any(name.startswith(f"{section}.") for name in recipe):
                    assert recipe.get(field) == value, (table.id, cell.row, cell.column, field)
                    checked += 1
            if "attention_output.bits" in recipe:
                assert recipe["attention_output.bits"] == recipe["activations.bits"]
    assert checked


def printed(table: str, cell: Cell, labels: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the names and labels that a paper prints for a cell say of its recipe."""
    if bits := re.search(r"\b(\d+)-(\d+)-(\d+)$", cell.row):
        weights, activations, cache = (None if number == "16" else int(number) for number in bits.groups())
        alone = "(w4)" in cell.row
        yield from (("weights.scheme.bits", weights), ("activations.bits", None if alone else activations))
        yield from ((f"{part}.bits", None if alone else cache) for part in ("keys", "values"))
    if bits := re.search(r"\bINT(\d)$", cell.row):
        yield from ((f"{part}.bits", int(bits[1])) for part in ("weights.scheme", "activations", "keys", "values"))
    if bits := re.search(r"\bA16W(\d)$", cell.row):
        yield from (("weights.scheme.bits", int(bits[1])), ("weights.scheme.symmetric", False))  # QuaRot Sec. A.4
        yield from ((f"{part}.bits", None) for part in ("activations", "keys", "values"))
    names = (labels.get("Precision", ""), cell.column, cell.row)
    found = [re.fullmatch(r"W(\d+)A(\d+)(?:KV(\d+))?(?:g(\d+))?", name) for name in names]
    for bits in [one for one in found if one and cell.row != "FP16"][:1]:  # PrefixQuant, Sec. 6.1
        weights, activations, cache, size = (None if number == "16" else number for number in bits.groups())
        parts = {"weights.scheme": weights, "activations": activations, "keys": cache, "values": cache}
        yield from ((f"{part}.bits", number and int(number)) for part, number in parts.items())
        if size:
            yield "weights.scheme.group_size", int(size)
    if size := re.search(r"-(\d+)G\b", cell.row):
        yield from ((f"{part}.group_size", int(size[1])) for part in ("weights.scheme", "activations"))
    if cell.row.startswith("Cayley on 4-4-KV"):
        yield "methods.spinquant.network", "all"
    if table == "quarot_table5" and cell.row != "Baseline":
        parts = ("activations",) if cell.row.startswith("Input") else ("keys", "values")
        yield from ((f"{part}.clip_ratio", float(cell.column)) for part in parts)
    for label, part in (("K bits", "keys"), ("V bits", "values")):
        if label in labels:
            yield f"{part}.bits", None if labels[label] == 16 else labels[label]
    for label, path in (("samples", "text.samples"), ("iterations", "steps")):
        if labels.get("Number of") == label:
            yield f"methods.spinquant.{path}", labels["Value"]
    for label, part, ratio in (("K", "keys", 0.95), ("K", "values", 0.95), ("A", "activations", 0.9)):  # SpinQuant A.4
        if labels.get(f"{label} asym") in ("yes", "no"):
            yield f"{part}.symmetric", labels[f"{label} asym"] == "no"
            yield f"{part}.clip_ratio", ratio if labels[f"{label} clip"] == "yes" else 1.0


def test_what_a_paper_prints_beside_a_number_is_what_is_computed(project: Project) -> None:
    checked = 0
    for table in project.of(RunTable).values():
        for cell in project.cells(table.id):
            labels = dict(zip(table.label_columns, table.row(cell.row).labels, strict=True))
            recipe = dict(flat(cell.runs[0].recipe.model_dump(mode="json")))
            for field, value in printed(table.id, cell, labels):
                assert recipe.get(field) == value, (table.id, cell.row, cell.column, field)
                checked += 1
    assert checked > 1000


def test_tables_measure_as_the_papers_do(project: Project) -> None:
    """Perplexity and signal-to-noise ratio on all of WikiText-2's test text; the papers' tasks with all their items."""
    for table in project.of(RunTable).values():
        if table.paper not in TASKS:  # one of your own measures as it likes
            continue
        tasks = TASKS[table.paper]
        for cell in project.cells(table.id):
            metric = cell.metric
            if isinstance(metric, ZeroShot):
                scored = {"spinquant": {"normalization": "unconditional"}, "prefixquant": {"bos": False}}.get(
                    table.paper, {}
                )
                expected = ZeroShot(suite="paper", tasks=tasks, **scored)
                if metric.tasks in INSTRUCTED_TASKS:
                    expected = ZeroShot(suite="paper", tasks=metric.tasks, shots=INSTRUCTED_TASKS[metric.tasks])
                if metric.tasks in DOMAIN_TASKS:
                    prompt = project.slot(table, cell.column).zero_shot
                    expected = ZeroShot.model_validate({**prompt, "tasks": metric.tasks})
                    assert prompt.keys() <= {"suite", "template", "longest_prompt"}
                assert metric == expected, table.id
            elif isinstance(metric, Perplexity | SNR):
                place = {"bos": metric.bos} if table.id in ("quarot_switches", "quarot_cache") else {}
                text = "code" if cell.column == "WizardCoder-7B" else "wikitext2"  # for KL divergence
                assert metric == type(metric)(corpus=text, **place), table.id


def test_models_texts_types_and_seeds_are_the_papers(project: Project) -> None:
    config = project.config
    assert {name: slot.checkpoint for name, slot in config.slots.items()} == CHECKPOINTS
    assert all(slot.compute for slot in config.slots.values())
    sources = {name: spec.sources for name, spec in config.corpora.items()}
    mixed = sources.pop("alpaca_wikitext2")  # RCP Sec. 5.1
    assert [spec.path for spec in mixed] == ["tatsu-lab/alpaca", "Salesforce/wikitext"]
    assert mixed[1:] == sources["wikitext2"]
    texts = {name: (spec.path, spec.subset, spec.separator) for name, (spec,) in sources.items()}
    assert texts == {
        "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "\n\n"),
        "c4": ("allenai/c4", "en", "\n\n"),  # SpinQuant Sec. A.5
        "pile": ("monology/pile-uncopyrighted", None, "\n\n"),  # PrefixQuant Sec. 6.1
        "redpajama": ("togethercomputer/RedPajama-Data-1T-Sample", None, "\n\n"),  # PrefixQuant Sec. G, as its code
        "evol_instruct": ("nickrosh/Evol-Instruct-Code-80k-v1", None, "\n\n"),
        "metamathqa": ("meta-math/MetaMathQA", None, "\n\n"),
        "code": ("openai/openai_humaneval", None, "\n\n"),  # RCP's programs, in place of its accuracy on stand-ins
    }
    assert config.dtype == "float16"  # QuaRot Table 1's baseline, SpinQuant Sec. 2
    assert {cell.runs[0].dtype for cell in project.cells("rcp_table2")} == {"bfloat16"}  # RCP App. A.4
    assert config.trials == 100  # SpinQuant Sec. 2.2
    other = [cell for cell in project.cells("spinquant_table13") if cell.row.startswith("C4")]
    assert {cell.runs[0].recipe.methods["spinquant"].text.corpus for cell in other} == {"c4"}
