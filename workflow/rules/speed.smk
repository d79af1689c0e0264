# Speed tables: measured anew where there is a GPU, else rendered from the committed records of results/bench/<gpu>/.
# Those of a CPU are always rendered: a machine that runs other jobs measures them badly (`rotquant bench measure` does).
localrules:
    speed_figure,
    speed_report,
    speed_drawing,
    speed,


# A figure draws numbers of other tables and has none of its own.
MEASURED = [name for name, table in PLAN.speed.items() if table.cells]
DRAWN = [name for name in PLAN.speed if name not in MEASURED]


def speed_records(name):
    """The records behind a page. Without a GPU there may be none, and the page says so."""
    found = (speed_record(*source) for source in PLAN.speed[name].sources.items())
    return [path for path in found if path is not None]


def speed_record(source, committed):
    """The record of a table, None where there is none and none is to be made."""
    own = f"results/speed/{source}.json"
    return own if (GPU and PLAN.speed[source].measured) or Path(own).exists() else committed


# Without a GPU there is no such job: a record that lies in results/speed/ was brought from elsewhere and stays as it is.
if GPU:

    rule measure_speed:
        output:
            update("results/speed/{speed}.json"),
        log:
            "logs/speed/{speed}.log",
        threads: 1
        # The longest table took 9 minutes of an H200 (results/bench), whose host's memory was not recorded.
        resources:
            gpu=1,
            mem_mb=lambda wildcards, attempt: attempt * 32000,
            runtime=lambda wildcards, attempt: attempt * 60,
        params:
            current=lambda wildcards: CURRENT.speed(wildcards.speed),
        message:
            "measure {wildcards.speed}"
        shell:
            JOB + "bench measure {wildcards.speed} --output {output}"


rule speed_figure:
    input:
        lambda wildcards: speed_records(wildcards.speed),
    output:
        update("reports/figures/{speed}.svg"),
    log:
        "logs/figures/{speed}.log",
    params:
        current=lambda wildcards: CURRENT.speed_figure(wildcards.speed),
    message:
        "figure {wildcards.speed}"
    shell:
        JOB + "report speed-figure {wildcards.speed}" + BY_PLAN


rule speed_report:
    input:
        records=lambda wildcards: speed_records(wildcards.speed),
        figure=lambda wildcards: (
            f"reports/figures/{wildcards.speed}.svg" if PLAN.speed[wildcards.speed].figure else []
        ),
        tracking="results/tracking.json" if PLAN.tracking else [],
    output:
        update("reports/{speed}.md"),
        update("results/tables/{speed}.csv"),
        update("results/tables/{speed}.parquet"),
    log:
        "logs/reports/{speed}.log",
    wildcard_constraints:
        speed="|".join(MEASURED) or "none",
    params:
        current=lambda wildcards: CURRENT.speed_page(wildcards.speed),
    message:
        "report {wildcards.speed}"
    shell:
        JOB + "report speed {wildcards.speed}" + BY_PLAN


use rule speed_report as speed_drawing with:
    output:
        update("reports/{speed}.md"),
    wildcard_constraints:
        speed="|".join(DRAWN) or "none",


# The speed half of the papers, and the kernels' own report; reports/index.md would ask for the accuracy half too.
rule speed:
    input:
        expand("reports/{speed}.md", speed=PLAN.speed),
