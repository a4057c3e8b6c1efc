#!/usr/bin/env bash
# Pre-trains cnn-fdsl on VisualAtom images and fine-tunes it on MNIST, beside training from scratch: the rows of the
# figure fine_tuning.
#
#   scripts/fine_tuning.sh DIR FILE     DIR: the four files of MNIST; FILE: the CSV that rows are appended to
#
# VARIANT (train-cuda; without a GPU train-omp), CLASSES (1000) and IMAGES (a class: 110, of which a tenth is for tests) of the pre-training, its
# EPOCHS (10); SIZES of the training set (1000 60000) and SEEDS (0 1 2) of fine-tuning; PRE: a folder whose
# checkpoint is taken in place of a pre-training. Both ways have the same epochs, batch, rate and seeds.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail
(($# == 2)) || { echo 'usage: scripts/fine_tuning.sh DIR FILE' >&2 && exit 2; }
data=$1 out=$2
bench=${FDSL_BENCH:-$(dirname "$0")/../fdsl-bench}
variant=${VARIANT:-train-cuda} classes=${CLASSES:-1000}
# Before images are made for long. The data too: it is needed last.
"$bench" --variant "$variant" --model cnn-fdsl --data "$data" --train-size 1 --test-size 1 --batch 1 --dry-run || {
    status=$?
    ((status != 4)) || echo 'fine_tuning.sh: name another variant, as with VARIANT=train-omp' >&2
    exit $status
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

train() {
    "$bench" --variant "$variant" --model cnn-fdsl --lr-schedule cosine --lr-warmup 0.5 --out "$out" "$@"
}

# Lengths of an atom are pixels: at 64 x 64 most of it would be outside. So it is drawn at 224 x 224, and made smaller.
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
