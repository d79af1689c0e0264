# Rotated and quantized weights, once for all runs that share them. The job also measures the first of these runs while the
# process is warm: loading torch and transformers costs several seconds, as much as a small model's evaluation.
def run_of_weights(weights_key):
    """The first run that uses these weights."""
    return sentence(PROJECT.runs_of_weights, weights_key)[0]


rule weights:
    output:
        update("results/weights/{weights_key}/weights.json"),
    log:
        "logs/weights/{weights_key}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: code("weights", run_of_weights(wildcards.weights_key).recipe),
        attempt=lambda wildcards: attempt(f"results/weights/{wildcards.weights_key}/weights.json"),
    message:
        "weights of {CELL:{wildcards.weights_key}}"
    shell:
        JOB + "rotquant runs weights {wildcards.weights_key} --config {CONFIG_FILE}"
