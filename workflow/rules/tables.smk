# A table's numbers next to the paper's, per cell.
localrules:
    table,


rule table:
    input:
        lambda wildcards: measured(wildcards.table),
    output:
        update("results/tables/{table}.csv"),
        update("results/tables/{table}.parquet"),
    log:
        "logs/tables/{table}.log",
    params:
        current=lambda wildcards: sentence(CURRENT.table, wildcards.table),
    message:
        "table {wildcards.table}"
    shell:
        JOB + "report table {wildcards.table}" + BY_PLAN
