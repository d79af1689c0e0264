"""reports/index.md: every table and figure of the papers, and how far this project is: computed, recorded, not yet.

A target is computed when its report was rendered from runs of this machine, recorded when results/bench/<gpu>/ holds
its measurements from a real GPU. The list is config/targets.yaml; what is done is read from the files, never from a
list.
"""

from pathlib import Path
from typing import Any

from rotquant.errors import ResultError
from rotquant.reporting import claims
from rotquant.reporting.tables import markdown_table, read_csv, table_path
from rotquant.results import REPORTS
from rotquant.project import Project
from rotquant.tables import load_targets

BENCH = Path("results/bench")


def index(project: Project) -> str:
    """The scoreboard as Markdown; links are relative to the reports folder."""
    data = load_targets(project.root)
    parts, done, total = [], 0, 0
    for paper, title in data["papers"].items():
        rows = [_line(project, target, data["kinds"]) for target in data["targets"] if target["paper"] == paper]
        finished = sum(row[3] != "not yet" for row in rows)
        done, total = done + finished, total + len(rows)
        parts.append(f"## {title}\n\n{finished} of {len(rows)}\n")
        parts.append(markdown_table(["Target", "What it shows", "Kind", "Status", "Claims that hold"], rows, "lllll"))
    head = (
        "# Scoreboard\n\n"
        f"{done} of {total} tables and figures are computed or recorded. *Computed*: rendered from runs of this "
        "machine. *Recorded*: measured on the GPU that is named. "
        "Build one with `snakemake --cores all reports/<target>.md`.\n"
    )
    return "\n".join([head, *parts])


def _line(project: Project, target: dict[str, Any], kinds: dict[str, str]) -> list[str]:
    name = target["id"]
    report = REPORTS / f"{name}.md"
    score = _score(project, name)
    kind = kinds[target["kind"]]
    if (project.root / report).exists():
        return [f"[{name}]({report.name})", target["title"], kind, "computed", score]
    machines = sorted(path.parent.name for path in (project.root / BENCH).glob(f"*/{name}.*"))
    if machines:
        return [name, target["title"], kind, f"recorded on {', '.join(machines)}", score]
    return [name, target["title"], kind, "not yet", "-"]


def _score(project: Project, name: str) -> str:
    """Claims that hold, of those that could be checked; "-" before the table is collected."""
    if name not in project.tables:
        return "-"
    try:
        values = read_csv(project.root / table_path(name))
        passed, checked = claims.score(project.tables[name], values)
    except ResultError:
        return "-"
    return f"{passed} of {checked}"
