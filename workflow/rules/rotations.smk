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
        current=lambda wildcards: sentence(CURRENT.rotation, wildcards.rotation),
    message:
        "learn rotations of {LABEL:rotations {wildcards.rotation}}"
    shell:
        JOB + "runs rotations {wildcards.rotation}" + BY_PLAN
