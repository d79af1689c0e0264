# One measurement: a recipe on a checkpoint with a seed, measured by a metric.
def weights_of_run(wildcards):
    """The stored weights a run needs; the baseline needs none."""
    run = sentence(PROJECT.run, wildcards.key)
    return f"results/weights/{PROJECT.batch_of(run)}.json" if run.weights_key else []


rule run:
    input:
        weights_of_run,
    output:
        update("results/runs/{key}.json"),
    log:
        "logs/runs/{key}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: code("runs", sentence(PROJECT.run, wildcards.key).recipe),
        attempt=lambda wildcards: attempt(f"results/runs/{wildcards.key}.json"),
    message:
        "measure {CELL:{wildcards.key}}"
    shell:
        JOB + "rotquant runs compute {wildcards.key} --config {CONFIG_FILE}"
