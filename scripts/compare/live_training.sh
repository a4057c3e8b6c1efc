#!/usr/bin/env bash
# Compares three kinds of training: on images generated during training; on the same images loaded from shards or from files; and
# on one constant batch, which needs no data feed. The comparison corresponds to the paper's fourth figure. `make plots` draws it
# as training_time.
#
#   scripts/compare/live_training.sh DIR FILE.csv     DIR: a folder on the disk to measure, for the images
#
# Environment (defaults in parentheses):
#   VARIANT (train-cuda)        without a GPU, use train-omp
#   MODEL (cnn), BATCH (64), EPOCHS (3)
#   SAMPLES (20480)             training images per epoch
#   TEST (512)                  test images
#   RES (224), CLASSES (1000)   width and height in pixels; number of classes
#   FDSL_BENCH (./fdsl-bench)   the program
#
# Live and loaded samples are the same, in the same order, so their losses are equal. Prepared images stay in DIR and
# are reused. The trainer reads a data set into memory once. The column opening_s has this time; the time of an epoch
# does not include it.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 the variant cannot run here.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=${FDSL_BENCH:-$root/fdsl-bench}
(($# == 2)) || { echo 'usage: scripts/compare/live_training.sh DIR FILE.csv' >&2 && exit 2; }
dir=$1 out=$2
samples=${SAMPLES:-20480} test=${TEST:-512} res=${RES:-224} classes=${CLASSES:-1000} variant=${VARIANT:-train-cuda}
first_test=2147483648 # instance of the trainer's first test image

prepare() { # layout, part, first image, number of images
    "$bench" --prepare "$dir/$1/$2" --from synth --store "$1" --encode npy --res "$res" \
        --classes "$classes" --instance "$3" --samples "$4" >&2
}
train() { # options ...
    "$bench" --variant "$variant" --model "${MODEL:-cnn}" --batch "${BATCH:-64}" --epochs "${EPOCHS:-3}" --raw \
        --out "$out" "$@"
}

live=(--data synth --classes "$classes" --res "$res" --train-size "$samples" --test-size "$test")
# Check the options first, because generating images takes long.
train "${live[@]}" --feed live --dry-run || {
    status=$?
    ((status != 4)) || echo 'live_training.sh: choose another variant, for example VARIANT=train-omp' >&2
    exit $status
}
mkdir -p "$dir/shards" "$dir/files"
for layout in shards files; do
    prepare $layout train 0 "$samples"
    prepare $layout test $first_test "$test"
done
for feed in live constant; do
    train "${live[@]}" --feed $feed
done
for layout in shards files; do
    train --data "$dir/$layout"
done
