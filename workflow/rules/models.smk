# The small models that ship with the project are in the repository; this rule makes them anew elsewhere, with
# `snakemake --cores all results/models/rq-7b`, as config/training/<name>.yaml says.
rule train:
    input:
        local("config/training/{model}.yaml"),
    output:
        directory("results/models/{model}"),
    log:
        "logs/models/{model}.log",
    threads: lambda wildcards: workflow.cores
    # The longest of the shipped models took 8 minutes of an H200, as their cards say.
    resources:
        gpu=GPU,
        mem_mb=lambda wildcards, attempt: attempt * 16000,
        runtime=lambda wildcards, attempt: attempt * 60,
    shell:
        "OMP_NUM_THREADS={threads} rotquant train {input} --output {output} --device {PLAN.device} > {log} 2>&1"
