# Every table and figure of the papers: `snakemake --cores all reports/quarot_table1.md`, or without a target all that exist.
# The rules are in workflow/, as the catalog of Snakemake workflows has them.
include: "workflow/Snakefile"
