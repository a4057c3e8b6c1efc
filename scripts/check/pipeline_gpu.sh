#!/usr/bin/env bash
# Verifies training on a pipeline of ranks on a machine with GPUs. Compares steps with the reference, and the results of
# all schedules with each other. Tests samples from every feed, runs that resume with and without a pipeline, replicas of a
# pipeline, bubbles (the shares of a step in which stages wait), refusals, and a rank that is killed. With fewer GPUs than
# ranks, ranks share GPUs, and bubbles are not checked.
#
#   scripts/check/pipeline_gpu.sh [RANKS]     (default: 2; at most 8)
#
# With 4, 6 or 8 ranks, networks are also cut into two stages, which are replicated. Before the last line, prints a table with
# one line per vision transformer: stages, replicas, images/s, bubble, simulated bubble and formula.
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
gpus=$(count_gpus)
variants='train-cuda train-tf32 train-bf16 train-amp'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
share_processors

pipeline=(mpirun --bind-to none -n "$ranks" "$bench" --parallel pipeline --scaling strong)
digits=(--data digits --test-size 50)
piped() { "${pipeline[@]}" "$@"; } # options ...

images=(--data synth --classes 8 --res 64 --train-size 203 --test-size 50 --batch 37)
pairs=() # options of two stages with replicas
((ranks % 2 || ranks < 4)) || pairs=(--stages 2)

# All schedules and a repeated run give the same parameters.
same_bits() { # variant model schedules options ...
    local schedule name=$work/$1-$2 run=(piped --variant "$1" --model "$2" --epochs 2) schedules=$3
    shift 3
    "${run[@]}" "$@" --export "$name.safetensors" || return
    for schedule in $schedules; do
        "${run[@]}" "$@" --schedule "$schedule" --export "$name-$schedule.safetensors" &&
            cmp "$name.safetensors" "$name-$schedule.safetensors" || return
    done
}

# A run that stops after an epoch and continues gives the same parameters as one that does not stop. A run can continue on
# one rank, and then on the pipeline again.
resumes() { # variant model schedule options ...
    local name=$work/k-$1-$2 run=(--variant "$1" --model "$2") schedule=$3
    shift 3
    piped "${run[@]}" "$@" --epochs 2 --export "$name-whole.safetensors" &&
        piped "${run[@]}" "$@" --epochs 1 --checkpoint "$name" &&
        piped "${run[@]}" "$@" --epochs 2 --checkpoint "$name" --resume --export "$name-resumed.safetensors" &&
        cmp "$name-whole.safetensors" "$name-resumed.safetensors" &&
        "$bench" "${run[@]}" "$@" --epochs 3 --checkpoint "$name" --resume &&
        piped "${run[@]}" "$@" --epochs 4 --schedule "$schedule" --microbatches 7 --checkpoint "$name" --resume
}

# Steps on samples of a feed, compared with the reference.
feeds() { # variant model
    local run=(piped --variant "$1" --model "$2" --epochs 1 --verify --verify-steps 6 --microbatches 3) mixes=(--mixup 0.8 --cutmix 1)
    [[ -d $work/set ]] || "$bench" --prepare "$work/set" --from synth --res 64 --classes 8 --samples 96 >/dev/null || return
    "${run[@]}" "${images[@]}" --feed live "${mixes[@]}" &&
        "${run[@]}" "${images[@]}" --feed stored "${mixes[@]}" --erasing 0.5 --shift 2 &&
        "${run[@]}" --data "$work/set" --test-data "$work/set" --batch 16 --feed load "${mixes[@]}" --rand-augment rand-m9 &&
        "${run[@]}" --data "$work/set" --test-data "$work/set" --batch 16 --feed mixed --mix load:0.5,synth:0.5 --res 64 "${mixes[@]}"
}

# Trains a vision transformer on images of 224 x 224 pixels. The bubble must be within 5 percentage points of the formula, and the
# row has both.
table() { # model batch options ...
    local model=$1 batch=$2 rows
    shift 2
    rows=$work/table-$model-$*.csv
    piped --variant train-vit --model "$model" --data synth --classes 100 --res 224 --feed stored --train-size $((8 * batch)) --test-size 64 --batch "$batch" \
        --microbatches 8 --epochs 3 "$@" --out "$rows" >/dev/null || return
    python3 - "$rows" <<'END' | tee -a "$work/table"
import csv, sys
rows = [row for row in csv.DictReader(open(sys.argv[1])) if row["rank"] == "all"]
row = max(rows, key=lambda row: int(row["epoch"]))
ranks = max(int(row["rank"]) for row in csv.DictReader(open(sys.argv[1])) if row["rank"] != "all") + 1
mean, ideal, formula = (100 * float(row[name]) for name in ("bubble", "bubble_ideal", "bubble_formula"))
print(f"{row['model']:10} {row['stages']} stages x {ranks // int(row['stages'])}  {row['schedule']:5} {float(row['items_per_s']):8.0f} images/s  "
      f"bubble {mean:4.1f} %  simulated {ideal:4.1f} %  formula {formula:4.1f} %  {float(row['memory_bytes']) / 1e9:5.1f} GB  {row['exchange']}")
assert abs(mean - formula) < 5, (mean, formula)
END
}

