# One job for each learned rotation, set of weights and run. A name is a key and a digest of the code (identity/names.py), so
# a file that exists is current, whoever computed it and whenever: inputs are `ancient`. Tensors of weights are temporary.
# Where they are made again for a run that is lacking, the other runs on them are measured again too, so that all are of
# the same bits; `--notemp` keeps tensors for later runs.


# What a job asks of a cluster, megabytes and minutes, more at each attempt. A small model takes MB at most, twice what was
# measured (results/reliability/slurm.json). A model of real size streams layer by layer: Llama-2-7B's shape went through
# GPTQ on a machine with 128 GB (results/bench), less was not tried.
MB, LARGE_MB = 4000, 96000
MINUTES = 240


CELLS = {"run": PLAN.runs, "weights": PLAN.weights, "rotation": PLAN.rotations}


def planned(kind, name):
    """A result of the plan by its file's name, and the run that it is of, or the first on it."""
    key = key_in(name)
    found = CELLS[kind].get(key)
    if found is None or name != PLAN.names[key]:
        raise SystemExit(
            f"rotquant: {name} is no result of this configuration and this code; `rotquant runs list` prints all keys."
        )
    return found, key if kind == "run" else found.run


def needs(kind):
    """Memory and time that a cluster's job asks for, by the size of its model.

    cell: a profile that makes a group of cells one job lets them follow one another by it, each with all memory.
    On this machine small models alone ask for the same each: Snakemake takes 0.1 ms of a plan for each function.
    """
    if workflow.local_exec and PLAN.only_small:
        return {"gpu": GPU, "cell": 1, "mem_mb": MB, "runtime": MINUTES}

    def megabytes(wildcards, attempt):
        small = PLAN.is_small(planned(kind, wildcards[kind])[1])
        return (1 + attempt) * (MB if small else LARGE_MB) // 2

    return {"gpu": GPU, "cell": 1, "mem_mb": megabytes, "runtime": lambda wildcards, attempt: attempt * MINUTES}


def of(kind):
    """What a job computes, and all that its result follows from but for its inputs."""

    def params(wildcards):
        found, run = planned(kind, wildcards[kind])
        fields = PLAN.runs[run].fields
        texts = (f"{name}: {digest}" for name, digest in sorted(fields["texts"].items()))
        return [found.label, f"code: {found.code}", f"model: {fields['checkpoint_digest']}", *texts]

    return params


MAKE = CELL + "runs make {output[0]}" + BY_PLAN


rule rotation:
    output:
        "results/rotations/{rotation}/rotation.json",
        "results/rotations/{rotation}/history.json",
        "results/rotations/{rotation}/rotations.safetensors",
    log:
        "logs/rotations/{rotation}.log",
    resources:
        **needs("rotation"),
    params:
        of=of("rotation"),
    message:
        "rotation {wildcards.rotation}: {params.of[0]}"
    shell:
        MAKE


def rotations(wildcards):
    """The files of the rotations that weights are made with."""
    key = planned("weights", wildcards.weights)[0].rotation
    names = ("rotation.json", "rotations.safetensors")
    return [] if key is None else [ancient(str(FILES.rotation(key) / name)) for name in names]


rule weights:
    input:
        rotations,
    output:
        "results/weights/{weights}/weights.json",
        "results/weights/{weights}/history.json",
        temp(directory("results/weights/{weights}/model")),
    log:
        "logs/weights/{weights}.log",
    resources:
        **needs("weights"),
    params:
        of=of("weights"),
    message:
        "weights {wildcards.weights}: {params.of[0]}"
    shell:
        MAKE


# Zero-shot tasks are made, or local data checked, once and first: what is wrong with them shows before the long jobs.
rule tasks:
    output:
        "results/tasks/{tasks}.json",
    log:
        "logs/tasks/{tasks}.log",
    priority: 1
    localrule: True
    message:
        "zero-shot tasks"
    shell:
        MAKE


def measured_on(wildcards):
    """The weights and the tasks that a run is measured on; of one that is only shown, what is there."""
    run, key = planned("run", wildcards.run)
    weights = [] if run.weights is None else [FILES.weights(run.weights) / name for name in ("weights.json", "model")]
    tasks = [] if run.tasks is None else [FILES.tasks(run.tasks)]
    shown = PLAN.is_only_shown(key) and not all(path.exists() for path in (*weights[:1], *tasks))
    return [] if shown else [ancient(str(path)) for path in (*weights, *tasks)]


rule run:
    input:
        measured_on,
    output:
        "results/runs/{run}.json",
    log:
        "logs/runs/{run}.log",
    resources:
        **needs("run"),
    params:
        of=of("run"),
    message:
        "run {wildcards.run}: {params.of[0]}"
    shell:
        MAKE
