#!/usr/bin/env bash
# Pre-trains cnn-fdsl on VisualAtom images, fine-tunes it on MNIST, and trains it from scratch for comparison. With MODEL and
# PRE, fine-tunes another network that is pre-trained already. The figure fine_tuning shows these rows.
#
#   scripts/compare/fine_tuning.sh DIR FILE     DIR: a folder with MNIST's four files, or digits; FILE: CSV file to append rows to
#
# Environment (defaults in parentheses):
#   VARIANT (train-cuda)    without a GPU, use train-omp
#   CLASSES (1000)          pre-training: number of classes
#   IMAGES (110)            pre-training: images per class; a tenth of them are for tests
#   EPOCHS (10)             pre-training: number of epochs
#   MODEL (cnn-fdsl)        the network; another one needs PRE
#   PRE                     a folder with a checkpoint, or a file of --export, to use instead of the pre-training
#   SIZES (1000 60000)      fine-tuning: sizes of the training set
#   SEEDS (0 1 2)           fine-tuning: seeds
#   BATCH (50)              fine-tuning: batch
#   RATE (0.001)            fine-tuning: learning rate
#   TUNE_EPOCHS             fine-tuning: epochs (default: 4 with at least 20,000 samples, otherwise 40)
#   OPTIONS                 fine-tuning: further options of fdsl-bench, such as "--out-res 224 --channels 3"
#   FDSL_BENCH              the program (default: ./fdsl-bench of this project)
#
# Training from scratch uses the same epochs, batch, learning rate and seeds as fine-tuning.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
(($# == 2)) || { echo 'usage: scripts/compare/fine_tuning.sh DIR FILE' >&2 && exit 2; }
data=$1 out=$2 model=${MODEL:-cnn-fdsl}
[[ $model == cnn-fdsl || ${PRE-} ]] || { echo "fine_tuning.sh: MODEL=$model needs PRE, a checkpoint or a file of --export" >&2 && exit 2; }
read -ra options <<<"${OPTIONS-}"
few=(--train-size 1 --batch 1)
[[ ${OPTIONS-} == *--test-size* ]] || few+=(--test-size 1)
bench=${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}
variant=${VARIANT:-train-cuda} classes=${CLASSES:-1000}
# Check the variant and the data first, because generating images takes long, and the data are needed only after that.
"$bench" --variant "$variant" --model "$model" --data "$data" "${few[@]}" "${options[@]}" --dry-run || {
    status=$?
    ((status != 4)) || echo 'fine_tuning.sh: choose another variant, for example VARIANT=train-omp' >&2
    exit $status
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

train() {
    "$bench" --variant "$variant" --model "$model" --lr-schedule cosine --lr-warmup 0.5 --out "$out" "$@"
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
    epochs=${TUNE_EPOCHS:-$((size < 20000 ? 40 : 4))} # enough to converge, both pre-trained and from scratch
    for seed in ${SEEDS:-0 1 2}; do
        for init in '' "$PRE"; do
            train --data "$data" --train-size "$size" --batch "${BATCH:-50}" --epochs "$epochs" --lr "${RATE:-0.001}" \
                --seed "$seed" "${options[@]}" ${init:+--init "$init"}
        done
    done
done
