"""Every function of the package that reads what it has not made in the same process, and who fuzzes it.

`found` looks for calls of what reads files and decodes them; `FUZZED` says by which formats of the trial each such
function is met, `ASIDE` why another is not. A test compares them, so that a new reader is noticed.
"""

import ast
from collections.abc import Iterator
from functools import cache
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


#: The folders that the packages lie in.
ROOTS = (REPOSITORY, REPOSITORY / "workflow")


@cache
def found() -> dict[str, set[str]]:
    """What reads in each function of both packages, by "module:function"."""
    calls: dict[str, set[str]] = {}
    for path in (path for root in ROOTS for path in _modules(root)):
        root = next(root for root in reversed(ROOTS) if path.is_relative_to(root))
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for place, name in _calls(ast.parse(path.read_bytes()), ""):
            calls.setdefault(f"{module}:{place}", set()).add(name)
    return calls


def _modules(root: Path) -> list[Path]:
    return [path for package in ("rotquant", "reproduction") for path in (root / package).rglob("*.py")]


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
    "reproduction.benchmarks.records:read_record": ("records of times", "committed records of times"),
    "rotquant.commands.options:_change": ("options", "recipes"),
    "rotquant.commands.options:named_recipe": ("recipes",),
    "reproduction.commands.report:_naming": ("rendered reports",),
    "reproduction.commands.report:_placed": ("rendered reports",),
    "reproduction.commands.report:gallery": ("rendered reports",),
    "reproduction.commands.report:make_report": ("run files behind pages",),
    "rotquant.decoder.storage:load_decoder": ("decoders",),
    "rotquant.decoder.storage:read_decoder_manifest": ("manifests of decoders",),
    "reproduction.reading.arrays:read_array": ("texts as tokens",),
    "rotquant.foundation.contents:content_digest": ("digests of contents",),
    "rotquant.foundation.files:read_json": ("records of weights", "tokenizers"),
    "rotquant.foundation.files:read_text": ("rendered reports",),
    "rotquant.foundation.files:read_object": ("run files", "safetensors indices"),
    "rotquant.foundation.parsing:parse_json": ("run files", "safetensors headers"),
    "rotquant.foundation.parsing:broken_line": ("corpora: jsonl",),
    "reproduction.reading.written:read_yaml": ("configuration", "tables of accuracy"),
    "rotquant.foundation.written:yaml_value": ("configuration", "options"),
    "reproduction.reading.written:read_csv": ("printed numbers", "printed times"),
    "reproduction.identity.syntax:read_module": ("digests of syntax",),
    "reproduction.tasks.definitions:check_written": ("tasks: definitions and items",),
    "reproduction.tasks.rows:_rows": ("tasks: piqa", "tasks: definitions and items"),
    "reproduction.tasks.rows:_parsed": ("tasks: piqa", "tasks: lists and parquet"),
    "reproduction.tasks.rows:_parquet": ("tasks: lists and parquet",),
    "reproduction.tasks.shipped:definition": ("tasks: definitions and items",),
    "rotquant.models.folders:weight_files": ("safetensors indices",),
    "rotquant.models.folders:_config": ("config.json",),
    "rotquant.models.folders:check_weight_files": ("safetensors headers",),
    "rotquant.models.folders:read_safetensors_header": ("safetensors headers",),
    "rotquant.models.gguf.header:_read": ("GGUF files",),
    "rotquant.models.gguf.importing:origin_of": ("origins",),
    "rotquant.models.deltas:checked_base": ("low-rank deltas",),
    "rotquant.models.checkpoints:_merged": ("low-rank deltas",),
    "rotquant.models.checkpoints:_load": ("whole checkpoints", "whole checkpoints of shards"),
    "rotquant.models.checkpoints:_tokenizer_settings": ("tokenizers",),
    "rotquant.models.checkpoints:_check_ids": ("tokenizers",),
    "rotquant.models.checkpoints:load_tokenizer": ("tokenizers",),
    "rotquant.models.checkpoints:_check_generation": ("config.json",),
    "rotquant.models.generation:generation_config": ("quantized folders",),
    "rotquant.models.deltas:read_delta": ("low-rank deltas",),
    "rotquant.models.deltas:merge": ("low-rank deltas",),
    "rotquant.models.integrity:read_tensors": ("quantized folders", "decoders", "low-rank deltas"),
    "rotquant.models.integrity:_sha256": ("manifests of quantized folders",),
    "rotquant.models.integrity:_content_digest": ("manifests of quantized folders", "exports to compressed-tensors"),
    "rotquant.models.integrity:_stored": ("whole checkpoints",),
    "rotquant.models.rotation.matrices:_read": ("rotations",),
    "rotquant.qat.engine:ShardedCheckpoint.load": ("states of shared trainings",),
    "reproduction.render.figures.arrays:history_of": ("histories of rotations",),
    "reproduction.render.html.inline_svg:inline_svg": ("rendered reports",),
    "reproduction.render.html.pages:render_pages": ("rendered reports",),
    "reproduction.render.pages.origins:_shape": ("run files behind pages",),
    "reproduction.render.pages.trained:last_step": ("histories of trainings",),
    "reproduction.scoreboard.standings:machine_noise": ("records of machines",),
    "reproduction.tables.configuration:read_layers": ("configuration",),
    "reproduction.tables.configuration:_typed": ("options",),
    "reproduction.tables.configuration:hidden_size": ("config.json",),
    "reproduction.run.plan:_read": ("plans",),
    "reproduction.run.archives:_read": ("files of results",),
    "reproduction.run.archives:_data": ("results in files",),
    "reproduction.planning.current:current_plan": ("places of plans",),
    "reproduction.planning.current:_content": ("places of plans",),
    "reproduction.planning.fits:read_fits": ("fits of recipes",),
    "reproduction.tables.resolution:check_names": ("configuration",),
    "reproduction.run.results:read_result": ("run files",),
    "reproduction.sources:load_tables": ("tables of accuracy", "tables of settings", "tables of speed"),
    "reproduction.tables.speed.published:read_printed": ("printed times",),
    "reproduction.run.stages.jobs:_record": ("records of weights", "records of rotations"),
    "reproduction.run.stages.measures:training_loss": ("histories of trainings",),
    "reproduction.run.stages.text:_tokens": ("texts as tokens",),
    "reproduction.tables.tables:tables_in": ("tables of accuracy",),
    "reproduction.tables.tables:read_published": ("printed numbers",),
    "reproduction.corpora.docstrings:file_docstrings": ("packs",),
    "rotquant.text.loading:_file_rows": ("corpora: jsonl", "corpora: json", "corpora: parquet"),
    "rotquant.text.loading:_text_lines": ("corpora: txt",),
    "reproduction.corpora.packages:_installed": ("packs",),
    "reproduction.corpora.packages:cached": ("kept corpora",),
    "rotquant.text.loading:data_rows": ("corpora: jsonl", "corpora: json"),
    "rotquant.text.loading:_parquet_rows": ("corpora: parquet",),
    "rotquant.training.state:Checkpoint._read": ("states of trainings",),
    "rotquant.training.state:Checkpoint._restored": ("states of trainings",),
    "rotquant.formats.reading:load_compressed": ("exports to compressed-tensors",),
    "rotquant.formats.reading:state_files": ("exports to compressed-tensors",),
    "rotquant.weights.storage:make_model": ("quantized folders", "exports to compressed-tensors"),
    "rotquant.weights.storage:read_quantized": ("quantized folders", "quantized folders with a prefix"),
    "rotquant.weights.storage:read_method_tensors": ("quantized folders with a prefix",),
    "rotquant.weights.storage:read_manifest": ("manifests of quantized folders",),
}

