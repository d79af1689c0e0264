# Rotated and quantized weights, once for all runs that share them. The job also measures the first of these runs while the
# process is warm: loading torch and transformers costs several seconds, as much as a small model's evaluation.
rule weights:
    output:
        update("results/weights/{weights_key}/weights.json"),
    log:
        "logs/weights/{weights_key}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=code("weights"),
        attempt=lambda wildcards: attempt(f"results/weights/{wildcards.weights_key}/weights.json"),
    message:
        "weights of {CELL:{wildcards.weights_key}}"
    shell:
        command(
            "runs weights {wildcards.weights_key} --config {CONFIG_FILE}", "results/weights/{weights_key}/weights.json"
        )
