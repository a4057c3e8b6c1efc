#!/usr/bin/env bash
# Pre-trains cnn-fdsl on VisualAtom images and fine-tunes it on MNIST, beside training from scratch: the rows of the
# figure fine_tuning.
#
#   scripts/fine_tuning.sh DIR FILE     DIR: the four files of MNIST; FILE: the CSV that rows are appended to
#
# VARIANT (train-cuda), CLASSES (1000) and IMAGES (200 a class) of the pre-training, its EPOCHS (10); SIZES of the
# training set (100 1000 60000) and SEEDS (0 1 2) of fine-tuning; PRE: a folder whose checkpoint is taken in place of a
# pre-training. Both ways have the same epochs, batch, rate and seeds.
set -euo pipefail
data=${1:?usage: scripts/fine_tuning.sh DIR FILE} out=${2:?usage: scripts/fine_tuning.sh DIR FILE}
bench=${FDSL_BENCH:-$(dirname "$0")/../fdsl-bench}
variant=${VARIANT:-train-cuda} classes=${CLASSES:-1000}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

train() {
    "$bench" --variant "$variant" --model cnn-fdsl --lr-schedule cosine --lr-warmup 0.5 --out "$out" "$@"
}

# Checkpoints hold the identity of rows: --init takes the latest of the folder.
if [[ ! ${PRE-} ]]; then
    PRE=$work/pre
    train --data synth --res 64 --classes "$classes" --train-size $((classes * ${IMAGES:-200})) --test-size 5000 \
        --batch 256 --epochs "${EPOCHS:-10}" --lr 0.002 --checkpoint "$PRE"
fi
for size in ${SIZES:-100 1000 60000}; do
    # So many steps of 50, or three epochs: enough for either way to end.
    epochs=$((size < 20000 ? (size < 1000 ? 100 : 40) : 5))
    for seed in ${SEEDS:-0 1 2}; do
        for init in '' "$PRE"; do
            train --data "$data" --train-size "$size" --batch 50 --epochs $epochs --lr 0.001 --seed "$seed" \
                ${init:+--init "$init"}
        done
    done
done
