"""Where numbers come from: checkpoints, settings, run files, learned rotations, and the provenance of all of them."""

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from rotquant.foundation.files import read_json
from rotquant.recipes.recipe import Recipe
from rotquant.reporting.pages.model import Block, Bullets, Fact, Folded, Listing, RunLine
from rotquant.reporting.tracking import Logged
from rotquant.reporting.words.describe import measurement, settings
from rotquant.reporting.words.numbers import listed, show
from rotquant.study.project import Cell, Project
from rotquant.study.quantities import quantities
from rotquant.study.results import HISTORY_FILE, REPORTS, RunResult, rotation_path, rotations_of
from rotquant.study.tables import Table
from rotquant.study.values import Values

Results = Mapping[str, RunResult]
"""Run results by key: all of a table's, or of an older table those that are still there."""

#: What a learned rotation's table shows of the first and the last step, and its name in the history.
_PROGRESS = {"Loss": "loss", "Activation SNR (dB)": "activation_snr", "End-to-end SNR (dB)": "end_to_end_snr"}


def column_listing(project: Project, table: Table) -> Listing:
    """Which checkpoint each column is computed on, and what the paper's group sizes and outlier counts become."""
    slots: dict[str, list[str]] = {}
    for column in project.columns(table):
        slots.setdefault(project.slot(table, column).name, []).append(column)
    recipes = [run.recipe for cell in project.cells(table.id) for run in cell.runs]
    scaled = [("Group sizes, paper → here", "group_sizes")] if any(map(_has_groups, recipes)) else []
    scaled += [("Outlier features, paper → here", "outlier_features")] if any(r.held_out for r in recipes) else []
    header = ["Column", "Checkpoint", "Digest", "Shape", *(title for title, _ in scaled)]
    lines = []
    for name, columns in slots.items():
        slot = project.config.slot(name)
        label = name if columns == [name] else f"{', '.join(columns)} (all on {name})"
        maps = [_map(getattr(slot, attribute)) for _, attribute in scaled]
        digest = f"`{project.digest(name)[:12]}`"
        lines.append([label, _card(project, slot.checkpoint), digest, _shape(project, slot.checkpoint), *maps])
    return Listing(header, lines, "l" * len(header))


def _has_groups(recipe: Recipe) -> bool:
    schemes = [recipe.weights and recipe.weights.scheme, recipe.activations, recipe.keys, recipe.values]
    return any(scheme.granularity == "group" for scheme in schemes if scheme)


def shared_checkpoints(project: Project, slots: Iterable[str]) -> list[str]:
    """A sentence for each slot whose checkpoint also stands for an earlier slot of the configuration."""
    sentences = []
    for name in slots:
        slot = project.config.slot(name)
        first = next(other for other in project.config.slots.values() if other.checkpoint == slot.checkpoint).name
        if first != name:
            sentences.append(f"{name} and {first} are computed on the same checkpoint, so that their numbers agree.")
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


def setting_blocks(project: Project, table: Table) -> list[Block]:
    """The recipe of each row in words, on the first slot; a line per column where a row's recipe changes with it."""
    cells = project.cells(table.id)
    first = project.slot(table, project.columns(table)[0]).name
    lines = []
    for row in table.computed_rows:
        found: dict[str, list[str]] = {}
        for cell in cells:
            if cell.row == row.name and project.slot(table, cell.column).name == first:
                found.setdefault(settings(cell.runs[0].recipe), []).append(cell.column)
        for recipe, columns in found.items():
            varies = f", {', '.join(dict.fromkeys(columns))}" if len(found) > 1 else ""
            lines.append([f"{row.name}{varies}", f"`{row.method}`", recipe])
    return [
        Folded("The recipe of each row", [Listing(["Row", "Preset", f"Recipe on {first}"], lines, "lll")]),
        *_measured(table, cells),
        f"The network runs in {cells[0].runs[0].dtype}. Each run file holds its complete recipe.",
    ]


def _measured(table: Table, cells: tuple[Cell, ...]) -> list[str]:
    """How each metric measures; rows that measure differently are named."""
    lines: dict[str, dict[str, None]] = {}
    for cell in cells:
        lines.setdefault(measurement(cell.runs[0]), {})[cell.row] = None
    usual = {measurement(cell.runs[0]) for cell in cells if cell.row == table.baseline}
    return [f"Measured by {line}{'' if line in usual else f' (rows {listed(rows)})'}." for line, rows in lines.items()]


