# Rendered reports, the scoreboard, and MLflow's view of the runs.
localrules:
    tracking,
    report,
    index,
    quarot_accuracy,
    spinquant,
    prefixquant,
    rcp,
    all,


# Several processes that meet a fresh MLflow database all try to create its tables and most fail, so it is made once, before.
rule tracking:
    output:
        update("results/tracking.json"),
    log:
        "logs/tracking.log",
    params:
        current=CURRENT.tracking(os.environ.get("MLFLOW_TRACKING_URI", "")),
    message:
        "MLflow database"
    shell:
        JOB + "runs init-tracking --output {output}"


rule report:
    input:
        runs=lambda wildcards: measured(wildcards.table),
        table="results/tables/{table}.csv",
        figure=lambda wildcards: (
            f"reports/figures/{figure}.svg" if (figure := sentence(PLAN.table, wildcards.table).figure) else []
        ),
        tracking="results/tracking.json" if PLAN.tracking else [],
    output:
        update("reports/{table}.md"),
    log:
        "logs/reports/{table}.log",
    params:
        current=lambda wildcards: sentence(CURRENT.page, wildcards.table),
    message:
        "report {wildcards.table}"
    shell:
        JOB + "report page {wildcards.table}" + BY_PLAN


rule index:
    input:
        reports=expand("reports/{table}.md", table=[*PLAN.tables, *PLAN.speed, *PLAN.settings]),
        targets="config/targets.yaml",
    output:
        update("reports/index.md"),
        update("reports/index.html"),
    log:
        "logs/reports/index.log",
    params:
        current=CURRENT.index(),
    message:
        "scoreboard"
    shell:
        JOB + "report index" + BY_PLAN


# One paper's reports, and then the scoreboard as it stands: reports/index.md itself would ask for all papers.
def reports_of(tables, paper):
    """The pages of those tables that belong to a paper."""
    return [f"reports/{name}.md" for name, table in tables.items() if table.paper == paper]


INDEX = "rotquant report index --plan {PLAN.path} > {log} 2>&1"


def refresh_index():
    """Render the scoreboard as it stands where a page is newer, whatever was asked for. It never fails the run."""
    index = Path("reports/index.html")
    pages = [page.stat().st_mtime_ns for page in Path("reports").glob("*.md") if page.name != "index.md"]
    if pages and not (index.exists() and max(pages) <= index.stat().st_mtime_ns):
        log = "logs/reports/refresh_index.log"
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        try:
            shell(INDEX)
        except subprocess.CalledProcessError:
            print(f"warning: the scoreboard {index} could not be rendered: {log} says why.", file=sys.stderr)


onsuccess:
    refresh_index()


# Of several targets that --keep-going goes on with, those that succeeded. This takes the place of common.smk's.
onerror:
    refresh_index()
    say_lost_jobs(log)


# The accuracy half of QuaRot: Tables 1 to 13, Figure 1 and the switches.
rule quarot_accuracy:
    input:
        reports_of(PLAN.tables, "quarot"),
    log:
        "logs/reports/quarot_accuracy.log",
    message:
        "scoreboard"
    shell:
        INDEX


# SpinQuant: all of its tables and figures, of accuracy and of speed.
rule spinquant:
    input:
        reports_of(PLAN.tables, "spinquant"),
        reports_of(PLAN.speed, "spinquant"),
    log:
        "logs/reports/spinquant.log",
    message:
        "scoreboard"
    shell:
        INDEX


# PrefixQuant: the same.
rule prefixquant:
    input:
        reports_of(PLAN.tables, "prefixquant"),
        reports_of(PLAN.speed, "prefixquant"),
        reports_of(PLAN.settings, "prefixquant"),
    log:
        "logs/reports/prefixquant.log",
    message:
        "scoreboard"
    shell:
        INDEX


# RCP: the same.
rule rcp:
    input:
        reports_of(PLAN.tables, "rcp"),
        reports_of(PLAN.speed, "rcp"),
        reports_of(PLAN.settings, "rcp"),
    log:
        "logs/reports/rcp.log",
    message:
        "scoreboard"
    shell:
        INDEX
