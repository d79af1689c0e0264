#!/usr/bin/env bash
# Run a job's command: job.sh OUTPUT LOG COMMAND...   All messages go to LOG; the last one of a failure
# and warnings also to the screen.
#
# Snakemake deletes a job's old outputs before it starts, and a failing re-run would cost an earlier good result; outputs
# marked `update` are kept. Then, however, Snakemake takes the kept file of a failed job for that job's own. So each output
# has an attempt file: it gets a new content when the job starts and the old one back at the very end. Its content is a
# parameter of the rule (common.smk), hence a job that failed or was interrupted in any way is tried again.
set -euo pipefail
output=$1
log=$2
shift 2

attempt=.snakemake/attempts/$output
mkdir -p "$(dirname "$attempt")"
if [ -e "$attempt" ]; then cp "$attempt" "$attempt.before"; else : > "$attempt.before"; fi
date +%s%N > "$attempt"

"$@" > "$log" 2>&1 || {
    status=$?
    tail -n 1 "$log" >&2
    exit $status
}
grep '^warning: ' "$log" >&2 || true

mv "$attempt.before" "$attempt"
