# Every table and figure of the papers: `snakemake --cores all reports/quarot_table1.md`, or without a target all that exist.
# The rules are in workflow/, as the catalog of Snakemake workflows has them. An included file has no say about what is
# made without a target.
include: "workflow/Snakefile"


rule everything:
    default_target: True
    input:
        rules.all.input,
