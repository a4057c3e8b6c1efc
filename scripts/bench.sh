#!/usr/bin/env bash
# The first command of the README: every variant that runs here, checked and timed at small sizes. Prints one
# table a size, then two of loading and one of training, and appends the rows to results/synth.csv, load.csv and
# train.csv; results/env.json (or .csv) says on what machine.
set -euo pipefail
cd "$(dirname "$0")/.."

# Sizes of the paper's figures, with a batch that a laptop makes in seconds. Formula and class are the defaults:
# the paper's benchmark class (1000 vertices, 200 orbits).
sizes=${SIZES:-224 512}
batch=${BATCH:-16}
bench=./fdsl-bench

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
for size in $sizes; do
    echo
    $bench --variant all --verify --batch "$batch" --res "$size" --max-time 5 --out results/synth.csv \
        2> >(grep -v ': skipping ' >&2)
done

# The same samples as files and as shards, from the page cache: 33 MB.
if $bench --list | grep -q '^  files  *available'; then
    rm -rf "$samples" && mkdir "$samples"
    shape=(--samples 2000 --sample-shape '3,74,74' --dtype u8)
    $bench --prepare "$samples/files" --layout files "${shape[@]}" >/dev/null
    $bench --prepare "$samples/shards" --layout shards --shards 10 "${shape[@]}" >/dev/null
    for layout in files shards; do
        echo
        $bench --workload load --variant all --data "$samples/$layout" --verify --max-time 5 --out results/load.csv \
            2> >(grep -v ': skipping ' >&2)
    done
fi
# One epoch over digits that are generated.
echo
$bench --workload train --variant all --model lenet --epochs 1 --lr 0.002 --verify --out results/train.csv \
    2> >(grep -v ': skipping ' >&2)
echo
echo "rows: results/*.csv   machine: $machine   more: ./fdsl-bench --help"
