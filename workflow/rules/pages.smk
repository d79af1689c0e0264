# A table's numbers, its figure and its page; the scoreboard. These jobs are children of a process
# that has read all papers once. They run where Snakemake runs and write there, `local`, where results are in a store.
localrules:
    index,
    all,


# Tables of which was said what is not possible here.
REMARKED = set()


def measured(name):
    """What a table's numbers are collected from: the files of its runs, and the records of what was timed.

    Without a GPU there may be none of these, and the page says so. What of it is not possible on the models here is said
    when the jobs are planned, thus by a dry run too.
    """
    table = sentence(PLAN.table, name)
    if name not in SHOWN:
        raise SystemExit(
            f"rotquant: {name}: none of its runs is here but of the unquantized model, nor is their checkpoint."
        )
    if workflow.is_main_process and name not in REMARKED:
        REMARKED.add(name)
        for remark in table.remarks:
            print(f"{name}: {remark}", file=sys.stderr)
    timed = (timed_record(*record) for record in table.records.items())
    return [*(str(FILES.run(run)) for run in RUNS[name]), *filter(None, timed)]


# The runs that a table shows: all, but of a checkpoint that is not here those that are computed.
RUNS = {
    name: [run for run in table.runs if not PLAN.is_only_shown(run) or FILES.run(run).exists()]
    for name, table in PLAN.tables.items()
}
# What is made without a target: all tables but those that lack runs and have none of more than the unquantized model.
SHOWN = [
    name
    for name, table in PLAN.tables.items()
    if len(RUNS[name]) == len(table.runs) or not all(PLAN.runs[run].unquantized for run in RUNS[name])
]


def timed_record(name, committed):
    """The record of what was timed for a table, None where there is none and none is to be made."""
    own = f"results/speed/{name}.json"
    return own if (GPU and name in SPEED) or Path(own).exists() else committed and local(committed)


def learned(name):
    """How a table's weights and learned rotations were made, and the histories that its page and figure show."""
    runs = RUNS[name]
    weights = dict.fromkeys(key for run in runs if (key := PLAN.runs[run].weights))
    rotations = dict.fromkeys(key for one in weights if (key := PLAN.weights[one].rotation))
    records = [(FILES.weights(key), "weights.json") for key in weights]
    records += [(FILES.rotation(key), "rotation.json") for key in rotations]
    files = [f"{folder}/{file}" for folder, record in records for file in (record, "history.json")]
    shown = any(map(PLAN.is_only_shown, runs))
    return [file for file in files if not shown or Path(file).exists()]


def behind(wildcards):
    """What a table's report is made from.

    Of an input that was deleted Snakemake asks only where the report has to be made anyway. So a report that lacks one is
    made again, with all that it needs.
    """
    name = wildcards.table
    if lost(name):
        workflow.dag.forcefiles.add(f"reports/{name}.md")
    other = PLAN.tables[name].figure
    here = [f"reports/figures/{other}.svg"] * (other not in (None, name))
    return [*measured(name), *learned(name), *map(local, here)]


def results_of(wildcards, input):
    """The folder of results: with a storage provider, that of its copies."""
    return next((path.parent for path in map(Path, input) if path.parent.name == "runs"), FILES.root / "runs").parent


def follows(wildcards):
    """What a report follows from beside its inputs: its definition, and the code that renders and that is timed."""
    table = PLAN.tables[wildcards.table]
    return [table.definition, *table.codes.values(), *table.kernels]


def lost(name):
    """Whether something that a report was made from or with is gone; with a storage provider it is elsewhere."""
    if not Path(f"reports/{name}.md").exists() or workflow.storage_settings.default_storage_provider:
        return False
    table = PLAN.tables[name]
    made = [f"results/tables/{name}.{form}" for form in ("csv", "parquet")] * table.has_numbers
    made += [f"reports/figures/{name}.svg"] * (table.figure == name)
    return not all(Path(path).exists() for path in (*measured(name), *learned(name), *made))


