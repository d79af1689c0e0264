# Rotated and quantized weights, once for all runs that share them, for all seeds of a recipe in one job. While the process is
# warm the job also measures the runs on them that all tables with these weights show, if there are any: loading torch and
# transformers takes 6 s of processor time, more than the evaluation of a small model.
def run_of_batch(batch):
    """The first run that uses the weights of a batch; what is stored is the same for all of them but for the seed."""
    return next(iter(sentence(PROJECT.batch, batch).values()))[0]


def rotations_of_batch(batch):
    """The learned rotations that the weights of a batch are made with, one for each seed; none where none are learned."""
    return rotation_files(run for members in sentence(PROJECT.batch, batch).values() for run in members)


def tasks_of_batch(batch):
    """What the group of runs that is measured in the same job needs."""
    group = sentence(PROJECT.measured_with, batch)
    return [] if group is None else task_files(PROJECT.group(group))


rule weights:
    input:
        rotations=lambda wildcards: rotations_of_batch(wildcards.batch),
        tasks=lambda wildcards: tasks_of_batch(wildcards.batch),
    output:
        update("results/weights/{batch}.json"),
    log:
        "logs/weights/{batch}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        code=lambda wildcards: code("weights", run_of_batch(wildcards.batch)),
        weights=lambda wildcards: sorted(sentence(PROJECT.batch, wildcards.batch)),
        attempt=lambda wildcards: attempt(f"results/weights/{wildcards.batch}.json"),
    message:
        "weights of {CELL:{wildcards.batch}}"
    shell:
        JOB + "rotquant runs weights {wildcards.batch} --config {CONFIG_FILE}"
