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
        current=lambda wildcards: CURRENT.tasks(wildcards.tasks),
    message:
        "zero-shot tasks"
    shell:
        JOB + "runs tasks {wildcards.tasks}" + BY_PLAN


def weights_of_group(group):
    """The stored weights that a group of runs needs; those of the checkpoint itself need none."""
    batch = sentence(PLAN.group, group).batch
    return [f"results/weights/{batch}.json"] if batch else []


rule measure:
    input:
        weights=lambda wildcards: weights_of_group(wildcards.group),
        tasks=lambda wildcards: task_files(sentence(PLAN.group, wildcards.group).tasks),
    output:
        update("results/measured/{group}.json"),
    log:
        "logs/measured/{group}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        current=lambda wildcards: sentence(CURRENT.group, wildcards.group),
    message:
        "measure {LABEL:groups {wildcards.group}}"
    shell:
        JOB + "runs measure {wildcards.group}" + BY_PLAN
