"""Sections on where the numbers come from: checkpoints, settings, run files, and the provenance of all of them."""

import os
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

from rotquant.foundation.files import read_json
from rotquant.recipes.recipe import Recipe
from rotquant.reporting.tracking import Logged
from rotquant.reporting.words.describe import measurement, settings
from rotquant.reporting.words.markdown import markdown_table
from rotquant.reporting.words.numbers import show
from rotquant.study.project import Cell, Project
from rotquant.study.quantities import quantities
from rotquant.study.results import HISTORY_FILE, REPORTS, RunResult, rotation_path, rotations_of, run_path, table_path
from rotquant.study.tables import Table

#: What a learned rotation's table shows of the first and the last step, and its name in the history.
_PROGRESS = {"Loss": "loss", "Activation SNR (dB)": "activation_snr", "End-to-end SNR (dB)": "end_to_end_snr"}


def columns_section(project: Project, table: Table) -> str:
    """Which checkpoint each column is computed on, and what the paper's group sizes and outlier counts become."""
    slots: dict[str, list[str]] = {}
    for column in project.columns(table):
        slots.setdefault(project.slot(table, column).name, []).append(column)
    recipes = [run.recipe for cell in project.cells(table.id) for run in cell.runs]
    scaled = [("Group sizes, paper → here", "group_sizes")] if any(map(_has_groups, recipes)) else []
    scaled += [("Outlier features, paper → here", "outlier_features")] if any(r.outliers for r in recipes) else []
    header = ["Column", "Checkpoint", "Digest", "Shape", *(title for title, _ in scaled)]
    rows = []
    for name, columns in slots.items():
        slot = project.config.slot(name)
        label = name if columns == [name] else f"{', '.join(columns)} (all on {name})"
        maps = [_map(getattr(slot, attribute)) for _, attribute in scaled]
        digest = f"`{project.digest(name)[:12]}`"
        rows.append([label, _card(project, slot.checkpoint), digest, _shape(project, slot.checkpoint), *maps])
    return f"## What each column is\n\n{markdown_table(header, rows, 'l' * len(header))}"


def _has_groups(recipe: Recipe) -> bool:
    schemes = [recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys, recipe.values]
    return any(scheme.granularity == "group" for scheme in schemes if scheme)


def shared_checkpoints(project: Project, slots: Iterable[str]) -> list[str]:
    """A sentence for each slot whose checkpoint also stands for an earlier slot of the configuration."""
    sentences = []
    for name in slots:
        slot = project.config.slot(name)
        first = next(other for other in project.config.slots.values() if other.checkpoint == slot.checkpoint)
        if first.name != name:
            sentences.append(
                f"{name} and {first.name} are computed on the same checkpoint, so that their numbers agree.\n"
            )
    return sentences


def _card(project: Project, checkpoint: str) -> str:
    """The checkpoint with a link to its model card."""
    for card in ("MODEL_CARD.md", "README.md"):
        if (project.root / checkpoint / card).is_file():
            return f"[{checkpoint}]({os.path.relpath(Path(checkpoint) / card, REPORTS)})"
    if (project.root / checkpoint).exists() or checkpoint.count("/") != 1:
        return f"`{checkpoint}`"
    return f"[{checkpoint}](https://huggingface.co/{checkpoint.partition('@')[0]})"


def _shape(project: Project, checkpoint: str) -> str:
    path = project.root / checkpoint / "config.json"
    if not path.is_file():
        return "-"
    config = read_json(path, "model configuration")
    heads, kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    grouped = f", {kv} KV" if kv and kv != heads else ""
    width, ffn, layers = config.get("hidden_size"), config.get("intermediate_size"), config.get("num_hidden_layers")
    return f"{layers} layers, width {width}, FFN {ffn}, {heads} heads{grouped}"


