# Speed tables: measured anew where there is a GPU, else rendered from the committed records of results/bench/<gpu>/.
# Those of a CPU are always rendered: a machine that runs other jobs measures them badly (`rotquant bench measure` does).
from rotquant.reporting.speed.numbers import record_path


localrules:
    speed_figure,
    speed_report,
    speed,


def speed_records(name):
    """The records behind a page. Without a GPU there may be none, and the page says so."""
    found = (speed_record(source) for source in PROJECT.speed[name].sources)
    return [path for path in found if path is not None]


def speed_record(source):
    """The record of a table, None where there is none and none is to be made."""
    if GPU and PROJECT.speed[source].device == "gpu":
        return f"results/speed/{source}.json"
    return sentence(record_path, Path.cwd(), source)


def speed_definition(name):
    """Digest of everything that the definitions and the papers' numbers behind a page say."""
    tables = [PROJECT.speed[source] for source in dict.fromkeys([name, *PROJECT.speed[name].sources])]
    texts = [(PROJECT.root / table.published).read_text() for table in tables if table.published]
    return short_hash(canonical_json([[table.model_dump(mode="json") for table in tables], texts]))


def speed_cells(name):
    """What is measured for a table, and by which code: a renamed row is not measured anew."""
    cells = PROJECT.speed[name].cells
    benchmarks = {cell.benchmark for cell in cells}
    return [sorted(cell.key for cell in cells), sorted(digests.benchmark_digest(name) for name in benchmarks)]


# Without a GPU there is no such job: a record that lies in results/speed/ was brought from elsewhere and stays as it is.
if GPU:

    rule measure_speed:
        output:
            update("results/speed/{speed}.json"),
        log:
            "logs/speed/{speed}.log",
        threads: 1
        resources:
            gpu=1,
        params:
            cells=lambda wildcards: speed_cells(wildcards.speed),
            attempt=lambda wildcards: attempt(f"results/speed/{wildcards.speed}.json"),
        message:
            "measure {wildcards.speed}"
        shell:
            JOB + "rotquant bench measure {wildcards.speed} --output {output}"


rule speed_figure:
    input:
        lambda wildcards: speed_records(wildcards.speed),
    output:
        update("reports/figures/{speed}.svg"),
    log:
        "logs/figures/{speed}.log",
    params:
        code=code("speed"),
        definition=lambda wildcards: speed_definition(wildcards.speed),
        attempt=lambda wildcards: attempt(f"reports/figures/{wildcards.speed}.svg"),
    message:
        "figure {wildcards.speed}"
    shell:
        JOB + "rotquant report speed-figure {wildcards.speed} --config {CONFIG_FILE}"


rule speed_report:
    input:
        records=lambda wildcards: speed_records(wildcards.speed),
        figure=lambda wildcards: (
            f"reports/figures/{wildcards.speed}.svg" if PROJECT.speed[wildcards.speed].drawing else []
        ),
        tracking="results/tracking.json" if CONFIG.tracking else [],
    output:
        update("reports/{speed}.md"),
    log:
        "logs/reports/{speed}.log",
    params:
        code=code("speed"),
        definition=lambda wildcards: speed_definition(wildcards.speed),
        # The page says whether the code is still the one that was measured.
        kernels=lambda wildcards: speed_cells(wildcards.speed)[1],
        attempt=lambda wildcards: attempt(f"reports/{wildcards.speed}.md"),
    message:
        "report {wildcards.speed}"
    shell:
        JOB + "rotquant report speed {wildcards.speed} --config {CONFIG_FILE}"


# The speed half of the papers, and the kernels' own report; reports/index.md would ask for the accuracy half too.
rule speed:
    input:
        expand("reports/{speed}.md", speed=PROJECT.speed),
