"""Every function of the package that reads what it has not made in the same process, and who fuzzes it.

`found` looks for calls of what reads files and decodes them; `FUZZED` says by which formats of the trial each such
function is met, `ASIDE` why another is not. A test compares them, so that a new reader is noticed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.trials.trial import REPOSITORY

#: Functions and methods that read or decode, by the last part of their names.
READING = frozenset(
    {
        *("read_json", "read_object", "parse_json", "read_text", "read_bytes", "read_yaml", "yaml_value", "read_csv"),
        *("open", "load", "loads", "safe_load", "load_all", "get_single_node", "model_validate_json"),
        *("safe_open", "load_file", "read_tensors", "read_array", "from_pretrained", "load_dataset", "data_rows"),
        *("read_parquet", "read_table", "ParquetFile", "DictReader", "reader", "fromstring", "read_safetensors_header"),
    }
)


def found(package: Path = REPOSITORY / "rotquant") -> dict[str, set[str]]:
    """What reads in each function, by "module:function" without the package's name."""
    calls: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        for place, name in _calls(ast.parse(path.read_bytes()), ""):
            calls.setdefault(f"{module}:{place}", set()).add(name)
    return calls


def _calls(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """The calls that read, each with the names of the functions and classes around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(child, f"{place}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Call) and (name := _name(child.func)) in READING:
            yield place, name
        yield from _calls(child, place)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


#: The formats in whose cases each function reads, by "module:function".
FUZZED: dict[str, tuple[str, ...]] = {
    "bench.records:read_record": ("records of times", "committed records of times"),
    "commands.options:_change": ("options", "recipes"),
    "commands.report:gallery": ("rendered reports",),
    "commands.tracking:make_report": ("run files behind pages",),
    "decoder.storage:load_decoder": ("decoders",),
    "decoder.storage:read_decoder_manifest": ("manifests of decoders",),
    "foundation.arrays:read_array": ("texts as tokens", "training data"),
    "foundation.contents:content_digest": ("digests of contents",),
    "foundation.files:read_json": ("records of weights", "tokenizers"),
    "foundation.files:read_text": ("rendered reports",),
    "foundation.files:read_object": ("run files", "safetensors indices"),
    "foundation.parsing:parse_json": ("run files", "safetensors headers"),
    "foundation.parsing:broken_line": ("corpora: jsonl",),
    "foundation.files:file_digest": ("records of rotations",),
    "foundation.written:read_yaml": ("configuration", "tables of accuracy"),
    "foundation.written:yaml_value": ("configuration", "options", "tasks: definitions and items"),
    "foundation.written:read_csv": ("printed numbers", "printed times"),
    "identity.code:_read_python": ("digests of syntax",),
    "metrics.zeroshot.definitions:read_definition": ("tasks: definitions and items",),
    "metrics.zeroshot.lines:json_lines": ("tasks: piqa", "tasks: definitions and items"),
    "metrics.zeroshot.lines:json_list": ("tasks: lists and parquet",),
    "metrics.zeroshot.lines:_parsed": ("tasks: piqa",),
    "metrics.zeroshot.paper:_rows": ("tasks: piqa",),
    "metrics.zeroshot.paper:_parquet_rows": ("tasks: lists and parquet",),
    "models.architectures:check_family_of": ("config.json",),
    "models.checkpoints:weight_files": ("safetensors indices",),
    "models.checkpoints:check_weight_files": ("safetensors headers",),
    "models.checkpoints:read_safetensors_header": ("safetensors headers",),
    "models.checkpoints:checked_base": ("low-rank deltas",),
    "models.checkpoints:_tensors": ("low-rank deltas",),
    "models.checkpoints:_merged": ("low-rank deltas",),
    "models.checkpoints:_load": ("whole checkpoints", "whole checkpoints of shards"),
    "models.checkpoints:_tokenizer_settings": ("tokenizers",),
    "models.checkpoints:load_tokenizer": ("tokenizers",),
    "models.checkpoints:load_config": ("config.json",),
    "models.checkpoints:_check_generation": ("config.json",),
    "models.deltas:read_delta": ("low-rank deltas",),
    "models.deltas:merge": ("low-rank deltas",),
    "models.integrity:read_tensors": ("quantized folders", "decoders", "low-rank deltas"),
    "models.integrity:_sha256": ("manifests of quantized folders",),
    "models.integrity:_stored": ("whole checkpoints",),
    "models.rotation.matrices:_told": ("rotations",),
    "models.rotation.matrices:_read": ("rotations",),
    "qat.engine:ShardedCheckpoint.load": ("states of shared trainings",),
    "reporting.figures.arrays:history_of": ("histories of rotations",),
    "reporting.html.inline_svg:inline_svg": ("rendered reports",),
    "reporting.html.pages:_contents": ("rendered reports",),
    "reporting.pages.origins:_shape": ("run files behind pages",),
    "reporting.pages.trained:last_step": ("histories of trainings",),
    "reporting.scoreboard:machine_noise": ("records of machines",),
    "study.configuration:read_layers": ("configuration",),
    "study.configuration:_typed": ("options",),
    "study.configuration:hidden_size": ("config.json",),
    "study.plan:read_plan": ("plans",),
    "study.archives:unpack": ("archives of results",),
    "study.planning:current_plan": ("places of plans",),
    "study.planning:_content": ("places of plans",),
    "study.resolution:site_widths": ("config.json",),
    "study.resolution:check_names": ("configuration",),
    "study.results:read_result": ("run files",),
    "study.settings:load_settings": ("tables of settings",),
    "study.speed.loading:_load": ("tables of speed",),
    "study.speed.published:read_printed": ("printed times",),
    "study.stages.jobs:record_part": ("records of measured parts",),
    "study.stages.jobs:rotation_current": ("records of rotations",),
    "study.stages.jobs:weights_current": ("records of weights", "records of rotations"),
    "study.stages.jobs:result_current": ("run files that are current", "records of tasks"),
    "study.stages.jobs:_weights_record": ("records of weights",),
    "study.stages.measures:training_loss": ("histories of trainings",),
    "study.stages.text:_tokens": ("texts as tokens",),
    "study.states:States._marks": ("marks of jobs",),
    "study.tables:load_tables": ("tables of accuracy",),
    "study.tables:read_published": ("printed numbers",),
    "study.targets:load_targets": ("targets",),
    "study.tuning:_value": ("options",),
    "study.tuning:recorded_runs": ("records of tunings",),
    "study.values:read_frame": ("tables' numbers",),
    "text.docstrings:file_docstrings": ("packs",),
    "text.loading:_file_rows": ("corpora: jsonl", "corpora: json", "corpora: parquet"),
    "text.loading:_text_lines": ("corpora: txt",),
    "text.packages:_installed": ("packs",),
    "text.packages:kept": ("kept corpora",),
    "text.rows:data_rows": ("corpora: jsonl", "corpora: json"),
    "text.rows:_parquet_rows": ("corpora: parquet",),
    "training.data:TrainingData.__init__": ("training data",),
    "training.finetuning:FineTuning.from_yaml": ("training recipes",),
    "training.finetuning:is_fine_tuning": ("training recipes",),
    "training.recipe:TrainingConfig.from_yaml": ("training recipes",),
    "training.state:Checkpoint.load": ("states of trainings",),
    "training.state:Checkpoint._read": ("states of trainings",),
    "weights.storage:load_quantized": ("quantized folders",),
    "weights.storage:read_quantized": ("quantized folders", "quantized folders with a prefix"),
    "weights.storage:read_manifest": ("manifests of quantized folders",),
}

_LOADS = "calls a load of this package, which is listed itself"
_OURS = "reads the package's own files"
_WRITES = "opens a file for writing, or a display"
_AGAIN = "reads what another reader of the same command has accepted"
_MLFLOW = "reads, for MLflow, files that read_result and pages have accepted, or MLflow's own answers"
#: Functions whose calls only look like readers of files, or whose files are nobody's input, and why.
ASIDE: dict[str, str] = {
    "foundation.files:_new_file": _WRITES,
    "foundation.files:_new_folder": _WRITES,
    "foundation.files:_remove_strays": "opens what is left of a write, to lock and remove it",
    "study.archives:_write": _WRITES,
    "study.cluster:_lines": "reads a job's log for its last line",
    "study.cluster:lost_jobs": "reads Snakemake's log of this run",
    "study.starting:begin": _WRITES,
    "bench.timing.cpu:_l3_bytes": "reads the kernel's own account of the machine",
    "foundation.environment:cpu_name": "reads the kernel's own account of the machine",
    "commands.diagnose:diagnose": "reads a model card, text in which only a marker is looked for, by read_text",
    "commands.diagnose:_write_card": "reads a model card, text in which only a marker is looked for, by read_text",
    "commands.finetuning:fine_tuned": _LOADS,
    "commands.models:evaluate": _LOADS,
    "commands.runs:show": _AGAIN,
    "study.expansion:speed_definition": _AGAIN,
    "study.stages.jobs:make_weights": "reads the manifest that the stage has written just before",
    "study.stages.jobs:_rotation_record": "reads a record whose content check_signed checks, as rotation_current does",
    "study.stages.weights:compute_weights": "reads the record that make_weights has checked",
    "foundation.progress:task": _WRITES,
    "reporting.tracking.store:_locked": _WRITES,
    "study.locks:locked": _WRITES,
    "metrics.zeroshot.confined:_redirect": _WRITES,
    "metrics.zeroshot.confined:main": "reads the job that its parent process pipes to it, before it is confined",
    "foundation.hub:commit_of": "matches a reference of the hub's cache against the form of a commit",
    "identity.code:_with_headers": _OURS,
    "identity.code:_read": _OURS,
    "identity.code:_rules": _OURS,
    "identity.code:sources": _OURS,
    "kernels.cpu.compiling:compile_source": _OURS,
    "kernels.launch.loading:_source_text": _OURS,
    "kernels.launch.loading:compile_source": "reads names of compiled kernels in the user's cache, on a GPU alone",
    "recipes.corpus:expected_hashes": _OURS,
    "methods.block_ap.tuning:tune_block": _LOADS,
    "qat.training:Training._teacher_outputs": _LOADS,
    "training.loop:train": _LOADS,
    "metrics.diagnostics:measure_costs": _LOADS,
    "metrics.magnitudes:read_inputs": "makes a hook that is called reader",
    "metrics.token_maxima:_reading_inputs": "makes a hook that is called reader",
    "metrics.zeroshot.definitions:hub_dataset": "reads definitions of lm-eval, whose package is installed",
    "metrics.zeroshot.definitions:_included": "reads definitions of lm-eval, whose package is installed",
    "metrics.zeroshot.harness:_load_task": "gives lm-eval a definition whose rows were checked one by one",
    "recipes.registry:_loaded": "imports a method that an installed package registers",
    "reporting.tracking.experiments:_name_in": _MLFLOW,
    "reporting.tracking.papers:Paper.show_table": _MLFLOW,
    "reporting.tracking.papers:Paper._run": _MLFLOW,
    "reporting.tracking.runs:_overview": _MLFLOW,
    "text.loading:_hub_rows": "reads the hub, by the datasets library",
    "text.modules:_read": "reads source files of installed packages as text, whatever it is",
}