def settings_section(project: Project, table: Table) -> str:
    """The recipe of each row in words, on the first slot; a line per column where a row's recipe changes with it."""
    cells = project.cells(table.id)
    first = project.slot(table, project.columns(table)[0]).name
    rows = []
    for row in table.computed_rows:
        found: dict[str, list[str]] = {}
        for cell in cells:
            if cell.row == row.name and project.slot(table, cell.column).name == first:
                found.setdefault(settings(cell.runs[0].recipe), []).append(cell.column)
        for recipe, columns in found.items():
            varies = f", {', '.join(dict.fromkeys(columns))}" if len(found) > 1 else ""
            rows.append([f"{row.name}{varies}", f"`{row.method}`", recipe])
    text = markdown_table(["Row", "Preset", f"Recipe on {first}"], rows, "lll")
    return "\n".join(
        [
            "## Settings\n",
            f"<details><summary>The recipe of each row</summary>\n\n{text}\n</details>\n",
            *_measured(table, cells),
            f"The network runs in {cells[0].runs[0].dtype}. Each run file holds its complete recipe.\n",
        ]
    )


def _measured(table: Table, cells: tuple[Cell, ...]) -> list[str]:
    """How each metric measures; rows that measure differently are named."""
    lines: dict[str, dict[str, None]] = {}
    for cell in cells:
        lines.setdefault(measurement(cell.runs[0]), {})[cell.row] = None
    usual = {measurement(cell.runs[0]) for cell in cells if cell.row == table.baseline}
    return [f"Measured by {line}{'' if line in usual else f' (rows {_list(rows)})'}.\n" for line, rows in lines.items()]


def runs_section(project: Project, table: Table, results: dict[str, RunResult], logged: Logged | None) -> str:
    """Every run of the table with its seed, its main number, its file and its MLflow run."""
    rows = []
    for cell in project.cells(table.id):
        quantity = quantities(cell.metric)[0]
        for run in cell.runs:
            link = f"[`{run.key}`]({os.path.relpath(run_path(run.key), REPORTS)})"
            number = f"{quantity.title} {show(results[run.key].metrics[quantity.name])}"
            seconds = f"{results[run.key].provenance.get('seconds', 0.0):.1f}"
            mlflow = [f"`{logged.runs[run.key]}`"] if logged else []
            rows.append([cell.row, cell.column, run.seed, number, seconds, link, *mlflow])
    header = ["Row", "Column", "Seed", "Measured", "Seconds", "Run file", *(["MLflow run"] if logged else [])]
    text = markdown_table(header, rows, "llrrrll"[: len(header)])
    return f"## Seeds and run files\n\n<details><summary>{len(rows)} runs</summary>\n\n{text}\n</details>\n"


def rotations_section(results: dict[str, RunResult], logged: Logged | None) -> str:
    """Every learned rotation behind the table: its seed, how far learning came, its history and its MLflow run."""
    rows = []
    for key, record in rotations_of(results.values()).items():
        link = f"[`{key}`]({os.path.relpath(rotation_path(key) / HISTORY_FILE, REPORTS)})"
        first, last = record["first"], record["last"]
        ends = [f"{show(first.get(name))} → {show(last.get(name))}" for name in _PROGRESS.values()]
        learning = record["learning"]
        network = "all" if learning["network"] == "all" else "inputs, cache"
        steps = f"{learning['steps']} x {learning['batch_size']} x {learning['text']['sequence_length']}"
        mlflow = [f"`{logged.rotations[key]}`"] if logged and key in logged.rotations else []
        name = Path(record["checkpoint"]).name
        rows.append([name, record["seed"], network, steps, *ends, f"{record['seconds']:.0f}", link, *mlflow])
    if not rows:
        return ""
    header = ["Checkpoint", "Seed", "Quantized", "Steps x batch x tokens", *_PROGRESS, "Seconds", "History"]
    header += ["MLflow run"] if len(rows[0]) > len(header) else []
    text = markdown_table(header, rows, "lrlrrrrrll"[: len(header)])
    summary = f"{len(rows)} learned rotation{'s' if len(rows) > 1 else ''}, from the first step to the last"
    return f"## Learned rotations\n\n<details><summary>{summary}</summary>\n\n{text}\n</details>\n"


