#!/usr/bin/env bash
# Verifies the trainers on a machine with a GPU. Compares layers, networks and the losses of 50 steps with the reference, for
# odd sizes. Checks that repeated and resumed runs are bit-identical, that samples generated during training (live) equal
# stored ones, that samples read during training (--feed load; ONLY='^load:') give the reference's losses with any number of
# threads, and that the trainer continues from a checkpoint of train-naive. With --sanitize, runs layers, short training
# runs and inference under compute-sanitizer. --engine selects another variant than train-cuda. For tf32, bf16 and amp, the
# gemms on tensor cores are also checked bit for bit. The tests of the kernels for live samples, streams and augmentation, of
# cuDNN and of train-graph run only with --engine cuda, the default. Processes block each other in the JPEG engines of a GPU, so
# checks of the engines run alone, and the other checks decode by CPU threads.
#
#   scripts/check/train_gpu.sh [--engine cuda|tf32|bf16|amp|vit|vit-amp|resnet|resnet-amp] [--sanitize]
#
# Prints one line per check, then "N passed, N failed". Exit status 1 if a check failed, 4 if the trainer is not
# available. ONLY=REGEX: run only the checks whose names match. JOBS=N: parallel checks (default: half of the
# processors, at most 8). LIMIT=N: time limit per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh # in parallel: most time goes to CUDA initialisation and the single-threaded reference

bench=${FDSL_BENCH:-./fdsl-bench}
kernels=${FDSL_GPU_TRAIN:-build/tests/gpu_train}
products=${FDSL_GPU_TENSOR:-build/tests/gpu_tensor}
engine=cuda
live=${FDSL_GPU_LIVE:-build/tests/gpu_live}
streams=${FDSL_GPU_STREAM:-build/tests/gpu_stream}
library=${FDSL_GPU_LIB:-build/tests/gpu_lib}
graph_kernels=${FDSL_GPU_GRAPH:-build/tests/gpu_graph}
augment_kernels=${FDSL_GPU_AUGMENT:-build/tests/gpu_augment}
sanitize=0
while (($#)); do
    case $1 in
    --engine)
        engine=${2:-}
        [[ $engine =~ ^(cuda|tf32|bf16|amp|vit|vit-amp|resnet|resnet-amp)$ ]] ||
            refuse "--engine '$engine': the engines are cuda, tf32, bf16, amp, vit, vit-amp, resnet and resnet-amp"
        shift
        ;;
    --sanitize) sanitize=1 ;;
    *) echo "check/train_gpu.sh: unknown option '$1'; see --help" >&2 && exit 2 ;;
    esac
    shift
done
need_variant "train-$engine"
family=${engine%-amp} # vit and resnet in either 16-bit type

# small, model: the networks of the checks that train; small is for checks with many steps. infer: the variant for inference.
# nets: the layers and networks to compare with the reference; sanitized: those to run under compute-sanitizer.
small=lenet model=cnn infer=infer-cuda
nets='linear relu conv conv_deep pool pool_deep dropout mean add add_pool add_rows logreg mlp lenet cnn cnn3d cnn-fdsl large'
sanitized='relu conv conv_deep pool pool_deep dropout cnn3d mean add add_pool'
tools='memcheck racecheck initcheck synccheck'
[[ ! $engine =~ ^(tf32|bf16)$ ]] || infer=infer-$engine
if [[ $family == vit ]]; then
    small=vit-micro model=vit-micro infer=infer-vit
    nets='vit-micro vit64 vit128 vit192 vit200 vit256 vit384 vit768 vit1024 vit-tiny vit-base vit-large' sanitized='vit-micro vit64 vit128 vit200 vit1024'
    # cuBLASLt's kernels (nvjet_*) copy through TMA, and initcheck does not see what they write.
    tools='memcheck racecheck synccheck'
fi

if [[ $family == resnet ]]; then
    small=resnet-micro model=resnet-micro infer=infer-resnet
    nets='resnet-micro residual' sanitized='resnet-micro residual'
    tools='memcheck racecheck synccheck' # initcheck: as for vit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
share_processors

