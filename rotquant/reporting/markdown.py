"""The page of a table: ours beside the paper's, claims, and each number's origin, as GitHub-flavoured Markdown.

Three marks run through all pages: numbers computed here stand upright, *published* ones in italics, and numbers
recorded on another machine say on which. Nothing is printed that no result file holds.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rotquant.files import read_json
from rotquant.reporting import claims
from rotquant.reporting.describe import settings
from rotquant.reporting.figures import figure_path
from rotquant.reporting.tables import Values, increases, markdown_table, table_path
from rotquant.results import REPORTS, RunResult, run_path
from rotquant.project import Project
from rotquant.tables import Table
from rotquant.tracking import Logged


def page_path(name: str) -> Path:
    """The page of a table."""
    return REPORTS / f"{name}.md"


def page(project: Project, table: Table, values: Values, results: dict[str, RunResult], logged: Logged | None) -> str:
    """The whole page of a table as Markdown; links are relative to the reports folder."""
    number = table.id.removeprefix(f"{table.paper}_")
    kind = "Table" if number.startswith("table") else "Figure"
    passed, checked = claims.score(table, values)
    sections = [
        f"# {table.paper_title.split(':')[0]}, {kind} {number.removeprefix(kind.lower())}: {table.title}\n",
        f"{table.caption} ({table.paper_title}, Section {table.section})\n",
        _summary(project, table, results, passed, checked),
        _figure(project, table),
        "## Values\n",
        _values_table(project, table, values),
        "## Increase over the baseline\n",
        _increase_table(project, table, values),
        "".join(f"- {note}\n" for note in table.notes),
        f"## Claims of the paper: {passed} of {checked} hold here\n",
        _claims(table, values),
        "## What each column is\n",
        _columns(project, table, results),
        "## Settings\n",
        _settings(project, table),
        "## Seeds and run files\n",
        _seeds(project, table, values, results, logged),
        "## Provenance\n",
        _provenance(project, table, results, logged),
    ]
    return "\n".join(section for section in sections if section)


def show(value: float | None, deviation: float | None = None) -> str:
    """A number as printed, with its deviation over the seeds; "-" for none, Inf and NaN as such."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    text = f"{value:.2f}" if abs(value) < 1e4 else f"{value:.2e}"
    return text if deviation is None else f"{text} ± {show(deviation)}"


def _summary(project: Project, table: Table, results: dict[str, RunResult], passed: int, checked: int) -> str:
    stand_ins = [name for name in project.columns(table) if is_stand_in(project, name)]
    lines = ["Upright numbers were computed here, *italic* ones are the paper's.\n"]
    if stand_ins:
        lines.append(
            f"> The columns {', '.join(stand_ins)} were computed on small models that stand for the paper's, on other "
            "text: compare the order of the methods and the relative losses, not the values.\n"
        )
    skipped = [name for name in table.columns if name not in project.columns(table)]
    if skipped:
        lines.append(f"> Not computed under this configuration: {', '.join(skipped)}.\n")
    return "\n".join(lines)


def is_stand_in(project: Project, slot: str) -> bool:
    """Whether a slot's checkpoint is not the model it is named after, judged by its name."""
    checkpoint = project.config.slot(slot).checkpoint.rstrip("/").split("/")[-1].lower()
    return not checkpoint.startswith(slot.lower())


def _figure(project: Project, table: Table) -> str:
    if table.figure is None:
        return ""
    link = os.path.relpath(figure_path(table.id), REPORTS)
    return f"![{table.figure.caption}]({link})\n\n{table.figure.caption}\n"


def _values_table(project: Project, table: Table, values: Values) -> str:
    columns = project.columns(table)
    header = ["Method", *table.label_columns]
    for column in columns:
        header += [column, "*published*"]
    rows = []
    for row in table.rows:
        line: list[Any] = [row.name, *row.labels]
        for column in columns:
            value = values[row.name, column]
            line += [show(value.mean, value.deviation), _italic(show(value.published))]
        rows.append(line)
    align = "l" * (1 + len(table.label_columns)) + "r" * (2 * len(columns))
    seeds = ", ".join(map(str, project.config.seeds))
    text = markdown_table(header, rows, align)
    return (
        f"{text}\nMean ± sample deviation over the rotation seeds {seeds}; rows without a rotation are computed once.\n"
    )


def _increase_table(project: Project, table: Table, values: Values) -> str:
    columns = project.columns(table)
    header = ["Method"]
    for column in columns:
        header += [column, "*published*", "difference"]
    rows = []
    for row in table.rows:
        if row.name == table.baseline:
            continue
        line: list[Any] = [row.name]
        for column in columns:
            ours, papers = increases(values, table.baseline, (row.name, column))
            difference = None if ours is None or papers is None else ours - papers
            line += [_percent(ours), _italic(_percent(papers)), _signed(difference)]
        rows.append(line)
    text = markdown_table(header, rows, "l" + "r" * (3 * len(columns)))
    return f"{text}\nIn percent of the column's {table.baseline} row; differences, ours less published, in points.\n"