def run_lines(project: Project, table: Table, values: Values, results: Results) -> tuple[RunLine, ...]:
    """Every run of the table with the main number of what it measures."""
    first = {quantities(cell.metric)[0].name: quantities(cell.metric)[0].title for cell in project.cells(table.id)}
    return tuple(
        RunLine(row, column, seed, f"{first[name]} {show(value)}", _seconds(results.get(key)), key)
        for (row, column, name), number in values.items()
        if name in first
        for key, seed, value in zip(number.runs, number.seeds, number.values, strict=True)
    )


def _seconds(result: RunResult | None) -> str:
    return "-" if result is None else f"{result.provenance.get('seconds', 0.0):.1f}"


def run_listing(runs: Sequence[RunLine], logged: Logged | None) -> Folded:
    """The runs with their files and MLflow runs."""
    header = ["Row", "Column", "Seed", "Measured", "Seconds", "Run file", *(["MLflow run"] if logged else [])]
    lines = [
        [*run[:5], f"[`{run.key}`]({run.path})", *([f"`{logged.runs[run.key]}`"] if logged else [])] for run in runs
    ]
    return Folded(f"{len(runs)} runs", [Listing(header, lines, "llrrrll"[: len(header)])])


def rotation_listing(results: Results, logged: Logged | None) -> Folded | None:
    """Every learned rotation behind the table: its seed, how far learning came, its history and its MLflow run."""
    lines = []
    for key, record in rotations_of(results.values()).items():
        link = f"[`{key}`]({os.path.relpath(rotation_path(key) / HISTORY_FILE, REPORTS)})"
        first, last = record["first"], record["last"]
        ends = [f"{show(first.get(name))} → {show(last.get(name))}" for name in _PROGRESS.values()]
        learning = record["learning"]
        network = "all" if learning["network"] == "all" else "inputs, cache"
        steps = f"{learning['steps']} x {learning['batch_size']} x {learning['text']['sequence_length']}"
        mlflow = [f"`{logged.rotations[key]}`"] if logged and key in logged.rotations else []
        name = Path(record["checkpoint"]).name
        lines.append([name, record["seed"], network, steps, *ends, f"{record['seconds']:.0f}", link, *mlflow])
    if not lines:
        return None
    header = ["Checkpoint", "Seed", "Quantized", "Steps x batch x tokens", *_PROGRESS, "Seconds", "History"]
    header += ["MLflow run"] if len(lines[0]) > len(header) else []
    summary = f"{len(lines)} learned rotation{'s' if len(lines) > 1 else ''}, from the first step to the last"
    return Folded(summary, [Listing(header, lines, "lrlrrrrrll"[: len(header)])])


def model_facts(results: Results) -> tuple[Fact, ...]:
    """On which models and with which seeds."""
    runs = [result.run for result in results.values()]
    models = {run.checkpoint: run.checkpoint_digest for run in runs}
    named = "; ".join(f"{Path(name).name} (digest {digest[:12]})" for name, digest in models.items())
    seeds = listed(sorted({run.seed for run in runs}))
    return (Fact("Models", named), Fact("Seeds", seeds)) if runs else ()


def origin_facts(results: Results) -> tuple[Fact, ...]:
    """When, on what, by which code, from which texts; nothing without results."""
    records = [result.provenance for result in results.values()]
    if not records:
        return ()
    stored = {result.run.weights_key: result.weights for result in results.values() if result.weights}
    learned = list(rotations_of(results.values()).values())
    stages = [*stored.values(), *learned]
    dates = sorted(record["date"] for record in records)
    seconds = sum(record.get("seconds", 0.0) for record in [*records, *stages])
    system = f"{listed(record['python'] for record in records)} on {listed(record['platform'] for record in records)}"
    return (
        Fact("Computed", f"{dates[0]} to {dates[-1]} (UTC)", " "),
        Fact("Hardware", listed(_hardware(record) for record in [*records, *stages])),
        Fact(f"Wall time, summed over {_counts(records, stored, learned)}", f"{seconds:.0f} s"),
        Fact("Commit", listed(commit(record) or "not a git checkout" for record in records)),
        Fact("Code digest", _stage_digests(learned, list(stored.values()), records)),
        Fact("Versions", listed(versions(record) for record in records)),
        Fact("Python", system, " "),
        *_corpora([*records, *stages]),
        *_tasks(records),
    )