# Runs a command under a tool of compute-sanitizer. racecheck does not see the barriers of copies by TMA, so it reports races in
# cuBLASLt's kernels (nvjet_*). With a filter by kernel name, racecheck itself fails with an internal error. So it checks all
# kernels, and every hazard that it counts must be in a kernel of cuBLASLt.
under() { # tool, command ...
    local log hazards options=(--error-exitcode 9)
    [[ $1 != racecheck ]] || options=(--print-limit 0)
    log=$(mktemp -p "$work")
    compute-sanitizer --tool "$1" "${options[@]}" "${@:2}" >"$log" 2>&1 || { cat "$log" && return 1; }
    [[ $1 == racecheck ]] || return 0
    hazards=$(sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazard.*/\1/p' "$log")
    [[ $hazards == "$(grep -c 'Race reported between .* access at nvjet_' "$log")" ]] || { cat "$log" && return 1; }
}

augmented='--fit random-resized-crop --flip --rand-augment 28 --erasing 0.25'
if ((sanitize)); then
    for tool in $tools; do
        for net in $sanitized recipe masked multi-hot; do
            check "$tool: $net" under "$tool" "$kernels" --engine "$engine" --short "$net"
        done
        if [[ $engine == cuda ]]; then
            check "$tool: live and loaded samples" under "$tool" "$live" --short
            check "$tool: augmentation" under "$tool" "$augment_kernels" --short
            check "$tool: streams on the device" under "$tool" "$streams" --short cpu
            # initcheck would also check memory that nvJPEG's own kernels write.
            [[ $tool == initcheck ]] || alone check "$tool: streams that decode on the device" under "$tool" \
                "$streams" --short hardware hybrid
        elif [[ ! $family =~ ^(vit|resnet)$ ]]; then
            check "$tool: gemms" under "$tool" "$products" --short
        fi
        check "$tool: an epoch, a test, a checkpoint" under "$tool" \
            "$bench" --variant "train-$engine" --model "$model" --data digits --train-size 20 --test-size 9 --batch 7 --epochs 1 \
            --shift 2 --flip --checkpoint "$work/$tool"
        # shellcheck disable=SC2086  # several words on purpose
        check "$tool: an epoch of augmented and mixed samples" under "$tool" \
            "$bench" --variant "train-$engine" --model "$model" --data synth --res 40 --out-res 32 --classes 5 --train-size 20 \
            --test-size 9 --batch 8 --epochs 1 $augmented --repeats 2 --mixup 0.8 --cutmix 1
        # shellcheck disable=SC2086  # several words on purpose
        [[ $family == resnet ]] || # it has no parts
            check "$tool: an epoch of augmented and mixed samples, in parts" under "$tool" \
            "$bench" --variant "train-$engine" --model "$model" --data synth --res 40 --out-res 32 --classes 5 \
            --train-size 20 --test-size 9 --batch 8 --epochs 1 $augmented --repeats 2 --mixup 0.8 --cutmix 1 --accumulate 3
        [[ $engine == cuda ]] || continue
        check "$tool: train-graph's kernels" under "$tool" "$graph_kernels" --short 2 9 22 27 34
        check "$tool: train-graph: a long graph, a test, a checkpoint" under "$tool" \
            "$bench" --variant train-graph --model cnn --data digits --train-size 75 --test-size 9 --batch 2 --epochs 1 \
            --shift 2 --flip --checkpoint "$work/$tool-graph"
        # With more than 128 samples per batch, blocks process a second sample and a second stage of rows. The last
        # batch has 6 samples.
        check "$tool: train-graph: a batch of 129, and a short one" under "$tool" \
            "$bench" --variant train-graph --model cnn --data digits --train-size 135 --test-size 9 --batch 129 --epochs 1
    done
    wait # the next checks read the checkpoints
    for tool in $tools; do
        check "$tool: inference" under "$tool" \
            "$bench" --variant "$infer" --data digits --train-size 20 --test-size 9 --batch 4 \
            --checkpoint "$work/$tool" --min-samples 1 --min-time 0 --max-time 0
        [[ $engine == cuda ]] || continue
        check "$tool: infer-graph" under "$tool" \
            "$bench" --variant infer-graph --data digits --train-size 75 --test-size 9 --batch 4 \
            --checkpoint "$work/$tool-graph" --min-samples 1 --min-time 0 --max-time 0
    done
    conclude
    exit
fi

for net in $nets; do
    check "compared with the reference: $net" "$kernels" --engine "$engine" "$net"
done

check 'compared with the reference: clipping, averages, layer decay, steps in parts' "$kernels" --engine "$engine" recipe
check 'load: masked samples compared with the reference; a planted fault is found' "$kernels" --engine "$engine" masked
check 'multi-hot labels compared with the reference; a planted fault is found' "$kernels" --engine "$engine" multi-hot
[[ $engine == cuda ]] || check 'compared with the reference: layers in fp32' "$kernels" --engine "$engine" fp32
several=(--data synth --preset multifractal-1k --classes 37 --res 28 --train-size 200 --test-size 60 --batch 33)
several_classes() { # images with several classes: live (fresh) ones that the device or the host draws, and a prepared set
    local run=("$bench" --variant "train-$engine" --model "$model" --loss bce --epochs 2 --verify) generator feed
    for generator in fused omp; do
        "${run[@]}" "${several[@]}" --fresh --mixup 0.8 --cutmix 1 --generator $generator --export "$work/several-$generator" ||
            return
    done
    cmp "$work/several-fused" "$work/several-omp" || return
    "$bench" --prepare "$work/several" --from synth --preset multifractal-1k --classes 37 --res 28 --samples 300 || return
    for feed in load stored; do
        "${run[@]}" --data "$work/several" --feed $feed --batch 33 --checkpoint "$work/several-$feed" || return
    done
    "$bench" --variant "$infer,infer-naive" --verify --checkpoint "$work/several-load" --min-samples 1 --min-time 0 --max-time 0
}
check 'images with several classes: live, fresh, loaded and stored; the same weights from both generators' several_classes
[[ $engine != cuda ]] || check 'live and loaded samples: their bits, their order on two streams, the same weights' "$live"
[[ $engine != cuda ]] || alone check 'load: samples from files: their bits, their order on two streams, planted faults' "$live" --loaded
[[ $engine != cuda ]] || alone check 'load: streams on the device: their bits, broken files, seeks, memory, planted faults' "$streams"
[[ $engine != cuda ]] || alone check 'libfdsl: batches in device memory: their bits, lifetimes, graphs, host time, planted faults' "$library"
[[ $engine != cuda ]] || check 'augmentation: the bits of the host, for all operations and odd sizes' "$augment_kernels"

# model data batch train-size extra options. Each line trains 50 steps, over several epochs if epochs are short. The
# network must not memorise the samples, because the remaining loss would be rounding error.
grid="logreg digits 1 60
logreg digits 257 700 --optimizer sgd --lr 0.01
lenet digits 1 60 --optimizer sgd --lr 0.001
lenet digits 7 20 --optimizer adamw --weight-decay 0.01 --lr-schedule cosine --lr-warmup 0.5
lenet digits 257 600 --shift 2 --flip
lenet synth 33 400 --res 40 --classes 7 --shift 2 --flip
lenet synth 7 20 --res 33 --feed constant
cnn digits 1 60 --optimizer sgd --lr 0.001
cnn-fdsl synth 7 20 --res 16 --optimizer sgd --lr 0.01 --shift 2
cnn digits 16 800
cnn digits 7 20 --label-smoothing 0.1 --optimizer sgd --lr 0.01
cnn digits 7 20 --mixup 0.8 --cutmix 1 --label-smoothing 0.1 --optimizer sgd --lr 0.01
lenet digits 1 20 --mixup 0.8 --optimizer sgd --lr 0.01
lenet synth 33 400 --res 40 --classes 7 --shift 2 --flip --mixup 0.8 --cutmix 1 --loss bce
cnn3d clips 1 60
cnn3d clips 7 20 --optimizer sgd --lr 0.01 --lr-schedule step --lr-step 5
lenet digits 7 20 --optimizer adamw --weight-decay 0.01 --clip-norm 0.5 --ema 0.99 --accumulate 3
lenet synth 33 400 --res 40 --classes 7 --shift 2 --flip --accumulate 4 --clip-norm 1
cnn-fdsl synth 7 20 --res 16 --optimizer sgd --lr 0.01 --accumulate 7 --ema 0.9
cnn digits 7 20 --mixup 0.8 --cutmix 1 --label-smoothing 0.1 --optimizer sgd --lr 0.01 --accumulate 3
lenet synth 33 400 --res 40 --classes 7 --shift 2 --flip --mixup 0.8 --cutmix 1 --loss bce --accumulate 7
lenet synth 33 400 --res 60 --out-res 41 --classes 7 $augmented --interpolation bicubic --repeats 3
lenet synth 33 400 --res 60 --out-res 41 --classes 7 $augmented --repeats 3 --mixup 0.8 --cutmix 1
lenet synth 33 400 --res 60 --out-res 41 --classes 7 $augmented --repeats 3 --mixup 0.8 --cutmix 1 --accumulate 7
lenet synth 16 100 --res 60 --out-res 30 --channels 1 --feed stored $augmented --accumulate 3 --clip-norm 1
lenet synth 16 100 --res 60 --out-res 30 --channels 1 --feed stored --shift 2 $augmented
lenet digits 16 100 --optimizer lamb --lr 0.01 --weight-decay 0.02 --clip-norm 1 --ema 0.9 --ema-warmup
cnn digits 16 100 --optimizer muon --weight-decay 0.02 --clip-adaptive 0.05 --ema 0.9 --dropout 0.1
cnn3d clips 7 40 --optimizer muon --momentum 0.95 --accumulate 3
lenet digits 16 100 --optimizer sgd --lr 0.01 --clip-value 0.01 --loss bce --bce-sum --bce-threshold 0.2 --bce-pos-weight 2"
[[ $family != vit ]] || grid="vit-micro digits 1 60 --optimizer sgd --lr 0.01
vit-micro digits 257 600 --shift 2 --flip
vit-micro digits 7 20 --optimizer adamw --weight-decay 0.05 --lr-schedule cosine --lr-warmup 0.5 --label-smoothing 0.1
vit-micro digits 64 200 --checkpoint-activations --optimizer sgd --lr 0.01
vit-micro digits 7 20 --mixup 0.8 --cutmix 1 --label-smoothing 0.1 --optimizer sgd --lr 0.01
vit-micro synth 33 400 --res 40 --classes 7 --shift 2 --flip --mixup 0.8 --cutmix 1 --loss bce
vit-micro synth 33 400 --res 40 --classes 7 --shift 2 --flip
vit-micro synth 7 20 --res 64 --out-res 32 --fit crop --feed constant
vit-tiny synth 3 9 --res 32 --optimizer sgd --lr 0.01
vit-micro digits 7 20 --optimizer adamw --weight-decay 0.05 --clip-norm 0.5 --ema 0.99 --layer-decay 0.75 --drop-path 0.2
vit-micro digits 64 200 --accumulate 3 --checkpoint-activations --ema 0.9 --optimizer sgd --lr 0.01
vit-micro synth 33 400 --res 40 --classes 7 --accumulate 4 --clip-norm 1
vit-micro digits 7 20 --mixup 0.8 --cutmix 1 --label-smoothing 0.1 --optimizer sgd --lr 0.01 --accumulate 3
vit-micro synth 33 400 --res 40 --classes 7 --shift 2 --flip --mixup 0.8 --cutmix 1 --loss bce --accumulate 7
vit-micro synth 33 400 --res 60 --out-res 32 --classes 7 $augmented --interpolation bicubic --repeats 3
vit-micro synth 33 400 --res 60 --out-res 32 --classes 7 $augmented --repeats 3 --mixup 0.8 --cutmix 1
vit-micro synth 33 400 --res 60 --out-res 32 --classes 7 $augmented --repeats 3 --mixup 0.8 --cutmix 1 --accumulate 7
vit-micro synth 16 100 --res 60 --out-res 32 --feed stored $augmented --accumulate 3 --clip-norm 1
vit-micro synth 16 100 --res 60 --out-res 32 --feed stored --shift 2 $augmented
vit-micro digits 16 100 --optimizer lamb --lr 0.01 --weight-decay 0.05 --clip-norm 1 --layer-decay 0.8
vit-micro digits 16 100 --optimizer muon --weight-decay 0.05 --ema 0.9 --layer-decay 0.8
vit-tiny synth 3 9 --res 32 --optimizer muon --clip-adaptive 0.05
vit-micro digits 16 100 --optimizer sgd --lr 0.01 --clip-value 0.01 --loss bce --bce-sum --bce-pos-weight 2"
[[ $family != resnet ]] || grid="resnet-micro digits 32 96 --optimizer sgd --lr 0.01
resnet-micro digits 257 600 --shift 2 --flip --optimizer sgd --lr 0.01
resnet-micro synth 33 99 --res 40 --classes 7 --shift 2 --flip --optimizer sgd --lr 0.01 --clip-norm 1 --ema 0.9
resnet-micro synth 33 99 --res 60 --out-res 41 --classes 7 $augmented --repeats 3 --mixup 0.8 --cutmix 1 --optimizer sgd --lr 0.01
resnet-micro synth 33 99 --res 40 --classes 7 --erasing 0.9 --erase-last --mixup 0.8 --cutmix 1 --optimizer sgd --lr 0.01
resnet-micro digits 32 96 --optimizer sgd --lr 0.01 --clip-adaptive 0.05 --ema 0.9
resnet-micro digits 32 96 --optimizer muon --clip-value 0.01 --ema 0.9"
while read -r net data batch size extra; do
    # shellcheck disable=SC2086  # several words on purpose
    check "50 steps of $net, $data, batch $batch of $size $extra" "$bench" --variant "train-$engine" --verify \
        --verify-steps 50 --model "$net" --data "$data" --batch "$batch" --train-size "$size" \
        --test-size "$batch" --epochs 1 $extra
done <<<"$grid"
[[ $family =~ ^(cuda|vit|resnet)$ ]] || check 'gemms on tensor cores, bit for bit' "$products"

cudnn() {
    if ! grep -q 'train-cudnn  *available' <<<"$list"; then
        echo "skipped train-cudnn:$(grep ' train-cudnn ' <<<"$list")"
        return
    fi
    # Checks odd filter and image sizes, a partial last batch and 3-D convolutions. Then checks that two runs give
    # bit-identical results.
    while read -r net data batch size extra; do
        # shellcheck disable=SC2086  # several words on purpose
        check "cuDNN: $net, $data, batch $batch of $size $extra" "$bench" --variant train-cudnn,train-cudnn-tf32 --verify \
            --model "$net" --data "$data" --batch "$batch" --train-size "$size" --test-size 50 --epochs 1 $extra
    done <<<$'lenet digits 1 60\nlenet digits 257 600\ncnn digits 16 250\ncnn3d clips 7 20\nlenet synth 33 400 --feed live'
    # --verify repeats each epoch, which ends with a short batch, and requires the same bits. The bits are the same because
    # a layer measures its algorithms only once per batch size. The optimizer is SGD, because the fastest algorithm may round
    # more than others, and Adam amplifies rounding.
    while read -r net data batch size extra; do
        # shellcheck disable=SC2086  # several words on purpose
        check "cuDNN, measured: $net, $data, batch $batch of $size $extra" "$bench" --variant train-cudnn,train-cudnn-tf32 \
            --cudnn-benchmark --verify --model "$net" --data "$data" --batch "$batch" --train-size "$size" --test-size 50 \
            --epochs 2 --optimizer sgd --lr 0.01 $extra
    done <<<$'lenet digits 257 600\ncnn digits 16 250\ncnn3d clips 7 20\ncnn-fdsl synth 33 100 --res 32'
    check '--cudnn-benchmark is refused without cuDNN' fails_with 2 'works only with train-cudnn' \
        "$bench" --variant train-cuda --cudnn-benchmark --model lenet --train-size 256
    same_by_cudnn() {
        "$bench" --variant train-cudnn --data digits --train-size 500 --epochs 2 --export "$work/four" &&
            "$bench" --variant train-cudnn --data digits --train-size 500 --epochs 2 --export "$work/five" &&
            cmp "$work/four" "$work/five"
    }
    check 'cuDNN: the same seed gives the same weights' same_by_cudnn
}
[[ $engine != cuda ]] || cudnn

train=("$bench" --variant "train-$engine" --model "$model" --data digits --train-size 1000 --test-size 300 --batch 64 --shift 2)
same_weights() { # name, command: compares two runs of three epochs, and a run that stops after one epoch and is resumed
    local name=$work/$1 run=("${@:2}")
    "${run[@]}" --epochs 3 --export "$name-one" && "${run[@]}" --epochs 3 --export "$name-two" &&
        "${run[@]}" --epochs 1 --checkpoint "$name" &&
        "${run[@]}" --epochs 3 --checkpoint "$name" --resume --export "$name-resumed" &&
        cmp "$name-one" "$name-two" && cmp "$name-one" "$name-resumed"
}
check 'the same seed gives the same weights, resumed or not' same_weights part "${train[@]}"
recipe=(--clip-norm 0.5 --ema 0.99 --accumulate 3) # with --ema, exports contain the average of the weights
[[ $family != vit ]] || recipe+=(--layer-decay 0.75 --drop-path 0.2)
[[ $family != resnet ]] || recipe=(--clip-norm 0.5 --ema 0.99)
check 'clipping, averages and parts: the same weights, resumed or not' same_weights recipe "${train[@]}" "${recipe[@]}"
check 'lamb: the same weights, resumed or not' same_weights lamb "${train[@]}" --optimizer lamb --weight-decay 0.02 --ema 0.9 \
    --ema-warmup
check 'muon: the same weights, resumed or not' same_weights muon "${train[@]}" --optimizer muon --clip-adaptive 0.05
latest() { # folder: prints its latest checkpoint, or the pattern itself if there is none
    local all=("$1"/*.ckpt)
    echo "${all[-1]}"
}
# Starts a training run, and kills it up to `most` ms after its first checkpoint whose name matches the pattern.
killed_after() { # pattern, most, folder of checkpoints, command ...
    local before pid status=0
    before=$(latest "$3")
    "${@:4}" &
    pid=$!
    # shellcheck disable=SC2053  # a pattern
    while kill -0 $pid 2>/dev/null && { [[ $(latest "$3") == "$before" ]] || [[ $(latest "$3") != $1 ]]; }; do sleep 0.002; done
    (($2 == 1)) || sleep "0.$(printf %03d $((RANDOM % $2)))"
    kill -KILL $pid && wait $pid || status=$?
    ((status == 137)) || { echo "ended with status $status, but should have been killed" && return 1; }
    echo "killed after $(latest "$3")"
}
killed_at_any_moment() { # variant, model, epochs, kills: each kill comes up to 0.2 s after the first checkpoint of its run
    local run=("$bench" --variant "$1" --model "$2" --data digits --train-size 2000 --test-size 100 --batch 64 --shift 2
        --epochs "$3") folder=$work/killed-$1 kills=$4
    "${run[@]}" --export "$folder-whole" || return
    while ((kills-- > 0)); do killed_after '*' 200 "$folder" "${run[@]}" --checkpoint "$folder" --resume || return; done
    "${run[@]}" --checkpoint "$folder" --resume --export "$folder-parts" && cmp "$folder-whole" "$folder-parts"
}
check "train-$engine, killed five times during training, gives the same weights" \
    killed_at_any_moment "train-$engine" "$small" 300 5
# resnet50 trains on JPEG files that it reads and crops during training. The loss must fall from epoch to epoch.
jpeg_epochs() {
    local set=$work/jpegs rows=$work/jpegs.csv
    "$bench" --prepare "$set" --from synth --classes 10 --samples 4000 --res 256 --store shards --encode jpeg &&
        "$bench" --variant train-resnet --model resnet50 --data "$set" --feed load --out-res 224 --fit random-resized-crop \
            --crop-scale 0.2,1 --flip --batch 64 --epochs 2 --optimizer sgd --lr 0.05 --zero-init-last-gamma --out "$rows" &&
        columns "$rows" 'items_per_s train_loss test_acc stall_share' &&
        columns "$rows" train_loss | awk 'NR == 1 { first = $1 } END { exit !(NR == 2 && $1 < first) }'
}
[[ $engine != resnet ]] || alone check 'resnet50: two epochs on JPEG shards' jpeg_epochs
scaled() { # the scale grows by a factor of 4 after steps 3 and 6 of 8
    "$bench" --variant "train-$engine" --model "$small" --data digits --train-size 80 --test-size 9 --batch 10 --epochs 1 \
        --loss-scale 1024 --loss-scale-growth 4 --loss-scale-backoff 0.25 --loss-scale-interval 3 --out "$work/scaled.csv" &&
        [[ $(columns "$work/scaled.csv" 'loss_scale_last skipped_steps') == '16384 0 ' ]]
}
overflowed() { # the first scale overflows; the steps are skipped, their layer is named, and the run resumes with the same bits
    local run=("$bench" --variant "train-$engine" --model "$small" --data digits --train-size 80 --test-size 9 --batch 10
        --loss-scale 16777216) rows
    "${run[@]}" --epochs 2 --out "$work/overflowed.csv" --export "$work/overflowed" || return
    rows=$(columns "$work/overflowed.csv" 'skipped_steps overflow_layers') && echo "$rows" &&
        [[ $rows =~ ^[1-9][0-9]*\ [a-z0-9_.]+=[1-9] ]] &&
        "${run[@]}" --epochs 1 --checkpoint "$work/overflowed-parts" && "${run[@]}" --epochs 2 --checkpoint "$work/overflowed-parts" --resume \
        --export "$work/overflowed-again" && cmp "$work/overflowed" "$work/overflowed-again"
}
if [[ $engine == *amp ]]; then
    check 'loss scaling with other constants' scaled
    check 'overflows are skipped and named' overflowed
fi
layers='conv*'
[[ $family != vit ]] || layers='head,patch_embed*'
[[ $family != resnet ]] || layers='fc'
[[ $engine == cuda ]] || check "--fp32-layers $layers, compared with the reference" "$bench" --variant "train-$engine" --verify --model "$small" \
    --data digits --train-size 200 --test-size 50 --batch 16 --epochs 1 --fp32-layers "$layers"
[[ ! $family =~ ^(vit|resnet)$ ]] || check '--fp32-layers refuses other layers by name' fails_with 2 '--fp32-layers may name' \
    "$bench" --variant "train-$engine" --model "$small" --data digits --train-size 200 --test-size 50 --batch 16 --fp32-layers '*'
within=(--data digits --train-size 5000 --test-size 100 --batch 16 --shift 2)
killed_within_an_epoch() { # name, variant, model, options: checks that checkpoints, tests and kills within epochs change no bits
    local run=("$bench" --variant "$2" --model "$3" "${within[@]}" --epochs 4 "${@:4}") stops=(--checkpoint-steps 100 --log-steps 70 --test-steps 150) folder=$work/within-$1/run kills=3
    local of_epoch='epoch train_loss train_acc test_loss skipped_steps gradient_norm ema_test_loss'
    local of_step='step samples_seen loss accuracy lr gradient_norm test_loss test_acc'
    mkdir "$work/within-$1" || return
    "${run[@]}" --export "$folder-alone" &&
        "${run[@]}" "${stops[@]}" --checkpoint "$folder-whole" --log "$folder-whole.csv" --out "$folder-whole-rows.csv" \
            --export "$folder-stopped" && cmp "$folder-alone" "$folder-stopped" || return
    while ((kills-- > 0)); do
        killed_after '*step*' 1 "$folder" "${run[@]}" "${stops[@]}" --checkpoint "$folder" --log "$folder.csv" \
            --out "$folder-rows.csv" --resume || return
    done
    "${run[@]}" "${stops[@]}" --checkpoint "$folder" --log "$folder.csv" --out "$folder-rows.csv" --resume --verify \
        --export "$folder-parts" && cmp "$folder-alone" "$folder-parts" &&
        diff <(columns "$folder-whole-rows.csv" "$of_epoch") <(columns "$folder-rows.csv" "$of_epoch") &&
        diff <(columns "$folder-whole.csv" "$of_step" | sort -u) <(columns "$folder.csv" "$of_step" | sort -u) &&
        [[ $(columns "$folder.csv" gpu_memory_bytes | tail -n 1) =~ [0-9] ]]
}
check "train-$engine, killed three times within an epoch, gives the same weights, losses and rows of --log" \
    killed_within_an_epoch "$engine" "train-$engine" "$small"
check "train-$engine with ${recipe[*]}, killed three times within an epoch" \
    killed_within_an_epoch "$engine-recipe" "train-$engine" "$small" "${recipe[@]}"
check "train-$engine with mixed samples, killed three times within an epoch" \
    killed_within_an_epoch "$engine-mixed" "train-$engine" "$small" --mixup 0.8 --cutmix 1 --clip-norm 0.5 --ema 0.99
check "train-$engine with mixed samples in parts, killed three times within an epoch" \
    killed_within_an_epoch "$engine-mixed-parts" "train-$engine" "$small" --mixup 0.8 --cutmix 1 --accumulate 3
synth=("$bench" --variant "train-$engine" --model "$small" --data synth --res 48 --classes 20 --train-size 500 --test-size 64 --batch 64 --epochs)
same_images() { # name, options: compares a live run, a stored run, and a stored run that continues live
    local name=$work/$1
    shift
    "${synth[@]}" 2 "$@" --export "$name-live" && "${synth[@]}" 2 "$@" --feed stored --export "$name-stored" &&
        "${synth[@]}" 1 "$@" --feed stored --checkpoint "$name" &&
        "${synth[@]}" 2 "$@" --checkpoint "$name" --resume --export "$name-resumed" &&
        cmp "$name-live" "$name-stored" && cmp "$name-live" "$name-resumed"
}
check 'live and stored samples give the same weights' same_images plain
# shellcheck disable=SC2086  # several words on purpose
check 'augmented live and stored samples give the same weights' same_images augmented --out-res 32 $augmented --repeats 2
check 'mixed live and stored samples give the same weights' same_images mixes --mixup 0.8 --cutmix 1
# shellcheck disable=SC2086  # several words on purpose
check 'augmented and mixed live and stored samples give the same weights' \
    same_images both --out-res 32 $augmented --repeats 2 --mixup 0.8 --cutmix 1
check 'live and stored samples in several parts per step give the same weights' same_images parts --accumulate 5
check 'mixed live and stored samples in several parts per step give the same weights' \
    same_images mixed-parts --accumulate 5 --mixup 0.8 --cutmix 1
# shellcheck disable=SC2086  # several words on purpose
check 'augmented and mixed live and stored samples in several parts per step give the same weights' \
    same_images both-parts --out-res 32 $augmented --repeats 2 --mixup 0.8 --cutmix 1 --accumulate 5
same_generators() { # compares the weights after training on images drawn on the host and on the GPU
    "${synth[@]}" 2 --generator fused --export "$work/fused" && "${synth[@]}" 2 --generator omp --verify --export "$work/omp" &&
        "${synth[@]}" 1 --generator omp --fresh --checkpoint "$work/drawn" &&
        "${synth[@]}" 2 --generator fused --fresh --checkpoint "$work/drawn" --resume --export "$work/drawn-weights" &&
        "${synth[@]}" 2 --fresh --export "$work/auto" &&
        cmp "$work/fused" "$work/omp" && cmp "$work/drawn-weights" "$work/auto"
}
check '--generator omp and fused give the same weights' same_generators
other_generators() { # trains with bat and gbase; runs with other generators must refuse their checkpoints
    for generator in bat gbase; do
        "${synth[@]}" 1 --generator $generator --checkpoint "$work/$generator" &&
            "${synth[@]}" 2 --generator $generator --checkpoint "$work/$generator" --resume &&
            fails_with 2 generator "${synth[@]}" 3 --checkpoint "$work/$generator" --resume || return
    done
}
check '--generator bat and gbase: other generators refuse their checkpoints' other_generators
infers() {
    "${train[@]}" --epochs 1 --checkpoint "$work/trained" &&
        "$bench" --variant "$infer" --verify --data digits --test-size 300 --checkpoint "$work/trained" --batch 257 \
            --min-samples 1 --min-time 0 --max-time 0
}
check "$infer from train-$engine's checkpoint" infers
few_rows() { # few_hopper.cu: 5 to 130 rows (blocks have 64), and each width
    local model res batches
    while read -r model res batches; do
        local images=(--data synth --res "$res" --out-res "$res" --channels 3 --classes 10 --test-size 26)
        "$bench" --variant "train-$engine" --model "$model" "${images[@]}" --train-size 8 --batch 8 --epochs 1 \
            --checkpoint "$work/few-$model-$res" &&
            "$bench" --variant "$infer" --verify "${images[@]}" --batch "$batches" --checkpoint "$work/few-$model-$res" \
                --min-samples 1 --min-time 0 --max-time 0 || return
    done <<<'vit-tiny 32 1,12,13,26
vit-tiny 128 1,2
vit-small 48 1,7
vit-base 32 1,13'
}
[[ $family != vit ]] || check "$infer with few rows" few_rows
same_test() { # with the batch of the training run, the loss of the test set has the same bits as in the training run's last row
    "$bench" --variant "train-$engine" --model "$small" --data digits --train-size 500 --test-size 300 --batch 64 --epochs 2 \
        --checkpoint "$work/tested" --out "$work/tested.csv" &&
        "$bench" --variant "$infer" --data digits --test-size 300 --batch 64 --checkpoint "$work/tested" --min-samples 1 \
            --min-time 0 --max-time 0 --out "$work/infer.csv" &&
        python3 - "$work/tested.csv" "$work/infer.csv" <<'END'
import csv, sys
trained, inferred = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])
for column in ("epoch", "test_loss", "test_acc"):
    print(column, trained[column], inferred[column])
    assert trained[column] and trained[column] == inferred[column]
END
}
[[ $engine == *amp ]] || check "$infer measures the test loss of train-$engine" same_test
goes_on() { # continues from the checkpoint of another variant
    "$bench" --variant train-naive --model "$small" --data digits --train-size 100 --epochs 1 --checkpoint "$work/naive" &&
        "$bench" --variant "train-$engine" --model "$small" --data digits --train-size 100 --epochs 2 --resume --checkpoint "$work/naive" &&
        "$bench" --variant "infer-naive,$infer" --verify --data digits --test-size 70 --checkpoint "$work/naive" \
            --batch 7 --min-samples 1 --min-time 0 --max-time 0
}
check "train-$engine continues from train-naive's checkpoint" goes_on
check 'a NaN loss stops training, with its step and layer' fails_with 1 \
    'epoch 1, step [0-9]* of 4: the loss is not finite; first non-finite result: [a-z]' \
    "$bench" --variant "train-$engine" --model "$small" --data digits --train-size 256 --optimizer sgd --lr 100000
# ---- Samples that are read during training (--feed load) ----

res=41
[[ $family != vit ]] || res=32
# JPEG files of two sizes in class folders; the same samples in shards, and in shards of raw arrays; and a folder with three
# truncated files.
make_loaded() {
    local part file number=0 samples=150
    for part in train test; do
        "$bench" --prepare "$work/photos/$part" --store imagefolder --from synth --classes 5 --encode jpeg --res 61 \
            --samples $samples &&
            "$bench" --prepare "$work/small" --store imagefolder --from synth --classes 5 --encode jpeg --res 47 --samples 61 \
                --seed 3 || return
        for file in "$work"/small/*/*.jpg; do
            mv "$file" "$work/photos/$part/$(basename "$(dirname "$file")")/small-${file##*/}" || return
        done
        rm -r "$work/small" "$work/photos/$part"/{classes.txt,samples.csv,synth.index} &&
            "$bench" --prepare "$work/shards/$part" --store shards --shards 5 --from dataset --source "$work/photos/$part" &&
            "$bench" --prepare "$work/raw/$part" --store shards --shards 3 --from dataset --source "$work/photos/$part" \
                --out-res $res --encode npy --channels 3 || return
        samples=30
    done
    cp -r "$work/photos" "$work/broken" || return
    for file in "$work"/broken/train/*/*.jpg; do
        ((number++ % 70 != 5)) || truncate -s 300 "$file" || return
    done
}
loads() { # set, decoder: prints the options that select them; the default is cpu
    case $1 in
    shards | raw) echo "--data $work/$1/train --test-data $work/$1/test --feed load --decoder ${2:-cpu}" ;;
    *) echo "--data $work/$1 --feed load --decoder ${2:-cpu}" ;;
    esac
}
make_loaded >"$work/made" 2>&1 || { cat "$work/made" && refuse 'cannot make the data sets of --feed load'; }
crops="--out-res $res $augmented"
grid="$small shards 33 $crops
$small shards 33 $crops --repeats 3 --mixup 0.8 --cutmix 1
$small shards 33 $crops --mixup 0.8 --cutmix 1 --accumulate 7 --threads 1
$small photos 1 --out-res $res --optimizer sgd --lr 0.001
$small photos 7 --out-res $res --fit random-resized-crop --shift 2 --lanes 3 --shuffle 50
$small raw 211 --shift 2 --flip --prefetch 1
$small raw 64 --mixup 0.8 --loss bce --drop-last --shuffle 0
$small broken 33 $crops --on-error mask
$small broken 33 --out-res $res --on-error mask --mixup 0.8 --label-smoothing 0.1
$small broken 7 --out-res $res --on-error mask --cutmix 1 --loss bce --accumulate 3 --label-smoothing 0.1
$small broken 1 --out-res $res --on-error mask --optimizer sgd --lr 0.001"
while read -r net set batch extra; do
    # shellcheck disable=SC2046,SC2086  # several words on purpose
    check "load: 10 steps and an epoch of $net, $set, batch $batch of 211 $extra" "$bench" --variant "train-$engine" --verify \
        --verify-steps 10 --model "$net" --batch "$batch" --epochs 2 $(loads "$set") $extra
done <<<"$grid"
# ---- Mixtures (--feed mixed), which train-graph does not support ----

mixed_resumes() { # options: a run that is resumed from each of its checkpoints has the same weights
    local run=("$bench" --variant "train-$engine" --model "$small" "$@" --epochs 2) name=$work/mixed checkpoint
    rm -rf "$name" "$name-again"
    "${run[@]}" --checkpoint "$name" --checkpoint-steps 5 --keep 100 --export "$name-1" || return
    for checkpoint in "$name"/epoch-00000[01]*.ckpt; do
        rm -rf "$name-again"
        mkdir "$name-again"
        cp "$checkpoint" "$name-again"
        "${run[@]}" --threads 3 --checkpoint "$name-again" --resume --export "$name-2" &&
            cmp "$name-1" "$name-2" || return
    done
}
if [[ $engine != graph ]]; then
    mixed="--feed mixed --classes 5 --data $work/shards/train --test-data $work/shards/test --out-res $res --batch 33"
    decoders="--decoder cpu" # of --verify, whose reference decodes with the CPU
    while read -r extra; do
        # shellcheck disable=SC2086  # several words on purpose
        check "mixed: 10 steps and an epoch of $extra" "$bench" --variant "train-$engine" --verify --verify-steps 10 \
            --model "$small" --epochs 2 $mixed $decoders $extra
    done <<<"--mix load:0.3,synth:0.7 --fit random-resized-crop --mixup 0.8
--mix load:0.5,b=$work/broken/train:0.2,synth:0.3 --on-error mask --mix-labels offset --drop-last
--mix load:0.4,b=$work/photos/train:0.2,synth:0.4 --mix-weights-at 5:0.4,0.5,0.1 --flip
--mix synth:auto,load --mix-epoch load"
    # shellcheck disable=SC2086  # several words on purpose
    check 'mixed: runs resume at any checkpoint' mixed_resumes $mixed --mix "load:0.5,b=$work/photos/train:0.2,synth:0.3" \
        --mix-weights-at 9:0.5,0.3,0.2
fi
loading=("$bench" --variant "train-$engine" --model "$small" --mixup 0.8 --flip --rand-augment 9)
weights() { # file of --export: prints it without the header, which names the data set
    python3 -c 'import sys; data = open(sys.argv[1], "rb").read(); sys.stdout.buffer.write(data[8 + int.from_bytes(data[:8], "little"):])' "$1"
}
same_order() { # the same weights for 1 and 5 threads, and for class folders and shards
    local crop=(--out-res "$res" --fit random-resized-crop --epochs 2) name=$work/order
    # shellcheck disable=SC2046  # several words on purpose
    "${loading[@]}" $(loads shards) "${crop[@]}" --threads 1 --prefetch 1 --export "$name-1" &&
        "${loading[@]}" $(loads shards) "${crop[@]}" --threads 5 --prefetch 3 --resident-bytes 1M --export "$name-5" &&
        "${loading[@]}" $(loads photos) "${crop[@]}" --threads 3 --resident-bytes all --export "$name-photos" &&
        "${loading[@]}" $(loads shards) "${crop[@]}" --threads 4 --resident-device-bytes 1M --export "$name-1M" &&
        "${loading[@]}" $(loads photos) "${crop[@]}" --threads 2 --resident-device-bytes 1G --export "$name-1G" &&
        cmp <(weights "$name-1") <(weights "$name-1M") && cmp <(weights "$name-1") <(weights "$name-1G") &&
        cmp <(weights "$name-1") <(weights "$name-5") && cmp <(weights "$name-1") <(weights "$name-photos") &&
        (($(weights "$name-1" | wc -c) > 1000))
}
check 'load: the same weights for any number of threads, from folders and from shards' same_order
decodes_alike() { # decoder, share: the same weights and losses in every run and for 1 and 4 threads; the row names the decoder
    local name=$work/decoded-$1-${2/./} losses='epoch train_loss train_acc test_loss masked'
    # shellcheck disable=SC2207  # several words on purpose
    local run=("${loading[@]}" $(loads shards "$1") --device-share "$2" --out-res "$res" --fit random-resized-crop --epochs 2)
    "${run[@]}" --threads 1 --export "$name-1" --out "$name-1.csv" &&
        "${run[@]}" --threads 4 --export "$name-4" --out "$name-4.csv" &&
        "${run[@]}" --threads 4 --export "$name-again" --prefetch 5 --resident-bytes all --resident-device-bytes 2M &&
        cmp <(weights "$name-1") <(weights "$name-4") && cmp <(weights "$name-1") <(weights "$name-again") &&
        (($(weights "$name-1" | wc -c) > 1000)) &&
        diff <(columns "$name-1.csv" "$losses") <(columns "$name-4.csv" "$losses") &&
        [[ $(columns "$name-1.csv" 'decoder device_share' | sort -u) == "$1 $2 " ]] || return
    # Values of hybrid differ by up to 3, so equal weights would mean that the CPU decoded.
    # shellcheck disable=SC2046  # several words on purpose
    [[ $1 != hybrid ]] || { "${loading[@]}" $(loads shards) --out-res "$res" --fit random-resized-crop --epochs 2 --export "$name-cpu" &&
        ! cmp -s <(weights "$name-1") <(weights "$name-cpu"); }
}
decodes_and_resumes() { # decoder, options: kills runs within an epoch
    # shellcheck disable=SC2207  # several words on purpose
    within=($(loads shards "$1") --out-res "$res" --fit random-resized-crop --batch 1 "${@:2}")
    killed_within_an_epoch "$engine-load-$1" "train-$engine" "$small" --mixup 0.8
}
decodes_broken() { # decoder: three truncated files are masked; with other decoders, a checkpoint is refused
    # shellcheck disable=SC2207  # several words on purpose
    local run=("${loading[@]}" --out-res "$res" --on-error mask --checkpoint "$work/masked-$1")
    # shellcheck disable=SC2046  # several words on purpose
    "${run[@]}" $(loads broken "$1") --epochs 2 --out "$work/masked-$1.csv" &&
        [[ $(columns "$work/masked-$1.csv" masked | sort -u) == '3 ' ]] &&
        fails_with 2 decoder "${run[@]}" $(loads broken) --epochs 3 --resume
}
for decoder in hardware hybrid; do
    # shellcheck disable=SC2046  # several words on purpose
    if ! "${loading[@]}" $(loads shards $decoder) --out-res "$res" --epochs 1 >"$work/$decoder" 2>&1 &&
        grep -qE 'no JPEG engines|nvJPEG not found|no nvjpeg\.h|nvJPEG cannot be used with this GPU' "$work/$decoder"; then
        echo "skipped --decoder $decoder: $(tail -n 1 "$work/$decoder")"
        continue
    fi
    for share in 0.7 1; do
        alone check "load: $small, --decoder $decoder, share $share: the same weights for 1 and 4 threads" \
            decodes_alike $decoder $share
    done
    alone check "load: $small, --decoder $decoder, killed three times within an epoch, gives the same weights and losses" \
        decodes_and_resumes $decoder --resident-device-bytes 1M
    alone check "load: $small, --decoder $decoder: broken samples are masked; another decoder refuses the checkpoint" \
        decodes_broken $decoder
    # shellcheck disable=SC2046,SC2086  # several words on purpose
    ! command -v compute-sanitizer >/dev/null || alone check "load: memcheck, --decoder $decoder, with masked samples" under memcheck \
        "$bench" --variant "train-$engine" --model "$small" --batch 33 --epochs 1 $(loads broken $decoder) --on-error mask $crops
    # The reference decodes by CPU threads. Augmentation could amplify differences, and those of hybrid are larger.
    # shellcheck disable=SC2046  # several words on purpose
    [[ $decoder == hybrid ]] || alone check "load: 10 steps and an epoch of $small, --decoder $decoder" "$bench" \
        --variant "train-$engine" --verify --verify-steps 10 --model "$small" --batch 33 --epochs 2 $(loads shards $decoder) \
        --out-res "$res" --fit random-resized-crop
done
# shellcheck disable=SC2046  # several words on purpose
check 'load: the same seed gives the same weights, resumed or not' same_weights load "${loading[@]}" $(loads raw)
check "load: train-$engine, killed three times within an epoch, gives the same weights, losses and rows of --log" \
    decodes_and_resumes cpu
counts_masked() { # name, command: the row counts the broken samples; more threads give the same weights
    local name=$work/$1 run=("${@:2}" --on-error mask)
    "${run[@]}" --threads 1 --export "$name-1" --out "$name.csv" && "${run[@]}" --threads 4 --export "$name-4" &&
        cmp "$name-1" "$name-4" && [[ $(columns "$name.csv" masked | sort -u) == '3 ' ]]
}
# shellcheck disable=SC2046  # several words on purpose
check 'load: three broken samples are masked and counted in every epoch' counts_masked masked \
    "${loading[@]}" $(loads broken) --out-res "$res" --epochs 3
# shellcheck disable=SC2046  # several words on purpose
check 'load: a broken sample ends training with the name of its file' fails_with 1 "$work/broken/train/.*\.jpg" \
    "${loading[@]}" $(loads broken) --out-res "$res"
# shellcheck disable=SC2046  # several words on purpose
check 'load: --on-error skip is refused' fails_with 2 'use --on-error mask' \
    "${loading[@]}" $(loads broken) --out-res "$res" --on-error skip
on_two_ranks() { # options ...
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
        mpirun --bind-to none -n 2 "${loading[@]}" "$@" --out-res "$res" --fit random-resized-crop --epochs 2 --verify
}
if command -v mpirun >/dev/null; then
    for extra in '--batch 17' '--batch 21 --scaling strong --balance 1:2' '--on-error mask --batch 13'; do
        # shellcheck disable=SC2046,SC2086  # several words on purpose
        check "load: two ranks $extra" on_two_ranks $(loads "$([[ $extra == *mask* ]] && echo broken || echo shards)") $extra
    done
else
    echo 'skipped two ranks with --feed load: mpirun is missing'
fi
if command -v compute-sanitizer >/dev/null; then
    # shellcheck disable=SC2046,SC2086  # several words on purpose
    check 'load: memcheck, with masked samples' under memcheck "$bench" --variant "train-$engine" --model "$small" --batch 33 \
        --epochs 1 $(loads broken) --on-error mask --mixup 0.8 $crops
fi

same_activations() { # with --checkpoint-activations, the forward pass is computed twice, and the weights are the same
    "${train[@]}" --epochs 2 --export "$work/kept" &&
        "${train[@]}" --epochs 2 --checkpoint-activations --export "$work/again" &&
        cmp "$work/kept" "$work/again"
}
if [[ $family == vit ]]; then
    check "train-$engine refuses another network" fails_with 2 'use train-cuda' \
        "$bench" --variant "train-$engine" --model lenet --data digits --train-size 256
    check '--checkpoint-activations gives the same weights' same_activations
    conclude
    exit
fi

# ---- Rows of embeddings ----

# Two clouds of 3000 rows in the types that files may have, with 37 and 64 values per row. The classes differ in the sign of
# the mean.
python3 - "$work" <<'END'
import json, os, random, struct, sys
random.seed(0)
rows, work = 3000, sys.argv[1]
labels = [random.randrange(2) for _ in range(rows)]
for width in 37, 64:
    flat = [random.gauss((1 if label else -1) * (3 if k % 2 else -3) / width**0.5, 1) for label in labels for k in range(width)]
    single = struct.pack("<%df" % len(flat), *flat)
    values = {"f32": single, "f16": struct.pack("<%de" % len(flat), *flat),
              "bf16": b"".join(single[i + 2 : i + 4] for i in range(0, len(single), 4))}
    for name, data in values.items():
        folder = os.path.join(work, "rows-%s-%d" % (name, width))
        os.mkdir(folder)
        for part, (first, end) in enumerate(((0, 1100), (1100, rows))):
            size = len(data) // rows
            own, own_labels = data[first * size : end * size], struct.pack("<%dq" % (end - first), *labels[first:end])
            header = {"rows": {"dtype": name.upper(), "shape": [end - first, width], "data_offsets": [0, len(own)]},
                      "labels": {"dtype": "I64", "shape": [end - first], "data_offsets": [len(own), len(own) + len(own_labels)]}}
            text = json.dumps(header).encode()
            with open(os.path.join(folder, "%d.safetensors" % part), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + own + own_labels)
END
learns_rows() { # folder, model, feed, batch, epochs: verifies, and expects more than 98 %, and the set's type and width in the rows
    local name=$work/learnt-$2-$3-$4-${1##*/} kind
    "$bench" --variant "train-$engine" --verify --data "$1" --model "$2" --feed "$3" --batch "$4" --epochs "$5" --lr 0.003 \
        --out "$name" || return
    kind=$(columns "$name" 'dtype dim' | sort -u)
    [[ rows-${kind% } == "$(basename "${1%-*}") ${1##*-}" ]] &&
        columns "$name" test_acc | awk 'END { exit !($1 > 0.98) }'
}
for width in 37 64; do
    for type in f32 f16 bf16; do
        for net in logreg mlp; do
            for feed in stored load; do
                check "rows: $net learns $type rows of $width values, --feed $feed" learns_rows "$work/rows-$type-$width" $net $feed 16 6
            done
        done
    done
done
check 'rows: batches of half a megabyte' learns_rows "$work/rows-f32-64" mlp load 2100 60
row_weights() { # the same weights with 1 and 5 threads, and resumed
    local run=("$bench" --variant "train-$engine" --data "$work/rows-f32-37" --model mlp --feed load)
    "${run[@]}" --epochs 4 --threads 1 --export "$work/row-1" &&
        "${run[@]}" --epochs 4 --threads 5 --prefetch 4 --export "$work/row-5" &&
        "${run[@]}" --epochs 2 --checkpoint "$work/row-run" &&
        "${run[@]}" --epochs 4 --checkpoint "$work/row-run" --resume --export "$work/row-2" &&
        cmp "$work/row-1" "$work/row-5" && cmp "$work/row-1" "$work/row-2" &&
        "$bench" --variant "${infer},infer-naive" --verify --checkpoint "$work/row-run" --min-samples 1 --min-time 0 --max-time 0
}
check 'rows: the same weights for any number of threads, resumed or not' row_weights
warns_of_width() { # of 37, not of 64, and only on tensor cores
    local run=("$bench" --variant "train-$engine" --model logreg --epochs 1) warning='tensor cores would be partly idle' wanted=1
    [[ $engine != cuda ]] || wanted=0
    [[ $("${run[@]}" --data "$work/rows-f32-37" 2>&1 | grep -c "$warning") == "$wanted" ]] &&
        [[ $("${run[@]}" --data "$work/rows-f32-64" 2>&1 | grep -c "$warning") == 0 ]]
}
check 'rows: a width that leaves tensor cores idle is warned of' warns_of_width
best_variant() { # --variant auto chooses a GPU variant, and without a GPU a CPU variant
    local run=("$bench" --workload train --variant auto --model mlp --data "$work/rows-f32-64" --epochs 1 --format csv)
    "${run[@]}" >"$work/auto-gpu" && CUDA_VISIBLE_DEVICES='' "${run[@]}" >"$work/auto-cpu" &&
        [[ $(columns "$work/auto-gpu" variant) == 'train-bf16 ' && $(columns "$work/auto-cpu" variant) == 'train-omp ' ]]
}
[[ $engine != cuda ]] || check '--variant auto chooses train-bf16 for rows, and train-omp without a GPU' best_variant

# With this batch, a layer would have 2^31 values or more.
check 'a batch that is too large is refused' fails_with 2 'lower --batch to 58254' \
    "$bench" --variant "train-$engine" --model cnn --data digits --train-size 59000 --batch 59000
if [[ $engine != cuda ]]; then
    conclude
    exit
fi

# ---- train-graph, infer-graph ----
graph_cases() { # runs the cases in parallel, because the reference is slow
    seq "$("$graph_kernels" --count)" | xargs -P "$(nproc)" -n 1 "$graph_kernels"
}
check 'train-graph compared with the reference; planted faults are found' graph_cases
graph=("$bench" --variant train-graph --model cnn --data digits --train-size 3000 --test-size 300 --batch 64 --shift 2)
for option in '--clip-norm 1' '--ema 0.9' '--accumulate 2'; do
    # shellcheck disable=SC2086  # two words on purpose
    check "train-graph refuses $option" fails_with 2 'use train-bf16' \
        "$bench" --variant train-graph --model cnn --data digits --train-size 256 $option
done
check '10 steps of train-graph' "$bench" --variant train-graph --verify --model cnn --data digits --batch 65 \
    --train-size 200 --test-size 65 --epochs 1
check 'train-graph: the same seed gives the same weights, resumed or not' same_weights graph "${graph[@]}"
check 'train-graph, killed five times during training, gives the same weights' \
    killed_at_any_moment train-graph cnn 150 5
check 'train-graph, killed three times within an epoch, gives the same weights, losses and rows of --log' \
    killed_within_an_epoch graph train-graph cnn
wait # the next check reads a checkpoint of the checks above
check "infer-graph and infer-cuda from train-graph's checkpoint" "$bench" --variant infer-graph,infer-cuda --verify \
    --data digits --test-size 300 --checkpoint "$work/graph" --batch 257 --min-samples 1 --min-time 0 --max-time 0
# Loaded samples: images in class folders, the same samples as arrays in shards, and folders with three broken files.
make_digits() {
    local part file number=0
    for part in train:2111 test:150; do
        "$bench" --prepare "$work/digits-files/${part%:*}" --from digits --samples "${part#*:}" --store imagefolder &&
            rm "$work/digits-files/${part%:*}"/{classes.txt,samples.csv,digits.index} &&
            "$bench" --prepare "$work/digits/${part%:*}" --store shards --shards 3 --encode npy --out-res 28 --channels 1 \
                --from dataset --source "$work/digits-files/${part%:*}" || return
    done
    cp -r "$work/digits-files" "$work/digits-broken" || return
    for file in "$work"/digits-broken/train/*/*.png; do
        ((number++ % 704 != 5)) || truncate -s 90 "$file" || return
    done
}
make_digits >"$work/made" 2>&1 || { cat "$work/made" && refuse 'cannot make the data sets of train-graph'; }
digits=(--test-data "$work/digits/test" --feed load --threads 3)
loading=("$bench" --variant train-graph --model cnn --data "$work/digits/train" "${digits[@]}")
for extra in '--batch 65 --shift 2' '--batch 7 --prefetch 1 --shuffle 0' '--batch 256 --drop-last --lanes 3' '--batch 3000'; do
    # shellcheck disable=SC2086  # several words on purpose
    check "load: 10 steps and two epochs of train-graph $extra" "${loading[@]}" --verify --verify-steps 10 --epochs 2 $extra
done
graph_order() { # the same weights for 1 and 4 threads, and for class folders and shards
    local run=("$bench" --variant train-graph --model cnn --epochs 2 --batch 33 --feed load) name=$work/graph-order
    "${run[@]}" --data "$work/digits/train" --test-data "$work/digits/test" --threads 1 --prefetch 1 --export "$name-1" &&
        "${run[@]}" --data "$work/digits/train" --test-data "$work/digits/test" --threads 4 --export "$name-4" &&
        "${run[@]}" --data "$work/digits-files" --threads 3 --export "$name-files" &&
        cmp <(weights "$name-1") <(weights "$name-4") && cmp <(weights "$name-1") <(weights "$name-files") &&
        (($(weights "$name-1" | wc -c) > 1000))
}
check 'load: train-graph, the same weights for any number of threads, from folders and from shards' graph_order
check 'load: train-graph, the same seed gives the same weights, resumed or not' same_weights graph-load "${loading[@]}" --batch 64
graph_killed() {
    within=(--data "$work/digits/train" "${digits[@]}" --batch 4)
    killed_within_an_epoch graph-load train-graph cnn
}
check 'load: train-graph, killed three times within an epoch, gives the same weights, losses and rows of --log' graph_killed
near_cuda() { # the losses of three epochs with the samples and the order of train-cuda, which computes in fp32
    local variant
    for variant in train-graph train-cuda; do
        "$bench" --variant $variant --model cnn --data "$work/digits/train" "${digits[@]}" --batch 64 --epochs 3 \
            --out "$work/near-$variant.csv" || return
    done
    paste <(columns "$work/near-train-graph.csv" train_loss) <(columns "$work/near-train-cuda.csv" train_loss) |
        awk '{ off = ($1 - $2) / $2; if (off < 0) off = -off; if (!(off < 0.1)) bad = 1; print } END { exit bad || NR != 3 }'
}
check 'load: train-graph and train-cuda have similar losses' near_cuda
check 'load: train-graph masks and counts three broken samples in every epoch' counts_masked graph-masked \
    "$bench" --variant train-graph --model cnn --data "$work/digits-broken" --feed load --batch 64 --epochs 2
check 'load: train-graph ends with the name of a broken sample' fails_with 1 "$work/digits-broken/train/.*png" \
    "$bench" --variant train-graph --model cnn --data "$work/digits-broken" --feed load --batch 64
if command -v mpirun >/dev/null; then
    check 'load: two ranks of train-graph' env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        OMPI_MCA_rmaps_base_oversubscribe=1 mpirun --bind-to none -n 2 "${loading[@]}" --sync peer --verify --batch 21 \
        --scaling strong --epochs 2
fi
if command -v compute-sanitizer >/dev/null; then
    check 'load: train-graph, memcheck' under memcheck "$bench" --variant train-graph --model cnn --batch 65 --epochs 1 \
        --data "$work/digits-broken" --feed load --on-error mask
fi
check 'train-graph refuses a constant batch' fails_with 2 'supports only --feed stored and load' \
    "$bench" --variant train-graph --model cnn --data digits --train-size 256 --feed constant
check 'train-graph refuses another network' fails_with 2 'train-cuda supports all models' \
    "$bench" --variant train-graph --model lenet --data digits --train-size 256
check 'train-graph refuses mixed samples' fails_with 2 'neither --mixup nor --cutmix nor --loss bce' \
    "$bench" --variant train-graph --model cnn --data digits --train-size 256 --mixup 0.8
check 'infer-graph refuses another network' fails_with 2 'infer-cuda supports all models' \
    "$bench" --variant infer-graph --data digits --test-size 70 --checkpoint "$work/naive"
check 'train-graph: a NaN loss stops training' fails_with 1 'epoch 1, step [0-9]* of 4: the loss is not finite' \
    "$bench" --variant train-graph --model cnn --data digits --train-size 256 --optimizer sgd --lr 100000
conclude
