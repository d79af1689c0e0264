# Speed tables: measured anew where there is a GPU, else rendered from the committed records of results/bench/<gpu>/.
# Those of a CPU are always rendered: a machine that runs other jobs measures them badly (`rotquant bench measure` does).
# Without a GPU there is no such job: a record that lies in results/speed/ was brought from elsewhere and stays as it is.
if GPU:

    rule measure_speed:
        output:
            # what an interrupted or failed job has measured stays, and an earlier record until it is measured anew
            update("results/speed/{speed}.json"),
        log:
            "logs/speed/{speed}.log",
        threads: 1
        # The longest table took 9 minutes of an H200 (results/bench), whose host's memory was not recorded.
        resources:
            gpu=1,
            mem_mb=lambda wildcards, attempt: attempt * 32000,
            runtime=lambda wildcards, attempt: attempt * 60,
        params:
            benchmarks=lambda wildcards: PLAN.tables[wildcards.speed].benchmarks,
            kernels=lambda wildcards: PLAN.tables[wildcards.speed].kernels,
        message:
            "measure {wildcards.speed}"
        shell:
            CELL + "bench measure {wildcards.speed} --output {output}"
