# Every table and figure of the papers: `snakemake --cores all reports/quarot_table1.md`, or without a target all that exist.
from snakemake.utils import min_version

min_version("9.0")


include: "workflow/rules/common.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/runs.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/speed.smk"
include: "workflow/rules/reports.smk"


rule all:
    default_target: True
    input:
        expand("reports/{table}.md", table=PLAN.tables),
        "reports/index.md",
