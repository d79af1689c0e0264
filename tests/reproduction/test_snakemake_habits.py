"""Habits of a public Snakemake workflow: the catalog's layout, a report that holds results, lint with reasons."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.project import REPOSITORY, Copy
from tests.helpers.workflows import REPORT, one_column

#: What `snakemake --lint` says of this workflow, and why each stays.
EXCEPTIONS = {
    "Specify a conda environment or container for each rule.": "all rules run in the one environment of "
    "requirements.lock, which `make setup` or Containerfile makes; results record its versions",
    "Do not access input and output files individually by index in shell commands": "a cell is named by its first file",
    "Path composition with '+' in line N": "what is added is a command to the prefix of all commands, no path",
    "Mixed rules and functions in same snakefile.": "a function stands next to the rules that alone use it",
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A project whose report is rendered."""
    project = one_column(tmp_path_factory.mktemp("habits"))
    status, output = project.snakemake(REPORT)
    assert status == 0, output
    return project


@pytest.mark.long
def test_it_works_as_snakemakes_manual_says(computed: Copy) -> None:
    # lint: what is excepted, with its reason, and nothing else
    _, output = computed.run("snakemake", "--lint")
    said = {re.sub(r"line \d+", "line N", one) for one in re.findall(r"^ +\* (.*?):?$", output, re.MULTILINE)}
    assert said == EXCEPTIONS.keys()

    # the report holds page, figure and numbers below their paper
    status, output = computed.snakemake("--report", "report.html", REPORT)
    assert status == 0, output
    text = (computed.root / "report.html").read_text(encoding="utf-8")
    results = json.loads(re.search(r"^ *var results = (\{.*\});?$", text, re.MULTILINE)[1])
    labels = {path: one["labels"]["file"] for path, one in results.items()}
    assert labels == {
        REPORT: "Page",
        "reports/figures/quarot_table1.svg": "Figure",
        "results/tables/quarot_table1.csv": "Numbers",
    }
    assert '"quarot"' in re.search(r"var categories = (.*)", text)[1]

    # it runs by the catalog's layout as from the top
    status, output = computed.snakemake("--snakefile", "workflow/Snakefile", REPORT)
    assert (status, "Nothing to be done" in output) == (0, True), output
    told = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))
    assert told["usage"]["report"] is True
    assert all((REPOSITORY / path).exists() for path in ("config/README.md", "config/config.yaml", "LICENSE"))

    # cells are nodes of the graph and lines of the summary, and options name them
    _, dag = computed.snakemake("--dag", "--forceall", REPORT)
    assert len(re.findall(r'label = "run', dag)) == 3
    _, summary = computed.snakemake("--summary", REPORT)
    assert len(re.findall(r"^results/runs/", summary, re.MULTILINE)) == 3
    assert computed.planned("--forcerun", "weights", "--", REPORT) == {"weights": 2, "run": 2, "page": 1}
    assert computed.planned("--forceall", "--until", "weights", "--", REPORT)["weights"] == 2
    _, changes = computed.snakemake("--list-changes", "input", REPORT)
    assert "results/" not in changes.partition("Building DAG")[2]


def test_citation_changelog_and_packages_say_one_version() -> None:
    version = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    for path in ("pyproject.toml", "workflow/pyproject.toml"):
        assert f'\nversion = "{version}"\n' in (REPOSITORY / path).read_text(encoding="utf-8")
    assert f"## [{version}]" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f'__version__ = "{version}"' in Path(REPOSITORY, "rotquant/__init__.py").read_text(encoding="utf-8")
