#!/usr/bin/env bash
# Repeats, with this build, the measurements in results/reference that README.md and docs/ quote. File names are fixed, so new
# files replace old ones. To update the pages afterwards:
#   cp OUT/*.csv OUT/*.json results/reference/ && scripts/figures/measured.py --fix
#
#   scripts/sweep/reference.sh OUT [--section NAME,...] [--mnist DIR] [--work DIR] [--prefix NAME] [--dry-run]
#
# OUT: folder for the files and for reference.tar.gz with all of them. --section: sections to measure. --list shows each
# section, its seconds on one H200 with 16 cores, whether it is measured by default (yes), and its files. The default
# sections take ten minutes. --mnist: folder with the four files of MNIST, for the sections train, train-others, infer and
# pytorch. --work (OUT/work): folder for images (1 GB) on the disk to measure; sections with the same folder reuse the
# images. --prefix (h200): prefix of file names. --dry-run: prints the commands, runs nothing.
#
# Rows contain the revision of the build. A tree without git history has no revision: build it with make REVISION=NAME.
# FDSL_BENCH: the program (./fdsl-bench).
#
# Exit status: 0 done, 1 a section failed (the others ran), 2 usage, 4 no program, or a build without a revision.
set -euo pipefail
cd "$(dirname "$0")/../.."

# name, seconds on one H200 with 16 cores, measured by default, files
sections='ladder          165 yes synth
break-even      310 yes break_even_synth break_even_load
train            75 yes train_graph
vit              90 no  train_vit infer_vit
infer            20 yes infer
pytorch         130 no  train_pytorch
break-even-cold 260 no  break_even_cold
formulas        140 no  formulas
monitor          60 no  break_even_loaders break_even_monitor monitor
load            120 no  load_gpu_sizes
load-stress      50 no  load_gpu_stress
load-ranks       60 no  load_gpu_ranks
clips            30 no  train_clips
sweeps          200 no  sweep_vertices sweep_resolution sweep_batch
train-others    150 no  train train_mixed train_batches train_cnn_fdsl'

note() { printf 'reference.sh: %s\n' "$1" >&2; }
die() { # exit status, text
    note "$2"
    exit "$1"
}

out='' chosen='' mnist='' work='' prefix=h200 dry=''
while (($#)); do
    case $1 in
    --section) chosen=${2:?} && shift ;;
    --mnist) mnist=$(realpath "${2:?}") && shift ;;
    --work) work=${2:?} && shift ;;
    --prefix) prefix=${2:?} && shift ;;
    --dry-run) dry=yes ;;
    --list)
        printf '%s\n' "$sections"
        exit
        ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        exit
        ;;
    -*) die 2 "unknown option $1; see --help" ;;
    *)
        [[ ! $out ]] || die 2 "one folder at a time, not '$out' and '$1'"
        out=$1
        ;;
    esac
    shift
done
[[ $out ]] || die 2 'name a folder for the rows'
chosen=${chosen:-$(awk '$3 == "yes" { print $1 }' <<<"$sections" | paste -sd,)}
for name in ${chosen//,/ }; do
    awk -v name="$name" '$1 == name { found = 1 } END { exit !found }' <<<"$sections" ||
        die 2 "no section '$name'; the sections are $(awk '{ print $1 }' <<<"$sections" | paste -sd' ')"
    [[ $mnist || ! $name =~ ^(train|train-others|infer|pytorch)$ ]] || die 2 "section $name needs --mnist DIR"
done
bench=$(command -v -- "${FDSL_BENCH:-./fdsl-bench}") || die 4 'fdsl-bench is not built; run make first'
bench=$(realpath "$bench")
revision=$("$bench" --env --format csv | awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "revision") at = i } END { print $at }')
[[ $revision && $revision != unknown ]] || die 4 'this build has no revision; build it with make REVISION=NAME'
mkdir -p "$out" "${work:=$out/work}"
out=$(realpath "$out") work=$(realpath "$work")

