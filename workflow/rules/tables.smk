# A table's numbers beside the paper's, per cell.
localrules:
    table,


rule table:
    input:
        lambda wildcards: measured(wildcards.table),
    output:
        update("results/tables/{table}.csv"),
    log:
        "logs/tables/{table}.log",
    params:
        code=code("tables"),
        definition=lambda wildcards: definition(wildcards.table),
        attempt=lambda wildcards: attempt(f"results/tables/{wildcards.table}.csv"),
    message:
        "table {wildcards.table}"
    shell:
        JOB + "rotquant report table {wildcards.table} --config {CONFIG_FILE}"