def logged_fact(project: Project, logged: Logged) -> Fact:
    """Where MLflow shows the table."""
    store = logged.uri.replace(str(project.root.resolve()) + "/", "")
    return Fact("MLflow", f"experiment `{logged.experiment}`, run `{logged.parent}`, store `{store}`")


def _hardware(record: dict[str, Any]) -> str:
    threads = record["threads"]
    cpu = f"{record['cpu']}, {threads} thread{'s' if threads != 1 else ''} a job"
    return f"{record['gpu']} ({cpu})" if record.get("gpu") else cpu


def commit(record: Mapping[str, Any]) -> str | None:
    """The commit that an environment was of, None where it was no git checkout."""
    if not record.get("git_commit"):
        return None
    return f"`{record['git_commit'][:12]}`{' with uncommitted changes' if record.get('git_dirty') else ''}"


def _digests(records: list[dict[str, Any]]) -> str:
    return listed(f"`{record['code_digest']}`" for record in records)


def _counts(runs: Sized, weights: Sized, rotations: Sized) -> str:
    if not rotations:
        return f"{len(runs)} runs and {len(weights)} stored weights"
    return f"{len(runs)} runs, {len(weights)} stored weights and {len(rotations)} learned rotations"


def _stage_digests(rotations: list[dict[str, Any]], weights: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    """By which code each stage was computed."""
    learned = [("rotations", rotations)] if rotations else []
    return "; ".join(f"{stage} {_digests(found)}" for stage, found in [*learned, ("weights", weights), ("runs", runs)])


def versions(record: Mapping[str, Any]) -> str:
    """The packages of an environment with their versions."""
    return ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())


def file_link(words: str, path: Path) -> str:
    """A file of the project, its path as a link from the reports folder."""
    return f"{words}: [{path}]({os.path.relpath(path, REPORTS)})"


def provenance(facts: Iterable[Fact], links: Iterable[str]) -> Bullets:
    """What is known of where a page's numbers come from, and the files with them."""
    return Bullets([*(fact.sentence for fact in facts), *links])


def _corpora(records: list[dict[str, Any]]) -> list[Fact]:
    """Each text that was read: which, how much, its hash, and whether that is the recorded one."""
    facts: dict[Fact, None] = {}
    for record in records:
        for use, corpus in record.get("corpora", {}).items():
            name = corpus["name"] if not corpus.get("path") else f"{corpus['name']} ({corpus['path']})"
            for split, text in corpus["splits"].items():
                size = f"{text['characters']:,} characters"
                identity = f"sha256 `{text['sha256'][:12]}`{_expected(corpus, text)}"
                facts[Fact(f"Text for {use}", f"{name}, {split}, {size}, {identity}")] = None
    return list(facts)


def _tasks(records: list[dict[str, Any]]) -> list[Fact]:
    """Each suite of zero-shot tasks: lm-eval's version, and the hash of each task's data."""
    facts: dict[Fact, None] = {}
    for record in records:
        if suite := record.get("tasks"):
            data = [
                f"{name} `{task['sha256'][:12]}`" if "sha256" in task else f"{name} from the hub"
                for name, task in suite["tasks"].items()
            ]
            words = f"suite {suite['suite']}, lm-eval {suite['lm_eval']}, sha256 of {', '.join(data)}"
            facts[Fact("Tasks", words)] = None
    return list(facts)


def _expected(corpus: dict[str, Any], text: dict[str, Any]) -> str:
    """Whether a corpus of installed packages is the recorded one: it follows their versions."""
    expected = text.get("expected_sha256")
    if corpus["source"] not in ("modules", "docstrings"):
        return ""
    if expected is None:
        return ", no hash recorded"
    if expected == text["sha256"]:
        return ", as recorded"
    return f", **not the recorded text** (`{expected[:12]}`): other package versions are installed"


def _map(mapping: dict[int, int]) -> str:
    return ", ".join(f"{paper} → {here}" for paper, here in mapping.items()) or "-"