file() { printf '%s/%s_%s.csv' "$out" "$prefix" "$1"; } # name
failed=()                                               # names of sections; the rest of a failed section still runs
attempt() {                                             # command ...
    printf '%q ' "${@//"$bench"/fdsl-bench}" >&2 && echo >&2
    [[ $dry ]] || FDSL_BENCH=$bench "$@" >&2 || {
        note "$name: failed with exit status $?"
        [[ " ${failed[*]-} " == *" $name "* ]] || failed+=("$name")
    }
}
run() { attempt "$bench" "$@"; } # options ...

# ---- Sections ----

synth() { run --variant "$1" --verify --min-time 0.5 --out "$(file synth)" "${@:2}"; } # variants, options ...

ladder() {
    local res batch i slow
    slow=$("$bench" --list | awk '$2 == "available" && !/-graph/ { print $1 }' |
        grep -xE 'gbase|gbase-device|mem|mem-float2|rng|rng-reuse|rng-uniform4|rng-xorwow-reuse|bat|bat-reuse|fused' | paste -sd,) || true
    synth naive --batch 32 --max-time 20
    for ((i = 0; i < 5; i++)); do synth omp --batch 32 --max-time 4; done # its time varies from process to process
    [[ $slow ]] || return 0
    synth "$slow" --batch 32 --max-time 3
    for res in 224 512 1024; do synth bat,bat-reuse,fused,fused-graph --batch 256 --res $res --max-time 3; done
    for batch in 1 8 64 128 512 1024 4096; do synth bat,fused --batch $batch --max-time 3; done
    synth bat,fused --batch 256 --classes 256 --max-time 3
    for res in 224 512; do synth fused --batch 256 --res $res --dtype f16 --max-time 3; done
    synth fused --batch 256 --out-res 224 --max-time 3
    synth fused --batch 256 --out-res 224 --dtype f16 --channels 3 --max-time 3
    synth fused --batch 256 --out-res 224 --fit crop --dtype f16 --channels 3 --layout nhwc --max-time 3
}

# The classes of published sets, or those of the paper; of fractals, instance 8 shows the system itself. On one core, few
# images take long enough. A build without a GPU measures omp alone.
formulas() {
    local preset gpu
    # shellcheck disable=SC2086 # a preset with an option
    of_preset() { run --preset $preset --verify --min-time 0.5 --out "$(file formulas)" "$@"; } # options ...
    gpu=$("$bench" --list | awk '$1 == "fused" && $2 == "available"') || true
    for preset in 'paper-1000 --classes 1000' visualatom-script-1k rcdb-1k segrcdb fractaldb-1k ofdb-1k 1p-frac exfractaldb-1k \
        fractal-color-1k multifractal-1k; do
        of_preset --variant omp --threads 1 --batch 64 --instance 8000 --max-time 6
        [[ ! $gpu ]] || of_preset --variant fused --batch 256 --instance 8000 --max-time 3
    done
    [[ $gpu ]] || return 0
    for preset in fractaldb-1k 1p-frac; do
        of_preset --variant fused --batch 256 --instance 8000 --draw points --max-time 3
        of_preset --variant fused --batch 256 --instance 8000 --out-res 224 --dtype f16 --channels 3 --max-time 3
    done
    # These images show all 25,000 orbits, so bank_s is the time of the whole bank.
    run --preset fractaldb-1k --variant fused --batch 100000 --loops 3 --out "$(file formulas)"
}

break_even_table() { # steps ...: prints a table for scripts/sweep/run.sh
    local variant step
    printf 'variant\tbatch\tres\tclasses\tcompute\tverify\twarmup-time\tmin-time\tmax-time\n'
    for variant in fused bat gbase omp; do
        for step in - "$@"; do printf '%s\t256\t224\t10\t%s\tyes\t0.25\t0.4\t1.2\n' $variant "$step"; done
    done
}

