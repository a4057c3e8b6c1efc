#!/usr/bin/env bash
# Verifies training on a pipeline of ranks on a machine with GPUs. Compares steps with the reference, and the results of
# all schedules with each other. Tests runs that resume with and without a pipeline, bubbles (the shares of a step in which
# stages wait), refusals, and a rank that is killed. With fewer GPUs than ranks, ranks share GPUs, and bubbles are not checked.
#
#   scripts/check/pipeline_gpu.sh [RANKS]     (default: 2; at most 8)
#
# Prints one line per check, then "N passed, N failed". Exit status 1 if a check failed, 4 if training does not run on
# a GPU here. ONLY=REGEX: run only the checks whose names match. LIMIT=N: time limit per check in seconds (default 600).
# ROWS=FILE: keep the rows that measure bubbles in this file, for the figure `pipeline`.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
export JOBS=1 # parallel checks would disturb the measured bubbles
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh

bench=$(realpath "${FDSL_BENCH:-./fdsl-bench}")
ranks=${1:-2}
[[ $ranks =~ ^[2-8]$ ]] || refuse "'$ranks': give a number of ranks from 2 to 8"
need_variant train-cuda
gpus=$(nvidia-smi -L | grep -c ^GPU)
[[ -z ${CUDA_VISIBLE_DEVICES:-} ]] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
variants='train-cuda train-tf32 train-bf16'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
share_processors

pipeline=(mpirun --bind-to none -n "$ranks" "$bench" --data digits --test-size 50 --parallel pipeline --scaling strong)
piped() { "${pipeline[@]}" "$@"; } # options ...

# All schedules and a repeated run give the same parameters.
same_bits() { # variant
    local schedule name=$work/$1
    for schedule in gpipe 1f1b zb-h1; do
        piped --variant "$1" --model cnn-deep --train-size 203 --batch 37 --microbatches 5 --epochs 2 --schedule $schedule \
            --export "$name-$schedule" || return
    done
    piped --variant "$1" --model cnn-deep --train-size 203 --batch 37 --microbatches 5 --epochs 2 --export "$name-again" &&
        cmp "$name-gpipe" "$name-1f1b" && cmp "$name-gpipe" "$name-zb-h1" && cmp "$name-gpipe" "$name-again"
}

# A run can continue on one rank, and then on the pipeline again.
resumes() { # variant
    piped --variant "$1" --model cnn-deep --train-size 200 --batch 40 --epochs 1 --checkpoint "$work/k-$1" &&
        "$bench" --variant "$1" --data digits --test-size 50 --model cnn-deep --train-size 200 --batch 40 --epochs 2 \
            --checkpoint "$work/k-$1" --resume &&
        piped --variant "$1" --model cnn-deep --train-size 200 --batch 40 --epochs 3 --schedule zb-h1 --checkpoint "$work/k-$1" --resume
}

# The measured bubble must be at most 5 percentage points above the larger of two values. One is the formula, which assumes stages
# of equal cost. The other is the bubble simulated with the measured cost of each stage. zb-h1 must wait less than 1f1b.
bubbles() { # variant
    local schedule rows=${ROWS:-$work/bubbles-$1.csv}
    for schedule in gpipe 1f1b zb-h1; do
        piped --variant "$1" --model cnn-deep --train-size 16384 --batch 4096 --microbatches 8 --epochs 4 --schedule $schedule \
            --out "$rows" >/dev/null || return
    done
    python3 - "$rows" "$1" <<'END'
import csv, statistics, sys
means = {}
for schedule in ("gpipe", "1f1b", "zb-h1"):
    rows = [row for row in csv.DictReader(open(sys.argv[1])) if (row["schedule"], row["variant"]) == (schedule, sys.argv[2])]
    last = max(int(row["epoch"]) for row in rows)
    for row in rows:
        if int(row["epoch"]) == last:
            print(schedule, "rank", row["rank"], row["layers"], "bubble", row["bubble"], "ideal", row["bubble_ideal"],
                  "formula", row["bubble_formula"], "samples/s", row["items_per_s"], "bytes", row["memory_bytes"])
    of_all = [row for row in rows if row["rank"] == "all" and int(row["epoch"]) > 1]
    mean, ideal, formula = (statistics.median(float(row[name]) for row in of_all)
                            for name in ("bubble", "bubble_ideal", "bubble_formula"))
    means[schedule] = mean
    assert mean < max(ideal, formula) + 0.05, (schedule, mean, ideal, formula)
assert means["zb-h1"] < means["1f1b"], means
END
}

killed_rank() { # variant
    local log=$work/killed-$1 pid
    piped --variant "$1" --train-size 10000 --batch 32 --epochs 1000 >"$log" 2>&1 &
    pid=$!
    sleep 15
    kill_last_rank "$log" "$pid" "variant $1 --train-size 10000" "$ranks"
}

# Adam divides the mean of a gradient by the root of its mean square, plus --epsilon. With the default of 1e-8, gradients as
# small as rounding errors get steps of full length, in a direction that rounding chooses. cnn-fdsl has such gradients, so its
# checks use a larger --epsilon.
for variant in $variants; do
    for schedule in gpipe 1f1b zb-h1; do
        check "$variant, $schedule: cnn-deep compared with the reference" piped --variant "$variant" --model cnn-deep --epochs 1 --verify \
            --verify-steps 12 --train-size 93 --batch 11 --microbatches 3 --shift 2 --schedule $schedule
        check "$variant, $schedule: cnn (dropout) compared with the reference" piped --variant "$variant" --model cnn --epochs 1 --verify \
            --verify-steps 12 --train-size 190 --batch 21 --microbatches 8 --schedule $schedule
        check "$variant, $schedule: cnn-fdsl compared with the reference" piped --variant "$variant" --model cnn-fdsl --epochs 1 --verify \
            --verify-steps 5 --train-size 50 --batch 16 --microbatches 16 --epsilon 1e-5 --schedule $schedule
    done
    check "$variant: the same bits with all schedules" same_bits "$variant"
    check "$variant: resumes with and without a pipeline" resumes "$variant"
    ((gpus < ranks)) || check "$variant: bubbles" bubbles "$variant"
done
check 'a killed rank' killed_rank train-cuda
for variant in train-amp train-graph; do
    check "$variant is refused" fails_with 2 'it cannot train a part of a network' "${pipeline[@]}" --variant $variant --batch 16 --train-size 100 --epochs 1
done
check 'live samples are refused' fails_with 2 'use --feed stored' \
    mpirun --bind-to none -n "$ranks" "$bench" --variant train-cuda --parallel pipeline --data synth --batch 16 --train-size 100 --epochs 1
conclude
