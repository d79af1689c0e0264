# The comparison at a glance.
localrules:
    figure,


rule figure:
    input:
        lambda wildcards: numbers(wildcards.table) or measured(wildcards.table),
    output:
        report(update("reports/figures/{table}.svg"), **shown("Figure")),
    log:
        "logs/figures/{table}.log",
    params:
        current=lambda wildcards: sentence(CURRENT.figure, wildcards.table),
    message:
        "figure {wildcards.table}"
    shell:
        JOB + "report figure {wildcards.table}" + BY_PLAN
