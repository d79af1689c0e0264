# Measurements: one job for the runs that share their weights and are asked for by the same tables, so that nothing is loaded
# twice and nothing is measured that a requested table does not show.
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
        code=code("tasks"),
        attempt=lambda wildcards: attempt(f"results/tasks/{wildcards.tasks}.json"),
    message:
        "zero-shot tasks"
    shell:
        JOB + "rotquant runs tasks {wildcards.tasks} --config {CONFIG_FILE}"


def weights_of_group(group):
    """The stored weights that a group of runs needs; those of the checkpoint itself need none."""
    batch = PROJECT.batch_of(sentence(PROJECT.group, group)[0])
    return [f"results/weights/{batch}.json"] if batch else []


rule measure:
    input:
        weights=lambda wildcards: weights_of_group(wildcards.group),
        tasks=lambda wildcards: task_files(sentence(PROJECT.group, wildcards.group)),
    output:
        update("results/measured/{group}.json"),
    log:
        "logs/measured/{group}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: sorted({code("runs", run) for run in sentence(PROJECT.group, wildcards.group)}),
        attempt=lambda wildcards: attempt(f"results/measured/{wildcards.group}.json"),
    message:
        "measure {CELL:{wildcards.group}}"
    shell:
        JOB + "rotquant runs measure {wildcards.group} --config {CONFIG_FILE}"
