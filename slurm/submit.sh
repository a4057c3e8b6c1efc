#!/usr/bin/env bash
# Submits the unfinished tasks of a table as job arrays. After all of them have succeeded, another job merges the rows and
# draws the figures.
#
#   slurm/submit.sh [--redo] [--dry-run] [--at-once N] TABLE [options of sbatch for the arrays ...]
#   slurm/submit.sh configs/sweep_batch.tsv --gpus=1 --cpus-per-task=16 --time=10
#   slurm/submit.sh --dry-run configs/sweep_batch.tsv --gpus=1
#
# --redo: repeats finished tasks. --at-once N: at most N tasks run at a time. --dry-run: checks the table, prints the number
# of tasks and the sbatch commands, submits nothing; works without Slurm.
#
# An array has at most 1000 tasks on a cluster with Slurm's default limits; a longer table is submitted as several arrays.
# To continue after a failure or a lost job, submit the table again.
#
# Options for all jobs come from the environment: SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_QOS, SBATCH_TIMELIMIT.
# Logs are in results/sweep/NAME/log/.
#
# Exit status: 0 submitted or printed; 1 the table could not be checked, or a folder not created; 2 usage, an error in the
# table, or more tasks than the cluster accepts; 4 no sbatch or no fdsl-bench; else the exit status of sbatch.
set -euo pipefail

die() { # exit status, text
    echo "submit.sh: $2" >&2
    exit "$1"
}

case ${1-} in
-h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" && exit ;;
esac
redo=() dry='' at_once=''
while [[ ${1-} == --* ]]; do
    case $1 in
    --redo) redo=(--redo) ;;
    --dry-run) dry=yes ;;
    --at-once)
        [[ ${2-} =~ ^[1-9][0-9]{0,6}$ ]] || die 2 "--at-once '${2-}': give the largest number of tasks that may run at a time"
        at_once=$2
        shift
        ;;
    *) break ;;
    esac
    shift
done
(($#)) || die 2 'name a table, such as configs/sweep_cpu.tsv; see --help'
[[ $1 != -* ]] || die 2 "unknown option '$1'; options of sbatch follow the table; see --help"
for option in "${@:2}"; do
    case $option in
    --redo | --dry-run | --at-once*) die 2 "$option after the table would be an option of sbatch; write it before the table" ;;
    --array* | -a*) die 2 "$option: the arrays are the unfinished tasks of the table; leave it out (--at-once N limits how many run at a time)" ;;
    esac
done
[[ $dry ]] || command -v sbatch >/dev/null ||
    die 4 "sbatch is not installed here; without Slurm, scripts/sweep/run.sh $1 runs the same tasks"
table=$(realpath -- "$1")
shift