# The measured bubble must be at most 5 percentage points above the larger of two values. One is the formula, which assumes stages
# of equal cost. The other is the bubble simulated with the measured cost of each stage. zb-h1 must wait less than 1f1b.
bubbles() { # variant
    local schedule rows=${ROWS:-$work/bubbles-$1.csv}
    for schedule in gpipe 1f1b zb-h1; do
        piped --variant "$1" --model cnn-deep "${digits[@]}" --train-size 16384 --batch 4096 --microbatches 8 --epochs 4 --schedule $schedule \
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
    piped --variant "$1" --train-size 10000 --batch 32 --epochs 1000 "${digits[@]}" >"$log" 2>&1 &
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
            --verify-steps 12 "${digits[@]}" --train-size 93 --batch 11 --microbatches 3 --shift 2 --schedule $schedule
        check "$variant, $schedule: cnn (dropout) compared with the reference" piped --variant "$variant" --model cnn --epochs 1 --verify \
            --verify-steps 12 "${digits[@]}" --train-size 190 --batch 21 --microbatches 8 --schedule $schedule
        check "$variant, $schedule: cnn-fdsl compared with the reference" piped --variant "$variant" --model cnn-fdsl --epochs 1 --verify \
            --verify-steps 5 "${digits[@]}" --train-size 50 --batch 16 --microbatches 16 --epsilon 1e-5 --schedule $schedule
    done
    check "$variant: the same bits with all schedules" same_bits "$variant" cnn-deep 'gpipe 1f1b zb-h1' "${digits[@]}" --train-size 203 \
        --batch 37 --microbatches 5
    check "$variant: resumes with and without a pipeline" resumes "$variant" cnn-deep zb-h1 "${digits[@]}" --train-size 200 --batch 40
    check "$variant: samples of every feed" feeds "$variant" cnn
    ((gpus < ranks)) || check "$variant: bubbles" bubbles "$variant"
done
for schedule in gpipe 1f1b; do
    check "train-vit, $schedule: vit-tiny compared with the reference" piped --variant train-vit --model vit-tiny --epochs 1 --verify \
        --verify-steps 5 --drop-path 0.2 "${images[@]}" --microbatches 5 --schedule $schedule
done
check 'train-vit: the same bits with all schedules' same_bits train-vit vit-tiny 'gpipe 1f1b' "${images[@]}" --microbatches 5 \
    --drop-path 0.2
check 'train-vit: activations are computed again' piped --variant train-vit --model vit-tiny --epochs 1 --verify --verify-steps 5 \
    --checkpoint-activations "${images[@]}"
check 'train-vit: resumes with and without a pipeline' resumes train-vit vit-tiny gpipe "${images[@]}"
check 'train-vit: samples of every feed' feeds train-vit vit-tiny
if ((${#pairs[@]})); then
    for variant in train-cuda train-amp; do
        check "$variant, replicas: cnn-deep compared with the reference" piped --variant $variant --model cnn-deep --epochs 1 --verify \
            --verify-steps 12 "${digits[@]}" --train-size 93 --batch 11 --microbatches 3 --shift 2 "${pairs[@]}"
    done
    for sync in mpi nccl; do
        check "train-vit, replicas, --sync $sync: the same bits" same_bits train-vit vit-tiny 'gpipe 1f1b' "${images[@]}" "${pairs[@]}" \
            --sync $sync
    done
    check 'train-vit, replicas: vit-tiny compared with the reference' piped --variant train-vit --model vit-tiny --epochs 1 --verify \
        --verify-steps 5 "${images[@]}" "${pairs[@]}"
fi
for model in vit-tiny vit-base; do
    [[ $model == vit-tiny ]] && batch=1024 || batch=512
    ((gpus < ranks)) || check "table: $model" table $model "$batch"
    ((gpus < ranks || !${#pairs[@]})) || check "table: $model, replicas" table $model "$batch" "${pairs[@]}"
done
check 'a killed rank' killed_rank train-cuda
check 'train-graph is refused' fails_with 2 'it cannot train a part of a network' "${pipeline[@]}" --variant train-graph --batch 16 \
    "${digits[@]}" --train-size 100 --epochs 1
wait
[[ ! -f $work/table ]] || cat "$work/table"
conclude
