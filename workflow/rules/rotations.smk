# Learned rotations, each once for all weights that are made with it: GPTQ and RTN, and several bit widths, share one. One job
# for each, since learning takes far longer than starting a process. Outputs are kept when a job fails, as everywhere; beside
# them lies the checkpoint from which an interrupted learning continues.
rule rotations:
    output:
        update("results/rotations/{rotation}/rotation.json"),
        update("results/rotations/{rotation}/rotations.safetensors"),
        update("results/rotations/{rotation}/history.json"),
    log:
        "logs/rotations/{rotation}.log",
    priority: 1
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: code("rotations", sentence(PROJECT.rotation, wildcards.rotation)[0]),
        attempt=lambda wildcards: attempt(f"results/rotations/{wildcards.rotation}/rotation.json"),
    message:
        "learn rotations of {CELL:{wildcards.rotation}}"
    shell:
        JOB + "rotquant runs rotations {wildcards.rotation} --config {CONFIG_FILE}"