# Separates --dependency from the other options, because --at-once adds a condition to it, and sbatch uses only the last one.
options=() dependency=''
while (($#)); do
    case $1 in
    --dep*=*) dependency=${1#*=} ;;
    -d?*) dependency=${1#-d} ;;
    --dep* | -d)
        (($# > 1)) || die 2 "$1: its value is missing"
        dependency=$2
        shift
        ;;
    *) options+=("$1") ;;
    esac
    shift
done
cd "$(dirname "$0")/.."

# ---- Chunks ----

# A chunk has a power of ten of tasks, so that its number followed by a padded index is the number of a task.
chunk=1000 most_jobs=0
if limits=$(scontrol show config 2>/dev/null); then
    indices=$(sed -nE '/^MaxArraySize *= *0*([0-9]{1,9})$/{s//\1/p;q}' <<<"$limits")
    in_array=$(sed -nE '/^SchedulerParameters *=(.*,| *)max_array_tasks=0*([0-9]{1,9})(,.*)?$/{s//\2/p;q}' <<<"$limits")
    most_jobs=$(sed -nE '/^MaxJobCount *= *0*([0-9]{1,9})$/{s//\1/p;q}' <<<"$limits")
    ((${in_array:-1000001} > ${indices:=1001})) || indices=$in_array
    ((indices >= 10)) || die 2 "this cluster permits no job arrays of 10 tasks (MaxArraySize and max_array_tasks of scontrol show config); \
run all tasks in one job: sbatch --wrap 'scripts/sweep/run.sh $table'"
    for ((chunk = 10; chunk * 10 <= indices; chunk *= 10)); do :; done
fi
digits=$((${#chunk} - 1))

todo=$(scripts/sweep/run.sh "$table" --todo "${redo[@]}")
mapfile -t todo < <(printf %s "$todo")
count=${#todo[@]}
((most_jobs == 0 || count < most_jobs)) ||
    die 2 "$table: $count tasks, but this cluster holds at most $most_jobs jobs (MaxJobCount of scontrol show config); divide the table, \
or give a line lists of values"

# Sets arrays[k] to the indices of the unfinished tasks of chunk k, such as "1-4,9", and counts[k] to their number.
arrays=() counts=()
for ((i = 0; i < count; i = last + 1)); do
    k=$((todo[i] / chunk))
    for ((last = i; last + 1 < count && todo[last + 1] == todo[last] + 1 && todo[last + 1] / chunk == k; last++)); do :; done
    counts[k]=$((${counts[k]:-0} + last - i + 1))
    arrays[k]+=${arrays[k]:+,}$((todo[i] % chunk))
    ((last == i)) || arrays[k]+=-$((todo[last] % chunk))
done

[[ ! $at_once || $dependency != *\?* || ${#arrays[@]} -lt 2 ]] ||
    die 2 "--dependency=$dependency: sbatch joins no further condition to one with '?', and --at-once makes each array wait for the previous one; \
leave out one of the two"

# ---- Jobs ----

name=${table##*/} name=${name%.[ct]sv} name=${name#sweep_}
log=results/sweep/$name/log
jobs=()

# Submits a job and appends its number to $jobs; on failure prints the reason in one line. With --dry-run, prints the
# command, quoted for the shell.
submit() { # arguments of sbatch
    if [[ $dry ]]; then
        printf 'sbatch'
        printf ' %s' "'--parsable'" "${@@Q}"
        echo
        jobs+=("JOB$((${#jobs[@]} + 1))")
        return
    fi
    local said status=0
    said=$(sbatch --parsable "$@" 2>&1) || status=$?
    jobs+=("$(sed -nE 's/^([0-9]+)(;.*)?$/\1/p' <<<"$said")") # sbatch may append ;CLUSTER
    if ((status == 0)) && [[ ${jobs[-1]} ]]; then
        sed -E '/^[0-9]+(;.*)?$/d' <<<"$said" >&2 # warnings
        return
    fi
    unset 'jobs[-1]'
    if ((status == 0)); then
        said="sbatch: it printed '$said' instead of the number of a job; look for it with squeue" status=1
    fi
    [[ ! ${jobs[*]-} ]] || echo "submit.sh: submitted before: ${jobs[*]}; when these jobs have ended, submit the table again for the other tasks" >&2
    case $said in
    *'configuration source'* | *'ontact slurm controller'*)
        echo "submit.sh: sbatch finds no cluster from here; without a cluster, scripts/sweep/run.sh $table runs the same tasks" >&2 ;;
    *) echo "submit.sh: $(sed -nE '1s/^sbatch: (error: )?/sbatch refused: /p' <<<"$said")" >&2 ;;
    esac
    exit "$status"
}

if [[ $dry ]]; then
    echo "tasks:  $count; JOBn is the number that the n-th sbatch prints"
    echo "mkdir -p ${log@Q}"
else
    mkdir -p "$log"
    ((count)) || echo 'tasks:  all are finished'
fi
for k in "${!arrays[@]}"; do
    file=task_%a.log after=$dependency
    ((k == 0)) || file=task_$k%${digits}a.log
    # The limit of an array counts only its own tasks, so the next array waits for the end of the previous one.
    [[ ! $at_once || ! ${jobs[*]-} ]] || after+=${after:+,}afterany:${jobs[-1]}
    submit --array="${arrays[k]}${at_once:+%$at_once}" --output="$log/$file" "${options[@]}" \
        ${after:+"--dependency=$after"} slurm/sweep.sbatch "$table" $((k * chunk)) "${redo[@]}"
    [[ $dry ]] || echo "tasks:  job ${jobs[-1]}, ${counts[k]} task$( ((counts[k] == 1)) || echo s); logs in $log/"
done
after=()
((count == 0)) || after=(--dependency="afterok$(printf ':%s' "${jobs[@]}")" --kill-on-invalid-dep=yes)
submit "${after[@]}" --output="$log/collect.log" slurm/collect.sbatch "$table"
[[ $dry ]] || echo "rows:   job ${jobs[-1]}, results/sweep_$name.csv; if a task fails, submit the table again"
