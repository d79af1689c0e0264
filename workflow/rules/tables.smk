# A table's numbers next to the paper's, per cell.
localrules:
    table,


rule table:
    input:
        lambda wildcards: measured(wildcards.table),
    output:
        report(update("results/tables/{table}.csv"), **shown("Numbers")),
        update("results/tables/{table}.parquet"),
    log:
        "logs/tables/{table}.log",
    params:
        current=lambda wildcards: sentence(CURRENT.table, wildcards.table),
    message:
        "table {wildcards.table}"
    shell:
        JOB + "report table {wildcards.table}" + BY_PLAN
