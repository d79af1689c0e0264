# Rendered reports, the scoreboard, and MLflow's view of the runs.
import os


localrules:
    tracking,
    report,
    index,
    quarot_accuracy,
    spinquant,
    all,


# Several processes that meet a fresh MLflow database all try to create its tables and most fail, so it is made once, before.
rule tracking:
    output:
        "results/tracking.json",
    log:
        "logs/tracking.log",
    params:
        uri=os.environ.get("MLFLOW_TRACKING_URI", ""),
    message:
        "MLflow database"
    shell:
        JOB + "rotquant runs init-tracking --output {output}"


rule report:
    input:
        runs=lambda wildcards: measured(wildcards.table),
        table="results/tables/{table}.csv",
        figure=lambda wildcards: (
            f"reports/figures/{wildcards.table}.svg" if sentence(PROJECT.table, wildcards.table).figure else []
        ),
        tracking="results/tracking.json" if CONFIG.tracking else [],
    output:
        update("reports/{table}.md"),
    log:
        "logs/reports/{table}.log",
    params:
        code=code("reports"),
        definition=lambda wildcards: definition(wildcards.table),
        attempt=lambda wildcards: attempt(f"reports/{wildcards.table}.md"),
    message:
        "report {wildcards.table}"
    shell:
        JOB + "rotquant report page {wildcards.table} --config {CONFIG_FILE}"


rule index:
    input:
        reports=expand("reports/{table}.md", table=[*PROJECT.tables, *PROJECT.speed]),
        targets="config/targets.yaml",
    output:
        update("reports/index.md"),
        update("reports/index.html"),
    log:
        "logs/reports/index.log",
    params:
        code=code("index"),
        attempt=attempt("reports/index.md"),
    message:
        "scoreboard"
    shell:
        JOB + "rotquant report index --config {CONFIG_FILE}"


# One paper's reports, and then the scoreboard as it stands: reports/index.md itself would ask for all papers.
def reports_of(tables, paper):
    """The pages of those tables that belong to a paper."""
    return [f"reports/{name}.md" for name, table in tables.items() if table.paper == paper]


INDEX = "rotquant report index --config {CONFIG_FILE} > {log} 2>&1"


# The accuracy half of QuaRot: Tables 1 to 13, Figure 1 and the switches.
rule quarot_accuracy:
    input:
        reports_of(PROJECT.tables, "quarot"),
    log:
        "logs/reports/quarot_accuracy.log",
    message:
        "scoreboard"
    shell:
        INDEX


# SpinQuant: all of its tables and figures, of accuracy and of speed.
rule spinquant:
    input:
        reports_of(PROJECT.tables, "spinquant"),
        reports_of(PROJECT.speed, "spinquant"),
    log:
        "logs/reports/spinquant.log",
    message:
        "scoreboard"
    shell:
        INDEX
