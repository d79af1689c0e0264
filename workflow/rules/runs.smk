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


def run_of(wildcards):
    """A run of a part of a table, of whose kind all are."""
    return sentence(PLAN.part, wildcards.part).runs[0]


rule measure:
    input:
        tasks=lambda wildcards: task_files(sentence(PLAN.part, wildcards.part).tasks),
        sign=lambda wildcards: sentence(CURRENT.part_sign, wildcards.part),
    output:
        update("results/measured/{part}.json"),
    log:
        "logs/measured/{part}.log",
    threads: workers
    resources:
        gpu=GPU,
        mem_mb=lambda wildcards, threads, attempt: memory(run_of(wildcards), threads, attempt),
        runtime=lambda wildcards, attempt: attempt * MINUTES,
        processes=lambda wildcards, threads: processes(run_of(wildcards), threads),
    params:
        current=lambda wildcards: sentence(CURRENT.part, wildcards.part),
    message:
        "measure {wildcards.part}"
    shell:
        "SHOWN=1 " + JOB + "runs execute {wildcards.part} --jobs {resources.processes}" + BY_PLAN
