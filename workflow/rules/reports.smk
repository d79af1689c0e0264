# Rendered reports, the scoreboard, and MLflow's view of the runs.
localrules:
    tracking,
    report,
    index,
    quarot_accuracy,
    speed,
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
        measured=lambda wildcards: measured(wildcards.table),
        table=lambda wildcards: numbers(wildcards.table),
        figure=lambda wildcards: (
            f"reports/figures/{figure}.svg" if (figure := sentence(PLAN.table, wildcards.table).figure) else []
        ),
        tracking="results/tracking.json" if PLAN.tracking else [],
    output:
        report(update("reports/{table}.md"), **shown("Page")),
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
        reports=expand("reports/{table}.md", table=PLAN.tables),
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


# Some reports, and then the scoreboard as it stands: reports/index.md itself would ask for all papers.
def reports_of(*papers, of=("runs", "benchmarks", "recipes", "elsewhere")):
    """The pages of papers' tables that have their numbers from these sources."""
    return [f"reports/{name}.md" for name, one in PLAN.tables.items() if one.paper in papers and one.source in of]


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
            print(f"to look at in a browser: {index}, and a page for each table next to it", file=sys.stderr)
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
        reports_of("quarot", of=["runs"]),
    log:
        "logs/reports/quarot_accuracy.log",
    message:
        "scoreboard"
    shell:
        INDEX


# All tables and figures of a paper.
for paper in ("spinquant", "prefixquant", "rcp"):

    rule:
        name:
            paper
        input:
            reports_of(paper),
        log:
            f"logs/reports/{paper}.log",
        localrule: True
        message:
            "scoreboard"
        shell:
            INDEX


# The speed half of the papers, and the kernels' own report; reports/index.md would ask for the accuracy half too.
rule speed:
    input:
        reports_of(*{table.paper for table in PLAN.tables.values()}, of=["benchmarks"]),
