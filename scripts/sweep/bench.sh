#!/usr/bin/env bash
# Verifies and times every available variant of synth, load, train and infer at small sizes. Prints one table for generating, two for loading,
# two for training and one for inference. Appends rows to synth.csv, load.csv, train.csv and infer.csv in results/,
# and writes a description of the machine to results/env.json (env.csv without jansson). `make bench` calls this script.
#
#   scripts/sweep/bench.sh
#
# Environment: SIZES="224 512", the image sides; BATCH=16, the images per batch.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

(($# == 0)) || { echo "bench.sh: unexpected argument '$1'; see --help" >&2 && exit 2; }

# Common image sizes, with a batch that a laptop generates in seconds. Formula and class keep their
# defaults: the paper's formula and its benchmark class (1000 vertices, 200 orbits).
sizes=${SIZES:-224 512}
batch=${BATCH:-16}
bench=./fdsl-bench

every() # variants, other options; hides messages about unavailable variants, which --list has shown
{
    echo
    $bench --variant "$1" --verify "${@:2}" 2> >(grep -v ': skipping ' >&2)
}

mkdir -p results
machine=results/env.json
samples=results/.bench_samples
trap 'rm -rf "$samples"' EXIT
if ! $bench --env --format json >"$machine.tmp" 2>/dev/null; then # a build without jansson
    machine=results/env.csv
    $bench --env --format csv >"$machine.tmp"
fi
mv "$machine.tmp" "$machine"
$bench --list
every all --batch "$batch" --res "${sizes// /,}" --max-time 5 --out results/synth.csv

# Reads the same samples (33 MB) as files and as shards, from the page cache.
rm -rf "$samples" && mkdir "$samples"
if $bench --list | grep -q '^  files  *available'; then
    shape=(--samples 2000 --sample-shape '3,74,74' --dtype u8)
    $bench --prepare "$samples/files" --store files "${shape[@]}" >/dev/null
    $bench --prepare "$samples/shards" --store shards --shards 10 "${shape[@]}" >/dev/null
    for layout in files shards; do
        every all --workload load --data "$samples/$layout" --max-time 5 --out results/load.csv
    done
fi

# Three epochs over generated digits are enough for the curves in the figures. train-naive would take minutes with cnn, and
# train-graph supports only cnn. Inference needs a trained network, but its speed does not depend on the weights.
digits=(--lr 0.002 --train-size 3000 --test-size 1000 --epochs 3 --out results/train.csv)
every all --workload train --model lenet "${digits[@]}"
others=$($bench --list | awk '/^  train-/ && $1 != "train-naive" && $2 == "available" { print $1 }' | paste -sd,)
[[ ! $others ]] || every "$others" --model cnn "${digits[@]}" --verify-steps 1
$bench --variant train-naive --model cnn --train-size 64 --test-size 64 --epochs 1 --checkpoint "$samples/network" >/dev/null
every all --workload infer --checkpoint "$samples/network" --max-time 5 --out results/infer.csv
echo
echo "rows: results/*.csv   machine: $machine   more: ./fdsl-bench --help, make help"
