# Rotated and quantized weights, once for all runs that share them, for all seeds of a recipe in one job. While the process is
# warm the job also measures the runs on them that all tables with these weights show, if there are any: loading torch and
# transformers takes 6 s of processor time, more than the evaluation of a small model.
def rotations_of_batch(batch):
    """The files of the learned rotations that the weights of a batch are made with; none where none are learned."""
    return [str(path) for key in sentence(PLAN.batch, batch).rotations for path in rotation_files(key)]


rule weights:
    input:
        rotations=lambda wildcards: rotations_of_batch(wildcards.batch),
        tasks=lambda wildcards: task_files(sentence(PLAN.batch, wildcards.batch).tasks),
    output:
        update("results/weights/{batch}.json"),
    log:
        "logs/weights/{batch}.log",
    threads: 1
    resources:
        gpu=GPU,
    params:
        current=lambda wildcards: sentence(CURRENT.batch, wildcards.batch),
    message:
        "weights of {LABEL:batches {wildcards.batch}}"
    shell:
        JOB + "runs weights {wildcards.batch}" + BY_PLAN
