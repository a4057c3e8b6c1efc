#!/usr/bin/env bash
# Checks that a training run which is killed and resumed ends with the same bits as an uninterrupted run.
#
#   scripts/check/resume.sh DIR OPTIONS...
#   scripts/check/resume.sh /tmp/resume --variant train-vit --model vit-tiny --recipe paper --train-size 153600 \
#       --epochs 1 --lr-warmup 0.2
#
# OPTIONS are those of fdsl-bench for one training run, without --checkpoint, --checkpoint-steps, --resume, --log, --log-steps
# and --export.
# DIR is created. The script trains twice. The first training run is not interrupted. The second is killed by SIGKILL, each
# time up to 0.2 s after a new checkpoint within an epoch, and resumed. Then the exported weights must be the same bytes. The
# rows of --log must have the same losses, accuracies and learning rates, all of them finite.
#
# Environment (defaults in parentheses):
#   KILLS (2)      number of kills
#   EVERY (100)    steps between two checkpoints
#   ROWS           steps between two rows of --log, a divisor of EVERY (default: EVERY)
#   DEVICES        two GPUs, such as "0 1": train both runs at the same time, the first on the first GPU. By default, the
#                  second training run follows the first, on the GPU that OPTIONS name
#   FDSL_BENCH     the program (default: ./fdsl-bench of this project)
#
# Exit status: 0 if the results are the same, 1 if they differ or a training run fails, 2 for wrong usage.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
(($# > 1)) || { echo 'usage: scripts/check/resume.sh DIR OPTIONS...' >&2 && exit 2; }
folder=$1 every=${EVERY:-100} kills=${KILLS:-2}
rows=${ROWS:-$every}
((rows > 0 && every % rows == 0)) || { echo "check/resume.sh: ROWS=$rows is not a divisor of EVERY=$every" >&2 && exit 2; }
shift
for option in "$@"; do
    case $option in
    --checkpoint | --checkpoint=* | --checkpoint-steps* | --resume | --log | --log=* | --log-steps* | --export | --export=*)
        echo "check/resume.sh: this script sets ${option%%=*} itself; leave it out (see --help)" >&2 && exit 2
        ;;
    esac
done
[[ ! -e $folder ]] || { echo "check/resume.sh: $folder exists; name a new folder, or remove this one" >&2 && exit 2; }
mkdir "$folder" || exit 2
bench=("${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}" "$@" --log-steps "$rows")
read -r first second <<<"${DEVICES:-}" || true

stop_trainings() {
    local pid
    for pid in $(jobs -p); do # a signal may arrive before a variable has the value of $!
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}
trap stop_trainings EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "check/resume.sh: $1" >&2
    exit 1
}

# whole() and parts() never return. Call them in the background: the new process becomes the training run, and a signal can
# end the script while it waits.
whole() {
    exec "${bench[@]}" ${first:+--device "$first"} --log "$folder/whole.csv" --export "$folder/whole.safetensors" >"$folder/whole.txt" 2>&1
}

latest() { # prints the latest checkpoint, or the pattern itself if there is none
    local all=("$folder"/checkpoints/*.ckpt)
    echo "${all[-1]}"
}

parts() { # arguments: further options
    exec "${bench[@]}" ${second:+--device "$second"} --log "$folder/parts.csv" --checkpoint "$folder/checkpoints" \
        --checkpoint-steps "$every" --resume "$@" >>"$folder/parts.txt" 2>&1
}

killed() { # starts the second training run, and kills it after a new checkpoint within an epoch
    local before parts_pid status=0
    before=$(latest)
    parts &
    parts_pid=$!
    while kill -0 "$parts_pid" 2>/dev/null && { [[ $(latest) == "$before" ]] || [[ $(latest) != *step* ]]; }; do sleep 0.01; done
    sleep "0.$(printf %03d $((RANDOM % 200)))"
    kill -KILL "$parts_pid" 2>/dev/null || true
    wait "$parts_pid" || status=$?
    ((status == 137)) || fail "the training run ended with status $status before it was killed; raise --train-size, or choose another EVERY (see $folder/parts.txt)"
    echo "killed after $(basename "$(latest)")"
}

losses() { # file of --log: prints step, samples, loss, accuracy and learning rate of each row; a repeated row only once
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        { print $at["step"], $at["samples_seen"], $at["loss"], $at["accuracy"], $at["lr"] }' "$1" | sort -u
}

whole &
whole_pid=$!
finish_whole() {
    wait "$whole_pid" || fail "the uninterrupted training failed: $(tail -n 1 "$folder/whole.txt") (see $folder/whole.txt)"
}
[[ $second ]] || finish_whole
while ((kills-- > 0)); do killed; done
parts --export "$folder/parts.safetensors" &
wait "$!" || fail "the resumed training failed: $(tail -n 1 "$folder/parts.txt") (see $folder/parts.txt)"
[[ ! $second ]] || finish_whole
cmp "$folder/whole.safetensors" "$folder/parts.safetensors" || fail 'the weights differ'
diff <(losses "$folder/whole.csv") <(losses "$folder/parts.csv") || fail 'the losses differ'
! losses "$folder/whole.csv" | grep -qi 'nan\|inf' || fail 'a loss is not finite'
sha256sum "$folder/whole.safetensors" | cut -c 1-64
echo "the same weights and losses, $(losses "$folder/whole.csv" | wc -l) rows; the last: $(tail -n 1 "$folder/whole.csv")"
