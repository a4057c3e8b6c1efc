#!/usr/bin/env bash
# Pre-trains cnn-fdsl on VisualAtom images, fine-tunes it on MNIST, and trains it from scratch for comparison:
# the rows of the figure fine_tuning.
#
#   scripts/compare/fine_tuning.sh DIR FILE     DIR: the four files of MNIST; FILE: the CSV that rows are appended to
#
# Environment: VARIANT (train-cuda, or train-omp without a GPU); for pre-training, CLASSES (1000), IMAGES per class
# (110, a tenth of them for tests) and EPOCHS (10); for fine-tuning, SIZES of the training set (1000 60000) and SEEDS
# (0 1 2). PRE: a folder with a checkpoint that replaces the pre-training. Training from scratch uses the same epochs,
# batch, learning rate and seeds.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
(($# == 2)) || { echo 'usage: scripts/compare/fine_tuning.sh DIR FILE' >&2 && exit 2; }
data=$1 out=$2
bench=${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}
variant=${VARIANT:-train-cuda} classes=${CLASSES:-1000}
# Check the variant and the data first, because generating images takes long and the data is needed last.
"$bench" --variant "$variant" --model cnn-fdsl --data "$data" --train-size 1 --test-size 1 --batch 1 --dry-run || {
    status=$?
    ((status != 4)) || echo 'fine_tuning.sh: choose another variant, for example VARIANT=train-omp' >&2
    exit $status
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

train() {
    "$bench" --variant "$variant" --model cnn-fdsl --lr-schedule cosine --lr-warmup 0.5 --out "$out" "$@"
}

# Lengths of an atom are in pixels: at 64 x 64 most of it would be outside. So draw at 224 x 224 and shrink.
if [[ ! ${PRE-} ]]; then
    PRE=$work/pre
    "$bench" --prepare "$work/atoms" --from synth --classes "$classes" --samples $((classes * ${IMAGES:-110})) \
        --res 224 --out-res 64 --encode npy
    train --data "$work/atoms" --batch 256 --epochs "${EPOCHS:-10}" --lr 0.002 --checkpoint "$PRE"
fi
for size in ${SIZES:-1000 60000}; do
    epochs=$((size < 20000 ? 40 : 4)) # enough for either way to end
    for seed in ${SEEDS:-0 1 2}; do
        for init in '' "$PRE"; do
            train --data "$data" --train-size "$size" --batch 50 --epochs $epochs --lr 0.001 --seed "$seed" \
                ${init:+--init "$init"}
        done
    done
done
