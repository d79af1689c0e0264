# Rotated and quantized weights, once for all runs that share them, for all seeds of a recipe in one job. The job also measures
# the first run of each while the process is warm: loading torch and transformers takes 6 s of processor time, more than the
# evaluation of a small model.
def run_of_batch(batch):
    """The first run that uses the weights of a batch; its recipe is that of all."""
    return next(iter(sentence(PROJECT.batch, batch).values()))[0]


rule weights:
    output:
        update("results/weights/{batch}.json"),
    log:
        "logs/weights/{batch}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: code("weights", run_of_batch(wildcards.batch).recipe),
        weights=lambda wildcards: sorted(sentence(PROJECT.batch, wildcards.batch)),
        attempt=lambda wildcards: attempt(f"results/weights/{wildcards.batch}.json"),
    message:
        "weights of {CELL:{wildcards.batch}}"
    shell:
        JOB + "rotquant runs weights {wildcards.batch} --config {CONFIG_FILE}"
