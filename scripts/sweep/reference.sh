#!/usr/bin/env bash
# Repeats, with this build, the measurements in results/reference that README.md and docs/ quote. File names are fixed, so new
# files replace old ones. To update the pages afterwards:
#   tar -xzf OUT/reference.tar.gz -C results/reference && scripts/figures/measured.py --fix
#
#   scripts/sweep/reference.sh OUT [--section NAME,...] [--limit-s N] [--redo] [--mnist DIR] [--work DIR] [--prefix NAME] [--dry-run]
#
# OUT: folder for the files and for reference.tar.gz with all of them. --section: sections to measure, in this order; all: all
# sections that can run here. --list shows each section, its seconds on one H200 with 16 cores, whether it is measured by
# default (yes), what it needs (a GPU, 2 GPUs and mpirun, MNIST, PyTorch), and its files. The most valuable sections come first.
# The default sections take ten minutes.
#
# The same command continues after an interruption: it measures only sections that are not done. OUT/state.tsv tells which
# ones are. The files of a section appear in OUT when the section ends. OUT belongs to one revision, GPU model and prefix;
# runs with others are refused. --redo: measure the chosen sections again, even if they are done. --limit-s: do not start a
# section whose expected seconds exceed the rest of N. At the end, the script prints a table of the chosen sections.
#
# --mnist: folder with the four files of MNIST. --work (OUT/work): folder for images (1 GB) on the disk to measure; sections
# with the same folder reuse the images. --prefix (h200): prefix of file names. --dry-run: prints the commands, runs nothing.
#
# Rows contain the revision of the build. A tree without git history has no revision: build it with make REVISION=NAME.
# FDSL_BENCH: the program (./fdsl-bench). MPIRUN (mpirun --bind-to none -n): launcher of ranks.
# MEMORY (/dev/shm): folder in memory, for samples of a section (4 GB, in fdsl-reference-NUMBER), and for the images of `training`,
# which stay there. Paths are relative to the current folder.
#
# Exit status: 0 all chosen sections are done, 1 a section failed (the others ran) or is left, 2 usage, or OUT has other rows,
# 4 no program, a build without a revision, or a section of --section cannot run here.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/../.."

# name, seconds on one H200 with 16 cores, measured by default, needs, files. @ in a file stands for the prefix.
sections='train            75 yes gpu,mnist         train_graph
vit              90 yes gpu               train_vit infer_vit
train-verified   80 yes gpu,mnist         train_verified
infer            20 yes gpu,mnist         infer
ops              45 yes gpu               ops/@
ladder          165 yes -                 synth
load            120 yes gpu               load_gpu_sizes
vit-load         60 no  gpu               train_vit_load
resnet           50 no  gpu               train_resnet
pytorch         130 no  gpu,mnist,torch   train_pytorch
pytorch-cpu      40 no  mnist,torch       train_pytorch_cpu
largest         180 no  gpu               largest
load-cpu         40 no  -                 load_cpu
break-even      310 no  -                 break_even_synth break_even_load
break-even-cold 260 no  -                 break_even_cold
formulas        140 no  -                 formulas
monitor          60 no  gpu               break_even_loaders break_even_monitor monitor
load-stress      50 no  gpu               load_gpu_stress
load-compute     40 no  gpu               load_compute
load-resident    40 no  gpu               resident
load-all        600 no  gpu               load_gpu
clips            30 no  gpu               train_clips
clip-loaders    110 no  gpu               clips_load clips_monitor clips_train
sweeps          200 no  gpu               sweep_vertices sweep_resolution sweep_batch
train-others    180 no  gpu,mnist         train train_mixed train_batches train_cnn_fdsl train_cudnn
live            150 no  gpu               live_training
fine-tuning     900 no  gpu,mnist         fine_tuning
ops-pytorch      90 no  gpu,torch         ops/@_pytorch
scaling          40 no  2gpus             scaling
sync             60 no  2gpus             train_sync
train-ranks     110 no  2gpus,mnist       train_ranks
training        260 no  2gpus             training
exchange         60 no  2gpus             exchange
ops-ranks        20 no  2gpus             ops/@_ranks
load-ranks       60 no  2gpus             load_gpu_ranks
ddp             240 no  2gpus,mnist,torch ddp
pipeline        150 no  2gpus             train_pipeline'