# One job for all of a table: its numbers, its figure where it has one of its own, and its page.
for has_numbers in (True, False):
    for draws in (True, False):
        tables = [
            name for name, one in PLAN.tables.items() if (one.has_numbers, one.figure == name) == (has_numbers, draws)
        ]

        rule:
            name:
                "_".join(["page", *["numbers"] * has_numbers, *["figure"] * draws])
            input:
                behind,
            output:
                report(local("reports/{table}.md"), **shown("Page")),
                *[report(local("results/tables/{table}.csv"), **shown("Numbers"))] * has_numbers,
                *[local("results/tables/{table}.parquet")] * has_numbers,
                *[report(local("reports/figures/{table}.svg"), **shown("Figure"))] * draws,
            log:
                "logs/reports/{table}.log",
            wildcard_constraints:
                table="|".join(tables) or "none",
            localrule: True
            params:
                follows=follows,
                results=results_of,
            message:
                "report {wildcards.table}"
            shell:
                PAGE + "report page {wildcards.table} --results {params.results}" + BY_PLAN


# Of a page that no table has Snakemake would say only that no rule makes it: its input function says which are near.
rule unknown:
    input:
        lambda wildcards: sentence(PLAN.table, wildcards.unknown),
    output:
        local("reports/{unknown}.md"),
    wildcard_constraints:
        unknown=rf"(?!(index|{'|'.join(PLAN.tables)})\.md$)[^/]+",
    localrule: True


INDEX = PAGE + "report index" + BY_PLAN


rule index:
    input:
        reports=local(expand("reports/{table}.md", table=SHOWN)),
    output:
        local("reports/index.md"),
        local("reports/index.html"),
    log:
        "logs/reports/index.log",
    params:
        code=PLAN.codes["index"],
    message:
        "scoreboard"
    shell:
        INDEX


def refresh_index():
    """Render the scoreboard as it stands where a page is newer, whatever was asked for. It never fails the run."""
    index = Path("reports/index.html")
    pages = [page.stat().st_mtime_ns for page in Path("reports").glob("*.md") if page.name != "index.md"]
    if pages and not (index.exists() and max(pages) <= index.stat().st_mtime_ns):
        log, threads = "logs/reports/refresh_index.log", 1
        try:
            shell(INDEX)
            print(f"to look at in a browser: {index}, and a page for each table next to it", file=sys.stderr)
        except subprocess.CalledProcessError:
            print(f"warning: the scoreboard {index} could not be rendered: {log} says why.", file=sys.stderr)


def logged():
    """Wait some seconds until MLflow has what jobs have said, and say what it has not. Then its process ends, as this one."""
    if PLAN.tracking and (said := settled(os.getpid())):
        print(said, file=sys.stderr)


onsuccess:
    refresh_index()
    logged()


# Of several targets that --keep-going goes on with, those that succeeded.
onerror:
    refresh_index()
    logged()


def tables_of(*papers, of=("runs", "benchmarks", "recipes")):
    """The tables of papers that have their numbers from these sources."""
    every = ((name, PLAN.tables[name]) for name in SHOWN)
    return [name for name, one in every if one.paper in papers and one.source in of]


# Targets that are no files, and their tables.
GROUPS = {paper: tables_of(paper) for paper in dict.fromkeys(table.paper for table in PLAN.tables.values())}
# The accuracy half of QuaRot: Tables 1 to 13, Figure 1 and the switches.
GROUPS["quarot_accuracy"] = tables_of("quarot", of=["runs"])
# The speed half of the papers, and the kernels' own report; reports/index.md would ask for the accuracy half too.
GROUPS["speed"] = tables_of(*GROUPS, of=["benchmarks"])
# A file that is a target lies in the store where there is one, and pages do not.
if workflow.storage_settings.default_storage_provider:
    GROUPS |= {name: [name] for name in PLAN.tables}

for group, members in GROUPS.items():

    rule:
        name:
            group
        input:
            local(expand("reports/{table}.md", table=members)),
        localrule: True
