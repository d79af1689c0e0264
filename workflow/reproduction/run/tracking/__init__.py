"""MLflow logs results while they are computed: one MLflow run for each, one experiment a paper, one parent run a table.

A job says what it begins, each step of a training, and how it ended (`job`, `line`). One process for all jobs of a
Snakemake writes that to MLflow (`logger`, `store`), so no job imports MLflow or waits for it. The result files are the
truth: `entries` reads from them what was not logged, when a table's page is rendered or by `rotquant runs
sync-tracking`.
"""
