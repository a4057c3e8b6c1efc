#!/usr/bin/env bash
# Pre-trains cnn-fdsl on VisualAtom images, fine-tunes it on MNIST, and trains it from scratch for comparison.
# The figure fine_tuning shows these rows.
#
#   scripts/compare/fine_tuning.sh DIR FILE     DIR: a folder with MNIST's four files; FILE: CSV file to append rows to
#
# Environment (defaults in parentheses):
#   VARIANT (train-cuda)    without a GPU, use train-omp
#   CLASSES (1000)          pre-training: number of classes
#   IMAGES (110)            pre-training: images per class; about a tenth of all images are for tests
#   EPOCHS (10)             pre-training: number of epochs
#   PRE                     a folder with a checkpoint to use instead of the pre-training
#   SIZES (1000 60000)      fine-tuning: sizes of the training set
#   SEEDS (0 1 2)           fine-tuning: seeds
#   FDSL_BENCH              the program (default: ./fdsl-bench of this project)
#
# Training from scratch uses the same epochs, batch, learning rate and seeds as fine-tuning.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
(($# == 2)) || { echo 'usage: scripts/compare/fine_tuning.sh DIR FILE' >&2 && exit 2; }
data=$1 out=$2
bench=${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}
variant=${VARIANT:-train-cuda} classes=${CLASSES:-1000}
# Check the variant and the data first, because generating images takes long, and the data are needed only after that.
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

# VisualAtom defines lengths in pixels, so at 64 x 64 most of a drawing would be outside the image. Therefore draw at
# 224 x 224 and shrink.
if [[ ! ${PRE-} ]]; then
    PRE=$work/pre
    "$bench" --prepare "$work/atoms" --from synth --classes "$classes" --samples $((classes * ${IMAGES:-110})) \
        --res 224 --out-res 64 --encode npy
    train --data "$work/atoms" --batch 256 --epochs "${EPOCHS:-10}" --lr 0.002 --checkpoint "$PRE"
fi
for size in ${SIZES:-1000 60000}; do
    epochs=$((size < 20000 ? 40 : 4)) # enough to converge, both pre-trained and from scratch
    for seed in ${SEEDS:-0 1 2}; do
        for init in '' "$PRE"; do
            train --data "$data" --train-size "$size" --batch 50 --epochs $epochs --lr 0.001 --seed "$seed" \
                ${init:+--init "$init"}
        done
    done
done