# Deletes earlier rows first, because scripts/sweep/run.sh does not repeat finished tasks.
break_even_rows() { # caches, readers, watch, steps ...
    break_even_table "${@:4}" >"$work/break_even.tsv"
    attempt rm -rf "$work/images/rows"
    CACHES=$1 READERS=$2 WATCH=$3 SAMPLES=8192 TIME=0.8 MIN_SAMPLES=3 \
        attempt scripts/compare/break_even.sh "$work/images" "$work/rows" "$work/break_even.tsv"
}

keep_rows() { # name of the file in $work, name of the file in $out
    attempt cp "$work/rows_$1.csv" "$(file "$2")"
}

break-even() {
    break_even_rows warm 'files-omp files-gpu shards-omp shards-gpu gpu-resident png' '' 0.5 1 2 4 5
    keep_rows synth break_even_synth
    keep_rows load break_even_load
}

break-even-cold() {
    break_even_rows cold 'files files-omp files-gpu shards shards-omp shards-gpu' '' 0.5 2 5
    keep_rows load break_even_cold
}

monitor() {
    break_even_rows warm 'files-gpu shards-gpu' yes 5
    keep_rows loaders break_even_loaders
    keep_rows monitor break_even_monitor
    run --variant bat,fused --batch 256 --verify --min-time 5 --max-time 8 --monitor "$(file monitor):100"
}

learn() { # file, variant, options ...
    run --variant "$2" --data "$mnist" --out "$(file "$1")" "${@:3}"
}

# Verifies only the first training run, because the single-threaded reference takes 9 s per epoch.
train() {
    local seed batch
    learn train_graph train-graph --model cnn --batch 256 --epochs 10 --seed 0 --lr 0.001 --verify --verify-steps 1
    for seed in 1 2; do learn train_graph train-graph --model cnn --batch 256 --epochs 10 --seed $seed --lr 0.001; done
    for seed in 0 1 2; do learn train_graph train-graph --model cnn --batch 256 --epochs 10 --seed $seed --lr 0.0015; done
    for batch in 64 128 512 1024; do learn train_graph train-graph --model cnn --batch $batch --epochs 3; done
}

# Generates images of 512 x 512 pixels, of which the network gets a crop of 224 x 224. The training runs are too short for a
# meaningful accuracy.
vit() {
    local pictures="--data synth --res 512 --out-res 224 --fit crop --channels 3 --classes 1000" model batch feed extra
    while read -r model batch feed extra; do
        # shellcheck disable=SC2086
        run --variant train-vit --model "$model" --batch "$batch" --feed "$feed" $pictures --train-size $((40 * batch)) \
            --optimizer adamw --lr 0.0005 --epochs 3 --test-size 256 $extra --out "$(file train_vit)"
    done <<<'vit-tiny 256 constant
vit-tiny 256 live
vit-tiny 256 constant --checkpoint-activations
vit-tiny 512 constant
vit-tiny 1024 constant
vit-tiny 1024 live
vit-small 256 constant
vit-base 256 constant
vit-base 256 live'
    attempt rm -rf "$work/vit"
    # shellcheck disable=SC2086
    run --variant train-vit --model vit-tiny --batch 256 $pictures --train-size 256 --test-size 256 --epochs 1 --checkpoint "$work/vit"
    # shellcheck disable=SC2086
    run --variant infer-vit $pictures --test-size 2048 --checkpoint "$work/vit" --batch 1,256,1024 --out "$(file infer_vit)"
}

infer() {
    local batch
    attempt rm -rf "$work/run"
    run --variant train-graph --data "$mnist" --model cnn --batch 256 --epochs 3 --checkpoint "$work/run"
    for batch in '1 --verify' '256 --verify' 4096; do # 4096 is not verified: its reference takes two minutes
        # shellcheck disable=SC2086
        run --variant infer-graph,infer-cuda --data "$mnist" --checkpoint "$work/run" --batch $batch --max-time 3 \
            --out "$(file infer)"
    done
}

