#!/usr/bin/env bash
# Checks GPU variants on a machine with a GPU. Kernels launched by kernels must draw the same images as kernels
# launched by the host. Rows must have the time of each stage. Profilers must see ranges and kernels. Training
# must give the same weights in the same time with and without a terminal.
#
#   scripts/check/profile_gpu.sh
#
# Takes half a minute on an H200. Prints one line per check, then "N passed, N failed". Exit status 1 if a check
# failed, 4 if no CUDA variant is available. Skips checks whose tool (ncu or nsys, compute-sanitizer, script) is not
# installed, with a message. ONLY=REGEX: run only the checks whose names match. JOBS=N: parallel checks (default: half
# of the processors, at most 8). LIMIT=N: time limit per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh

bench=${FDSL_BENCH:-./fdsl-bench}
(($# == 0)) || refuse "unknown option '$1'; see --help"
need_variant gbase-device
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
share_processors
has() { # tool, the checks that are skipped without it
    command -v "$1" >/dev/null && return
    echo "skipped, because $1 is not installed: $2" >&2
    return 1
}
quick=(--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0)

# ---- Kernels that launch kernels ----

sizes='1 1 1 1
2 3 31 5
3 5 31 2
257 33 225 7
1021 211 509 13
1500 3 64 2
3 1100 64 2
4096 20 1024 3
3 2 16 1100'
while read -r q k res batch; do
    check "launched by a kernel: $q vertices, $k orbits, $res^2, batch $batch" "$bench" \
        --variant gbase,gbase-device,bat,bat-reuse --verify "${quick[@]}" --vertices "$q" --orbits "$k" --res "$res" --batch "$batch"
done <<<"$sizes"
check 'launched by a kernel: 37 classes' "$bench" --variant gbase,gbase-device,bat --verify "${quick[@]}" --classes 37 --batch 100 \
    --formula visualatom --seed 18446744073709551615
if has compute-sanitizer 'memory checks'; then
    for size in '3 5 31 2' '257 33 64 3' '1500 3 64 2' '3 1100 64 2'; do
        read -r q k res batch <<<"$size"
        check "memcheck: $q vertices, $k orbits, $res^2, batch $batch" compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$bench" --variant gbase-device,bat,fused --verify "${quick[@]}" --vertices "$q" --orbits "$k" --res "$res" --batch "$batch"
    done
fi

# ---- Stages ----

stages() { # variant, columns that must be positive
    local rows=$work/stages-$1.csv name
    "$bench" --variant "$1" --verify --batch 64 --res 224 --max-time 2 --format csv >"$rows" || return
    for name in "${@:2}"; do
        awk -v value="$(columns "$rows" "$name")" 'BEGIN { exit !(value > 0) }' ||
            { echo "$1: $name is $(columns "$rows" "$name")" && return 1; }
    done
}
for variant in gbase gbase-device rng bat bat-reuse; do
    check "stages of $variant" stages $variant noise_s vertices_s painting_s
done
for variant in fused fused-graph; do check "stages of $variant" stages $variant noise_s painting_s; done
same_digest() { # checks, after the stages were timed, that the images equal those of naive
    local variant
    for variant in naive fused fused-graph; do
        "$bench" --variant $variant "${quick[@]}" --batch 5 --res 224 --format csv >"$work/digest-$variant.csv" || return
    done
    for variant in fused fused-graph; do
        [[ $(columns "$work/digest-$variant.csv" digest) == "$(columns "$work/digest-naive.csv" digest)" ]] ||
            { echo "the digest of $variant differs from naive's" && return 1; }
    done
}
check 'timing the stages does not change the images' same_digest

# ---- Profilers ----

profiled() { # words that the tables must contain, arguments of scripts/sweep/profile.sh ...
    local words=$1 output word
    output=$(scripts/sweep/profile.sh --launches 150 "${@:2}" 2>&1) || { echo "$output" && return 1; }
    for word in $words; do grep -q "^[^ ]*$word " <<<"$output" || { echo "no line for '$word' in:" && echo "$output" && return 1; }; done
}
status=0
scripts/sweep/profile.sh fused --batch 2 --res 32 >"$work/profile" 2>&1 || status=$?
if ((status == 4)) || grep -q ERR_NVGPUCTRPERM "$work/profile"; then
    echo "skipped the profiles: $(tail -n 1 "$work/profile")" >&2
else
    check 'profile: gbase' profiled 'noise_kernel vertex_kernel paint_kernel noise vertices painting' gbase --batch 2 --res 64
    check 'profile: fused' profiled 'paint_kernel vertices painting' fused --batch 64 --res 224
    check 'profile: train-cuda' profiled 'update_kernel gather forward backward update' train-cuda --model lenet --data digits \
        --train-size 256 --test-size 64
    check 'profile: train-cuda, live' profiled 'generate gather' train-cuda --model lenet --data synth --res 32 --classes 4 \
        --train-size 256 --test-size 64 --feed live
    check 'profile: train-graph' profiled 'update_kernel graph' train-graph --model cnn --data digits --train-size 2048 --test-size 64
    if grep -q 'shards-gpu  *available' <<<"$list"; then
        "$bench" --prepare "$work/set" --samples 500 --sample-shape 3,32,32 --dtype u8 --classes 0 --shards 4 >/dev/null
        check 'profile: shards-gpu' profiled 'unpack' shards-gpu --data "$work/set" --cache any
    fi
fi

# ---- A terminal ----

if has script 'training on a terminal'; then
    on_terminal() { # command ...
        script -qec "$(printf '%q ' "$@")" "$work/terminal-$BASHPID" </dev/null | cat
        (exit "${PIPESTATUS[0]}")
    }
    same_weights() { # variant, model: 5,000 steps per epoch, so that progress is shown
        local run=("$bench" --variant "$1" --model "$2" --data digits --train-size 10000 --test-size 100 --batch 2 --epochs 2 --lr 0.0002) said
        "${run[@]}" --export "$work/alone-$1" && said=$(on_terminal "${run[@]}" --export "$work/seen-$1") || return
        cmp "$work/alone-$1" "$work/seen-$1" || return
        grep -q "$1: epoch [12] of 2, step [0-9]* of 5000, loss" <<<"$said" || { echo "no progress in: $said" && return 1; }
    }
    check 'train-cuda gives the same weights on a terminal' same_weights train-cuda lenet
    check 'train-graph gives the same weights on a terminal' same_weights train-graph cnn
    same_time() { # variant, model: medians over epochs, within 5 %
        local run=("$bench" --variant "$1" --model "$2" --data digits --train-size 40000 --test-size 100 --batch 256 --epochs 15)
        "${run[@]}" --out "$work/alone-$1.csv" >/dev/null && on_terminal "${run[@]}" --out "$work/seen-$1.csv" >/dev/null || return
        python3 - "$work/alone-$1.csv" "$work/seen-$1.csv" <<'END'
import csv, statistics, sys
alone, seen = (statistics.median(float(row["time_median_s"]) for row in csv.DictReader(open(path))) for path in sys.argv[1:])
print(f"{1e3 * alone:.3f} ms per epoch, {1e3 * seen:.3f} ms on a terminal: {100 * (seen / alone - 1):+.2f} %")
sys.exit(abs(seen / alone - 1) > 0.05)
END
    }
    alone check 'train-graph takes the same time on a terminal' same_time train-graph cnn
    alone check 'train-cuda takes the same time on a terminal' same_time train-cuda lenet
fi
conclude
