# The comparison at a glance.
localrules:
    figure,


rule figure:
    input:
        "results/tables/{table}.csv",
    output:
        update("reports/figures/{table}.svg"),
    log:
        "logs/figures/{table}.log",
    params:
        code=code("figures"),
        definition=lambda wildcards: definition(wildcards.table),
        attempt=lambda wildcards: attempt(f"reports/figures/{wildcards.table}.svg"),
    message:
        "figure {wildcards.table}"
    shell:
        JOB + "rotquant report figure {wildcards.table} --config {CONFIG_FILE}"
