#!/usr/bin/env bash
# Measures loading to the GPU on this machine, and appends the rows to FILE.csv.
#
#   scripts/sweep/reference_load_gpu.sh [--section NAME] DIR FILE.csv
#
# DIR: folder for samples, on a disk or in an in-memory file system. Each section removes its samples at the end.
#
# section  workload  time on one H200 with 16 cores: what is measured; space in DIR
# sizes    load      10 min (default section): sample sizes for every GPU loader, thread counts for shards-gpu; 5 GB
# stress   load      50 s: 500 epochs over 1000 video samples, float16 (3, 8, 64, 64), for every GPU loader; 0.5 GB
# clips    train     40 s: cnn3d on float16 clips (1, 8, 16, 16) from shards, for four CUDA trainers; 0.2 GB
# ranks    load      3 min: one set shared by 1, 2 and 4 ranks with one GPU each, if the machine has enough GPUs; 2 GB
#
# Environment (defaults in parentheses):
# TIME (2): minimum seconds per row of sizes and ranks. SIZES (sizes: six from 2048 to 1048576, ranks: 2048 and 65536):
# bytes of one sample's file or tar member, including the .npy header. BYTES (2000000000): size of a set of shards; sets
# of files have a fifth of this size, because files are read one by one. LOOPS (500): epochs of stress. RANKS ("1 2 4"): numbers
# of ranks. MPIRUN (mpirun --bind-to none -n): launcher of the ranks.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

bench=${FDSL_BENCH:-./fdsl-bench}
section=sizes
if [[ ${1:-} == --section ]]; then
    section=${2:-}
    [[ $section =~ ^(sizes|stress|clips|ranks)$ ]] ||
        { echo "reference_load_gpu.sh: --section '$section': the sections are sizes, stress, clips and ranks" >&2 && exit 2; }
    shift 2
fi
dir=${1:?name a folder for the samples}
out=${2:?name the file for the rows}
time=${TIME:-2}
set_bytes=${BYTES:-2000000000}
loops=${LOOPS:-500}
read -ra launcher <<<"${MPIRUN:-mpirun --bind-to none -n}"
npy_header=128
for given in "TIME=$time" "BYTES=$set_bytes" "LOOPS=$loops"; do
    [[ ${given#*=} =~ ^[1-9][0-9]*$ ]] || { echo "reference_load_gpu.sh: $given: give a whole number from 1" >&2 && exit 2; }
done
mkdir -p "$dir"

measure() { # variant, set, options ...
    echo "$1 $2 ${*:3}" >&2
    "$bench" --variant "$1" --data "$dir/$2" --out "$out" --format csv "${@:3}" >/dev/null
}
run() { # variant, set, options ...
    measure "$1" "$2" --batch 256 --min-time "$time" --max-time "$((3 * time))" "${@:3}"
}
available() { # variant, set
    "$bench" --variant "$1" --data "$dir/$2" --cache any --dry-run
}

# Measures the video set of scripts/sweep/reference_load.sh, with the same number of epochs.
stress() {
    local variant set tensors=(--samples 1000 --sample-shape '3,8,64,64' --dtype f16 --classes 0)
    "$bench" --prepare "$dir/video-files" --store files "${tensors[@]}"
    "$bench" --prepare "$dir/video-shards" --store shards --shards 10 "${tensors[@]}"
    for variant in ${VARIANTS:-files-gpu shards-gpu gpu-resident gds}; do
        set=video-shards
        [[ $variant != files* ]] || set=video-files
        if available "$variant" $set; then measure "$variant" $set --batch 256 --loops "$loops" --verify; fi
    done
    rm -rf "$dir/video-files" "$dir/video-shards"
}

clips() {
    local variant
    "$bench" --prepare "$dir/clips" --from clips --samples 20000 --shards 8
    for variant in ${VARIANTS:-train-cuda train-tf32 train-bf16 train-amp}; do
        measure "$variant" clips --model cnn3d --batch 256 --epochs 3 --verify --verify-steps 1
    done
    rm -rf "$dir/clips"
}

# Measures one set of shards per sample size. The ranks of this host divide the samples of the set among themselves.
ranks() {
    local bytes count gpus variant
    gpus=${GPUS:-$(nvidia-smi -L | grep -c '^GPU')}
    for bytes in ${SIZES:-2048 65536}; do
        "$bench" --prepare "$dir/shared" --store shards --shards 32 --samples $((set_bytes / bytes)) \
            --sample-shape $((bytes - npy_header)) --dtype u8 --classes 0
        for variant in ${VARIANTS:-shards-gpu gpu-resident}; do
            for count in ${RANKS:-1 2 4}; do
                ((count <= gpus)) || { echo "reference_load_gpu.sh: there are $gpus GPUs: skipping $count ranks" >&2 && continue; }
                echo "$count ranks: $variant $bytes" >&2
                "${launcher[@]}" "$count" "$bench" --variant "$variant" --data "$dir/shared" --batch 256 --min-time "$time" \
                    --max-time "$((3 * time))" --verify --out "$out" --format csv >/dev/null
            done
        done
        rm -rf "$dir/shared"
    done
}

if [[ $section != sizes ]]; then
    $section
    exit
fi

cores=$(nproc)
for bytes in ${SIZES:-2048 4096 16384 65536 262144 1048576}; do
    samples=$((set_bytes / bytes))
    shape=$((bytes - npy_header))
    "$bench" --prepare "$dir/$bytes-shards" --store shards --shards 32 --samples "$samples" --sample-shape $shape --dtype u8 --classes 0
    "$bench" --prepare "$dir/$bytes-files" --store files --samples $((samples / 5)) --sample-shape $shape --dtype u8 --classes 0
    run files-gpu "$bytes-files" --verify
    run shards-gpu "$bytes-shards" --verify
    run gpu-resident "$bytes-shards" --verify
    if available gds "$bytes-shards"; then run gds "$bytes-shards" --ring 8 --verify; fi
    # For comparison: a CPU loader reads the same shards.
    run shards-omp "$bytes-shards"
    if ((bytes == 65536)); then
        for ((threads = 1; threads < cores; threads *= 2)); do
            run shards-gpu "$bytes-shards" --threads $threads
        done
        for dtype in raw f32; do
            run shards-gpu "$bytes-shards" --dtype $dtype
            run gpu-resident "$bytes-shards" --dtype $dtype
        done
    fi
    rm -rf "$dir/$bytes-shards" "$dir/$bytes-files"
done

python3 - "$out" <<'END'
import csv, sys
print(f"{'bytes':>8} {'variant':14}{'threads':>8}{'samples/s':>14}{'GB/s':>8}{'copy share':>12}  gds")
for row in csv.DictReader(open(sys.argv[1])):
    print(f"{float(row['sample_bytes']):8.0f} {row['variant']:14}{row['threads']:>8}{float(row['items_per_s']):14.0f}"
          f"{1e-9 * float(row['bytes_per_s']):8.2f}{float(row['copy_share'] or 'nan'):12.3f}  {row['gds']}")
END
