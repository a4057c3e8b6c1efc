#!/usr/bin/env bash
# Training on images that are generated meanwhile against the same images loaded: from shards, and from a file each; and
# against one constant batch, which needs no supply. The paper's fourth figure with our trainer: make plots draws
# training_time of it.
#
#   scripts/live_training.sh DIR FILE.csv     DIR: where the images are made, on the disk that is to be measured
#
# VARIANT (train-cuda; without a GPU train-omp), MODEL (cnn), BATCH (64), SAMPLES (20480): images of an epoch, RES (224): their side, CLASSES
# (1000), EPOCHS (3), TEST (512): images to test with. The samples and their order are the same in all, so losses are too.
# FDSL_BENCH: the program (./fdsl-bench). What is prepared stays, and is taken again.
#
# The trainer reads a dataset once, into memory: that is opening_s in the rows, and what an epoch takes comes after it.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bench=${FDSL_BENCH:-$root/fdsl-bench}
(($# == 2)) || { echo 'usage: scripts/live_training.sh DIR FILE.csv' >&2 && exit 2; }
dir=$1 out=$2
samples=${SAMPLES:-20480} test=${TEST:-512} res=${RES:-224} classes=${CLASSES:-1000} variant=${VARIANT:-train-cuda}
first_test=2147483648 # where the trainer's test images begin

prepare() { # layout, part, first image, images
    "$bench" --prepare "$dir/$1/$2" --from synth --layout "$1" --encode npy --res "$res" \
        --classes "$classes" --instance "$3" --samples "$4" >&2
}
train() { # options ...
    "$bench" --variant "$variant" --model "${MODEL:-cnn}" --batch "${BATCH:-64}" --epochs "${EPOCHS:-3}" --raw \
        --out "$out" "$@"
}

# Before images are made for long.
"$bench" --variant "$variant" --train-size 1 --test-size 1 --batch 1 --dry-run || {
    status=$?
    ((status != 4)) || echo 'live_training.sh: name another variant, as with VARIANT=train-omp' >&2
    exit $status
}
mkdir -p "$dir/shards" "$dir/files"
for layout in shards files; do
    prepare $layout train 0 "$samples"
    prepare $layout test $first_test "$test"
done
for feed in live constant; do
    train --data synth --feed $feed --classes "$classes" --res "$res" --train-size "$samples" --test-size "$test"
done
for layout in shards files; do
    train --data "$dir/$layout"
done