def provenance_section(project: Project, table: Table, results: dict[str, RunResult], logged: Logged | None) -> str:
    """When, on what, by which code, from which texts."""
    records = [result.provenance for result in results.values()]
    stored = {result.run.weights_key: result.weights for result in results.values() if result.weights}
    learned = list(rotations_of(results.values()).values())
    stages = [*stored.values(), *learned]
    dates = sorted(record["date"] for record in records)
    seconds = sum(record.get("seconds", 0.0) for record in [*records, *stages])
    lines = [
        f"Computed {dates[0]} to {dates[-1]} (UTC)",
        f"Hardware: {_list(_hardware(record) for record in [*records, *stages])}",
        f"Wall time, summed over {_counts(records, stored, learned)}: {seconds:.0f} s",
        f"Commit: {_list(_commit(record) for record in records)}",
        f"Code digest: {_stage_digests(learned, list(stored.values()), records)}",
        f"Versions: {_list(_versions(record) for record in records)}",
        f"Python {_list(record['python'] for record in records)} on {_list(record['platform'] for record in records)}",
        *_corpora([*records, *stages]),
        *_tasks(records),
        f"Table as CSV: [{table_path(table.id)}]({os.path.relpath(table_path(table.id), REPORTS)})",
    ]
    if logged:
        lines.append(
            f"MLflow: experiment `{logged.experiment}`, run `{logged.parent}`, store `{_store(project, logged.uri)}`"
        )
    return "## Provenance\n\n" + "".join(f"- {line}\n" for line in lines)


def _store(project: Project, uri: str) -> str:
    return uri.replace(str(project.root.resolve()) + "/", "")


def _hardware(record: dict[str, Any]) -> str:
    threads = record["threads"]
    cpu = f"{record['cpu']}, {threads} thread{'s' if threads != 1 else ''} a job"
    return f"{record['gpu']} ({cpu})" if record.get("gpu") else cpu


def _commit(record: dict[str, Any]) -> str:
    if not record.get("git_commit"):
        return "not a git checkout"
    return f"`{record['git_commit'][:12]}`{' with uncommitted changes' if record.get('git_dirty') else ''}"


def _digests(records: list[dict[str, Any]]) -> str:
    return _list(f"`{record['code_digest']}`" for record in records) or "-"


def _counts(runs: Sized, weights: Sized, rotations: Sized) -> str:
    if not rotations:
        return f"{len(runs)} runs and {len(weights)} stored weights"
    return f"{len(runs)} runs, {len(weights)} stored weights and {len(rotations)} learned rotations"


def _stage_digests(rotations: list[dict[str, Any]], weights: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    """By which code each stage was computed."""
    learned = [("rotations", rotations)] if rotations else []
    return "; ".join(f"{stage} {_digests(found)}" for stage, found in [*learned, ("weights", weights), ("runs", runs)])


def _versions(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def _corpora(records: list[dict[str, Any]]) -> list[str]:
    """One line per text that was read: which, how much, its hash, and whether that is the recorded one."""
    lines: dict[str, None] = {}
    for record in records:
        for use, corpus in record.get("corpora", {}).items():
            name = corpus["name"] if not corpus.get("path") else f"{corpus['name']} ({corpus['path']})"
            for split, text in corpus["splits"].items():
                size = f"{text['characters']:,} characters"
                identity = f"sha256 `{text['sha256'][:12]}`{_expected(corpus, text)}"
                lines[f"Text for {use}: {name}, {split}, {size}, {identity}"] = None
    return list(lines)


def _tasks(records: list[dict[str, Any]]) -> list[str]:
    """One line per suite of zero-shot tasks: lm-eval's version, and the hash of each task's data."""
    lines: dict[str, None] = {}
    for record in records:
        if suite := record.get("tasks"):
            data = [
                f"{name} `{task['sha256'][:12]}`" if "sha256" in task else f"{name} from the hub"
                for name, task in suite["tasks"].items()
            ]
            lines[f"Tasks: suite {suite['suite']}, lm-eval {suite['lm_eval']}, sha256 of {', '.join(data)}"] = None
    return list(lines)


def _expected(corpus: dict[str, Any], text: dict[str, Any]) -> str:
    """Whether the docstring corpus is the recorded one: it follows the versions of the installed packages."""
    expected = text.get("expected_sha256")
    if corpus["source"] != "docstrings":
        return ""
    if expected is None:
        return ", no hash recorded"
    if expected == text["sha256"]:
        return ", as recorded"
    return f", **not the recorded text** (`{expected[:12]}`): other package versions are installed"


def _map(mapping: dict[int, int]) -> str:
    return ", ".join(f"{paper} → {here}" for paper, here in mapping.items()) or "-"


def _list(items: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(items))