note() { printf 'reference.sh: %s\n' "$1" >&2; }
die() { # exit status, text
    note "$2"
    exit "$1"
}

value() { [[ ${2-} ]] || die 2 "$1 needs a value; see --help"; } # arguments
place() { [[ $1 == /* ]] && printf '%s' "$1" || printf '%s/%s' "$from" "$1"; } # path, relative to the caller's folder
out='' chosen='' mnist='' work='' prefix=h200 dry='' redo='' limit=''
while (($#)); do
    case $1 in
    --section) value "$@" && chosen=$2 && shift ;;
    --limit-s) value "$@" && limit=$2 && shift ;;
    --redo) redo=yes ;;
    --mnist) value "$@" && mnist=$(realpath "$(place "$2")") && shift ;;
    --work) value "$@" && work=$(place "$2") && shift ;;
    --prefix) value "$@" && prefix=$2 && shift ;;
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
        out=$(place "$1")
        ;;
    esac
    shift
done
[[ $out ]] || die 2 'name a folder for the rows'
[[ $prefix =~ ^[A-Za-z0-9_.-]+$ ]] || die 2 "--prefix '$prefix': give letters, digits, _, . and -"
[[ $limit =~ ^([1-9][0-9]*)?$ ]] || die 2 "--limit-s '$limit': give a whole number from 1"
field() { # section, column: prints it; 5: all files
    awk -v name="$1" -v at="$2" '$1 == name { for (i = at; i <= (at == 5 ? NF : at); i++) print $i }' <<<"$sections"
}
names=${chosen:-$(awk '$3 == "yes" { print $1 }' <<<"$sections" | paste -sd,)}
[[ $names != all ]] || names=$(awk '{ print $1 }' <<<"$sections" | paste -sd,)
read -ra names <<<"${names//,/ }"
for name in "${names[@]}"; do
    [[ $(field "$name" 2) ]] || die 2 "no section '$name'; the sections are $(awk '{ print $1 }' <<<"$sections" | paste -sd' ')"
done
bench=$(command -v -- "${FDSL_BENCH:-./fdsl-bench}") || die 4 'fdsl-bench is not built; run make first'
bench=$(realpath "$bench")
IFS=$'\t' read -r revision gpu <<<"$("$bench" --env --format csv | python3 -c 'import csv, sys
row = next(csv.DictReader(sys.stdin))
print(row.get("revision") or "unknown", row.get("gpu") or "no GPU", sep="\t")')"
[[ $revision && $revision != unknown ]] || die 4 'this build has no revision; build it with make REVISION=NAME'

variants=$("$bench" --list | awk '$2 == "available" { print $1 }')
available() { awk -v expression="^($1)\$" '$1 ~ expression' <<<"$variants" | paste -sd,; } # prints the variants that match
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
lacks() { # section: prints what it lacks here
    local need
    for need in $(field "$1" 4 | tr , ' '); do
        case $need in
        gpu) [[ $'\n'$variants$'\n' == *$'\nbat\n'* ]] || echo 'a GPU' ;;
        2gpus) { ((gpus >= 2)) && command -v mpirun >/dev/null; } || echo '2 GPUs and mpirun' ;;
        mnist) [[ $mnist ]] || echo '--mnist DIR' ;;
        torch) python3 -c 'import torch' 2>/dev/null || echo PyTorch ;;
        esac
    done | paste -sd, | sed 's/,/, /g'
}
declare -A lacking=() state=() took=()
for name in "${names[@]}"; do
    [[ $dry ]] || lacking[$name]=$(lacks "$name")
    [[ ! ${lacking[$name]-} || ! $chosen || $chosen == all ]] ||
        die "$([[ ${lacking[$name]} == *--mnist* ]] && echo 2 || echo 4)" "section $name needs ${lacking[$name]}"
done

out=$(realpath -m "$out") work=$(realpath -m "${work:-$out/work}") new=$out/new
if [[ ! $dry ]]; then
    mkdir -p "$out" "$work" || die 1 "cannot create $out or $work; name another folder"
    exec {lock}>"$out/lock" # commands inherit it: one that outlives this script would disturb the next run
    flock -n "$lock" || die 2 "another run measures into $out; wait for it, or name another folder"
fi

# ---- The state: one line with revision, GPU and prefix, then one line per section that has ended ----

if [[ -e $out/state.tsv ]]; then
    {
        read -r identity || die 2 "$out/state.tsv is empty; name another folder, or delete it"
        [[ $identity == "$revision"$'\t'"$gpu"$'\t'"$prefix" ]] ||
            die 2 "$out has rows of ${identity//$'\t'/, }, and this run is of $revision, $gpu, $prefix; name another folder"
        while IFS=$'\t' read -r name how seconds; do
            [[ $(field "$name" 2) && $how =~ ^(done|failed)$ && $seconds =~ ^[0-9]+$ ]] ||
                die 2 "$out/state.tsv is damaged at '$name'; name another folder, or delete the file"
            state[$name]=$how took[$name]=$seconds
        done
    } <"$out/state.tsv"
fi
keep_state() {
    local of
    {
        printf '%s\t%s\t%s\n' "$revision" "$gpu" "$prefix"
        for of in "${!state[@]}"; do printf '%s\t%s\t%s\n' "$of" "${state[$of]}" "${took[$of]}"; done
    } >"$out/state.new" || die 1 "cannot write $out/state.new"
    mv "$out/state.new" "$out/state.tsv" || die 1 "cannot write $out/state.tsv"
}

MEMORY=$(place "${MEMORY:-/dev/shm}")
samples=$MEMORY/fdsl-reference-$(cksum <<<"$out" | cut -d ' ' -f 1) # of the current section; another OUT has another folder
export MEMORY=$MEMORY/training # for scripts/compare/training.sh

# A section writes its files to $new. They are moved to $out when it ends.
in_out() { [[ $1 == *@* ]] && printf '%s.csv' "${1/@/"$prefix"}" || printf '%s_%s.csv' "$prefix" "$1"; } # file: its path in $out
file() { printf '%s/%s' "$new" "$(in_out "$1")"; }
broken=''      # a command of the current section failed; the rest of the section still runs
child=''
attempt() { # command ...
    local line
    line=$(printf '%q ' "${@//"$bench"/fdsl-bench}")
    [[ ! $dry ]] || { echo "$line" && return; }
    echo "$line" >&2
    set -m # a process group, so that stop() ends the command with all its processes
    FDSL_BENCH=$bench "$@" >&2 </dev/null &
    child=$!
    set +m
    wait "$child" || { note "$section: failed with exit status $?" && broken=yes; }
    child=''
}
run() { attempt "$bench" "$@"; } # options ...
read -ra launcher <<<"${MPIRUN:-mpirun --bind-to none -n}"
ranks() { if (($1 == 1)); then run "${@:2}"; else attempt "${launcher[@]}" "$1" "$bench" "${@:2}"; fi; } # number of ranks, options ...

# ---- Sections ----

synth() { run --variant "$1" --verify --min-time 0.5 --out "$(file synth)" "${@:2}"; } # variants, options ...

ladder() {
    local res batch i slow
    slow=$(available 'gbase|gbase-device|mem|mem-float2|rng|rng-reuse|rng-uniform4|rng-xorwow-reuse|bat|bat-reuse|fused')
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
    local preset gpu # hides the name of the GPU
    # shellcheck disable=SC2086 # a preset with an option
    of_preset() { run --preset $preset --verify --min-time 0.5 --out "$(file formulas)" "$@"; } # options ...
    gpu=$(available fused)
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
    [[ $dry ]] || break_even_table "${@:4}" >"$work/break_even.tsv"
    attempt rm -rf "$work/images/rows" "$work"/rows_*.csv
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
    for batch in '1 --verify' 256,1024; do # the reference takes 1 s per image
        # shellcheck disable=SC2086
        run --variant infer-vit $pictures --test-size 2048 --checkpoint "$work/vit" --batch $batch --out "$(file infer_vit)"
    done
}

# The single-threaded reference takes 4 s per step of cnn, and 4 s per sample of vit-tiny.
train-verified() {
    local kind
    verified() { run --epochs 3 --verify --out "$(file train_verified)" "$@"; } # options ...
    verified --variant "$(available 'train-(cuda|tf32|bf16|amp|cudnn|cudnn-tf32|graph)')" --data "$mnist" --model cnn --batch 256 \
        --verify-steps 1
    for kind in vit resnet; do
        verified --variant train-$kind,train-$kind-amp --data "$mnist" --model $kind-micro --batch 256 --verify-steps 8
    done
    verified --variant train-vit --model vit-tiny --data synth --res 224 --out-res 224 --channels 3 --classes 10 --feed constant \
        --batch 2 --train-size 32 --test-size 2 --verify-steps 1
}

vit-load() {
    MODELS=vit-base SAMPLES=4096 EPOCHS=6 IMAGES=8192 SOURCES='constant live jpeg' \
        attempt scripts/compare/training.sh "$work" "$(file train_vit_load)"
}

resnet() {
    MODELS=none SOURCES=jpeg IMAGES=8192 attempt scripts/compare/training.sh "$work" "$new/none.csv" # only prepares
    run --variant train-resnet --model resnet50 --batch 256 --feed load --data "$MEMORY/jpeg/train" --test-data "$MEMORY/jpeg/test" \
        --out-res 224 --fit random-resized-crop --train-size 8192 --epochs 4 --out "$(file train_resnet)"
    run --variant train-resnet --model resnet50 --batch 256 --feed constant --data synth --res 224 --out-res 224 --channels 3 --classes 16 \
        --test-size 512 --train-size 8192 --epochs 4 --out "$(file train_resnet)"
}

training() {
    GPUS='1 2' SAMPLES='8192 4096' EPOCHS='8 6' SOURCES='constant live raw jpeg disk' \
        attempt scripts/compare/training.sh "$work" "$(file training)"
}

largest() {
    local of
    for of in 'train-cuda,train-tf32,train-bf16,train-amp,train-graph --models cnn' \
        'train-vit --models vit-micro,vit-tiny,vit-small,vit-base,vit-large' 'train-resnet --models resnet-micro,resnet50'; do
        # shellcheck disable=SC2086
        attempt python3 scripts/compare/memory.py largest --bench "$bench" --variants $of --out "$(file largest)"
    done
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

pytorch-cpu() {
    local model
    for model in cnn vit-micro; do
        attempt python3 scripts/compare/pytorch.py --bench "$bench" --device cpu --variant train-omp --modes resident --data "$mnist" \
            --model $model --batch 256 --epochs 3 --train-size 20480 --out "$(file train_pytorch_cpu)"
    done
}

ddp() {
    attempt python3 scripts/compare/pytorch.py --bench "$bench" --ranks 1,2 --variant train-graph --sync auto,nccl --device cuda \
        --modes resident,graph,best --data "$mnist" --model cnn --batch 256 --epochs 12 --lr 0.0015 --out "$(file ddp)"
}

# ---- Several GPUs ----

scaling() {
    local count
    for count in 1 2 4; do
        ((count <= (gpus > 2 ? gpus : 2))) || continue
        ranks $count --variant fused --verify --min-time 0.2 --max-time 1 --batch 1024 --out "$(file scaling)"
        ((count == 1)) || ranks $count --variant fused --verify --min-time 0.2 --max-time 1 --batch 4096 --scaling strong \
            --out "$(file scaling)"
    done
}

sync() {
    local method
    for method in nccl peer peer-bf16 peer-fused; do
        ranks 2 --variant train-vit --model vit-base --batch 256 --feed constant --data synth --res 224 --out-res 224 --channels 3 --classes 1000 \
            --train-size 20480 --test-size 512 --epochs 2 --sync $method --out "$(file train_sync)"
        ranks 2 --variant train-cuda --data digits --model cnn --batch 256 --train-size 10240 --test-size 512 --epochs 3 --verify \
            --verify-steps 2 --sync $method --out "$(file train_sync)"
    done
}

train-ranks() {
    local seed method
    learn_on() { ranks "$1" --data "$mnist" --model cnn --out "$(file train_ranks)" "${@:2}"; } # ranks, options ...
    learn_on 1 --variant train-graph --batch 256 --epochs 10
    for method in peer nccl; do learn_on 2 --variant train-graph --batch 256 --epochs 10 --sync $method; done
    for seed in 1 2 3; do
        learn_on 1 --variant train-graph --batch 256 --epochs 10 --seed $seed
        learn_on 2 --variant train-graph --batch 256 --epochs 10 --seed $seed --sync peer --scaling strong
    done
    learn_on 1 --variant train-cuda --batch 1024 --epochs 3
    for method in mpi nccl peer; do learn_on 2 --variant train-cuda --batch 1024 --epochs 3 --sync $method; done
}

exchange() {
    local dtype
    reduce() { # options ...
        ranks 2 --workload exchange --min-samples 20 --min-time 0 --max-time 0.25 --warmup-time 0 --warmups 2 \
            --out "$(file exchange)" "$@"
    }
    for dtype in f32 bf16; do
        reduce --variant nccl,peer,peer-one-shot,peer-two-shot --dtype $dtype --verify --bytes 1K:16M:4x,1200000,2400000,4900000
        reduce --variant nccl,peer,peer-one-shot,peer-two-shot --dtype $dtype --bytes 64M,180000000,256M
        reduce --variant mpi --dtype $dtype --bytes 1K:16M:4x,1200000,2400000,4900000
    done
}

pipeline() {
    local schedule count
    for schedule in gpipe 1f1b zb-h1; do
        for count in 2 4; do
            ranks $count --variant train-omp --data digits --model cnn-deep --train-size 2048 --test-size 20 --batch 512 --scaling strong \
                --epochs 3 --threads 4 --parallel pipeline --microbatches 8 --schedule $schedule --out "$(file train_pipeline)"
        done
    done
    ROWS=$(file train_pipeline) ONLY=bubbles attempt scripts/check/pipeline_gpu.sh 2
}

# ---- Embedding sets ----

operations() { # file, ranks, options ...
    ranks "$2" --resident --loops 20 --warmups 3 --warmup-time 0 --out "$(file "$1")" "${@:3}"
}

# --verify takes minutes at 4 million rows. The last run verifies all steps on fewer rows.
ops() {
    local of='ops/@' steps
    for steps in mask mask,compact,convert mask,compact,convert,hash permute; do
        operations $of 1 --variant ops-cuda,ops-fused --rows 4000000 --steps $steps
    done
    operations $of 1 --variant ops-cuda,ops-fused --rows 4000000 --steps mask,compact,convert,hash --to fp8
    operations $of 1 --variant ops-cuda,ops-fused --rows 1000000 --steps permute
    operations $of 1 --variant ops-fused --rows 1000000 --steps mask,compact,convert
    for steps in mask mask,compact,convert mask,compact,convert,hash; do
        run --variant ops-omp --rows 1000000 --steps $steps --loops 20 --warmups 3 --warmup-time 0 --out "$(file $of)"
    done
    operations $of 1 --variant ops-cuda,ops-fused --rows 100000 --verify
}

ops-ranks() {
    local steps
    for steps in mask mask,compact,convert; do
        operations 'ops/@_ranks' 2 --variant ops-cuda,ops-fused --rows 4000000 --steps $steps
    done
}

ops-pytorch() {
    attempt python3 scripts/compare/ops.py --bench "$bench" --rows 4000000 --loop-rows 10000 --out "$(file 'ops/@_pytorch')"
}

# ---- Loading ----

load() {
    local bytes
    for bytes in 2048 16384 65536 1048576; do
        attempt rm -rf "$samples"
        run --prepare "$samples" --store shards --shards 32 --samples $((2000000000 / bytes)) --sample-shape $((bytes - 128)) \
            --dtype u8 --classes 0
        run --variant shards-gpu,gpu-resident --data "$samples" --batch 256 --verify --warmup-time 0.1 --min-time 0.3 --max-time 1 \
            --out "$(file load_gpu_sizes)"
        ((bytes != 65536)) || run --variant gpu-resident --dtype raw --data "$samples" --batch 256 --verify --warmup-time 0.1 \
            --min-time 0.3 --max-time 1 --out "$(file load_gpu_sizes)"
    done
}

load-cpu() {
    local bytes store
    for bytes in 2048 16384 65536; do
        for store in files shards; do
            attempt rm -rf "$samples"
            run --prepare "$samples" --store $store --samples $((100000000 / bytes)) --sample-shape $((bytes - 128)) \
                --dtype u8 --classes 0
            run --variant $store,$store-omp --data "$samples" --batch 256 --verify --warmup-time 0.1 --min-time 0.3 --max-time 1 \
                --out "$(file load_cpu)"
        done
    done
}

load-compute() {
    local shuffle
    run --prepare "$samples" --store shards --shards 32 --samples 20480 --sample-shape 3,224,224 --dtype u8 --classes 0
    for shuffle in 100 1000; do
        run --variant shards-gpu --data "$samples" --compute 5 --shuffle $shuffle --epochs 2 --loops 2 --out "$(file load_compute)"
    done
}

load-resident() {
    run --prepare "$samples" --from counter --samples 24000 --sample-shape 150528 --dtype u8 --shards 24
    run --variant gpu-resident,shards-gpu --data "$samples" --threads 16 --batch 256 --loops 7 --warmups 1 --out "$(file resident)"
}

# These sections call scripts/sweep/reference_load_gpu.sh.
load-all() { attempt scripts/sweep/reference_load_gpu.sh "$samples" "$(file load_gpu)"; }
load-stress() { attempt scripts/sweep/reference_load_gpu.sh --section stress "$samples" "$(file load_gpu_stress)"; }
load-ranks() { TIME=1 BYTES=500000000 attempt scripts/sweep/reference_load_gpu.sh --section ranks "$samples" "$(file load_gpu_ranks)"; }
clip-loaders() {
    local rows
    attempt rm -rf "$work/clip_rows" # clips.sh keeps complete runs
    BATCH=64 LIMIT_S=300 attempt scripts/compare/clips.sh "$MEMORY/clips" "$work/clip_rows"
    for rows in load monitor train; do attempt cp "$work/clip_rows/clips_$rows.csv" "$(file clips_$rows)"; done
}

clips() { attempt scripts/sweep/reference_load_gpu.sh --section clips "$samples" "$(file train_clips)"; }

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
    variant=$(available 'train-cudnn(-tf32)?')
    [[ ! $variant ]] || learn train_cudnn "$variant" --model cnn --batch 256 --epochs 4
    for feed in constant live; do
        run --variant train-cuda --data synth --classes 1000 --test-size 256 --feed $feed --model cnn-fdsl --batch 256 \
            --epochs 2 --res 224 --train-size 5120 --out "$(file train_cnn_fdsl)"
        run --variant train-cuda --data synth --classes 1000 --test-size 256 --feed $feed --model cnn-fdsl --batch 256 \
            --epochs 2 --res 64 --train-size 20480 --out "$(file train_cnn_fdsl)"
    done
}

live() {
    local feed of
    for feed in constant live; do
        while read -r of; do
            # shellcheck disable=SC2086
            run --variant train-cuda --data synth --classes 1000 --test-size 256 --feed $feed --epochs 3 $of --out "$(file live_training)"
        done <<<'--model cnn --res 224 --batch 64 --train-size 3200
--model lenet --res 224 --batch 256 --train-size 20480
--model lenet --res 64 --batch 256 --train-size 40960
--model cnn --res 64 --batch 256 --train-size 40960'
    done
    MODEL=lenet BATCH=256 EPOCHS=4 attempt scripts/compare/live_training.sh "$samples" "$(file live_training)"
}

fine-tuning() { attempt scripts/compare/fine_tuning.sh "$mnist" "$(file fine_tuning)"; }

# ---- Running the sections ----

report() {
    local left=0
    printf '%-16s %8s  %s\n' section seconds state
    for name in "${names[@]}"; do
        [[ ${state[$name]-} == 'done' && ! ${why[$name]+x} ]] || left=1
        if [[ ${why[$name]+x} ]]; then
            printf '%-16s %8s  left: %s\n' "$name" "~$(field "$name" 2)" "${why[$name]}"
        else
            printf '%-16s %8s  %s\n' "$name" "${took[$name]-~$(field "$name" 2)}" "${state[$name]-left}"
        fi
    done
    return $left
}
stop() { # exit status
    trap '' HUP INT TERM
    if [[ $child ]]; then
        kill -TERM -- -"$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    rm -rf "$samples" || true
    why[$section]=interrupted
    report || true
    exit "$1"
}
declare -A why=()
section=${names[0]}
[[ $dry ]] || trap 'stop 129' HUP
[[ $dry ]] || trap 'stop 130' INT
[[ $dry ]] || trap 'stop 143' TERM

complete() { # section: whether its files are still there
    local of
    for of in $(field "$1" 5); do [[ -e $out/$(in_out "$of") ]] || return 1; done
}
for section in "${names[@]}"; do
    seconds=$(field "$section" 2)
    if [[ ${state[$section]-} == 'done' && ! $redo ]] && complete "$section"; then
        note "$section: is done"
    elif [[ ${lacking[$section]-} ]]; then
        why[$section]="needs ${lacking[$section]}"
    elif [[ $limit ]] && ((SECONDS + seconds > limit)); then
        why[$section]="takes about $seconds s, $((limit > SECONDS ? limit - SECONDS : 0)) s are left"
    else
        note "$section: takes about $seconds s"
        unset "state[$section]" "took[$section]"
        broken='' begun=$SECONDS
        [[ $dry ]] || { keep_state && rm -rf "$new" "$samples" && mkdir -p "$new/ops"; }
        "$section"
        [[ ! $dry ]] || continue
        for of in $(field "$section" 5); do
            to=$out/$(in_out "$of")
            mkdir -p "$(dirname "$to")"
            if [[ -e $(file "$of") ]]; then mv "$(file "$of")" "$to"; else rm -f "$to"; fi
        done
        state[$section]=${broken:+failed} took[$section]=$((SECONDS - begun))
        state[$section]=${state[$section]:-done}
        keep_state
        note "$section: took ${took[$section]} s"
        rm -rf "$samples"
    fi
done
[[ ! $dry ]] || exit 0
rm -rf "$new"
"$bench" --env --format json >"$out/${prefix}_env.json" || rm -f "$out/${prefix}_env.json" # a build without jansson
(
    cd "$out"
    for of in "${prefix}_env.json" $(awk '{ for (i = 5; i <= NF; i++) print $i }' <<<"$sections"); do
        [[ $of == *.json ]] || of=$(in_out "$of")
        [[ ! -e $of ]] || printf '%s\n' "$of"
    done | tar -czf reference.tar.gz -T -
)
note "revision $revision: $out/reference.tar.gz"
report || die 1 'sections are not done; the same command continues'
