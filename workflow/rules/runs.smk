# Everything that is learned, quantized and measured: one job for all of a table, by processes that stay alive (for models of
# real size one for each table and model). It is `rotquant runs execute`, which computes what is not there, so a killed job
# continues, and tables that share rotations, weights or runs compute them once.
localrules:
    tasks,


# Zero-shot tasks are made, or local data checked, once and first: what is wrong with them shows before the long jobs.
rule tasks:
    output:
        update("results/tasks/{tasks}.json"),
    log:
        "logs/tasks/{tasks}.log",
    priority: 1
    params:
        current=lambda wildcards: CURRENT.tasks(wildcards.tasks),
    message:
        "zero-shot tasks"
    shell:
        JOB + "runs tasks {wildcards.tasks}" + BY_PLAN


rule measure:
    input:
        tasks=lambda wildcards: task_files(sentence(PLAN.part, wildcards.part).tasks),
    output:
        update("results/measured/{part}.json"),
    log:
        "logs/measured/{part}.log",
    threads: WORKERS
    resources:
        gpu=GPU,
    params:
        current=lambda wildcards: sentence(CURRENT.part, wildcards.part),
    message:
        "measure {wildcards.part}"
    shell:
        "SHOWN=1 " + JOB + "runs execute {wildcards.part} --jobs {threads}" + BY_PLAN
