#!/usr/bin/env bash
# Submits a sweep: a job array with one task per line of the table, and a job that merges the rows and draws
# the figures after all tasks have succeeded.
#
#   slurm/submit.sh [--redo] TABLE [options of sbatch for the array ...]
#   slurm/submit.sh configs/sweep_batch.tsv --gpus=1 --cpus-per-task=16 --time=10
#
# Set options of both jobs in the environment: SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_QOS, SBATCH_TIMELIMIT. When a
# table is submitted again, finished tasks are skipped unless --redo is given. Logs are in results/sweep/NAME/log/.
#
# Exit status: 0 submitted, 2 an error in the table, else that of sbatch.
set -euo pipefail

case ${1-} in
-h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" && exit ;;
esac
redo=()
[[ ${1-} != --redo ]] || { redo=(--redo) && shift; }
if (($# == 0)); then
    echo 'submit.sh: name a table, such as configs/sweep_cpu.tsv; see --help' >&2
    exit 2
fi
if ! command -v sbatch >/dev/null; then
    echo "submit.sh: no sbatch here; without Slurm, scripts/sweep/run.sh $1 does the same" >&2
    exit 4
fi
table=$(realpath -- "$1")
shift
cd "$(dirname "$0")/.."

scripts/sweep/run.sh "$table" --dry-run >/dev/null
count=$(scripts/sweep/run.sh "$table" --count)
name=${table##*/} name=${name%.tsv} name=${name#sweep_}
log=results/sweep/$name/log
mkdir -p "$log"

# Submits a job and sets $job to its number; on failure prints the reason in one line.
submit() { # arguments of sbatch
    local said status=0
    said=$(sbatch --parsable "$@" 2>&1) || status=$?
    job=$(sed -nE 's/^([0-9]+)(;.*)?$/\1/p' <<<"$said") # ;cluster
    ((status)) || { sed -E '/^[0-9]+(;.*)?$/d' <<<"$said" >&2 && return; } # warnings
    case $said in
    *'configuration source'* | *'ontact slurm controller'*)
        echo "submit.sh: sbatch finds no cluster from here; without one, scripts/sweep/run.sh $table does the same" >&2 ;;
    *) echo "submit.sh: $(sed -nE '1s/^sbatch: (error: )?/sbatch refused: /p' <<<"$said")" >&2 ;;
    esac
    exit "$status"
}

submit --array="1-$count" --output="$log/task_%a.log" "$@" slurm/sweep.sbatch "$table" "${redo[@]}"
echo "tasks:  job $job, $count of them; logs in $log/"
submit --dependency="afterok:$job" --kill-on-invalid-dep=yes --output="$log/collect.log" slurm/collect.sbatch "$table"
echo "rows:   job $job, results/sweep_$name.csv; should a task fail, scripts/sweep/run.sh $table --collect"
