# Tables on a cluster whose nodes share no file system: what jobs compute travels as archives through an object store.
#
#   snakemake --snakefile workflow/storage.smk --profile profiles/slurm --default-storage-provider s3 \
#       --default-storage-prefix s3://bucket/rotquant --shared-fs-usage sources source-cache software-deployment -- quarot_table1
#   snakemake reports/quarot_table1.md
#
# The first computes on the nodes, each of which has this project at the same place (a clone or the container), and brings
# the results home; the second renders them here. A target is a table or a paper; without one, all. An archive is named by
# all that it follows from, so what is in the store is current, and several people may share one.
from snakemake.utils import min_version

min_version("9.0")


include: "rules/common.smk"


from reproduction.run import archives

if workflow.storage_settings.default_storage_provider is None:
    raise WorkflowError(
        "archives need a place: name one with --default-storage-provider s3 --default-storage-prefix s3://bucket/folder "
        "(`pip install -e ./workflow[s3]` brings that provider)."
    )


wildcard_constraints:
    kind="rotations|weights|measured",
    name="[^/]+",


def needed(wildcards):
    """The archives that a job of an archive needs."""
    kind, name = wildcards.kind, f"{wildcards.kind}/{wildcards.name}.tar"
    return archives.archives_needed(PLAN, kind, sentence(archives.target_of, PLAN, name))


def run_of(wildcards):
    """The run that an archive is of, or one of its runs, of whose kind all are."""
    key = sentence(archives.target_of, PLAN, f"{wildcards.kind}/{wildcards.name}.tar")
    planned = {"rotations": PLAN.rotations, "weights": PLAN.weights}.get(wildcards.kind)
    return planned[key].run if planned else PLAN.parts[key].runs[0]


rule archive:
    input:
        needed,
    output:
        "{kind}/{name}.tar",
    log:
        "logs/{kind}/{name}.log",
    threads: workers
    resources:
        gpu=GPU,
        mem_mb=lambda wildcards, threads, attempt: memory(run_of(wildcards), threads, attempt),
        runtime=lambda wildcards, attempt: attempt * MINUTES,
        processes=lambda wildcards, threads: processes(run_of(wildcards), threads),
    params:
        needs=lambda wildcards, input: [f"--needs {path}" for path in input],
    message:
        "archive {wildcards.kind}/{wildcards.name}"
    shell:
        "OMP_NUM_THREADS=1 workflow/scripts/job.sh {output} {log} "
        "rotquant runs archive {output} {params.needs} --jobs {resources.processes}" + BY_PLAN


def lacking(tables):
    """The archives of those parts of tables that are not here."""
    parts = dict.fromkeys(part for table in tables for part in PLAN.tables[table].parts)
    return [archives.archive_of(PLAN, "measured", part) for part in parts if not archives.received(PLAN, part)]


TARGETS = {name: [name] for name in PLAN.of_runs}
for name, table in PLAN.of_runs.items():
    TARGETS.setdefault(table.paper, []).append(name)


rule all:
    default_target: True
    input:
        lambda wildcards: lacking(PLAN.of_runs),
    localrule: True
    shell:
        "rotquant runs import {input}" + BY_PLAN


for target, tables in TARGETS.items():

    rule:
        name:
            target
        input:
            lambda wildcards, tables=tables: lacking(tables),
        localrule: True
        shell:
            "rotquant runs import {input}" + BY_PLAN
