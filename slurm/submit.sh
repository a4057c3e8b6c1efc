#!/usr/bin/env bash
# Submits a sweep as two jobs. The first is a job array with one task per line of the table. After all its tasks have
# succeeded, the second job merges the rows and draws the figures.
#
#   slurm/submit.sh [--redo] [--dry-run] TABLE [options of sbatch for the array ...]
#   slurm/submit.sh configs/sweep_batch.tsv --gpus=1 --cpus-per-task=16 --time=10
#   slurm/submit.sh --dry-run configs/sweep_batch.tsv --gpus=1
#
# --redo: repeats finished tasks. --dry-run: checks the table, prints the number of tasks and the sbatch commands,
# submits nothing; works without Slurm.
#
# Options for both jobs come from the environment: SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_QOS, SBATCH_TIMELIMIT.
# If a table is submitted again without --redo, its finished tasks are skipped. Logs are in results/sweep/NAME/log/.
#
# Exit status: 0 submitted or printed; 1 the table could not be checked, or a folder not created; 2 usage or an error in the
# table; 4 no sbatch or no fdsl-bench; else the exit status of sbatch.
set -euo pipefail

case ${1-} in
-h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" && exit ;;
esac
redo=() dry=''
while [[ ${1-} == --redo || ${1-} == --dry-run ]]; do
    if [[ $1 == --redo ]]; then redo=(--redo); else dry=yes; fi
    shift
done
if (($# == 0)); then
    echo 'submit.sh: name a table, such as configs/sweep_cpu.tsv; see --help' >&2
    exit 2
fi
if [[ $1 == -* ]]; then
    echo "submit.sh: unknown option '$1'; options of sbatch follow the table; see --help" >&2
    exit 2
fi
for option in "${@:2}"; do
    if [[ $option == --redo || $option == --dry-run ]]; then
        echo "submit.sh: $option after the table would be an option of sbatch; write it before the table" >&2
        exit 2
    fi
done
if [[ ! $dry ]] && ! command -v sbatch >/dev/null; then
    echo "submit.sh: sbatch is not installed here; without Slurm, scripts/sweep/run.sh $1 runs the same tasks" >&2
    exit 4
fi
table=$(realpath -- "$1")
shift
cd "$(dirname "$0")/.."

scripts/sweep/run.sh "$table" --dry-run >/dev/null
count=$(scripts/sweep/run.sh "$table" --count)
name=${table##*/} name=${name%.tsv} name=${name#sweep_}
log=results/sweep/$name/log
[[ $dry ]] || mkdir -p "$log"

# Submits a job and sets $job to its number; on failure prints the reason in one line. With --dry-run, prints the
# command, quoted for the shell.
submit() { # arguments of sbatch
    if [[ $dry ]]; then
        printf 'sbatch'
        printf ' %s' "'--parsable'" "${@@Q}"
        echo
        job=JOB
        return
    fi
    local said status=0
    said=$(sbatch --parsable "$@" 2>&1) || status=$?
    job=$(sed -nE 's/^([0-9]+)(;.*)?$/\1/p' <<<"$said") # sbatch may append ;CLUSTER
    ((status)) || { sed -E '/^[0-9]+(;.*)?$/d' <<<"$said" >&2 && return; } # warnings
    case $said in
    *'configuration source'* | *'ontact slurm controller'*)
        echo "submit.sh: sbatch finds no cluster from here; without a cluster, scripts/sweep/run.sh $table runs the same tasks" >&2 ;;
    *) echo "submit.sh: $(sed -nE '1s/^sbatch: (error: )?/sbatch refused: /p' <<<"$said")" >&2 ;;
    esac
    exit "$status"
}

array=(--array="1-$count" --output="$log/task_%a.log" "$@" slurm/sweep.sbatch "$table" "${redo[@]}")
collect=(--kill-on-invalid-dep=yes --output="$log/collect.log" slurm/collect.sbatch "$table")
if [[ $dry ]]; then
    echo "tasks:  $count; JOB is the number that the first sbatch prints"
    echo "mkdir -p ${log@Q}"
fi
submit "${array[@]}"
[[ $dry ]] || echo "tasks:  job $job, $count tasks; logs in $log/"
submit --dependency="afterok:$job" "${collect[@]}"
[[ $dry ]] || echo "rows:   job $job, results/sweep_$name.csv; if a task fails, run scripts/sweep/run.sh $table --collect"