def _claims(table: Table, values: Values) -> str:
    rows, details = [], []
    for number, claim in enumerate(table.claims, 1):
        ours = claims.judge(claim, table, claims.ours(values))
        papers = claims.judge(claim, table, claims.papers(values))
        note = f"<br><sub>{claim.note}</sub>" if claim.note else ""
        rows.append([number, claim.text + note, claim.section, _verdict(ours.holds), _verdict(papers.holds)])
        details.append(f"{number}. {claim.text}\n")
        details.append(f"   - ours: {_findings(ours)}\n   - *published*: {_findings(papers)}\n")
    text = markdown_table(["", "Claim", "Section", "here", "*paper's numbers*"], rows, "rllll")
    return f"{text}\n<details><summary>The numbers behind each verdict</summary>\n\n{''.join(details)}\n</details>\n"


def _verdict(holds: bool | None) -> str:
    return "not checkable" if holds is None else "✅ pass" if holds else "❌ fail"


def _findings(verdict: claims.Verdict) -> str:
    parts = [f"{finding.column}: {finding.numbers}{'' if finding.holds else ' ❌'}" for finding in verdict.findings]
    parts += [f"{where}: no number" for where in verdict.missing]
    return "; ".join(parts) or "nothing to compare"


def _columns(project: Project, table: Table, results: dict[str, RunResult]) -> str:
    header = ["Column", "Checkpoint", "Digest", "Shape", "Group sizes, paper → here", "Outlier features, paper → here"]
    rows = []
    for column in project.columns(table):
        slot = project.config.slot(column)
        digest = _only(run.run.checkpoint_digest for run in _of_column(project, table, column, results))
        maps = [_map(slot.group_sizes), _map(slot.outlier_features)]
        rows.append(
            [column, _card(project, slot.checkpoint), f"`{digest[:12]}`", _shape(project, slot.checkpoint), *maps]
        )
    return markdown_table(header, rows, "llllll")


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


def _settings(project: Project, table: Table) -> str:
    first = project.columns(table)[0]
    cells = {cell.row: cell for cell in project.cells(table.id) if cell.column == first}
    rows = [[row.name, f"`{row.method}`", settings(cells[row.name].runs[0].recipe)] for row in table.rows]
    run = next(iter(cells.values())).runs[0]
    metric = ", ".join(f"{key} {value}" for key, value in run.metric.model_dump().items() if value is not None)
    text = markdown_table(
        ["Row", "Preset", f"Recipe on {first} (group sizes and outlier features as mapped above)"], rows, "lll"
    )
    return f"{text}\nMetric: {metric}. Network in {run.dtype}. Each run file holds its complete recipe.\n"


def _seeds(project: Project, table: Table, values: Values, results: dict[str, RunResult], logged: Logged | None) -> str:
    rows = []
    for (row, column), value in values.items():
        for key, seed, number in zip(value.keys, value.seeds, value.values, strict=True):
            link = f"[`{key}`]({os.path.relpath(run_path(key), REPORTS)})"
            mlflow = f"`{logged.runs[key]}`" if logged else "-"
            rows.append([row, column, seed, show(number), f"{results[key].seconds:.1f}", link, mlflow])
    header = ["Row", "Column", "Seed", table.metric["kind"], "seconds", "Run file", "MLflow run"]
    text = markdown_table(header, rows, "llrrrll")
    return f"<details><summary>{len(rows)} runs</summary>\n\n{text}\n</details>\n"


def _provenance(project: Project, table: Table, results: dict[str, RunResult], logged: Logged | None) -> str:
    records = [result.provenance for result in results.values()]
    stages = [result.weights for result in results.values() if result.weights]
    dates = sorted(record["date"] for record in records)
    lines = [
        f"Computed {dates[0]} to {dates[-1]} (UTC)",
        f"Hardware: {_list(_hardware(record) for record in [*records, *stages])}",
        f"Wall time, summed over all jobs: {sum(result.seconds for result in results.values()):.0f} s",
        f"Commit: {_list(_commit(record) for record in records)}",
        f"Code digest: weights {_digests(stages)}, runs {_digests(records)}",
        f"Versions: {_list(_versions(record) for record in records)}",
        f"Python {_list(record['python'] for record in records)} on {_list(record['platform'] for record in records)}",
        *_corpora([*records, *stages]),
        f"Table as CSV: [{table_path(table.id)}]({os.path.relpath(table_path(table.id), REPORTS)})",
    ]
    if logged:
        lines.append(
            f"MLflow: experiment `{logged.experiment}`, run `{logged.parent}`, store `{_store(project, logged.uri)}`"
        )
    return "".join(f"- {line}\n" for line in lines)


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


def _of_column(project: Project, table: Table, column: str, results: dict[str, RunResult]) -> list[RunResult]:
    return [results[run.key] for cell in project.cells(table.id) if cell.column == column for run in cell.runs]


def _map(mapping: dict[int, int]) -> str:
    return ", ".join(f"{paper} → {here}" for paper, here in mapping.items()) or "-"


def _list(items: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(items))


def _only(items: Iterable[str]) -> str:
    return _list(items)


def _italic(text: str) -> str:
    return text if text == "-" else f"*{text}*"


def _percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return show(value)
    return f"{value:+.1f} %" if abs(value) < 1e4 else f"{value:+.1e} %"


def _signed(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return show(value)
    return f"{value:+.1f}" if abs(value) < 1e4 else f"{value:+.1e}"