_LOADS = "calls a load of this package, which is listed itself"
_OURS = "reads the package's own files"
_KIND = "asks of any content whether it is of a kind that is written here, and takes every error for no"
_WRITES = "opens a file for writing, or a display"
_AGAIN = "reads what another reader of the same command has accepted"
_MLFLOW = "reads, for MLflow, files that pages read too, or what this user's jobs say, or the kernel's own account"
#: Functions whose calls only look like readers of files, or whose files are nobody's input, and why.
ASIDE: dict[str, str] = {
    "rotquant.foundation.files:_new_file": _WRITES,
    "rotquant.foundation.files:has_keys.is_one": _KIND,
    "rotquant.commands.answers:answers.decorate.is_one": _KIND,
    "rotquant.models.folders:_begins_with": _KIND,
    "rotquant.models.gguf.header:is_gguf": _KIND,
    "reproduction.commands.report:_has": _KIND,
    "reproduction.run.archives:is_archive": _KIND,
    "reproduction.run.archives:_of_run": _AGAIN,
    "reproduction.run.archives:_learned": "exports what pages read too, by read_object and read_json",
    "reproduction.run.stages.states:read": "reads what a job of the same workflow has written, in a folder of its own",
    "rotquant.qat.writing:_shared": "reads what a job of the same workflow has written, in a folder of its own",
    "reproduction.run.client:said_in": "reads a job's log for warnings and its last line",
    "reproduction.run.client:run": _WRITES,
    "reproduction.run.server:_lock": "opens a folder of its own to lock it",
    "reproduction.run.plan:occupied": "opens an empty file to lock it",
    "rotquant.foundation.files:alone": "opens an empty file to lock it",
    "rotquant.formats.reading:_load_gptq": "reads tensors by the functions of load_compressed",
    "rotquant.formats.export:seal_export": "reads what it has written just before",
    "rotquant.commands.formats:export": "reads what it has written just before",
    "rotquant.foundation.files:_new_folder": _WRITES,
    "rotquant.foundation.files:file_digest": "hashes bytes, whatever they are",
    "rotquant.foundation.files:_remove_strays": "opens what is left of a write, to lock and remove it",
    "reproduction.benchmarks.distillation:distill_shared": "reads what its own processes have written just before",
    "reproduction.benchmarks.timing:_l3_bytes": "reads the kernel's own account of the machine",
    "rotquant.foundation.environment:cpu_name": "reads the kernel's own account of the machine",
    "rotquant.commands.models:evaluate": _LOADS,
    "rotquant.comparison:compare": _LOADS,
    "rotquant.comparison:compare.load": _LOADS,
    "rotquant.models.companions:companions": "takes a checkpoint's other files along byte for byte, whatever they hold",
    "rotquant.metrics.lm_eval:written_names": "finds words in files of the installed lm-eval, whatever these hold",
    "rotquant.comparison:_bits_per_weight": _AGAIN,
    "rotquant.formats.gguf:_tokenizer": "decodes what the loaded tokenizer says of itself",
    "rotquant.models.gguf.tokenizer:rules_of": "decodes what a tokenizer that is made here says of itself",
    "reproduction.run.tracking.entries:finished": _MLFLOW,
    "reproduction.run.tracking.entries:of_table": _MLFLOW,
    "reproduction.run.tracking.line:_start": _WRITES,
    "reproduction.run.tracking.logger:Writer.hear": _MLFLOW,
    "reproduction.run.tracking.logger:read": _MLFLOW,
    "reproduction.run.tracking.store:_alone": _WRITES,
    "reproduction.run.tracking.store:_started": _MLFLOW,
    "reproduction.commands.runs:table_names": "completes a command line; a file of a wrong form completes nothing",
    "rotquant.commands.root:": "loads the commands that an installed package registers",
    "reproduction.tasks.folders:_source_digest": _OURS,
    "rotquant.costs.time:records": _OURS,
    "reproduction.benchmarks.costs:_of_weights_stage": _OURS,
    "reproduction.commands.runs:show": _AGAIN,
    "reproduction.sources.benchmarks:Benchmarks.planned": _AGAIN,
    "reproduction.run.stages.jobs:make_weights": "reads the manifest that the stage has written just before",
    "reproduction.run.stages.weights:compute_weights": "reads the record that make_weights has checked",
    "reproduction.tasks.confined:_redirect": _WRITES,
    "reproduction.tasks.confined:main": ("reads the job that its parent process pipes to it, before it is confined"),
    "rotquant.foundation.hub:commit_of": "matches a reference of the hub's cache against the form of a commit",
    "reproduction.identity.code:_included": _OURS,
    "reproduction.identity.code:_content": _OURS,
    "reproduction.identity.syntax:rules": _OURS,
    "reproduction.identity.code:sources": _OURS,
    "reproduction.benchmarks.cpu_kernels.compiling:compile_source": _OURS,
    "rotquant.kernels.launch.loading:_source_text": _OURS,
    "rotquant.kernels.launch.loading:compile_source": (
        "reads names of compiled kernels in the user's cache, on a GPU alone"
    ),
    "reproduction.run.stages.text:expected_hashes": _OURS,
    "rotquant.qat.training:Training._teacher_outputs": _LOADS,
    "rotquant.training.loop:train": _LOADS,
    "rotquant.metrics.diagnostics:measure_costs": _LOADS,
    "rotquant.weights.reconstruction:tuned": _LOADS,
    "reproduction.metrics.magnitudes:read_inputs": "makes a hook that is called reader",
    "reproduction.metrics.token_maxima:_reading_inputs": "makes a hook that is called reader",
    "reproduction.tasks.definitions:hub_dataset": "reads definitions of lm-eval, whose package is installed",
    "reproduction.tasks.definitions:_included": "reads definitions of lm-eval, whose package is installed",
    "rotquant.metrics.lm_eval:_loaded": "gives lm-eval rows that datasets reads; what that refuses becomes a sentence",
    "reproduction.tasks.harness:_load_task": "gives lm-eval a definition whose rows were checked one by one",
    "rotquant.recipes.registry:_loaded": "imports a method that an installed package registers",
    "rotquant.text.loading:_hub_rows": "reads the hub, by the datasets library",
    "reproduction.corpora.modules:_read": "reads source files of installed packages as text, whatever it is",
}
