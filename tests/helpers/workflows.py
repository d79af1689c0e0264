"""Small projects for the workflow's tests."""

from pathlib import Path

from rotquant.foundation.data import merge
from tests.helpers.project import CONFIG, TABLES, Copy

REPORT = "reports/quarot_table1.md"


def one_column(folder: Path, figure: bool = True) -> Copy:
    """A project whose table has one column: three runs, two of them on the stored weights of one batch."""
    project = Copy(folder)
    if not figure:
        (table,) = TABLES["tables"]
        project.set_tables({**TABLES, "tables": [{key: table[key] for key in table if key != "figure"}]})
    project.set_config(merge(CONFIG, {"slots": {"Llama-2-13B": {"compute": False}}}))
    return project


def with_rotations(folder: Path) -> Copy:
    """A project whose table has two rows on the same learned rotations, and one without, on one model."""
    project = one_column(folder, figure=False)
    rtn = {"methods": {"gptq": None}}
    rows = [
        {"name": "Baseline", "method": "baseline"},
        {"name": "GPTQ", "method": "spinquant-hard"},
        {"name": "RTN", "method": "spinquant-hard", "recipe": rtn},
        {"name": "Hadamard", "method": "spinquant-hard", "recipe": {**rtn, "methods": {"spinquant": None}}},
    ]
    (table,) = TABLES["tables"]
    fields = {key: value for key, value in table.items() if key not in ("figure", "published")}
    project.set_tables({**TABLES, "tables": [{**fields, "rows": rows, "claims": []}]})
    return project
