#!/usr/bin/env bash
# Makes the rows of results/reference/h200_synth.csv on the machine that it runs on: every variant at three
# sizes, the fast ones over batches, a mixed batch, and outputs. Every image is verified. A few minutes.
#
#   scripts/reference.sh FILE.csv
set -euo pipefail
cd "$(dirname "$0")/.."

bench=${FDSL_BENCH:-./fdsl-bench}
out=${1:?name the file for the rows}
run() { # variants, options ...
    "$bench" --variant "$1" --verify --out "$out" "${@:2}"
}

for res in 224 512 1024; do
    run all --batch 32 --res $res
    run bat,bat-reuse,fused,fused-graph --batch 256 --res $res
done
for batch in 1 8 64 128 512 1024 4096; do
    run bat,fused,fused-graph --batch $batch
done
run bat,fused --batch 256 --classes 256
for res in 224 512; do
    run fused --batch 256 --res $res --output f16
done
run fused --batch 256 --out-res 224
run fused --batch 256 --out-res 224 --output f16 --channels 3
run fused --batch 256 --out-res 224 --fit crop --output f16 --channels 3 --layout nhwc