pytorch() {
    attempt python3 scripts/compare/pytorch.py --bench "$bench" --device cuda --variant train-graph,train-bf16,train-cuda \
        --modes autotuned,best,graph,resident --data "$mnist" --model cnn --batch 256 --epochs 8 --lr 0.0015 \
        --out "$(file train_pytorch)"
}

load() {
    local bytes sets=/dev/shm/fdsl-reference
    for bytes in 2048 16384 65536 1048576; do
        attempt rm -rf $sets
        run --prepare $sets --store shards --shards 32 --samples $((2000000000 / bytes)) --sample-shape $((bytes - 128)) --dtype u8 --classes 0
        run --variant shards-gpu,gpu-resident --data $sets --batch 256 --verify --warmup-time 0.1 --min-time 0.3 --max-time 1 \
            --out "$(file load_gpu_sizes)"
        ((bytes != 65536)) || run --variant gpu-resident --dtype raw --data $sets --batch 256 --verify --warmup-time 0.1 \
            --min-time 0.3 --max-time 1 --out "$(file load_gpu_sizes)"
    done
    attempt rm -rf $sets
}

# These sections call scripts/sweep/reference_load_gpu.sh.
load-stress() { attempt scripts/sweep/reference_load_gpu.sh --section stress /dev/shm/fdsl-reference "$(file load_gpu_stress)"; }
load-ranks() { TIME=1 BYTES=500000000 attempt scripts/sweep/reference_load_gpu.sh --section ranks /dev/shm/fdsl-reference "$(file load_gpu_ranks)"; }
clips() { attempt scripts/sweep/reference_load_gpu.sh --section clips /dev/shm/fdsl-reference "$(file train_clips)"; }

sweeps() {
    local table
    for table in vertices resolution batch; do
        attempt scripts/sweep/run.sh configs/sweep_$table.tsv --redo --out "$work"
        attempt cp "$work/sweep_$table.csv" "$(file sweep_$table)"
    done
}

train-others() {
    local seed variant batch feed
    for seed in 0 1 2; do
        learn train train-cuda --model cnn --batch 256 --epochs 10 --seed $seed
        for variant in train-tf32 train-bf16 train-amp; do
            learn train_mixed $variant --model cnn --batch 256 --epochs 10 --seed $seed
        done
    done
    for batch in 64 1024; do
        learn train_batches train-tf32,train-bf16,train-amp,train-cuda --model cnn --batch $batch --epochs 3
    done
    for batch in 64 256 1024; do learn train_batches train-tf32,train-bf16,train-amp --model lenet --batch $batch --epochs 3; done
    learn train_batches train-cuda --model lenet --batch 256 --epochs 3
    learn train_batches train-cuda --model logreg --batch 256 --epochs 3
    for feed in constant live; do
        run --variant train-cuda --data synth --classes 1000 --test-size 256 --feed $feed --model cnn-fdsl --batch 256 \
            --epochs 2 --res 224 --train-size 5120 --out "$(file train_cnn_fdsl)"
        run --variant train-cuda --data synth --classes 1000 --test-size 256 --feed $feed --model cnn-fdsl --batch 256 \
            --epochs 2 --res 64 --train-size 20480 --out "$(file train_cnn_fdsl)"
    done
}

# ---- Running the sections ----

for name in ${chosen//,/ }; do
    read -r _ seconds _ files <<<"$(awk -v name="$name" '$1 == name' <<<"$sections")"
    note "$name: takes about $seconds s"
    [[ $dry ]] || for of in $files; do rm -f "$(file "$of")"; done
    begun=$SECONDS
    "$name"
    note "$name: took $((SECONDS - begun)) s"
done
[[ ! $dry ]] || exit 0
"$bench" --env --format json >"$out/${prefix}_env.json" || rm -f "$out/${prefix}_env.json" # a build without jansson
(cd "$out" && find . -maxdepth 1 -name "${prefix}_*" -printf '%P\n' | sort | tar -czf reference.tar.gz -T -)
note "revision $revision: $out/reference.tar.gz"
((${#failed[@]} == 0)) || die 1 "failed: ${failed[*]}"
