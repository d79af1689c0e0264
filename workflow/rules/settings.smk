# Tables of settings: derived from the recipes, without any run.
localrules:
    settings_report,


rule settings_report:
    output:
        update("reports/{settings}.md"),
        update("results/tables/{settings}.csv"),
        update("results/tables/{settings}.parquet"),
    log:
        "logs/reports/{settings}.log",
    params:
        current=lambda wildcards: CURRENT.settings_page(wildcards.settings),
    message:
        "report {wildcards.settings}"
    shell:
        JOB + "report settings {wildcards.settings}" + BY_PLAN
