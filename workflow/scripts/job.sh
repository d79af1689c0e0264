#!/usr/bin/env bash
# Run a job's command: STATE=... job.sh OUTPUT LOG COMMAND...   All messages go to LOG; the last one of a failure
# and warnings also to the screen, or with SHOWN=1 all of standard error. While the job runs, and after a failure, its output
# has a mark; at the end the mark is that of the state the job was started for (workflow/reproduction/run/states.py says why).
set -euo pipefail
output=$1
log=$2
shift 2

mark=.snakemake/attempts/$output
mkdir -p "$(dirname "$mark")"
set_mark() { # to what it says, or on a full disk as it was, and the job fails
    if ! { echo "$1" > "$mark.$$" && mv "$mark.$$" "$mark"; }; then
        echo "rotquant: $PWD/$mark cannot be written; make room." >&2
        exit 1
    fi
}
set_mark "$(date +%s%N)"

: > "$log"
if [ "${SHOWN:-}" ]; then # a long job, whose progress and errors are on standard error
    "$@" >> "$log" 2> >(tee -a "$log" >&2)
else
    "$@" >> "$log" 2>&1 || {
        status=$?
        tail -n 1 "$log" >&2
        head -c 4096 /dev/zero > "$log.room" || echo "rotquant: $PWD/$log cannot be written; make room." >&2
        rm -f "$log.room"
        exit $status
    }
    grep '^warning: ' "$log" >&2 || true
fi

earlier=${STATE:-}
earlier=${earlier#*-}
if [ -n "$earlier" ]; then set_mark "$earlier"; else rm -f "$mark"; fi # which another Snakemake may have done
